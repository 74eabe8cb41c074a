"""How much longer does an epoch take by Lightning? It and stage 03 in turns, with equal options and output.

python results/bench/lightning_overhead.py --workers 1,2 --pairs 5 --train-size 6000

The runs stay in the folder that --out names, where results/plot_results.py finds them.
"""

import argparse
import statistics
from pathlib import Path

from trainkit import records
from trainkit.command_line import Parser, at_least, list_of
from trainkit.errors import UserError, run
from trainkit.files import check_writable
from trainkit.jobs import following, local
from trainkit.staging import DEFAULT_DIR

DDP = Path(__file__).resolve().parents[2] / "03_multigpu_ddp"
OUT = Path(__file__).with_name("out") / "lightning"
SCRIPTS = (DDP / "mnist_ddp.py", DDP / "beyond" / "lightning" / "mnist_lightning.py")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = list_of(at_least(1))
    parser.add_argument("--workers", type=numbers, default=(1, 2), metavar="N,...", help="processes (1,2)")
    parser.add_argument("--pairs", type=at_least(1), default=5, metavar="N", help="trainings by each (5)")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help="where the runs go (%(default)s)"
    )
    args, options = parser.parse_known_args()
    check_writable(args.out, "runs", "give another --out.")
    print("workers  Lightning's seconds per epoch over stage 03's: median (min..max)")
    for workers in args.workers:
        ratios = []
        for pair in range(args.pairs):
            order = SCRIPTS if pair % 2 else SCRIPTS[::-1]  # neither is always the one after a pause
            seconds = {
                script: seconds_per_epoch(
                    script, workers, options, args.out / f"{script.stem}-{workers}-{pair}"
                )
                for script in order
            }
            ratios.append(seconds[SCRIPTS[1]] / seconds[SCRIPTS[0]])
        print(
            f"{workers:7}  {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})", flush=True
        )


def seconds_per_epoch(script: Path, workers: int, options: list[str], out: Path) -> float:
    """The median of a training's epochs without the first one, which is a warm-up; `out` is a new folder."""
    if out.exists():
        raise UserError(f"{out} is there already: give another --out.")
    defaults = ["--epochs", "4", "--batch-size", "64", "--precision", "fp32", "--test-size", "1000"]
    gpus = min(workers, local.gpus_here())
    how = {"ranks": workers, "gpus": gpus, "threads": 1, "checkpoints": False}
    handle = local.start(script, (*defaults, *options), out / "job", DEFAULT_DIR, out, **how)
    if following.follow(handle, quiet=True):
        raise UserError(f"{script.name} failed; its error is above.")
    (path,) = handle.results.glob("*.csv")
    rows = [row["train_seconds"] for row in records.read(path) if not row["warmup"]]
    if not rows:
        raise UserError("the first epoch does not count: give --epochs 2 or more.")
    return statistics.median(rows)


if __name__ == "__main__":
    run(main)
