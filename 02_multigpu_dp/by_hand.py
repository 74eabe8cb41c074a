"""Train the classic MNIST network as nn.DataParallel does, with its work written out and timed.

Try: python by_hand.py --replicas 2 --epochs 2
"""

import copy
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from manygpus import (
    Net,
    Options,
    Run,
    at_least,
    augmentation,
    build_optimizer,
    entrypoint,
    errors,
    eval_loader,
    evaluate,
    init_single_process,
    load_dataset,
    option,
    parse_options,
    resolve_precision,
    take_all_gpus,
    train_loader,
    tune_process,
)


@dataclass(frozen=True)
class ByHandOptions(Options):
    replicas: int = option(
        2,
        type=at_least(1, 64),
        metavar="N",
        help="replicas on the CPU; otherwise there is one on each GPU",
    )


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, ByHandOptions)
    dist_env = init_single_process(use_gpu=not opts.no_cuda, debug_dir=opts.debug_dir)
    tune_process(dist_env)
    gpus = torch.cuda.device_count() if dist_env.device.type == "cuda" else 0
    if gpus > 0:
        devices = [torch.device("cuda", index) for index in range(gpus)]
    else:
        devices = [dist_env.device] * opts.replicas
    count = len(devices)
    opts = opts.resolve_batch_size(count, "replicas")
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)
    take_all_gpus(opts.seed)  # so that each GPU drops different neurons
    torch.set_num_threads(max(torch.get_num_threads() // count, 1))  # the replicas share the cores

    # By default all images go to the device once and stay there.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    replicas = [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]
    threads = ThreadPoolExecutor(count)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    run = Run("dp-by-hand", opts, dist_env, train_set, model, optimizer, lr_scheduler, devices=count)
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
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
                outputs = list(threads.map(forward, replicas, parts, [opts.precision] * count))
            with phase("gather", seconds, devices):
                output = torch.cat([part.detach().to(dist_env.device) for part in outputs]).requires_grad_()
            loss = F.nll_loss(output, labels)
            loss.backward()  # as far as the output
            with phase("backward", seconds, devices):
                gradients = to_each(devices, output.grad.chunk(count))
                list(threads.map(torch.autograd.backward, outputs, gradients))
            with phase("sum", seconds, devices):
                for replica in replicas[1:]:
                    for copied, weights in zip(replica.parameters(), model.parameters(), strict=True):
                        weights.grad += copied.grad.to(dist_env.device)
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        errors.print_line("seconds: " + ", ".join(f"{name} {spent:.3f}" for name, spent in seconds.items()))
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))
    run.finish()


def to_each(devices: list[torch.device], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send one part to each device."""
    return [part.to(device) for part, device in zip(parts, devices, strict=True)]


def forward(replica: nn.Module, images: torch.Tensor, precision: str) -> torch.Tensor:
    """Return the replica's output. Autocast is a state of a thread, so each thread enters its own."""
    with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        return replica(images)


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
    main()
