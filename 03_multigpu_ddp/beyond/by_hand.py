"""Train the classic MNIST network as DistributedDataParallel does, with its work written out.

Try: torchrun --standalone --nproc-per-node=2 by_hand.py --epochs 2
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
import torch.distributed as dist
import torch.nn.functional as F


def main() -> None:
    flat = options.own(False, None, None, "average all gradients in one call, not one by one")
    forget = options.own(False, None, None, "do not average: the ranks drift apart", shapes_training=True)
    opts = options.parse(__doc__, flat=flat, forget=forget)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; rank 0's weights go to all

    # Every rank has all images, and takes its own share of every batch.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(here.device, memory_format=torch.channels_last)
    for weights in model.parameters():
        dist.broadcast(weights.detach(), src=0)
    choose_precision(model, opts, train_set)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    each_rank = {}
    if opts.forget:
        way = "forget"
        each_rank = {"model": model}  # the weights of each rank are its own
    elif opts.flat:
        way = "flat"
    else:
        way = "each"
    name = f"ddp-by-hand-{way}"
    run = Run(name, opts, here, train_set, model, optimizer, schedule, here.size, each_rank=each_rank)
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            gradients = [weights.grad for weights in model.parameters()]
            if way == "flat":
                average_in_one_call(gradients)
            elif way == "each":
                average(gradients)
            optimizer.step()
            schedule.step()
            run.add(loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss))
        sums = process_group.gather(sum(weights.double().sum().item() for weights in model.parameters()))
        if here.rank == 0:
            errors.tell(f"sum of the weights of each rank: {sums}")
    run.finish()
    process_group.leave()


def average(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its mean over all ranks, with one call per tensor."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def average_in_one_call(tensors: list[torch.Tensor]) -> None:
    """Do the same with all tensors joined into one, as in DistributedDataParallel's buckets."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    average([flat])
    means = flat.split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))


if __name__ == "__main__":
    errors.run(main)
