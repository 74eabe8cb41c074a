"""Train the classic MNIST network as nn.DataParallel does, with its work written out and timed.

Try: python by_hand.py --replicas 2 --epochs 2
"""

import copy
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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
from trainkit.config.command_line import at_least

import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    replicas = options.own(2, at_least(1, 64), "N", "replicas on the CPU; otherwise there is one on each GPU")
    opts = options.parse(__doc__, replicas=replicas)
    here = process_group.alone(not opts.no_cuda, opts.debug_dir)
    gpus = torch.cuda.device_count() if here.device.type == "cuda" else 0
    if gpus > 0:
        devices = [torch.device("cuda", index) for index in range(gpus)]
    else:
        devices = [here.device] * opts.replicas
    count = len(devices)
    opts = opts.for_devices(count, "replicas")
    torch.manual_seed(opts.seed)
    take_all_gpus(opts.seed)  # each drops other neurons
    torch.set_num_threads(max(torch.get_num_threads() // count, 1))  # the replicas share the cores

    # By default all images go to the device once and stay there.
    train_set, test_set = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device)
    test_batches = batches.testing(test_set, opts, here.device)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(here.device, memory_format=torch.channels_last)
    choose_precision(model, opts, train_set)
    replicas = [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]
    threads = ThreadPoolExecutor(count)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    run = Run("dp-by-hand", opts, here, train_set, model, optimizer, schedule, devices=count)
    for epoch in run.epochs():  # goes on where an earlier run stopped
        seconds = Counter()
        for replica in replicas:
            replica.train()
        for images, labels in run.steps(epoch, train_batches):
            for replica in replicas:
                replica.zero_grad()
            with phase("replicate", seconds, devices), torch.no_grad():
                for replica in replicas[1:]:
                    for copied, weights in zip(replica.parameters(), model.parameters(), strict=True):
                        copied.copy_(weights)
            with phase("scatter", seconds, devices):
                parts = to_each(devices, images.chunk(count))
            with phase("forward", seconds, devices):
                outputs = list(threads.map(nn.Module.__call__, replicas, parts))
            with phase("gather", seconds, devices):
                output = torch.cat([part.detach().to(here.device) for part in outputs]).requires_grad_()
            loss = F.nll_loss(output, labels)
            loss.backward()  # as far as the output
            with phase("backward", seconds, devices):
                gradients = to_each(devices, output.grad.chunk(count))
                list(threads.map(torch.autograd.backward, outputs, gradients))
            with phase("sum", seconds, devices):
                for replica in replicas[1:]:
                    for copied, weights in zip(replica.parameters(), model.parameters(), strict=True):
                        weights.grad += copied.grad.to(here.device)
            optimizer.step()
            schedule.step()
            run.add(loss)
        errors.tell("seconds: " + ", ".join(f"{name} {spent:.3f}" for name, spent in seconds.items()))
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss))
    run.finish()


def to_each(devices: list[torch.device], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send one part to each device."""
    return [part.to(device) for part, device in zip(parts, devices, strict=True)]


@contextmanager
def phase(name: str, seconds: Counter, devices: list[torch.device]) -> Iterator[None]:
    """Add the time of the block to `seconds[name]`, up to the end of the GPUs' work."""
    started = time.perf_counter()
    yield
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    seconds[name] += time.perf_counter() - started


if __name__ == "__main__":
    errors.run(main)
