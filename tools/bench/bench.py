"""Time our stages against the classic script, side by side on this machine.

The parts speed, ladder and ddp run their cases in turn, several times over, and compare medians:
machines drift, and a ratio of neighbours survives that. Each part writes `<out>/<part>.csv`, and prints the
table made of it.
"""

import argparse
import csv
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import torch
from ladder import RUNGS

from manygpus import at_least, errors
from manygpus.config.command_line import Parser
from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.data import staging
from manygpus.devices import accelerator_of, device_name
from manygpus.files import check_writable
from manygpus.jobs.stages import STAGES
from manygpus.record import records
from manygpus.reports.page import markdown
from manygpus.training.run_facts import git_commit

HERE = Path(__file__).resolve().parent
SPEEDS = {"images_per_s": "training", "eval_images_per_s": "evaluation"}
GOAL_PERCENT = 99.0  # test accuracy that the recipe part runs to
TEST_IMAGES = 10_000

Rows = Iterator[dict[str, object]]


@errors.entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, help="turns of speed, ladder and ddp (default: 3)"
    )
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="where MNIST is")
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="for the CSVs (default: tools/bench/out)"
    )
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        raise errors.UserError(f"unknown part {', '.join(unknown)}: the parts are {', '.join(PARTS)}.")
    staging.check("mnist", args.data_dir)  # says what to do where there is none
    check_writable(args.out, "the benchmark", "give a different --out.")

    for part in args.parts or PARTS:
        measure, _ = PARTS[part]
        print(f"\n== {part}: {measure.__doc__}", flush=True)
        path = args.out / f"{part}.csv"
        _measure(measure, args, path)
        print(table(path), flush=True)


def _measure(measure: Callable[[argparse.Namespace], Rows], args: argparse.Namespace, path: Path) -> None:
    """Write the rows of one part to `path`, after each run, so that an interrupted part keeps its rows."""
    machine = {"device_name": device_name(_device()), "torch_version": torch.__version__}
    machine |= {"git_commit": git_commit()}
    rows = []
    try:
        for row in measure(args):
            rows.append(machine | row)
            pd.DataFrame(rows).to_csv(path, index=False, float_format="%.6g")
    except subprocess.CalledProcessError as error:
        raise errors.UserError(f"{shlex.join(map(str, error.cmd))} failed; its error is above.") from None


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def table(path: Path) -> str:
    """Lay out the CSV of a part, which has its name, as a table in Markdown."""
    _, summarise = PARTS[path.stem]

    def text(value: object) -> str:
        if not isinstance(value, float):
            return str(value)
        if math.isnan(value):
            return "-"
        return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"

    # Else numpy would turn whole numbers into floats.
    summary = summarise(pd.read_csv(path)).reset_index().astype(object)
    return markdown(summary.apply(lambda column: column.map(text)).rename(columns=str))


def speed(args: argparse.Namespace) -> Rows:
    """Two epochs of the classic recipe at batch 128, on one GPU or all CPU cores."""
    device = _device()
    # The classic script's convolutions have it there.
    tf32 = ("tf32",) if accelerator_of(device).supports_tf32(device) else ()
    for repeat in range(args.repeats):
        yield from _classic(args, repeat, "--epochs=2")
        for precision in ("fp32", *tf32, "bf16"):
            chosen = ("--epochs=2", "--batch-size=128", f"--precision={precision}")
            yield from _stage(args, f"ours, {precision}", repeat, "single", *chosen)


def ladder(args: argparse.Namespace) -> Rows:
    """Training images per second with each technique added to those above it, batch 128."""
    for repeat in range(args.repeats):
        for number, rung in enumerate(RUNGS):
            command = [sys.executable, HERE / "ladder.py", str(number), "--data-dir", args.data_dir]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            yield {"case": rung, "repeat": repeat, "images_per_s": float(done.stdout)}


def recipe(args: argparse.Namespace) -> Rows:
    """The whole process to 99 % test accuracy: the classic script, and --recipe fast on five fresh seeds."""
    yield from _classic(args, 1, "--epochs=14", f"--stop-at={GOAL_PERCENT}")
    for seed in range(101, 106):
        chosen = ("--recipe=fast", "--precision=fp32", "--epochs=2", "--batch-size=128", f"--seed={seed}")
        yield from _stage(args, "recipe fast", seed, "single", *chosen)


def ddp(args: argparse.Namespace) -> Rows:
    """One and two workers of one thread each, at three global batch sizes."""
    chosen = ("--epochs=3", "--train-size=12800", "--no-cuda")
    for repeat in range(args.repeats):
        for batch in (128, 256, 1024):
            for workers in (1, 2):
                of_batch = (*chosen, f"--batch-size={batch}")
                for row in _stage(args, "ddp", repeat, "ddp", *of_batch, workers=workers, threads=1):
                    yield {"batch": batch, "workers": workers} | row


def _stage(
    args: argparse.Namespace,
    case: str,
    repeat: int,
    stage: str,
    *chosen: str,
    workers: int = 1,
    threads: int | None = None,
) -> Rows:
    """Run a stage and yield the rows of its CSV, cut to the columns of a benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable]
        if workers > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        command = [*launcher, STAGES[stage].script, *chosen, "--data-dir", args.data_dir.absolute()]
        threads = threads or torch.get_num_threads()  # as the classic script
        subprocess.run(
            [*command, "--results-dir", folder],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        (path,) = Path(folder, "runs").glob("*.csv")
        rows = records.read(path)
    for row in rows:
        yield {
            "case": case,
            "repeat": repeat,
            "epoch": row["epoch"],
            "device_name": row["device_name"],  # a part may run on the CPU beside a GPU
            "images_per_s": row["images_per_s"],
            "eval_images_per_s": TEST_IMAGES / row["eval_seconds"],
            "test_accuracy": row["test_accuracy"],
            "elapsed_s": row["elapsed_s"],
            "threads_per_worker": row["threads_per_worker"],
            "peak_memory_mb": row["peak_memory_mb"],
        }


def _classic(args: argparse.Namespace, repeat: int, *chosen: str) -> Rows:
    """Run the classic script and yield its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "classic.csv")
        command = [sys.executable, HERE / "classic_mnist.py", *chosen, "--csv", path]
        subprocess.run([*command, "--data-dir", args.data_dir], stdout=subprocess.DEVNULL, check=True)
        with path.open() as file:
            for row in csv.DictReader(file):
                numbers = {name: float(value) for name, value in row.items()}
                yield {"case": "classic script", "repeat": repeat, **numbers}


def _against_first(frame: pd.DataFrame) -> pd.DataFrame:
    """Return medians of each case over its repeats, past the warm-up, and the ratio to the first case."""
    if "epoch" in frame:
        frame = frame[frame.epoch > 1]
    medians = frame.groupby("case", sort=False).median(numeric_only=True)
    table = pd.DataFrame(index=medians.index)
    for column, name in SPEEDS.items():
        if column in medians:
            table[f"{name}, images/s"] = medians[column]
            table[f"{name}, x first row"] = medians[column] / medians[column].iloc[0]
    if "test_accuracy" in medians:
        table["test accuracy, %"] = medians.test_accuracy
    return table


def _time_to_goal(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds until each run reached the goal, and the speedup over the classic script."""
    runs = ["case", "repeat"]
    reached = frame[frame.test_accuracy >= GOAL_PERCENT].groupby(runs).first()
    # A run that never reached the goal shows as NaN.
    table = reached[["epoch", "test_accuracy", "elapsed_s"]].reindex(frame.groupby(runs).first().index)
    table["epoch"] = table.epoch.astype("Int64")
    table["times sooner"] = table.elapsed_s["classic script", 1] / table.elapsed_s
    return table.rename_axis(["case", "seed"]).rename(
        columns={"test_accuracy": "test accuracy, %", "elapsed_s": "seconds"}
    )


def _efficiency(frame: pd.DataFrame) -> pd.DataFrame:
    """Return median images/s of one and of two workers by global batch size, and their ratio over two."""
    table = frame[frame.epoch > 1].pivot_table("images_per_s", "batch", "workers", aggfunc="median")
    table["efficiency"] = table[2] / table[1] / 2
    return table.rename(columns={1: "1 worker, images/s", 2: "2 workers, images/s"})


PARTS = {
    "speed": (speed, _against_first),
    "ladder": (ladder, _against_first),
    "recipe": (recipe, _time_to_goal),
    "ddp": (ddp, _efficiency),
}


if __name__ == "__main__":
    main()
