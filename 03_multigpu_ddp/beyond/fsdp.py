"""Train the classic MNIST network split over the ranks: each holds a share of weights, gradients and optimizer.

Try: torchrun --standalone --nproc-per-node=2 fsdp.py --epochs 2
"""

from trainkit import batches, data, errors, options, world
from trainkit.evaluation import evaluate
from trainkit.model import Net
from trainkit.precision import choose_precision
from trainkit.recipes import optimizer_and_schedule
from trainkit.run import Run
from trainkit.sharded import Sharded, local

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh


def main() -> None:
    how = options.own("shard", ("shard", "ddp"), None, "a share of the network on each rank, or all of it")
    opts = options.parse(__doc__, how=how)
    here = world.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; rank 0's weights go to all

    # Every rank has all images, and takes its own share of every batch.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)

    model = Net(opts.width).to(here.device)  # fully_shard takes no weights in channels_last
    choose_precision(model, opts, train_set)
    if opts.how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        for weights in model.parameters():
            dist.broadcast(weights.detach(), src=0)
        mesh = init_device_mesh(here.device.type, (here.size,))
        for part in (model.conv1, model.conv2, model.fc1, model.fc2, model):
            fsdp.fully_shard(part, mesh=mesh)
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
    run.finish()
    world.leave()


if __name__ == "__main__":
    errors.run(main)
