"""Time one training step of the MNIST network, made in several ways: by itself, and in the kit's training.

Try: PYTHONPATH=. python3 tools/bench/gpu/steps.py --out /tmp/steps.csv "128 tf32 Adadelta"

Three speeds of each: the step on one batch again and again (`one batch`), on batches that are gathered and
normalised on the GPU as the kit's loader does (`gathered`), and in a training by the kit, whose epochs
last at least three seconds (`kit`, which is captured.py of stage 03 with one rank).
"""

import argparse
import gc
import itertools
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measuring import DEVICE, Table, captured, steps_per_s
from torch import nn

from manygpus import InMemoryDataset, Net, load_dataset
from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.data.loaders import DistributedBatchSampler, ResidentBatches
from manygpus.record import records
from manygpus.training.precision import set_float32_precision

REPOSITORY = Path(__file__).resolve().parents[3]
CAPTURED_SCRIPT = REPOSITORY / "03_multigpu_ddp" / "beyond" / "by_feature" / "captured.py"
COLUMNS = ["shape", "way", "loop", "images_per_s", "slowest", "fastest", "ms_per_step", "windows", "start_s"]
WARMUP_STEPS = 30


class Shape(NamedTuple):
    batch: int
    precision: str
    optimizer: str  # Adadelta (the kit's recipe classic) or Adam (its recipe fast)


SHAPES = {
    "128 tf32 Adadelta": Shape(128, "tf32", "Adadelta"),
    "1024 bf16 Adadelta": Shape(1024, "bf16", "Adadelta"),
    "4096 bf16 Adadelta": Shape(4096, "bf16", "Adadelta"),
    "128 bf16 Adam": Shape(128, "bf16", "Adam"),
    "1024 bf16 Adam": Shape(1024, "bf16", "Adam"),
}
WAYS = (
    "eager",
    "graphed",
    "captured",
    "whole step captured",
    "compiled",
    "reduce-overhead",
    "compiled and captured",
    "compiled and whole step captured",
)
COMPILED = tuple(way for way in WAYS if "compiled" in way or way == "reduce-overhead")
# The kit's options for a way; it does not have the other ways.
IN_THE_KIT = {
    "eager": ["--how", "eager"],
    "graphed": ["--how", "graphed"],
    "captured": [],
    "compiled": ["--how", "eager", "--compile"],
    "compiled and captured": ["--compile"],
}
OF_ADAM = ("eager", "captured", "compiled and captured", "compiled and whole step captured")
# What is measured, the most important first; the kit's training where it says so.
PLAN = {
    "128 tf32 Adadelta": (WAYS, ("eager", "captured")),
    "1024 bf16 Adadelta": (WAYS, ("eager", "captured")),
    "128 bf16 Adam": (OF_ADAM, ("compiled and captured",)),
    "1024 bf16 Adam": (OF_ADAM, ("compiled and captured",)),
    "4096 bf16 Adadelta": (
        ("eager", "captured", "compiled", "compiled and captured"),
        ("eager",),
    ),
}
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV to write")
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="where MNIST is")
    parser.add_argument("--seconds", type=float, default=0.35, help="of a window (default: %(default)s)")
    parser.add_argument("--kit-seconds", type=float, default=3.1, help="of an epoch (default: %(default)s)")
    parser.add_argument("--compile-only", action="store_true", help="only fill the cache of torch.compile")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = DEVICE.type == "cuda"
    train_set, _ = load_dataset("mnist", args.data_dir)
    table = Table(args.out, COLUMNS)
    for name in args.shapes or PLAN:
        ways, ways_of_the_kit = PLAN[name]
        for way in ways:
            if args.compile_only and way not in COMPILED:
                continue
            try:
                gathered = measure(table, name, way, train_set, args)
                if way in ways_of_the_kit and not args.compile_only:
                    train_with_the_kit(table, name, way, gathered, args)
            except Exception as error:  # the other ways are still to be measured
                print(f"{name}, {way}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            torch._dynamo.reset()
            gc.collect()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()


def measure(table: Table, name: str, way: str, train_set: InMemoryDataset, args: argparse.Namespace) -> float:
    """Time the step by itself, write two rows, and return the images/s of gathered batches."""
    shape = SHAPES[name]
    order = DistributedBatchSampler(len(train_set), shape.batch, seed=1, size=100 * len(train_set))
    epoch = ResidentBatches(train_set, order, DEVICE)
    batches = itertools.chain.from_iterable(itertools.repeat(epoch))
    one_batch = next(batches)
    started = time.perf_counter()
    step = make(shape, way, one_batch)
    step(*one_batch).item()
    step(*one_batch).item()
    start_s = time.perf_counter() - started
    loops = {
        "one batch": (lambda: step(*one_batch), args.seconds / 2),
        "gathered": (lambda: step(*next(batches)), args.seconds),
    }
    if args.compile_only:
        table.add(shape=name, way=way, loop="first two steps, cache cold", start_s=round(start_s, 1))
        return 0.0
    for loop, (call, seconds) in loops.items():
        speeds = [shape.batch * speed for speed in steps_per_s(call, 3, seconds, WARMUP_STEPS)]
        write(table, name, way, loop, speeds, start_s)
    return median(speeds)


def write(table: Table, name: str, way: str, loop: str, images_per_s: list[float], start_s: float) -> None:
    """Write the median of the windows or epochs, with their slowest and fastest."""
    typical = median(images_per_s)
    table.add(
        shape=name,
        way=way,
        loop=loop,
        images_per_s=round(typical),
        slowest=round(min(images_per_s)),
        fastest=round(max(images_per_s)),
        ms_per_step=round(1000 * SHAPES[name].batch / typical, 4),
        windows=len(images_per_s),
        start_s=round(start_s, 2),
    )


def make(shape: Shape, way: str, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    """Return a function that trains a new network on one batch, and returns its loss."""
    torch.manual_seed(1)
    network = Net().to(DEVICE, memory_format=torch.channels_last).train()
    precision = shape.precision if DEVICE.type == "cuda" else "fp32"
    set_float32_precision(precision, DEVICE)
    # Without its cache, as a graph that is captured within it cannot have one.
    autocast = torch.autocast(
        DEVICE.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )
    whole = "whole step" in way
    optimizer = make_optimizer(shape, network, capturable=whole and DEVICE.type == "cuda")
    model: nn.Module = network
    if way == "reduce-overhead":
        model = torch.compile(network, mode="reduce-overhead")
    elif "compiled" in way:
        model = torch.compile(network)
    elif way == "graphed" and DEVICE.type == "cuda":
        with autocast:
            model = torch.cuda.make_graphed_callables(network, (batch[0],))

    def forward_backward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # Without gradients to add to, the backward pass writes them: in a graph always to the same place.
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = F.nll_loss(model(images), labels)
        loss.backward()
        return loss.detach()

    def with_optimizer(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = forward_backward(images, labels)
        optimizer.step()
        return loss

    if whole:
        return captured(with_optimizer, batch)
    if "captured" not in way:
        return with_optimizer
    replay = captured(forward_backward, batch)

    def replay_and_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = replay(images, labels)
        optimizer.step()
        return loss

    return replay_and_step


def make_optimizer(shape: Shape, network: nn.Module, capturable: bool) -> torch.optim.Optimizer:
    """Return the optimizer of the kit's recipes; `capturable` keeps its counters on the GPU."""
    if shape.optimizer == "Adam":
        return torch.optim.Adam(network.parameters(), lr=0.003, fused=True, capturable=capturable)
    return torch.optim.Adadelta(network.parameters(), lr=1.0, foreach=True, capturable=capturable)


def train_with_the_kit(
    table: Table, name: str, way: str, images_per_s: float, args: argparse.Namespace
) -> None:
    """Train four epochs in this process, and write the speed of those past the warm-up."""
    shape = SHAPES[name]
    results = args.out.parent / "kit"
    before = set(results.glob("runs/*.csv"))
    steps = int(images_per_s * args.kit_seconds) // shape.batch
    sys.argv = [
        str(CAPTURED_SCRIPT),
        *("--batch-size", str(shape.batch), "--precision", shape.precision, "--epochs", "4"),
        *("--train-size", str(max(steps, 2) * shape.batch), "--data-dir", str(args.data_dir)),
        *("--recipe", "fast" if shape.optimizer == "Adam" else "classic", "--results-dir", str(results)),
        *IN_THE_KIT[way],
    ]
    if DEVICE.type == "cpu":
        sys.argv[sys.argv.index("--precision") + 1] = "fp32"
    started = time.perf_counter()
    try:
        runpy.run_path(str(CAPTURED_SCRIPT), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"the kit ended with {ended.code}") from None
    finally:
        if torch.distributed.is_initialized():  # the training failed, and left it
            torch.distributed.destroy_process_group()
    (path,) = set(results.glob("runs/*.csv")) - before
    rows = records.read(path)
    speeds = [row["images_per_s"] for row in rows if not row["warmup"]]
    start_s = time.perf_counter() - started - sum(row["train_seconds"] for row in rows[1:])
    write(table, name, way, "kit", speeds, start_s)


if __name__ == "__main__":
    main()
