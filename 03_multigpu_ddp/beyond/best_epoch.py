"""Train the classic MNIST network with DistributedDataParallel, and end with the weights of its best epoch.

Try: torchrun --standalone --nproc-per-node=2 best_epoch.py --validation 5000 --patience 3 --epochs 20
"""

from dataclasses import replace

from trainkit.data import loaders as batches, datasets as data
from trainkit import errors
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.training.model import Net
from trainkit.training.run import Run
from trainkit.training.precision import choose_precision
from trainkit.training.evaluation import evaluate
from trainkit.training.optim import optimizer_and_schedule
from trainkit.training.best import Best
from trainkit.training.evaluation import Metric
from trainkit.config.command_line import at_least

import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    what = "training images to choose the best epoch by, the same in every run"
    validation = options.own(5000, at_least(1), "N", what, shapes_training=True)
    opts = options.parse(__doc__, validation=validation)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; DDP makes the weights equal

    # Every rank has all images, and takes its own share of every batch.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_set, validation_set = batches.without(train_set, opts.validation)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)
    all_of_it = replace(opts, test_size=None)  # --test-size is for the test alone
    validation_batches = batches.testing(validation_set, all_of_it, here.device, here.rank, here.size)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(here.device, memory_format=torch.channels_last)
    # Sends rank 0's weights to all ranks, and averages the gradients over the ranks in every
    # backward pass: so the weights stay equal. The bucket view saves a copy of the gradients.
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    choose_precision(model, opts, train_set)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    best = Best(model)  # rank 0 keeps the weights, in its checkpoints too
    more = {"devices": here.size, "also": {"best": best}}
    run = Run("ddp-best-epoch", opts, here, train_set, model, optimizer, schedule, **more)
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.add(loss)
        tested = evaluate(model, test_batches, F.nll_loss)
        validated = evaluate(model, validation_batches, F.nll_loss)
        best.keep(epoch, validated.loss)
        metrics = [Metric("loss", "validation", validated.loss)]
        run.end_of_epoch(epoch, tested, metrics, best_epoch=best.epoch)
    best.load()
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
