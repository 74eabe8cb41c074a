"""Train the classic MNIST network with DistributedDataParallel, and split each batch into micro-batches.

Try: torchrun --standalone --nproc-per-node=2 accumulate.py --accumulate 4 --epochs 2
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from manygpus import (
    Net,
    Options,
    Run,
    at_least,
    augmentation,
    build_optimizer,
    check_divides,
    destroy_distributed,
    entrypoint,
    eval_loader,
    evaluate,
    init_distributed,
    load_dataset,
    option,
    parse_options,
    resolve_precision,
    train_loader,
    tune_process,
)


@dataclass(frozen=True)
class AccumulateOptions(Options):
    accumulate: int = option(
        4, type=at_least(1), metavar="K", help="micro-batches in a batch, computed one after the other"
    )


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, AccumulateOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    check_divides(
        opts.batch_size,
        parts=dist_env.world_size * opts.accumulate,
        what=f"micro-batches ({dist_env.world_size} processes x --accumulate {opts.accumulate})",
    )
    torch.manual_seed(opts.seed + dist_env.rank)  # different dropout on each rank; DDP equalises the weights

    # Every rank has all images, and takes its own shard of every batch.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    # DDP sends rank 0's weights to all ranks once, and averages the gradients over the ranks in every
    # backward pass, which keeps the weights equal. The bucket view saves a copy of the gradients.
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    run = Run(
        "ddp-accumulate",
        opts,
        dist_env,
        train_set,
        model,
        optimizer,
        lr_scheduler,
        gradient_accumulation_steps=opts.accumulate,
    )
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = 0
            micro_batches = zip(images.chunk(opts.accumulate), labels.chunk(opts.accumulate), strict=True)
            for number, (micro_images, micro_labels) in enumerate(micro_batches, start=1):
                # The gradients of all micro-batches add up. Only the last backward pass all-reduces them.
                is_last = number == opts.accumulate
                with nullcontext() if is_last else model.no_sync():
                    with autocast:
                        micro_loss = F.nll_loss(model(micro_images), micro_labels) / opts.accumulate
                    micro_loss.backward()
                loss += micro_loss.detach()
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
