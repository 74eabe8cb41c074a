"""Train the classic MNIST network split over the ranks: weights, gradients and optimizer (FSDP, ZeRO).

Try: torchrun --standalone --nproc-per-node=2 fsdp.py --epochs 2
"""

from collections.abc import Iterable

from trainkit.data import loaders as batches, datasets as data
from trainkit import errors
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.training.model import Net
from trainkit.training.run import Run
from trainkit.training.precision import choose_precision
from trainkit.training.evaluation import evaluate
from trainkit.training.optim import optimizer_and_schedule
from trainkit.training.sharded import Sharded, check_pytorch, local_part

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh


def main() -> None:
    check_pytorch()
    how = options.own("shard", ("shard", "ddp"), None, "a share of the network on each rank, or all of it")
    opts = options.parse(__doc__, how=how)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; rank 0's weights go to all

    # Every rank has all images, and takes its own share of every batch.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)
    steps = process_group.gather(len(test_batches))  # each forward pass is a meeting
    if steps.count(steps[0]) < here.size:
        raise errors.UserError(
            "the ranks have unequal numbers of test steps: raise --test-batch-size or --test-size."
        )

    # channels_last is faster, but fully_shard refuses it.
    layout = torch.channels_last if opts.how == "ddp" else torch.contiguous_format
    model = Net(opts.width).to(here.device, memory_format=layout)
    choose_precision(model, opts, train_set)
    if opts.how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        split(model, here)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    name, sharded = ("ddp", None) if opts.how == "ddp" else ("fsdp", Sharded(model, optimizer))
    run = Run(name, opts, here, train_set, model, optimizer, schedule, devices=here.size, sharded=sharded)
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.add(loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss))
    print_memory(model, optimizer)
    run.finish()
    process_group.leave()


def split(model: nn.Module, here: process_group.Place) -> None:
    """Leave each rank its share of every weight. A layer is whole only while it is used."""
    for weights in model.parameters():
        dist.broadcast(weights.detach(), src=0)
    mesh = init_device_mesh(here.device.type, (here.size,))
    for layer in (model.conv1, model.conv2, model.fc1, model.fc2):
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)


def print_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print on rank 0 what each rank keeps from one step to the next, in MB."""
    weights = list(model.parameters())
    state = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
    gradients = [one.grad for one in weights if one.grad is not None]  # none if nothing was left to do
    held = process_group.gather([megabytes(weights), megabytes(gradients), megabytes(state)])
    if process_group.is_rank_0():
        each = ", ".join("{:.2f} + {:.2f} + {:.2f}".format(*of_rank) for of_rank in held)
        errors.tell(f"MB of weights + gradients + optimizer on each rank: {each}")


def megabytes(tensors: Iterable[torch.Tensor]) -> float:
    """Return the megabytes of this rank's parts of the tensors."""
    return sum(local_part(tensor).nbytes for tensor in tensors) / 1e6


if __name__ == "__main__":
    errors.run(main)
