"""Run single GPU, DataParallel and DDP, and compare them: as jobs where there is a Slurm, else one
after the other on this machine.

Without GPUs, CPU cores stand in as workers, one thread each. All other options go to every stage:
make compare ARGS="--epochs 10 --batch-size 512"
"""

import argparse
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trainkit import errors, options, staging
from trainkit.command_line import Parser, at_least
from trainkit.errors import UserError
from trainkit.jobs import local, slurm, submission, sweep
from trainkit.jobs.site import Site, read_site
from trainkit.jobs.stages import STAGES

BATCH_SIZE = 256
CPU_TRAIN_SIZE = 20_000  # a core trains one or two thousand images a second; all of MNIST would take long
MOST_WORKERS = 4  # jobs with more wait longer, and cores stand in for a common node; --workers asks for more


def main() -> int:
    own, passed_on = _parse()
    arguments = ["--epochs", str(sweep.EPOCHS), "--batch-size", str(BATCH_SIZE), *passed_on]
    site = read_site()
    opts = submission.read_options(STAGES["ddp"], arguments, site)
    if opts.dry_run:
        raise UserError("--dry-run measures nothing that could be compared: leave it out.")
    # Inside a job the GPUs of that job are meant.
    here = own.local or opts.no_cuda or "SLURM_JOB_ID" in os.environ
    in_slurm = 0 if here else _gpus_of_a_node(site)
    gpus = 0 if in_slurm or opts.no_cuda else local.gpus_here()
    available = in_slurm or gpus or len(os.sched_getaffinity(0))
    if own.workers and own.workers > available:
        raise UserError(f"--workers {own.workers} is more than the {available} found here: lower it.")
    workers = own.workers or gpus or min(available, MOST_WORKERS)
    train_size = opts.train_size
    if not (in_slurm or gpus or train_size):
        train_size = CPU_TRAIN_SIZE
    opts = replace(opts, batch_size=_shared_by(workers, opts.batch_size), train_size=train_size)
    options.check_sizes(opts, staging.TRAIN_IMAGES)

    dataset = _find_data(opts)
    folder = own.out or opts.results_dir / "comparisons" / datetime.now().strftime("%Y%m%d-%H%M%S")
    compared = sweep.Sweep(
        folder.resolve(),
        (*arguments, "--dataset", dataset),
        replace(opts, dataset=dataset),
        site,
        submission.DEFAULT_MINUTES if in_slurm else local.DAY_MINUTES,
        here=not in_slurm,
        gpus_here=gpus,
    )
    numbers = tuple({1, workers})
    cells, _ = compared.cells(
        sweep.Lists(tuple(STAGES.values()), numbers, (opts.batch_size,), train_sizes=(train_size,))
    )
    if in_slurm:
        print("Slurm found: the runs go as jobs; --local runs them on this machine")
    # One job at a time: jobs that share a node could slow each other down.
    return sweep.run(compared, cells, max_jobs=1)


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--workers",
        type=at_least(1),
        metavar="N",
        help="GPUs or CPU workers of the largest runs (default: all GPUs here; of a node in Slurm, or of CPU "
        f"cores, up to {MOST_WORKERS})",
    )
    parser.add_argument("--local", action="store_true", help="run here, also where there is a Slurm")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to go on in (default: a new one in results/comparisons/)",
    )
    return parser.parse_known_args()


def _gpus_of_a_node(site: Site) -> int:
    """The most GPUs that a node of the partition has to which jobs go; 0 without a Slurm that answers."""
    if not slurm.is_here():
        return 0
    partition = site.sbatch.get("SBATCH_PARTITION") or slurm.default_partition()
    gpus = slurm.largest_nodes(partition)["GPUs"]
    if not gpus:
        why = slurm.ask("sinfo").stderr.strip() or f"partition {partition or '(default)'} has no GPUs"
        print(f"Slurm cannot be used ({why}): running on this machine")
    return gpus


def _shared_by(workers: int, batch_size: int) -> int:
    """The global batch size, or the next above that divides among the workers."""
    shared = -(-batch_size // workers) * workers
    if shared != batch_size:
        print(f"global batch size {shared}, the next above {batch_size} that {workers} workers share")
    return shared


def _find_data(opts: options.Options) -> str:
    """Put MNIST in place if it is not there; where that cannot be done, say loudly what is used instead."""
    if opts.dataset == "synthetic":
        return "synthetic"
    try:
        print(staging.put_in_place(opts.data_dir))
    except UserError as error:
        print(f"\n{'!' * 80}\nMNIST cannot be had: {error}\n")
        print("All runs below use GENERATED DIGITS (--dataset synthetic), NOT MNIST.")
        print(f"Compare speeds with them, never accuracies.\n{'!' * 80}")
        return "synthetic"
    return "mnist"


if __name__ == "__main__":
    errors.run(main)
