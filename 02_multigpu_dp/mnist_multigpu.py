"""Train the classic MNIST network on the GPUs of one node with nn.DataParallel: one process drives all.

Try: python mnist_multigpu.py --epochs 2
"""

import torch
from torch import nn

from trainkit import batches, data, engine, errors, options, world
from trainkit.checkpoint import Checkpoints
from trainkit.model import Net
from trainkit.recipes import optimizer_and_schedule
from trainkit.runlog import RunLog


def main() -> None:
    opts = options.parse(__doc__)
    here = world.alone(not opts.no_cuda, "02_multigpu_dp")
    precision = engine.choose_precision(opts.precision, here.device)
    torch.manual_seed(opts.seed)

    # By default all images go to the device once and stay there.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device)
    test_batches = batches.testing(test_set, opts, here.device)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(precision).to(here.device, memory_format=torch.channels_last)
    gpus = torch.cuda.device_count() if here.device.type == "cuda" else 0
    if gpus > 1:
        # At every step: copy the weights to each GPU, give each a slice of the batch, and add up
        # the gradients on the first one.
        batches.check_divides(opts.batch_size, gpus, "GPUs")
        model = nn.DataParallel(model)
    else:
        print(f"DataParallel needs at least 2 GPUs and finds {gpus}: this run is the plain model.")
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    log = RunLog("dp", opts, here, devices=max(gpus, 1), precision=precision)
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
