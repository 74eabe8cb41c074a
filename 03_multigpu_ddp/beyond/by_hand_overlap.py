"""Train as by_hand.py does, and send the gradients bucket by bucket while the backward pass goes on.

Try: torchrun --standalone --nproc-per-node=2 by_hand_overlap.py --epochs 2
"""

from trainkit.data import loaders as batches, datasets as data
from trainkit import errors
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.training.model import Net
from trainkit.training.run import Run
from trainkit.training.precision import choose_precision
from trainkit.training.evaluation import evaluate
from trainkit.training.optim import optimizer_and_schedule

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


BUCKET_GRADIENTS = 2**18  # 1 MB of float32: a bucket is sent when it has so many or more


class Buckets:
    """Makes the gradients of a network their means over the ranks, each bucket sent as soon as it is full."""

    def __init__(self, model: nn.Module, at_once: bool, size: int = BUCKET_GRADIENTS) -> None:
        self.at_once = at_once
        self.size = size
        self.bucket = []  # gradients that wait to be sent
        self.sent = []  # buckets whose sums are on their way: their gradients, the sums, and the call
        for weights in model.parameters():
            weights.register_post_accumulate_grad_hook(self.ready)

    def ready(self, weights: torch.Tensor) -> None:
        """Take a gradient that the backward pass has just computed; those of the last layers come first."""
        self.bucket.append(weights.grad)
        if sum(gradient.numel() for gradient in self.bucket) >= self.size:
            self.send()

    def send(self) -> None:
        """Begin to add up the bucket over the ranks."""
        flat = torch.cat([gradient.flatten() for gradient in self.bucket])
        work = dist.all_reduce(flat, async_op=True)  # comes back before the sum is there
        if self.at_once:
            work.wait()
        self.sent.append((self.bucket, flat, work))
        self.bucket = []

    def finish(self) -> None:
        """Send what is left, wait for all sums, and put the means in place."""
        if self.bucket:
            self.send()
        for bucket, flat, work in self.sent:
            work.wait()
            means = flat.div_(dist.get_world_size()).split([gradient.numel() for gradient in bucket])
            for gradient, mean in zip(bucket, means, strict=True):
                gradient.copy_(mean.view_as(gradient))
        self.sent = []


def main() -> None:
    wait = options.own(
        "late", ("late", "at-once"), None, "for a bucket: before the update, or right after it is sent"
    )
    opts = options.parse(__doc__, wait=wait)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; rank 0's weights go to all

    # Every rank has all images, and takes its own share of every batch.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(here.device, memory_format=torch.channels_last)
    for weights in model.parameters():
        dist.broadcast(weights.detach(), src=0)
    choose_precision(model, opts, train_set)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    buckets = Buckets(model, at_once=opts.wait == "at-once")
    run = Run(
        f"ddp-by-hand-{opts.wait}", opts, here, train_set, model, optimizer, schedule, devices=here.size
    )
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            buckets.finish()
            optimizer.step()
            schedule.step()
            run.add(loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss))
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
