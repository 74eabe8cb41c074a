"""Train a deep network as a pipeline: each rank has some of its layers, computes them, and hands on.

Try: torchrun --standalone --nproc-per-node=2 pipeline.py --micro-batches 8 --epochs 2
"""

from trainkit.data import loaders as batches, datasets as data
from trainkit import errors
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.training.run import Run
from trainkit.training.precision import choose_precision
from trainkit.training.evaluation import evaluate
from trainkit.training.optim import optimizer_and_schedule
from trainkit.training.sharded import Sharded, check_pytorch
from trainkit.config.command_line import at_least

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

BLOCKS, PIXELS, CLASSES = 8, 28 * 28, 10


class Block(nn.Module):
    """Two linear layers around 32 x `width` neurons, and a way past them. All blocks have the same work."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(PIXELS), nn.Linear(PIXELS, 32 * width)
        self.down = nn.Linear(32 * width, PIXELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Those of BLOCKS blocks that belong to one stage; the last stage has the classes, too.

    Takes images (n, 1, 28, 28) or what the stage before has made of them, float32 (n, 784). Returns the
    latter, the last stage log-probabilities (n, 10). Under their names no other stage has weights.
    """

    def __init__(self, width: int, stage: int, stages: int) -> None:
        super().__init__()
        blocks = [Block(width) for _ in range(BLOCKS)]  # all, so that each has the same weights in any stage
        own = range(stage * BLOCKS // stages, (stage + 1) * BLOCKS // stages)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in own})
        self.head = nn.Linear(PIXELS, CLASSES) if stage == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for block in self.blocks.values():
            x = block(x)
        return F.log_softmax(self.head(x), dim=1) if self.head else x


class InTurn(nn.Module):
    """All stages, one after the other; each rank gets what the last one returns. For evaluation."""

    def __init__(self, stage: nn.Module, here: process_group.Place) -> None:
        super().__init__()
        self.stage, self.rank, self.last = stage, here.rank, here.size - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank > 0:
            x = x.new_empty(len(x), PIXELS)
            dist.recv(x, src=self.rank - 1)
        x = self.stage(x)
        if self.rank < self.last:
            dist.send(x, dst=self.rank + 1)
            x = x.new_empty(len(x), CLASSES)
        dist.broadcast(x, src=self.last)
        return x


def main() -> None:
    check_pytorch()
    parts = options.own(4, at_least(1), "M", "micro-batches of a batch, in the pipeline behind each other")
    opts = options.parse(__doc__, micro_batches=parts)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(1)  # every image goes through all ranks
    options.check_divides(opts.batch_size, opts.micro_batches, "micro-batches")
    if BLOCKS % here.size:
        raise errors.UserError(
            f"{BLOCKS} blocks do not divide among {here.size} processes: start 1, 2, 4 or 8"
        )
    if opts.batch_size < here.size:
        raise errors.UserError(
            f"--batch-size {opts.batch_size} is less than the {here.size} processes: raise it."
        )
    torch.manual_seed(opts.seed)

    # Every rank takes every batch whole: the first needs the images, the last the labels.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device)
    test_batches = batches.testing(test_set, opts, here.device)

    model = Deep(opts.width, here.rank, here.size).to(here.device)
    choose_precision(model, opts, train_set)
    stage = PipelineStage(model, here.rank, here.size, here.device)
    pipe = ScheduleGPipe(stage, opts.micro_batches, loss_fn=F.nll_loss)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    run = Run(
        "pipeline",
        opts,
        here,
        train_set,
        model,
        optimizer,
        schedule,
        devices=here.size,
        accumulate=opts.micro_batches,
        sharded=Sharded(model, optimizer),
    )
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            inputs, losses = [images] if stage.is_first else [], []
            # Forward for all parts, then backward for all, each as soon as the neighbour has handed it on.
            pipe.step(*inputs, target=labels, losses=losses)
            optimizer.step()
            schedule.step()
            # The last rank has the loss; over all ranks, the mean is to be the loss.
            run.add(here.size * torch.stack(losses).mean() if stage.is_last else images.new_zeros(()))
        tested = evaluate(InTurn(model, here), test_batches, F.nll_loss)  # each rank counts every image
        run.end_of_epoch(epoch, tested._replace(samples=tested.samples // here.size))
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
