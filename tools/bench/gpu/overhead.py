"""Where the milliseconds between a bare training step and the kit's training go.

Try: PYTHONPATH=. python3 tools/bench/gpu/overhead.py --out /tmp/overhead.csv

Two kinds of rows. `loop`: the same eager step in a loop that does more and more of what the training does, in
turns, so that all see the same machine. `part`: one part by itself: how long the CPU takes to issue it, and
how long the GPU works for it (from torch.profiler).
"""

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from measuring import DEVICE, Table, wait
from torch.profiler import ProfilerActivity, profile

from trainkit.config import options
from trainkit.data import datasets as data
from trainkit.data import loaders as batches
from trainkit.data import staging
from trainkit.data.loaders import Batches, DistributedBatchSampler, ResidentBatches
from trainkit.distributed import process_group
from trainkit.training.model import Net
from trainkit.training.optim import optimizer_and_schedule
from trainkit.training.precision import set_precision
from trainkit.training.run import Run

COLUMNS = ["batch", "precision", "kind", "what", "ms", "least_ms", "most_ms", "gpu_ms", "gpu_kernels"]
SHAPES = {"128": (128, "tf32"), "1024": (1024, "bf16"), "4": (4, "fp32")}
CALLS = 200 if DEVICE.type == "cuda" else 10  # of a part, in a turn
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", metavar="BATCH", help="128, 1024 (default: both)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV to write")
    parser.add_argument("--data-dir", type=Path, default=staging.DEFAULT_DIR, help="where MNIST is")
    parser.add_argument("--steps", type=int, default=150, help="of a loop and turn (default: %(default)s)")
    args = parser.parse_args()
    table = Table(args.out, COLUMNS)
    train_set, _ = data.load("mnist", args.data_dir)
    here = process_group.alone(True)
    for name in args.shapes or SHAPES:
        batch, precision = SHAPES[name]
        if DEVICE.type == "cpu":
            precision = "fp32"
        given = ["--batch-size", str(batch), "--precision", precision, "--results-dir", str(args.out.parent)]
        given += [
            "--train-size",
            str(args.steps * batch),
            "--epochs",
            "1000",
            "--data-dir",
            str(args.data_dir),
        ]
        measure(table, options.parse(__doc__, given), here, train_set, args.steps)


def measure(
    table: Table, opts: options.Options, here: process_group.Place, train_set: data.Split, steps: int
) -> None:
    """Write the rows of one batch size."""
    row = {"batch": opts.batch_size, "precision": opts.precision}
    network = Net(opts.width).to(DEVICE, memory_format=torch.channels_last)
    set_precision(network, opts.precision)
    bare_network = Net(opts.width).to(DEVICE, memory_format=torch.channels_last)
    set_precision(bare_network, opts.precision)
    bare_optimizer, bare_schedule = optimizer_and_schedule(opts, bare_network, 10**6)
    optimizer, schedule = optimizer_and_schedule(opts, network, 10**6)
    run = Run("overhead", opts, here, train_set, network, optimizer, schedule, devices=1)
    epochs = run.epochs()
    train_batches = batches.training(train_set, opts, DEVICE)
    order = DistributedBatchSampler(len(train_set), opts.batch_size, seed=1, size=100 * len(train_set))
    endless = itertools.chain.from_iterable(
        itertools.repeat(ResidentBatches(train_set, order, DEVICE, shift=False))
    )
    one_batch = next(endless)

    def bare_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        bare_optimizer.zero_grad()
        loss = F.nll_loss(bare_network(images), labels)
        loss.backward()
        bare_optimizer.step()
        return loss

    def one_batch_again() -> None:
        for _ in range(steps):
            bare_step(*one_batch)

    def gathered() -> None:
        for images, labels in itertools.islice(endless, steps):
            bare_step(images, labels)

    def gathered_and_scheduled() -> None:
        for images, labels in itertools.islice(endless, steps):
            bare_step(images, labels)
            bare_schedule.step()

    def as_the_kit_trains() -> None:
        epoch = next(epochs)
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.nll_loss(network(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.add(loss)

    loops = {
        "step on one batch": one_batch_again,
        "and gathers its batch": gathered,
        "and steps the schedule": gathered_and_scheduled,
        "and run.steps, run.add: the training": as_the_kit_trains,
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(TURNS + 1):
        for name, loop in loops.items():
            wait()
            started = time.perf_counter()
            loop()
            wait()
            if turn:  # the first warms up
                milliseconds[name].append(1000 * (time.perf_counter() - started) / steps)
        run.end_of_epoch(turn + 1)  # writes a record: not a part of a step
    for name, times in milliseconds.items():
        values = {"ms": median(times), "least_ms": min(times), "most_ms": max(times)}
        table.add(**row, kind="loop", what=name, **{key: round(value, 4) for key, value in values.items()})

    pixels, targets, indices = (
        train_set.inputs.to(DEVICE), train_set.targets.to(DEVICE), torch.randperm(60_000, device=DEVICE)
    )  # fmt: skip
    some = indices[: opts.batch_size]
    raw = pixels.index_select(0, some)
    loss = torch.zeros((), device=DEVICE)
    epoch = next(epochs)
    repeated = run.steps(epoch, OneBatch(one_batch, 20 * CALLS * TURNS + 1000))

    def run_steps_and_add() -> None:
        next(repeated)
        run.add(loss)

    noted = torch.zeros(10, device=DEVICE)

    def note_the_loss() -> None:
        noted[5] = loss.detach()

    parts: dict[str, Callable[[], object]] = {
        "gather images by pixels[indices]": lambda: pixels[some],
        "gather images by index_select": lambda: pixels.index_select(0, some),
        "gather labels by targets[indices]": lambda: targets[some],
        "normalise": lambda: data.normalize(raw),
        "the loader: all of these": lambda: next(endless),
        "zero_grad, forward, loss, backward, optimizer: the step": lambda: bare_step(*one_batch),
        "optimizer.step": bare_optimizer.step,
        "schedule.step": bare_schedule.step,
        "note a loss (in run.add)": note_the_loss,
        "run.steps and run.add, without a step": run_steps_and_add,
    }
    for name, part in parts.items():
        issued = cpu_ms(part)
        gpu_ms, kernels = gpu_work(part)
        values = {"ms": round(median(issued), 4), "least_ms": round(min(issued), 4)}
        values |= {"most_ms": round(max(issued), 4), "gpu_ms": gpu_ms, "gpu_kernels": kernels}
        table.add(**row, kind="part", what=name, **values)


def cpu_ms(part: Callable[[], object]) -> list[float]:
    """Return the milliseconds that the CPU takes to issue `part`, in each turn.

    Only so many calls in a row that the GPU's queue, which holds about a thousand kernels, is never full.
    """
    times = []
    for _ in range(TURNS):
        speeds = []
        for _ in range(CALLS // 10):
            wait()
            started = time.perf_counter()
            for _ in range(10):
                part()
            speeds.append((time.perf_counter() - started) / 10)
        times.append(1000 * median(speeds))
    return times


def gpu_work(part: Callable[[], object], calls: int = 10) -> tuple[float | None, float | None]:
    """Return the milliseconds of kernels and copies on the GPU in one call of `part`, and their number."""
    if DEVICE.type == "cpu":
        return None, None
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            part()
        wait()
    on_gpu = [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Optimizer.")
    ]
    microseconds = sum(event.time_range.elapsed_us() for event in on_gpu)
    return round(microseconds / 1000 / calls, 4), round(len(on_gpu) / calls, 1)


class OneBatch(Batches):
    """The same batch in every step: a loader that takes no time."""

    def __init__(self, batch: tuple[torch.Tensor, torch.Tensor], steps: int) -> None:
        self.batch, self.steps, self.device = batch, steps, DEVICE

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Do nothing: every epoch is the same."""

    def __iter__(self) -> object:
        return itertools.repeat(self.batch, self.steps)


if __name__ == "__main__":
    main()
