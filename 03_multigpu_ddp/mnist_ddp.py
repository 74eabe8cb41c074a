"""Train the classic MNIST network with DistributedDataParallel: one process per GPU, on any number of nodes.

Try: torchrun --standalone --nproc-per-node=2 mnist_ddp.py --epochs 2
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from trainkit import batches, data, engine, errors, options, world
from trainkit.checkpoint import Checkpoints
from trainkit.model import Net
from trainkit.recipes import optimizer_and_schedule
from trainkit.runlog import RunLog


def main() -> None:
    opts = options.parse(__doc__)
    here = world.join(not opts.no_cuda, opts.timeout)
    precision = engine.choose_precision(opts.precision, here.device)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; DDP makes the weights equal

    # Every rank has all images, and takes its own share of every batch.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(precision).to(here.device, memory_format=torch.channels_last)
    # Sends rank 0's weights to all ranks, and averages the gradients over the ranks in every
    # backward pass: so the weights stay equal. The bucket view saves a copy of the gradients.
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    log = RunLog("ddp", opts, here, devices=here.size, precision=precision) if here.rank == 0 else None
    checkpoints = Checkpoints(opts, model, optimizer, schedule, log)  # goes on where an earlier run stopped
    for epoch in checkpoints.epochs():
        trained = engine.train_epoch(
            model, train_batches, optimizer, schedule, epoch, checkpoints, opts.log_interval
        )
        tested = engine.evaluate(model, test_batches)
        if log:
            log.epoch(epoch, trained, tested)
        checkpoints.end_of_epoch(epoch)
    if log:
        log.finish(model)
    world.leave()


if __name__ == "__main__":
    errors.run(main)
