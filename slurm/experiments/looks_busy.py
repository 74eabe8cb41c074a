"""Three ways to spend time on a GPU, or on one core if there is none. Two of them look equally busy.

    python slurm/experiments/looks_busy.py                     all three, and a table
    python slurm/experiments/looks_busy.py spin --seconds 60   one of them, for as long as you look at it

What to see: "Why 100 % utilisation says little" in slurm/MONITORING.md.
"""

import math
import time

import torch

from trainkit import errors
from trainkit.config.command_line import Parser, above_0

WAYS = {"wait": "sleeps", "spin": "turns in a loop that does nothing", "work": "multiplies matrices"}
PIECE = 0.02  # seconds of one turn, about
SETTLE = 2  # seconds


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("way", nargs="?", choices=WAYS, help="only this one (default: all three)")
    parser.add_argument("--seconds", type=above_0(1e6), default=5, metavar="S", help="for each (default: 5)")
    parser.add_argument("--no-cuda", action="store_true", help="use the CPU even if there is a GPU")
    opts = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not opts.no_cuda
    torch.set_num_threads(1)  # one core is all that it takes
    where = torch.cuda.get_device_name() if on_gpu else "one core"
    errors.tell(f"{where:42}{'looks busy':>12}{'power':>9}{'products/s':>13}")
    for way in [opts.way] if opts.way else WAYS:
        busy, watts, done = measure(way, on_gpu, opts.seconds)
        cells = ["-" if math.isnan(watts) else f"{watts:.0f} W", f"{done:,.0f}"]
        errors.tell(f"{way + ': ' + WAYS[way]:42}{busy:10.0f} %{cells[0]:>9}{cells[1]:>13}")


def measure(way: str, on_gpu: bool, seconds: float) -> tuple[float, float, float]:
    """Return what a monitor shows, % of the GPU or of a core and W, and the matrix products per second."""
    # A product that fills a GPU, or takes one core some milliseconds.
    size, kind = (8192, torch.half) if on_gpu else (512, torch.float)
    matrix = torch.rand(size, size, device="cuda" if on_gpu else "cpu", dtype=kind)
    product = matrix @ matrix

    def turn() -> None:
        if way == "wait":
            time.sleep(PIECE)
        elif way == "work":
            torch.matmul(matrix, matrix, out=product)
        elif on_gpu:
            torch.cuda._sleep(int(PIECE * 1.5e9))  # one thread that counts ticks of the GPU's clock
        else:
            until = time.perf_counter() + PIECE
            while time.perf_counter() < until:
                pass

    def turns_per_second(seconds: float) -> float:
        start, turns = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds:
            turn()
            turns += 1
            if on_gpu:
                torch.cuda.synchronize()
        return turns / passed

    if on_gpu:  # a first answer, and the mean of the first seconds, may hold what ran before
        torch.cuda.utilization()
        turns_per_second(SETTLE)
    start, start_of_cpu = time.perf_counter(), time.process_time()
    speed = turns_per_second(seconds)
    busy = 100 * (time.process_time() - start_of_cpu) / (time.perf_counter() - start)
    watts = math.nan
    if on_gpu:
        turn()  # it works on while it is asked; the answer is of its last second, or less
        busy, watts = torch.cuda.utilization(), torch.cuda.power_draw() / 1000
    return busy, watts, speed if way == "work" else 0


if __name__ == "__main__":
    errors.run(main)
