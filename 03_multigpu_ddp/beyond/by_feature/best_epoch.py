"""Train the classic MNIST network with DistributedDataParallel, and keep the weights of the best epoch.

Try: torchrun --standalone --nproc-per-node=2 best_epoch.py --validation 5000 --patience 3 --epochs 20
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from manygpus import (
    BestWeights,
    Metric,
    Net,
    Options,
    Run,
    at_least,
    augmentation,
    build_optimizer,
    destroy_distributed,
    entrypoint,
    eval_loader,
    evaluate,
    hold_out,
    init_distributed,
    load_dataset,
    option,
    parse_options,
    resolve_precision,
    train_loader,
    tune_process,
)


@dataclass(frozen=True)
class BestEpochOptions(Options):
    validation: int = option(
        5000,
        type=at_least(1),
        metavar="N",
        help="training images that choose the best epoch, the same in every run",
        shapes_training=True,
    )


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, BestEpochOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed + dist_env.rank)  # different dropout on each rank; DDP equalises the weights

    # Every rank has all images, and takes its own shard of every batch.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_set, validation_set = hold_out(train_set, opts.validation)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)
    # --test-size limits the test only. All held-out images help to choose the best epoch.
    validation_opts = replace(opts, test_size=None)
    validation_batches = eval_loader(validation_set, validation_opts, dist_env)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    # DDP sends rank 0's weights to all ranks once, and averages the gradients over the ranks in every
    # backward pass, which keeps the weights equal. The bucket view saves a copy of the gradients.
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    # Rank 0 keeps the best weights in its memory, and every checkpoint contains them, too.
    best = BestWeights(model)
    run = Run(
        "ddp-best-epoch",
        opts,
        dist_env,
        train_set,
        model,
        optimizer,
        lr_scheduler,
        extra_state={"best": best},
    )
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            with autocast:
                loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        tested = evaluate(model, test_batches, F.nll_loss, autocast)
        validated = evaluate(model, validation_batches, F.nll_loss, autocast)
        best.keep(epoch, validated.loss)
        validation_loss = Metric("loss", of="validation", value=validated.loss)
        run.end_of_epoch(epoch, tested, [validation_loss], best_epoch=best.epoch)
    best.load()
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
