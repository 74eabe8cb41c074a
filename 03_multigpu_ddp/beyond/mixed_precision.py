"""Train the classic MNIST network with DistributedDataParallel in fp16, for GPUs without bf16 (V100, T4).

Try: torchrun --standalone --nproc-per-node=2 mixed_precision.py --epochs 2
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
from torch import nn


def main() -> None:
    precision = options.own("fp16", ("fp16",), None, "what the layers compute in")
    opts = options.parse(__doc__, precision=precision)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; DDP makes the weights equal

    # Every rank has all images, and takes its own share of every batch.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(here.device, memory_format=torch.channels_last)
    # Sends rank 0's weights to all ranks, and averages the gradients over the ranks in every
    # backward pass: so the weights stay equal. The bucket view saves a copy of the gradients.
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    choose_precision(model, opts, train_set)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    # fp16 holds no numbers below 6e-8: the loss is multiplied, so that small gradients are not lost.
    scaler = torch.amp.GradScaler(here.device.type, init_scale=2.0**12)
    also = {"scaler": scaler}  # in the checkpoints
    run = Run("ddp-fp16", opts, here, train_set, model, optimizer, schedule, here.size, also=also)
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            scaler.scale(loss).backward()
            # Left out if a gradient is inf, because the factor was too large. It is inf on all ranks alike.
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            run.add(loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss))
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
