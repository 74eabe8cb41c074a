"""Run single GPU, DataParallel and DDP one after the other on this machine and compare them.

Without GPUs, CPU cores stand in as workers, one thread each. All other options go to every stage:
make compare ARGS="--epochs 10 --batch-size 512"
"""

import argparse
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import plot_results
import torch

from trainkit import data, engine, errors, options

REPOSITORY = Path(__file__).resolve().parents[1]
SINGLE = [sys.executable, str(REPOSITORY / "01_singlegpu" / "mnist_singlegpu.py")]
DP = [sys.executable, str(REPOSITORY / "02_multigpu_dp" / "mnist_multigpu.py")]
DDP = [str(REPOSITORY / "03_multigpu_ddp" / "mnist_ddp.py")]

EPOCHS = 3  # one to warm up, two to measure
BATCH_SIZE = 256
CPU_TRAIN_SIZE = 20_000  # a core trains one or two thousand images a second; all of MNIST would take long
MOST_CPU_WORKERS = 4  # the GPUs of a common node, for which the cores stand in; --workers asks for more


class Run(NamedTuple):
    """One run: what to call it, its command and the devices it may use (GPUs, or CPU workers)."""

    name: str
    command: list[str]
    devices: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--workers",
        type=options.at_least(1),
        metavar="N",
        help="GPUs or CPU workers of the largest runs (default: all GPUs; without GPUs all cores, up to 4)",
    )
    own, for_stages = parser.parse_known_args()
    arguments = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH_SIZE), *for_stages]
    wanted = options.parse(__doc__, arguments)

    on_gpus = torch.cuda.is_available() and not wanted.no_cuda
    available = torch.cuda.device_count() if on_gpus else len(os.sched_getaffinity(0))
    workers = own.workers or (available if on_gpus else min(available, MOST_CPU_WORKERS))
    if workers > available:
        raise errors.UserError(f"--workers {workers} is more than the {available} found here: lower it.")
    if not on_gpus and wanted.train_size is None:
        arguments += ["--train-size", str(CPU_TRAIN_SIZE)]
    if wanted.dry_run:
        raise errors.UserError("--dry-run measures nothing that could be compared: leave it out.")
    # A size that divides among the workers, and one precision for all, or the rows could not be compared.
    batch_size = -(-wanted.batch_size // workers) * workers
    if batch_size != wanted.batch_size:
        print(
            f"global batch size {batch_size}, the next above {wanted.batch_size} that {workers} workers share"
        )
    device = torch.device("cuda" if on_gpus else "cpu")
    precision = engine.choose_precision(wanted.precision, device)
    dataset = _find_data(wanted)
    folder = wanted.results_dir.resolve() / "comparisons" / datetime.now().strftime("%Y%m%d-%H%M%S")
    arguments += ["--batch-size", str(batch_size), "--precision", precision, "--dataset", dataset]
    arguments += ["--results-dir", str(folder)]

    runs = _runs(workers, on_gpus)
    failed = []
    for number, run in enumerate(runs, start=1):
        print(f"\n[{number}/{len(runs)}] {run.name}", flush=True)
        if not _start(run, arguments, on_gpus, folder / "logs" / f"{run.name.replace(' ', '-')}.log"):
            failed.append(run.name)

    print()
    if len(failed) < len(runs):
        print(plot_results.report([folder / "runs"], folder))
    if failed:
        print(f"failed: {', '.join(failed)}. Their logs are in {folder / 'logs'}.", file=sys.stderr)
    return 1 if failed else 0


def _runs(workers: int, on_gpus: bool) -> list[Run]:
    """Each stage on one worker and on all of them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    runs = [Run("single on 1", SINGLE, 1), Run("dp on 1", DP, 1)]
    if on_gpus and workers > 1:
        runs.append(Run(f"dp on {workers}", DP, workers))
    for count in sorted({1, workers}):
        runs.append(Run(f"ddp on {count}", [*torchrun, f"--nproc-per-node={count}", *DDP], count))
    return runs


def _start(run: Run, arguments: list[str], on_gpus: bool, log: Path) -> bool:
    """Run it to its end, its output on the screen and in `log`; True if it went well."""
    # The same number of threads for every worker of every run; torchrun would set 1, python all cores.
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if on_gpus:
        every_gpu = ",".join(map(str, range(torch.cuda.device_count())))
        visible = environment.get("CUDA_VISIBLE_DEVICES", every_gpu).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[: run.devices])
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [*run.command, *arguments]
        with log.open("w") as file, subprocess.Popen(command, env=environment, **output) as process:
            for line in process.stdout:
                print(f"    {line}", end="", flush=True)
                file.write(line)
    except OSError as error:
        raise errors.UserError(
            f"{log} cannot be written ({error.strerror}): give another --results-dir."
        ) from None
    return process.returncode == 0


def _find_data(wanted: options.Options) -> str:
    """Put MNIST in place if it is not there; where that cannot be done, say loudly what is used instead."""
    if wanted.dataset == "synthetic":
        return "synthetic"
    try:
        print(data.stage(wanted.data_dir))
    except errors.UserError as error:
        print(f"\n{'!' * 80}\nMNIST cannot be had: {error}\n")
        print("All runs below use GENERATED DIGITS (--dataset synthetic), NOT MNIST.")
        print(f"Compare speeds with them, never accuracies.\n{'!' * 80}")
        return "synthetic"
    return "mnist"


if __name__ == "__main__":
    errors.run(main)
