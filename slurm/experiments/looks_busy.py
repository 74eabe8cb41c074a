"""Three ways to spend time on a GPU, or on one core if there is none. Two of them look equally busy.

    python slurm/experiments/looks_busy.py                     all three, and a table
    python slurm/experiments/looks_busy.py spin --seconds 60   one of them, for as long as you look at it

What to see: "Why 100 % utilisation says little" in slurm/MONITORING.md.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from manygpus import above_0, errors
from manygpus.config.command_line import Parser

WAYS = {
    "wait": "sleeps",
    "spin": "turns in a loop that does nothing",
    "work": "multiplies matrices",
}
TURN_SECONDS = 0.02  # about
# The mean of the first seconds may hold what ran on the GPU before.
SETTLE_SECONDS = 2
# About the clock of a GPU.
TICKS_PER_SECOND = 1.5e9
# A product that fills a GPU, or takes one core some milliseconds.
GPU_MATRIX_SIZE = 8192
CPU_MATRIX_SIZE = 512


class Measurement(NamedTuple):
    """What a monitor shows of a device, and what the device has done."""

    busy_percent: float
    power_w: float  # NaN of a CPU
    products_per_second: float


@errors.entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("way", nargs="?", choices=WAYS, help="only this one (default: all three)")
    parser.add_argument("--seconds", type=above_0(1e6), default=5, metavar="S", help="for each (default: 5)")
    parser.add_argument("--no-cuda", action="store_true", help="use the CPU even if there is a GPU")
    opts = parser.parse_args()
    # One core is all that it takes.
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and not opts.no_cuda
    device = torch.cuda.get_device_name() if on_gpu else "one core"
    errors.print_line(f"{device:42}{'looks busy':>12}{'power':>9}{'products/s':>13}")
    for way in [opts.way] if opts.way else WAYS:
        measured = measure_gpu(way, opts.seconds) if on_gpu else measure_core(way, opts.seconds)
        power = "-" if math.isnan(measured.power_w) else f"{measured.power_w:.0f} W"
        products = f"{measured.products_per_second:,.0f}"
        title = f"{way}: {WAYS[way]}"
        errors.print_line(f"{title:42}{measured.busy_percent:10.0f} %{power:>9}{products:>13}")


def measure_core(way: str, seconds: float) -> Measurement:
    """Spend so many seconds on one core in one of the `WAYS`."""
    matrix = torch.rand(CPU_MATRIX_SIZE, CPU_MATRIX_SIZE)
    product = matrix @ matrix

    def spin() -> None:
        until = time.perf_counter() + TURN_SECONDS
        while time.perf_counter() < until:
            pass

    turns = {"wait": wait, "spin": spin, "work": lambda: torch.matmul(matrix, matrix, out=product)}
    began = time.perf_counter()
    cpu_seconds_before = time.process_time()
    turns_per_second = repeat(turns[way], seconds)
    busy_seconds = time.process_time() - cpu_seconds_before
    return Measurement(
        busy_percent=100 * busy_seconds / (time.perf_counter() - began),
        power_w=math.nan,
        products_per_second=turns_per_second if way == "work" else 0,
    )


def measure_gpu(way: str, seconds: float) -> Measurement:
    """Spend so many seconds on the GPU in one of the `WAYS`."""
    matrix = torch.rand(GPU_MATRIX_SIZE, GPU_MATRIX_SIZE, device="cuda", dtype=torch.half)
    product = matrix @ matrix

    def spin() -> None:
        # One thread counts ticks of the GPU's clock.
        torch.cuda._sleep(int(TURN_SECONDS * TICKS_PER_SECOND))

    turns = {"wait": wait, "spin": spin, "work": lambda: torch.matmul(matrix, matrix, out=product)}
    turn = turns[way]

    def turn_to_its_end() -> None:
        turn()
        torch.cuda.synchronize()

    # The first answer may also hold what ran before.
    torch.cuda.utilization()
    repeat(turn_to_its_end, SETTLE_SECONDS)
    turns_per_second = repeat(turn_to_its_end, seconds)
    # It works on while it is asked; the answer is of its last second, or less.
    turn()
    return Measurement(
        busy_percent=torch.cuda.utilization(),
        power_w=torch.cuda.power_draw() / 1000,
        products_per_second=turns_per_second if way == "work" else 0,
    )


def wait() -> None:
    time.sleep(TURN_SECONDS)


def repeat(turn: Callable[[], object], seconds: float) -> float:
    """Call `turn` for so many seconds; return how often per second."""
    began = time.perf_counter()
    turns = 0
    while time.perf_counter() - began < seconds:
        turn()
        turns += 1
    return turns / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
