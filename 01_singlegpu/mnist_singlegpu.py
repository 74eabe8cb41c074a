"""Train the classic MNIST network on one GPU (on the CPU where there is none).

Try: python mnist_singlegpu.py --epochs 2
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
import torch.nn.functional as F


def main() -> None:
    opts = options.parse(__doc__)
    here = process_group.alone(not opts.no_cuda, opts.debug_dir)
    opts = opts.for_devices(1)
    torch.manual_seed(opts.seed)

    # By default all images go to the device once and stay there.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device)
    test_batches = batches.testing(test_set, opts, here.device)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(here.device, memory_format=torch.channels_last)
    choose_precision(model, opts, train_set)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    run = Run("single", opts, here, train_set, model, optimizer, schedule, devices=1)
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
    run.finish()


if __name__ == "__main__":
    errors.run(main)
