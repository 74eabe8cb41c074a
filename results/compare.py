"""Run single GPU, DataParallel and DDP, and compare them: as jobs if there is a Slurm, else one
after the other on this machine.

On GPUs the length of an epoch is measured first, unless given. Without GPUs, CPU cores stand in as workers,
one thread each. All other options go to every stage:
make compare ARGS="--epochs 10 --batch-size 512"
"""

import argparse
import math
import os
import platform
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from trainkit import errors
from trainkit.config import options
from trainkit.config.command_line import Parser, at_least, given_path
from trainkit.data import staging
from trainkit.distributed import launchers as place
from trainkit.errors import UserError, tell
from trainkit.jobs import local, slurm, submission, sweep
from trainkit.jobs.site import Site, read_site
from trainkit.jobs.stages import STAGES
from trainkit.record import records
from trainkit.record.columns import DDP, DP, SINGLE

BATCH_SIZE = 256
CPU_TRAIN_SIZE = 20_000  # a core trains one or two thousand images a second; all of MNIST would take long
MOST_WORKERS = 4  # jobs with more wait longer, and cores stand in for a common node; --workers asks for more

# On GPUs. The length of an epoch comes from a short run on one, the probe: an epoch of 60 ms is noise.
GPU_BATCH_SIZE = 4096  # of each: with less a fast GPU waits for kernel launches (results/sample/h100)
EPOCH_SECONDS = 3  # on one GPU
FEWEST_STEPS = 20  # of an epoch, at the largest batch
GPU_EPOCHS = 4  # one to warm up, three to measure
GPU_REPEATS = 3
AROUND_SECONDS = 13  # of a run, outside its epochs


class Devices(NamedTuple):
    """The devices to compare on: `workers` in the largest runs, each a GPU or a CPU core."""

    workers: int
    in_slurm: bool  # on GPUs of a node there
    gpus_here: int

    @property
    def are_gpus(self) -> bool:
        return self.in_slurm or self.gpus_here > 0


def main() -> int:
    own, passed_on = _parse()
    site = read_site()
    opts = submission.read_options(STAGES["ddp"], passed_on, site)
    if opts.dry_run:
        raise UserError("--dry-run measures nothing that could be compared: leave it out.")
    devices = _find_devices(own, opts, site)
    if devices.are_gpus:
        batch = share_batch_size(devices.workers, own.batch_size, own.train_size)
    else:
        batch = _shared_by(devices.workers, own.batch_size or BATCH_SIZE)
        own.train_size = own.train_size or CPU_TRAIN_SIZE
        sizes = replace(opts, batch_size=batch, train_size=own.train_size)
        options.check_sizes(sizes, staging.TRAIN_IMAGES)
    compared = _make_sweep(own, opts, passed_on, site, devices)
    with compared.claim():
        if devices.are_gpus:
            return _compare_on_gpus(compared, devices.workers, batch, own)
        grid = sweep.Grid(
            tuple(STAGES.values()),
            tuple({1, devices.workers}),
            (batch,),
            train_sizes=(own.train_size,),
            repeats=own.repeats or 1,
        )
        return sweep.run(compared, compared.planned(grid)[0], max_jobs=1)


def _find_devices(own: argparse.Namespace, opts: options.Options, site: Site) -> Devices:
    in_job = os.environ.get("SLURM_JOB_ID")
    here = own.local or opts.no_cuda
    if in_job and not here and not place.job_id():
        raise UserError(
            f"this shell is in job {in_job}, but on {platform.node()}, which is none of its nodes: go there "
            "(srun --nodes=1 --ntasks=1 --pty bash), end the job (exit) to compare by jobs, or give --local."
        )
    here = here or in_job  # the GPUs of that job are meant
    in_slurm = 0 if here else _gpus_of_a_node(site)
    gpus_here = 0 if in_slurm or opts.no_cuda else local.gpus_here()
    available = in_slurm or gpus_here or len(os.sched_getaffinity(0))
    if own.workers and own.workers > available:
        raise UserError(f"--workers {own.workers} is more than the {available} found here: lower it.")
    workers = own.workers or gpus_here or min(available, MOST_WORKERS)
    return Devices(workers, bool(in_slurm), gpus_here)


def _make_sweep(
    own: argparse.Namespace, opts: options.Options, passed_on: list[str], site: Site, devices: Devices
) -> sweep.Sweep:
    dataset = _find_data(opts)
    epochs = own.epochs or (GPU_EPOCHS if devices.are_gpus else sweep.EPOCHS)
    folder = own.out or opts.results_dir / "comparisons" / datetime.now().strftime("%Y%m%d-%H%M%S")
    if devices.in_slurm:
        tell("Slurm found: the runs go as jobs; --local runs them on this machine")
    return sweep.Sweep(
        folder.absolute(),
        (*passed_on, "--epochs", str(epochs), "--dataset", dataset),
        replace(opts, dataset=dataset, epochs=epochs),
        site,
        site.minutes or submission.DEFAULT_MINUTES if devices.in_slurm else local.DAY_MINUTES,
        why_here="" if devices.in_slurm else "here",
        gpus_here=devices.gpus_here,
    )


def _compare_on_gpus(compared: sweep.Sweep, gpus: int, batch: int, own: argparse.Namespace) -> int:
    """Choose the length of an epoch, if it is not given, by a run on one GPU, and compare."""
    train_size, run_seconds = own.train_size, None
    if not train_size:
        images_per_s, eval_seconds = _probe(compared, batch)
        train_size = choose_train_size(images_per_s, batch, gpus)
        epoch_seconds = train_size / images_per_s + eval_seconds  # on several GPUs it is about the same
        run_seconds = AROUND_SECONDS + compared.opts.epochs * epoch_seconds
        tell(f"measured on one GPU: {images_per_s:,.0f} images/s")
    passes = train_size / staging.TRAIN_IMAGES
    length = f" ({passes:g} passes over MNIST)" if passes > 1 else ""
    tell(f"batch {batch} on each GPU, epochs of {train_size:,} images{length}")
    repeats = own.repeats or GPU_REPEATS
    if gpus == 1:
        tell(
            "One GPU shows what DDP itself costs, not how DDP and DataParallel scale: that takes two or more."
        )
    else:
        fewer = "--repeats 1 or " if repeats > 1 else ""
        tell(f"{fewer}--workers {gpus // 2} takes less time")
    matrix = plan_on_gpus(gpus, batch, train_size, repeats)
    runs = {run: None for grid in matrix for run in compared.planned(grid)[0]}
    in_order = sorted(runs, key=lambda run: (run.repeat, run.shape.gpus))
    # One job at a time: jobs that share a node could slow each other down.
    return sweep.run(compared, in_order, max_jobs=1, run_seconds=run_seconds)


def _probe(compared: sweep.Sweep, batch: int) -> tuple[float, float]:
    """Run stage 01 on one GPU, over MNIST as it is, or take the record of an earlier call.

    Return the images/s of its training, and the seconds of an evaluation.

    Raises:
        UserError: if that fails.
    """
    # A separate folder: it chooses its own precision, and does not enter the comparison.
    alone = replace(compared, folder=compared.folder / "probe")
    (run,) = alone.planned(sweep.Grid((STAGES["single"],), (1,), (batch,)))[0]
    if not alone.finished(run.name):
        tell("first a run on one GPU, to choose the length of an epoch by")
        sweep.finish(alone, [run], 1, compared.folder)
    if not (csvs := alone.finished(run.name)):
        raise UserError(
            f"the run on one GPU with batch {batch} failed, as reported above: fix that, or give a smaller "
            f"--batch-size, then the same command again, with --out {compared.folder}."
        )
    rows = [row for csv in csvs for row in records.read(csv)]
    steady = [row for row in rows if not row["warmup"]] or rows
    return max(row["images_per_s"] for row in steady), min(row["eval_seconds"] for row in steady)


def device_counts(gpus: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, and `gpus` itself."""
    return *(2**i for i in range((gpus - 1).bit_length())), gpus


def share_batch_size(gpus: int, given: int | None, train_size: int | None) -> int:
    """Return the batch size per GPU: the next one that divides among all numbers of GPUs.

    Raises:
        UserError: if an epoch of `train_size` images is shorter than one step with it.
    """
    shared_by = math.lcm(*device_counts(gpus))
    batch = -(-(given or GPU_BATCH_SIZE) // shared_by) * shared_by
    if batch * gpus > (train_size or options.MOST_IMAGES):
        raise UserError(
            f"--train-size {train_size or options.MOST_IMAGES} is not one step with batch {batch} on each of "
            f"{gpus} GPU(s): raise it, or lower --batch-size."
        )
    return batch


def choose_train_size(images_per_s: float, batch: int, gpus: int) -> int:
    """Choose the images for an epoch of about `EPOCH_SECONDS` on one GPU: whole passes, or a part of one."""
    largest = batch * gpus
    images = max(round(images_per_s * EPOCH_SECONDS), FEWEST_STEPS * largest)
    if images < staging.TRAIN_IMAGES:
        return images // largest * largest
    passes = min(round(images / staging.TRAIN_IMAGES), options.MOST_IMAGES // staging.TRAIN_IMAGES)
    return passes * staging.TRAIN_IMAGES


def plan_on_gpus(gpus: int, batch: int, train_size: int, repeats: int) -> list[sweep.Grid]:
    """Plan strong scaling, with the same global batch, and weak scaling, with the same batch per GPU.

    Every row has its baseline, the run on one GPU with the same global batch.
    """
    sizes = {"train_sizes": (train_size,), "repeats": repeats}
    if gpus == 1:
        return [sweep.Grid(tuple(STAGES.values()), (1,), (batch,), **sizes)]
    several = device_counts(gpus)[1:]
    # DataParallel on one GPU is the plain model, which stage single measures.
    return [
        sweep.Grid((STAGES[SINGLE], STAGES[DDP]), (1,), (batch,), **sizes),
        sweep.Grid((STAGES[SINGLE],), (1,), tuple(number * batch for number in several), **sizes),
        sweep.Grid((STAGES[DP], STAGES[DDP]), several, (batch,), scaling="both", **sizes),
    ]


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--workers",
        type=at_least(1),
        metavar="N",
        help="GPUs or CPU workers of the largest runs (default: all GPUs here; of a node in Slurm, or of CPU "
        f"cores, up to {MOST_WORKERS})",
    )
    sizes = (
        (
            "--batch-size",
            options.MOST_IMAGES,
            f"global batch size; on GPUs that of one ({GPU_BATCH_SIZE}, CPU: {BATCH_SIZE})",
        ),
        ("--train-size", options.MOST_IMAGES, f"images of an epoch (CPU: {CPU_TRAIN_SIZE})"),
        ("--epochs", 2**31 - 1, f"of a run, the first to warm up (GPUs: {GPU_EPOCHS}, CPU: {sweep.EPOCHS})"),
        ("--repeats", 1000, f"of every run, with other seeds (GPUs: {GPU_REPEATS}, CPU: 1)"),
    )
    for name, most, help in sizes:
        parser.add_argument(name, type=at_least(1, most), metavar="N", help=help)
    parser.add_argument("--local", action="store_true", help="run here, even if there is a Slurm")
    parser.add_argument(
        "--out",
        type=given_path,
        metavar="DIR",
        help="folder to go on in (default: a new one in results/comparisons/)",
    )
    return parser.parse_known_args()


def _gpus_of_a_node(site: Site) -> int:
    """Return the most GPUs of a node in the jobs' partition; 0 if no Slurm answers."""
    if slurm.why_not_here():
        return 0
    partition = site.sbatch.get("SBATCH_PARTITION") or slurm.default_partition()
    gpus = slurm.most_gpus(partition)
    if not gpus:
        why = slurm.ask("sinfo").stderr.strip() or f"partition {partition or '(default)'} has no GPUs"
        tell(f"Slurm cannot be used ({why}): running on this machine")
    return gpus


def _shared_by(workers: int, batch_size: int) -> int:
    """Return the global batch size, or the next larger one that divides among the workers."""
    shared = -(-batch_size // workers) * workers
    if shared != batch_size:
        tell(f"global batch size {shared}, the next above {batch_size} that divides among {workers} workers")
    return shared


def _find_data(opts: options.Options) -> str:
    """Put MNIST in place if it is missing; if that fails, say clearly what is used instead."""
    if opts.dataset == "synthetic":
        return "synthetic"
    try:
        tell(staging.put_in_place(opts.data_dir))
    except UserError as error:
        tell(f"\n{'!' * 80}\nMNIST cannot be had: {error}\n")
        tell("All runs below use GENERATED DIGITS (--dataset synthetic), NOT MNIST.")
        tell(f"Compare speeds with them, never accuracies.\n{'!' * 80}")
        return "synthetic"
    return "mnist"


if __name__ == "__main__":
    errors.run(main)
