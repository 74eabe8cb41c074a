"""Train the classic MNIST network on the GPUs of one node with nn.DataParallel: one process drives all.

Try: python mnist_multigpu.py --epochs 2
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
from trainkit.devices import take_all_gpus

import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    opts = options.parse(__doc__)
    here = process_group.alone(not opts.no_cuda, opts.debug_dir)
    gpus = torch.cuda.device_count() if here.device.type == "cuda" else 0
    opts = opts.for_devices(gpus, "GPUs")
    torch.manual_seed(opts.seed)
    take_all_gpus(opts.seed)  # each drops other neurons

    # By default all images go to the device once and stay there.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device)
    test_batches = batches.testing(test_set, opts, here.device)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(here.device, memory_format=torch.channels_last)
    if gpus > 1:
        # At every step: copy the weights to each GPU, give each a slice of the batch, and add up
        # the gradients on the first one.
        model = nn.DataParallel(model)
    else:
        errors.tell(f"DataParallel needs at least 2 GPUs and finds {gpus}: this run is the plain model.")
    choose_precision(model, opts, train_set)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    run = Run("dp", opts, here, train_set, model, optimizer, schedule, devices=max(gpus, 1))
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
