"""Run single GPU, DataParallel and DDP, and compare them: as jobs if there is a Slurm, else one
after the other on this machine.

On GPUs the length of an epoch is measured first, unless given. Without GPUs, CPU cores stand in as workers,
one thread each. All other options go to every stage:
make compare ARGS="--epochs 10 --batch-size 512"

To compare runs that you have: `manygpus compare`, which is results/plot_results.py.
"""

import argparse
import math
import os
import platform
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from manygpus.config import options
from manygpus.config.command_line import Parser, at_least, given_path, with_out
from manygpus.config.known_datasets import DATASETS
from manygpus.data import staging
from manygpus.errors import UserError, entrypoint, print_line
from manygpus.jobs import local_job, slurm
from manygpus.jobs.site import Site, read_site
from manygpus.jobs.stages import STAGES
from manygpus.jobs.submit import submission
from manygpus.jobs.submit.request import read_options
from manygpus.jobs.sweeps import execution
from manygpus.jobs.sweeps.plan import BOTH, STRONG, Grid, PlannedRun
from manygpus.jobs.sweeps.sweep import Sweep
from manygpus.launchers import job_id
from manygpus.record import records
from manygpus.record.columns import DDP, DP, SINGLE

# Without GPUs: the global batch, and the images of an epoch. A core trains one or two thousand images a
# second, so all of MNIST would take long.
CPU_BATCH_SIZE = 256
CPU_TRAIN_SIZE = 20_000
# Jobs with more workers wait longer, and cores stand in for a common node; --workers asks for more.
MOST_WORKERS = 4

# The batch of each GPU: with less a fast one waits for kernel launches (results/sample/h100).
GPU_BATCH_SIZE = 4096
MNIST_IMAGES = DATASETS["mnist"].train_images
# Of an epoch on one GPU. Its length comes from a short run on one, the probe: an epoch of 60 ms is noise.
EPOCH_SECONDS = 3
# Of an epoch, at the largest batch.
FEWEST_STEPS = 20
# One to warm up, three to measure.
GPU_EPOCHS = 4
GPU_REPEATS = 3
# Of a run, outside its epochs.
OVERHEAD_SECONDS = 13
MOST_EPOCHS = 2**31 - 1
MOST_REPEATS = 1000


class Devices(NamedTuple):
    """The devices to compare on: `workers` in the largest runs, each a GPU or a CPU core.

    With `in_slurm` they are GPUs of a node there.
    """

    workers: int
    in_slurm: bool
    gpus_here: int

    @property
    def are_gpus(self) -> bool:
        return self.in_slurm or self.gpus_here > 0


class Probe(NamedTuple):
    """What a short run on one GPU has shown."""

    images_per_s: float
    eval_seconds: float


@entrypoint
def main() -> int:
    arguments, passed_on = _parse()
    site = read_site()
    opts = read_options(STAGES[DDP], passed_on, site)
    if opts.dry_run:
        raise UserError("--dry-run measures nothing that could be compared: leave it out.")
    devices = _find_devices(arguments, opts, site)
    if devices.are_gpus:
        batch = share_batch_size(devices.workers, arguments.batch_size, arguments.train_size)
    else:
        batch = _shared_by(devices.workers, arguments.batch_size or CPU_BATCH_SIZE)
        arguments.train_size = arguments.train_size or CPU_TRAIN_SIZE
        sizes = replace(opts, batch_size=batch, train_size=arguments.train_size)
        options.check_sizes(sizes, DATASETS[opts.dataset].train_images)
    compared = _make_sweep(arguments, opts, passed_on, site, devices)
    with compared.claim():
        if devices.are_gpus:
            return _compare_on_gpus(compared, devices.workers, batch, arguments)
        return _compare_on_cores(compared, devices.workers, batch, arguments)


def _find_devices(arguments: argparse.Namespace, opts: options.Options, site: Site) -> Devices:
    job_of_shell = os.environ.get("SLURM_JOB_ID")
    on_this_machine = arguments.local or opts.no_cuda
    if job_of_shell and not on_this_machine and not job_id():
        raise UserError(
            f"this shell is in job {job_of_shell}, but on {platform.node()}, which is none of its nodes: go "
            "there (srun --nodes=1 --ntasks=1 --pty bash), end the job (exit) to compare by jobs, or give "
            "--local."
        )
    # In a job its GPUs are meant.
    asks_slurm = not on_this_machine and not job_of_shell
    gpus_of_a_node = _gpus_of_a_node(site) if asks_slurm else 0
    gpus_here = 0 if gpus_of_a_node or opts.no_cuda else local_job.gpus_here()
    available = gpus_of_a_node or gpus_here or len(os.sched_getaffinity(0))
    if arguments.workers and arguments.workers > available:
        raise UserError(f"--workers {arguments.workers} is more than the {available} found here: lower it.")
    workers = arguments.workers or gpus_here or min(available, MOST_WORKERS)
    return Devices(workers=workers, in_slurm=bool(gpus_of_a_node), gpus_here=gpus_here)


def _make_sweep(
    arguments: argparse.Namespace, opts: options.Options, passed_on: list[str], site: Site, devices: Devices
) -> Sweep:
    dataset = _find_data(opts)
    epochs = arguments.epochs or (GPU_EPOCHS if devices.are_gpus else execution.EPOCHS)
    folder = arguments.out or opts.results_dir / "comparisons" / datetime.now().strftime("%Y%m%d-%H%M%S")
    minutes = local_job.DAY_MINUTES
    if devices.in_slurm:
        minutes = site.minutes or submission.DEFAULT_MINUTES
        print_line("Slurm found: the runs go as jobs; --local runs them on this machine")
    return Sweep(
        folder=folder.absolute(),
        arguments=(*passed_on, "--epochs", str(epochs), "--dataset", dataset),
        opts=replace(opts, dataset=dataset, epochs=epochs),
        site=site,
        minutes=minutes,
        why_here="" if devices.in_slurm else "here",
        command_to_resume=with_out(folder, arguments.out),
        gpus_here=devices.gpus_here,
    )


def _compare_on_cores(compared: Sweep, workers: int, batch: int, arguments: argparse.Namespace) -> int:
    grid = Grid(
        stages=tuple(STAGES.values()),
        gpus=tuple({1, workers}),
        batch_sizes=(batch,),
        train_sizes=(arguments.train_size,),
        repeats=arguments.repeats or 1,
    )
    runs, _ = compared.planned(grid)
    return execution.run(compared, runs, max_jobs=1, report=_report)


def _compare_on_gpus(compared: Sweep, gpus: int, batch: int, arguments: argparse.Namespace) -> int:
    """Choose the length of an epoch, if it is not given, by a run on one GPU, and compare."""
    train_size = arguments.train_size
    run_seconds = None
    if not train_size:
        probe = _probe(compared, batch)
        train_size = choose_train_size(probe.images_per_s, batch, gpus)
        # On several GPUs it is about the same.
        epoch_seconds = train_size / probe.images_per_s + probe.eval_seconds
        run_seconds = OVERHEAD_SECONDS + compared.opts.epochs * epoch_seconds
        print_line(f"measured on one GPU: {probe.images_per_s:,.0f} images/s")
    passes = train_size / MNIST_IMAGES
    length = f" ({passes:g} passes over MNIST)" if passes > 1 else ""
    print_line(f"batch {batch} on each GPU, epochs of {train_size:,} images{length}")
    repeats = arguments.repeats or GPU_REPEATS
    if gpus == 1:
        print_line(
            "One GPU shows what DDP itself costs, not how DDP and DataParallel scale: that takes two or more."
        )
    else:
        fewer_repeats = "--repeats 1 or " if repeats > 1 else ""
        print_line(f"{fewer_repeats}--workers {gpus // 2} takes less time")
    # A dictionary without values: two grids may give the same run.
    runs: dict[PlannedRun, None] = {}
    for grid in plan_on_gpus(gpus, batch, train_size, repeats):
        grid_runs, _ = compared.planned(grid)
        runs |= dict.fromkeys(grid_runs)
    in_order = sorted(runs, key=lambda run: (run.repeat, run.shape.gpus))
    # One job at a time: jobs that share a node could slow each other down.
    return execution.run(compared, in_order, max_jobs=1, report=_report, run_seconds=run_seconds)


def _report(csvs: list[Path], out: Path) -> int:
    """Print the comparison of the runs, and write it to `out`."""
    # They load pandas, which is needed here only: login nodes are slow.
    from manygpus.reports.advice.answer import page_of_answer
    from manygpus.reports.advice.choice import Constraints
    from manygpus.reports.comparison_report import report

    print_line(report(csvs, out, answer=page_of_answer(csvs, Constraints())))
    return 0


def _probe(compared: Sweep, batch: int) -> Probe:
    """Run stage 01 on one GPU, over MNIST as it is, or take the record of an earlier call.

    Raises:
        UserError: if that fails.
    """
    # A folder of its own: its epochs have another length, and it does not enter the comparison.
    alone = replace(compared, folder=compared.folder / "probe")
    grid = Grid(stages=(STAGES[SINGLE],), gpus=(1,), batch_sizes=(batch,))
    (run,), _ = alone.planned(grid)
    if not alone.has_finished(run):
        print_line("first, a run on one GPU, which decides the length of an epoch")
        execution.finish(alone, [run], 1)
    csvs = alone.finished_csvs(run.name)
    if not csvs:
        raise UserError(
            f"the run on one GPU with batch {batch} failed, as reported above: fix that, or give a smaller "
            f"--batch-size, then the same command again, with --out {compared.folder}."
        )
    rows = [row for csv in csvs for row in records.read(csv)]
    steady = [row for row in rows if not row["warmup"]] or rows
    return Probe(
        images_per_s=max(row["images_per_s"] for row in steady),
        eval_seconds=min(row["eval_seconds"] for row in steady),
    )


def device_counts(gpus: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, and `gpus` itself."""
    counts = []
    power_of_two = 1
    while power_of_two < gpus:
        counts.append(power_of_two)
        power_of_two *= 2
    return (*counts, gpus)


def share_batch_size(gpus: int, batch_size: int | None, train_size: int | None) -> int:
    """Return the batch size per GPU: the next one that divides evenly among all numbers of GPUs.

    Args:
        gpus: the number of GPUs of the largest runs.
        batch_size: the batch size that was asked for, or None.
        train_size: images of an epoch, if they were given.

    Raises:
        UserError: if an epoch of `train_size` images is shorter than one step with it.
    """
    batch = _next_multiple(batch_size or GPU_BATCH_SIZE, math.lcm(*device_counts(gpus)))
    images = train_size or options.MOST_IMAGES
    if batch * gpus > images:
        raise UserError(
            f"--train-size {images} is not one step with batch {batch} on each of {gpus} GPU(s): raise it, "
            "or lower --batch-size."
        )
    return batch


def _next_multiple(number: int, divisor: int) -> int:
    """Return the least multiple that is not below `number`."""
    return math.ceil(number / divisor) * divisor


def choose_train_size(images_per_s: float, batch: int, gpus: int) -> int:
    """Choose the images for an epoch of about `EPOCH_SECONDS` on one GPU: whole passes, or a part of one."""
    largest_batch = batch * gpus
    images = max(round(images_per_s * EPOCH_SECONDS), FEWEST_STEPS * largest_batch)
    if images < MNIST_IMAGES:
        return images // largest_batch * largest_batch
    most_passes = options.MOST_IMAGES // MNIST_IMAGES
    return min(round(images / MNIST_IMAGES), most_passes) * MNIST_IMAGES


def plan_on_gpus(gpus: int, batch: int, train_size: int, repeats: int) -> list[Grid]:
    """Plan strong scaling, with the same global batch, and weak scaling, with the same batch per GPU.

    Every row has its baseline, the run on one GPU with the same global batch.
    """

    def grid(
        stages: tuple[str, ...],
        counts: tuple[int, ...],
        batch_sizes: tuple[int, ...],
        scaling: str = STRONG,
    ) -> Grid:
        return Grid(
            stages=tuple(STAGES[name] for name in stages),
            gpus=counts,
            batch_sizes=batch_sizes,
            train_sizes=(train_size,),
            repeats=repeats,
            scaling=scaling,
        )

    if gpus == 1:
        return [grid(tuple(STAGES), (1,), (batch,))]
    several = device_counts(gpus)[1:]
    # DataParallel on one GPU is the plain model, which stage single measures.
    return [
        grid((SINGLE, DDP), (1,), (batch,)),
        grid((SINGLE,), (1,), tuple(count * batch for count in several)),
        grid((DP, DDP), several, (batch,), scaling=BOTH),
    ]


def _parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the comparison's own options, and those for every run."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--workers",
        type=at_least(1),
        metavar="N",
        help="GPUs or CPU workers of the largest runs (default: all GPUs here, or of a node in Slurm; "
        f"without GPUs, up to {MOST_WORKERS} CPU cores)",
    )
    parser.add_argument(
        "--batch-size",
        type=at_least(1, options.MOST_IMAGES),
        metavar="N",
        help=f"global batch size; with GPUs, that of each (GPUs: {GPU_BATCH_SIZE}, CPU: {CPU_BATCH_SIZE})",
    )
    parser.add_argument(
        "--train-size",
        type=at_least(1, options.MOST_IMAGES),
        metavar="N",
        help=f"images per epoch (CPU: {CPU_TRAIN_SIZE})",
    )
    parser.add_argument(
        "--epochs",
        type=at_least(1, MOST_EPOCHS),
        metavar="N",
        help=f"epochs of a run; the first is a warm-up (GPUs: {GPU_EPOCHS}, CPU: {execution.EPOCHS})",
    )
    parser.add_argument(
        "--repeats",
        type=at_least(1, MOST_REPEATS),
        metavar="N",
        help=f"runs of each, with different seeds (GPUs: {GPU_REPEATS}, CPU: 1)",
    )
    parser.add_argument("--local", action="store_true", help="run on this machine, even if there is a Slurm")
    parser.add_argument(
        "--out",
        type=given_path,
        metavar="DIR",
        help="folder of the comparison, new or to resume (default: a new one in results/comparisons/)",
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
        print_line(f"Slurm cannot be used ({why}): running on this machine")
    return gpus


def _shared_by(workers: int, batch_size: int) -> int:
    """Return the global batch size, or the next larger one that divides evenly among the workers."""
    shared = _next_multiple(batch_size, workers)
    if shared != batch_size:
        print_line(
            f"global batch size {shared}, the next above {batch_size} that divides evenly among {workers} "
            "workers"
        )
    return shared


def _find_data(opts: options.Options) -> str:
    """Put MNIST in place if it is missing; if that fails, say clearly what is used instead."""
    if opts.dataset == "synthetic":
        return "synthetic"
    try:
        print_line(staging.put_in_place(opts.data_dir))
    except UserError as error:
        print_line(f"\n{'!' * 80}\nMNIST cannot be had: {error}\n")
        print_line("All runs below use GENERATED DIGITS (--dataset synthetic), NOT MNIST.")
        print_line(f"Compare speeds with them, never accuracies.\n{'!' * 80}")
        return "synthetic"
    return "mnist"
