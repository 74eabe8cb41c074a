"""Train the classic MNIST network on one GPU (on the CPU where there is none).

Try: python mnist_singlegpu.py --epochs 2
"""

import torch

from trainkit import batches, data, engine, errors, options, world
from trainkit.checkpoint import Checkpoints
from trainkit.model import Net
from trainkit.recipes import optimizer_and_schedule
from trainkit.runlog import RunLog


def main() -> None:
    opts = options.parse(__doc__)
    here = world.alone(not opts.no_cuda, "01_singlegpu")
    precision = engine.choose_precision(opts.precision, here.device)
    torch.manual_seed(opts.seed)

    # By default all images go to the device once and stay there.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device)
    test_batches = batches.testing(test_set, opts, here.device)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(precision).to(here.device, memory_format=torch.channels_last)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    log = RunLog("single", opts, here, devices=1, precision=precision)
    checkpoints = Checkpoints(opts, model, optimizer, schedule, log)  # goes on where an earlier run stopped
    for epoch in checkpoints.epochs():
        trained = engine.train_epoch(
            model, train_batches, optimizer, schedule, epoch, checkpoints, opts.log_interval
        )
        tested = engine.evaluate(model, test_batches)
        log.epoch(epoch, trained, tested)
        checkpoints.end_of_epoch(epoch)
    log.finish(model)


if __name__ == "__main__":
    errors.run(main)
