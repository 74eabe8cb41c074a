"""Train the classic MNIST network with DistributedDataParallel, the step captured in a CUDA graph.

Try: torchrun --standalone --nproc-per-node=1 captured.py --epochs 3 --batch-size 128
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
from trainkit.training import capture

import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    ways = ("captured", "graphed", "eager")
    how = options.own("captured", ways, None, "graphed: by make_graphed_callables; eager: as in mnist_ddp.py")
    compiled = options.own(False, None, None, "compile the network before that")
    opts = options.parse(__doc__, how=how, compile=compiled)
    if opts.how == "graphed" and opts.precision == "auto" and opts.resume == "auto":
        raise errors.UserError("--how graphed keeps the precision of its graphs: with --resume, say which.")
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; DDP makes the weights equal

    # Every rank has all images, and takes its own share of every batch.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(here.device, memory_format=torch.channels_last)
    choose_precision(model, opts, train_set)
    if opts.how != "eager":
        capture.check(model)
    if opts.compile:
        model = torch.compile(model)
    if opts.how == "graphed":
        capture.graphed(model, next(iter(train_batches))[0])
    # Sends rank 0's weights to all ranks, and averages the gradients over the ranks in every
    # backward pass: so the weights stay equal. The bucket view saves a copy of the gradients.
    stream = torch.cuda.Stream() if opts.how == "captured" else None
    with torch.cuda.stream(stream):  # a captured step averages its gradients there
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    def forward_backward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)  # a replay writes to the same tensors again
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        return loss

    name = f"ddp-{opts.how}" + ("-compiled" if opts.compile else "")
    run = Run(name, opts, here, train_set, model, optimizer, schedule, devices=here.size)
    step = forward_backward
    if opts.how == "captured":
        step = capture.CapturedStep(forward_backward, model, stream)
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            loss = step(images, labels)
            optimizer.step()
            schedule.step()
            run.add(loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss))
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
