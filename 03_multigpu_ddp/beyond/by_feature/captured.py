"""Train the classic MNIST network with DistributedDataParallel, with the step captured in a CUDA graph.

Try: torchrun --standalone --nproc-per-node=1 captured.py --epochs 3 --batch-size 128
"""

from dataclasses import dataclass

import capture
import torch
import torch.nn.functional as F
from torch import nn

from manygpus import (
    Net,
    Options,
    Run,
    augmentation,
    build_optimizer,
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
class CaptureOptions(Options):
    how: str = option(
        "captured",
        choices=("captured", "graphed", "eager"),
        help="graphed: with make_graphed_callables; eager: as in mnist_ddp.py",
    )
    compile: bool = option(False, help="compile the network first")


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, CaptureOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed + dist_env.rank)  # different dropout on each rank; DDP equalises the weights

    # Every rank has all images, and takes its own shard of every batch.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    # A graph that is captured within autocast cannot use its cache of converted weights.
    autocast = torch.autocast(
        dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16", cache_enabled=False
    )
    if opts.how != "eager":
        capture.check(model)
    if opts.compile:
        model = torch.compile(model)
    if opts.how == "graphed":
        with autocast:
            example_images, _ = next(iter(train_batches))
            capture.graphed(model, example_images)
    # DDP sends rank 0's weights to all ranks once, and averages the gradients over the ranks in every
    # backward pass, which keeps the weights equal. The bucket view saves a copy of the gradients.
    # A captured step averages its gradients on the stream on which it is captured.
    stream = torch.cuda.Stream() if opts.how == "captured" else None
    with torch.cuda.stream(stream):
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    def forward_backward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)  # a replay writes to the same tensors again
        with autocast:
            loss = F.nll_loss(model(images), labels)
        loss.backward()
        return loss

    if opts.how == "captured":
        step = capture.CapturedStep(forward_backward, model, stream)
    else:
        step = forward_backward

    name = f"ddp-{opts.how}-compiled" if opts.compile else f"ddp-{opts.how}"
    run = Run(name, opts, dist_env, train_set, model, optimizer, lr_scheduler)
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            loss = step(images, labels)
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
