"""Train the classic MNIST network on each rank alone, and average the weights every few steps (local SGD).

Try: torchrun --standalone --nproc-per-node=2 local_sgd.py --average-every 4 --epochs 2
"""

import warnings

from trainkit.data import loaders as batches, datasets as data
from trainkit import errors
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.training.model import Net
from trainkit.training.run import Run
from trainkit.training.precision import choose_precision
from trainkit.training.evaluation import evaluate
from trainkit.training.optim import optimizer_and_schedule
from trainkit.config.command_line import at_least

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters


def main() -> None:
    every = options.own(4, at_least(1), "N", "steps from one averaging to the next", shapes_training=True)
    opts = options.parse(__doc__, average_every=every)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; rank 0's weights go to all

    # Every rank has all images, and takes its own share of every batch.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)

    model = Net(opts.width).to(here.device)
    for weights in model.parameters():
        dist.broadcast(weights.detach(), src=0)
    choose_precision(model, opts, train_set)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    # Between two averagings each rank has weights of its own, and an optimizer with a state of its own.
    own = {"each_rank": {"model": model, "optimizer": optimizer}}
    run = Run("local-sgd", opts, here, train_set, model, optimizer, schedule, devices=here.size, **own)
    warnings.filterwarnings("ignore", "When period is 1")  # here it is measured what that costs
    averager = PeriodicModelAverager(opts.average_every)
    averager.step = schedule.last_epoch + 1  # where an earlier run stopped; it averages at the multiples
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            averager.average_parameters(model.parameters())
            run.add(loss)
        average_parameters(model.parameters(), dist.group.WORLD)  # one network to test and to save
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss))
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
