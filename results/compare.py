"""Run single GPU, DataParallel and DDP, and compare them: as jobs where there is a Slurm, else one
after the other on this machine.

Without GPUs, CPU cores stand in as workers, one thread each. All other options go to every stage:
make compare ARGS="--epochs 10 --batch-size 512"
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, NoReturn

import plot_results
import torch

from trainkit import data, engine, errors, options
from trainkit.site import REPOSITORY, read_site

SINGLE = [sys.executable, str(REPOSITORY / "01_singlegpu" / "mnist_singlegpu.py")]
DP = [sys.executable, str(REPOSITORY / "02_multigpu_dp" / "mnist_multigpu.py")]
DDP = [str(REPOSITORY / "03_multigpu_ddp" / "mnist_ddp.py")]
SWEEP = str(REPOSITORY / "slurm" / "sweep.py")

EPOCHS = 3  # one to warm up, two to measure
BATCH_SIZE = 256
CPU_TRAIN_SIZE = 20_000  # a core trains one or two thousand images a second; all of MNIST would take long
MOST_WORKERS = 4  # jobs with more wait longer, and cores stand in for a common node; --workers asks for more


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
        help="GPUs or CPU workers of the largest runs (default: all GPUs here; of a node in Slurm, or of CPU "
        f"cores, up to {MOST_WORKERS})",
    )
    parser.add_argument("--local", action="store_true", help="run here, also where there is a Slurm")
    own, for_stages = parser.parse_known_args()
    arguments = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH_SIZE), *for_stages]
    wanted = options.parse(__doc__, arguments)
    if wanted.dry_run:
        raise errors.UserError("--dry-run measures nothing that could be compared: leave it out.")
    # Inside a job the GPUs of that job are meant.
    here = own.local or wanted.no_cuda or "SLURM_JOB_ID" in os.environ
    if not here and (in_slurm := _gpus_of_a_node()):
        _send_to_slurm(arguments, _workers(own.workers, in_slurm, min(in_slurm, MOST_WORKERS)))

    on_gpus = torch.cuda.is_available() and not wanted.no_cuda
    available = torch.cuda.device_count() if on_gpus else len(os.sched_getaffinity(0))
    workers = _workers(own.workers, available, available if on_gpus else min(available, MOST_WORKERS))
    if not on_gpus and wanted.train_size is None:
        arguments += ["--train-size", str(CPU_TRAIN_SIZE)]
    # One precision for all, or the rows could not be compared.
    precision = engine.choose_precision(wanted.precision, torch.device("cuda" if on_gpus else "cpu"))
    arguments += ["--precision", precision, *_batch_and_data(wanted, workers)]
    folder = _folder(wanted)
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


def _gpus_of_a_node() -> int:
    """The most GPUs that a node of the partition has to which jobs go; 0 without a Slurm that answers."""
    if not (shutil.which("sbatch") and shutil.which("sinfo")):
        return 0
    partition = read_site().sbatch.get("SBATCH_PARTITION")
    chosen = [f"--partition={partition}"] if partition else []
    command = ["sinfo", "--noheader", "--format=%P %G", *chosen]
    told = subprocess.run(command, capture_output=True, text=True)
    nodes = [line.split() for line in told.stdout.splitlines()]
    # A star marks the default partition. As in "gpu:a100:2(S:0),gpu:v100:2": 4 GPUs of two kinds.
    counts = [
        sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", gres)))
        for name, gres in nodes
        if partition or name.endswith("*")
    ]
    gpus = max(counts, default=0)
    if not gpus:
        why = told.stderr.strip() or f"partition {partition or '(default)'} has no GPUs"
        print(f"Slurm cannot be used ({why}): running on this machine")
    return gpus


def _send_to_slurm(arguments: list[str], workers: int) -> NoReturn:
    """Become slurm/sweep.py with the same runs."""
    site = read_site()
    places = ["--data-dir", str(site.data_dir), "--results-dir", str(site.results_dir)]
    wanted = options.parse(__doc__, [*places, *arguments])
    arguments += [*_batch_and_data(wanted, workers), "--stages", "single,dp,ddp"]
    arguments += ["--gpus", ",".join(map(str, sorted({1, workers}))), "--out", str(_folder(wanted))]
    arguments += ["--max-jobs", "1"]  # jobs that share a node could slow each other down
    print(
        "Slurm found: the runs go as jobs, by slurm/sweep.py; --local runs them on this machine", flush=True
    )
    os.execv(sys.executable, [sys.executable, SWEEP, *arguments])


def _workers(wanted: int | None, available: int, usual: int) -> int:
    if wanted and wanted > available:
        raise errors.UserError(f"--workers {wanted} is more than the {available} found here: lower it.")
    return wanted or usual


def _batch_and_data(wanted: options.Options, workers: int) -> list[str]:
    """Options for a global batch that divides among the workers, and for data that is there."""
    batch_size = -(-wanted.batch_size // workers) * workers
    if batch_size != wanted.batch_size:
        print(
            f"global batch size {batch_size}, the next above {wanted.batch_size} that {workers} workers share"
        )
    return ["--batch-size", str(batch_size), "--dataset", _find_data(wanted)]


def _folder(wanted: options.Options) -> Path:
    return wanted.results_dir.resolve() / "comparisons" / datetime.now().strftime("%Y%m%d-%H%M%S")


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
