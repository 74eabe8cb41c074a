"""Where the milliseconds between a bare training step and the kit's training go.

Try: PYTHONPATH=. python3 tools/bench/gpu/overhead.py --out /tmp/overhead.csv

Two kinds of rows. `loop`: the same eager step in a loop that does more and more of what the training does, in
turns, so that all see the same machine. `part`: one part by itself: how long the CPU takes to issue it, and
how long the GPU works for it (from torch.profiler).
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from measuring import DEVICE, Table, wait
from torch.profiler import ProfilerActivity, profile

from manygpus import (
    DistEnv,
    InMemoryDataset,
    Net,
    Run,
    build_optimizer,
    load_dataset,
    normalize,
    parse_options,
    train_loader,
)
from manygpus.config import options
from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.data import loaders as batches
from manygpus.data.loaders import Batches, DistributedBatchSampler, ResidentBatches
from manygpus.distributed import process_group
from manygpus.training.precision import set_float32_precision

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
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="where MNIST is")
    parser.add_argument("--steps", type=int, default=150, help="of a loop and turn (default: %(default)s)")
    args = parser.parse_args()
    table = Table(args.out, COLUMNS)
    train_set, _ = load_dataset("mnist", args.data_dir)
    dist_env = process_group.init_single_process(use_gpu=True)
    for name in args.shapes or SHAPES:
        batch, precision = SHAPES[name]
        if DEVICE.type == "cpu":
            precision = "fp32"
        arguments = {
            "--batch-size": batch,
            "--precision": precision,
            "--train-size": args.steps * batch,
            "--epochs": 1000,
            "--data-dir": args.data_dir,
            "--results-dir": args.out.parent,
        }
        words = [str(word) for argument in arguments.items() for word in argument]
        measure(table, parse_options(__doc__, arguments=words), dist_env, train_set, args.steps)


def measure(
    table: Table, opts: options.Options, dist_env: DistEnv, train_set: InMemoryDataset, steps: int
) -> None:
    """Write the rows of one batch size; `steps`: of a loop and turn."""
    bare = BareTraining(opts)
    kit = KitTraining(opts, dist_env, train_set)
    order = DistributedBatchSampler(len(train_set), opts.batch_size, seed=1, size=100 * len(train_set))
    epoch = ResidentBatches(train_set, order, DEVICE)
    gathered = itertools.chain.from_iterable(itertools.repeat(epoch))
    one_batch = next(gathered)
    shape = {"batch": opts.batch_size, "precision": opts.precision}

    for name, times in time_loops(bare, kit, gathered, one_batch, steps).items():
        values = {"ms": median(times), "least_ms": min(times), "most_ms": max(times)}
        rounded = {column: round(value, 4) for column, value in values.items()}
        table.add(**shape, kind="loop", what=name, **rounded)

    for name, part in parts(opts.batch_size, bare, kit, train_set, gathered, one_batch).items():
        issued = cpu_ms(part)
        gpu_ms, kernels = gpu_work(part)
        table.add(
            **shape,
            kind="part",
            what=name,
            ms=round(median(issued), 4),
            least_ms=round(min(issued), 4),
            most_ms=round(max(issued), 4),
            gpu_ms=gpu_ms,
            gpu_kernels=kernels,
        )


class BareTraining:
    """The network with its optimizer and schedule, and an eager step."""

    def __init__(self, opts: options.Options) -> None:
        self.network = Net(opts.width).to(DEVICE, memory_format=torch.channels_last)
        set_float32_precision(opts.precision, DEVICE)
        self.autocast = torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
        self.optimizer, self.lr_scheduler = build_optimizer(opts, self.network, 10**6)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with self.autocast:
            loss = F.nll_loss(self.network(images), labels)
        loss.backward()
        self.optimizer.step()


class KitTraining:
    """The training of a stage, epoch by epoch."""

    def __init__(self, opts: options.Options, dist_env: DistEnv, train_set: InMemoryDataset) -> None:
        self.network = Net(opts.width).to(DEVICE, memory_format=torch.channels_last)
        set_float32_precision(opts.precision, DEVICE)
        self.autocast = torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
        self.optimizer, self.lr_scheduler = build_optimizer(opts, self.network, 10**6)
        self.run = Run(
            "overhead", opts, dist_env, train_set, self.network, self.optimizer, self.lr_scheduler, devices=1
        )
        self.epochs = self.run.epochs()
        self.train_batches = train_loader(train_set, opts, dist_env)

    def train_epoch(self) -> None:
        epoch = next(self.epochs)
        for images, labels in self.run.steps(epoch, self.train_batches):
            self.optimizer.zero_grad()
            with self.autocast:
                loss = F.nll_loss(self.network(images), labels)
            loss.backward()
            self.optimizer.step()
            self.lr_scheduler.step()
            self.run.log(loss=loss)


def time_loops(
    bare: BareTraining,
    kit: KitTraining,
    gathered: Iterator[batches.Batch],
    one_batch: batches.Batch,
    steps: int,
) -> dict[str, list[float]]:
    """Return the milliseconds of a step in loops that do more and more, of each turn."""

    def one_batch_again() -> None:
        for _ in range(steps):
            bare.step(*one_batch)

    def with_gathered_batches() -> None:
        for images, labels in itertools.islice(gathered, steps):
            bare.step(images, labels)

    def with_the_schedule() -> None:
        for images, labels in itertools.islice(gathered, steps):
            bare.step(images, labels)
            bare.lr_scheduler.step()

    loops = {
        "step on one batch": one_batch_again,
        "and gathers its batch": with_gathered_batches,
        "and steps the schedule": with_the_schedule,
        "and run.steps, run.log: the training": kit.train_epoch,
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(TURNS + 1):
        for name, loop in loops.items():
            wait()
            started = time.perf_counter()
            loop()
            wait()
            if turn > 0:  # the first warms up
                milliseconds[name].append(1000 * (time.perf_counter() - started) / steps)
        kit.run.end_of_epoch(turn + 1)  # writes a record: not a part of a step
    return milliseconds


def parts(
    batch_size: int,
    bare: BareTraining,
    kit: KitTraining,
    train_set: InMemoryDataset,
    gathered: Iterator[batches.Batch],
    one_batch: batches.Batch,
) -> dict[str, Callable[[], object]]:
    """Return what a training does in a step, each part as a function that does it once."""
    pixels = train_set.inputs.to(DEVICE)
    targets = train_set.targets.to(DEVICE)
    indices = torch.randperm(60_000, device=DEVICE)[:batch_size]
    raw = pixels.index_select(0, indices)
    loss = torch.zeros((), device=DEVICE)
    losses = torch.zeros(10, device=DEVICE)
    repeated = kit.run.steps(next(kit.epochs), OneBatch(one_batch, 20 * CALLS * TURNS + 1000))

    def note_the_loss() -> None:
        losses[5] = loss.detach()

    def run_steps_and_add() -> None:
        next(repeated)
        kit.run.log(loss=loss)

    return {
        "gather images by pixels[indices]": lambda: pixels[indices],
        "gather images by index_select": lambda: pixels.index_select(0, indices),
        "gather labels by targets[indices]": lambda: targets[indices],
        "normalise": lambda: normalize(raw),
        "the loader: all of these": lambda: next(gathered),
        "zero_grad, forward, loss, backward, optimizer: the step": lambda: bare.step(*one_batch),
        "optimizer.step": bare.optimizer.step,
        "schedule.step": bare.lr_scheduler.step,
        "note a loss (in run.log)": note_the_loss,
        "run.steps and run.log, without a step": run_steps_and_add,
    }


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
        self.batch = batch
        self.steps = steps
        self.device = DEVICE

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Do nothing: every epoch is the same."""

    def __iter__(self) -> object:
        return itertools.repeat(self.batch, self.steps)


if __name__ == "__main__":
    main()
