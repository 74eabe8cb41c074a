"""Train as by_hand.py does, but send full buckets of gradients while the backward pass continues.

Try: torchrun --standalone --nproc-per-node=2 by_hand_overlap.py --epochs 2
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
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

BUCKET_GRADIENTS = 2**18  # 1 MB of float32; a bucket is sent when it has at least this many


class Buckets:
    """Averages the gradients of a network over the ranks, and sends each bucket as soon as it is full."""

    def __init__(self, model: nn.Module, at_once: bool, size: int = BUCKET_GRADIENTS) -> None:
        self.at_once = at_once
        self.size = size
        self.bucket = []  # gradients that have not been sent yet
        self.sent = []  # buckets being added up: their gradients, their joined tensor, and the all-reduce
        for weights in model.parameters():
            weights.register_post_accumulate_grad_hook(self.ready)

    def ready(self, weights: torch.Tensor) -> None:
        """Take a gradient that the backward pass has just computed. The last layers come first."""
        self.bucket.append(weights.grad)
        if sum(gradient.numel() for gradient in self.bucket) >= self.size:
            self.send()

    def send(self) -> None:
        """Start to add up the bucket over the ranks."""
        flat = torch.cat([gradient.flatten() for gradient in self.bucket])
        work = dist.all_reduce(flat, async_op=True)  # returns before the sum is complete
        if self.at_once:
            work.wait()
        self.sent.append((self.bucket, flat, work))
        self.bucket = []

    def finish(self) -> None:
        """Send the last bucket, wait for all sums, and replace the gradients by their means."""
        if self.bucket:
            self.send()
        for bucket, flat, work in self.sent:
            work.wait()
            means = flat.div_(dist.get_world_size()).split([gradient.numel() for gradient in bucket])
            for gradient, mean in zip(bucket, means, strict=True):
                gradient.copy_(mean.view_as(gradient))
        self.sent = []


@dataclass(frozen=True)
class OverlapOptions(Options):
    wait: str = option(
        "late",
        choices=("late", "at-once"),
        help="wait for all buckets before the update, or for each right after it is sent",
    )


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, OverlapOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed + dist_env.rank)  # different dropout on each rank; rank 0's weights go to all

    # Every rank has all images, and takes its own shard of every batch.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    for weights in model.parameters():
        dist.broadcast(weights.detach(), src=0)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    buckets = Buckets(model, at_once=opts.wait == "at-once")
    run = Run(
        f"ddp-by-hand-{opts.wait}",
        opts,
        dist_env,
        train_set,
        model,
        optimizer,
        lr_scheduler,
        devices=dist_env.world_size,
    )
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            with autocast:
                loss = F.nll_loss(model(images), labels)
            loss.backward()
            buckets.finish()
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
