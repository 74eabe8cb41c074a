"""Run every combination of the lists you give as a job of its own, then compare the results.

Try: python slurm/sweep.py --stages single,ddp --gpus 1,2,4 --batch-size 256,1024 --dry-run
"""

import argparse
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from itertools import product
from pathlib import Path

import torch
from sweep_runs import Board, Queue, Run, Sweep, leave, watch

from trainkit import data, errors, options, submission
from trainkit.errors import UserError
from trainkit.site import REPOSITORY, Site, read_site
from trainkit.submission import STAGES, Request

PLOT_RESULTS = REPOSITORY / "results" / "plot_results.py"
EPOCHS = 3  # one to warm up, two to measure
NOTES = """\
Lists are separated by commas. All other options go to every run unchanged, such as --recipe fast;
`python 03_multigpu_ddp/mnist_ddp.py --help` lists them.

To go on after a break, give the same command with the --out that the sweep has printed. Finished runs
stay, jobs still in Slurm are watched again, failed ones are submitted again. Longer lists add runs.

One precision for all: with --precision auto the first run goes alone, and what it has chosen holds
for the others. Give fp32 or bf16, and none has to wait for it.

Every GPU comes with the same number of CPU cores (--cpus-per-gpu), and every process of single and
ddp has as many threads; the one process of dp has those of all its GPUs.

Jobs that share a node can slow each other down. --max-jobs 1, or `export SBATCH_EXCLUSIVE=1` for whole
nodes, keeps them apart; on the practice cluster, where all nodes are one machine, only --max-jobs 1 does.

Without Slurm the runs are processes of this machine, one run at a time. Without GPUs, CPU cores stand
in for them, one thread each."""


def main() -> int:
    own, arguments = _parse()
    site = read_site()
    places = ["--data-dir", str(site.data_dir), "--results-dir", str(site.results_dir)]
    opts = options.parse(__doc__, [*places, *arguments])
    if opts.checkpoint_dir or opts.resume != "never":
        raise UserError("--checkpoint-dir and --resume are every job's own matter: leave them out.")
    data.load(opts.dataset, opts.data_dir)  # without it no run makes sense, and that has one reason
    on_slurm = bool(shutil.which("sbatch"))
    if not on_slurm:
        os.environ["OMP_NUM_THREADS"] = "1"
    folder = own.out or opts.results_dir / "sweeps" / datetime.now().strftime("%Y%m%d-%H%M%S")
    sweep = Sweep(folder.resolve(), own, opts, arguments)

    most = math.inf if on_slurm else _workers_here(opts)
    runs, left_out = _matrix(own, lambda run: _check(sweep.request(run, opts.precision), site, most))
    if not runs:
        raise UserError(f"no run is left ({'; '.join(left_out)}): change the lists.")
    if own.dry_run:
        _tell(sweep, runs, left_out, own)
        return 0
    command = [sys.executable, *sys.argv] + ([] if own.out else ["--out", str(sweep.folder)])
    with sweep.claim():
        _tell(sweep, runs, left_out, own)
        print(f"results  {sweep.folder}\ngo on    {shlex.join(command)}\n")
        if not on_slurm:
            print("no Slurm here (sbatch is not on PATH): one run at a time, as processes of this machine")
        queue = Queue(sweep, runs, own.max_jobs if on_slurm else 1)
        try:
            watch(queue, Board(len(runs)))
        except KeyboardInterrupt:
            leave(queue, shlex.join(command))
            raise
        return _compare(sweep, queue.failed)


def _matrix(own: argparse.Namespace, check: Callable[[Run], None]) -> tuple[list[Run], Counter[str]]:
    """The runs that make sense, and the reasons for those that do not, with their numbers.

    Repeats come one after the other, so that a busy hour of the cluster does not hit a single
    configuration, and those on one GPU, with which the others are compared, come first.
    """
    runs, left_out = {}, Counter()
    repeats = range(1, own.repeats + 1)
    lists = repeats, sorted(own.gpus), own.stages, own.batch_size, _loaders(own), own.train_size
    for repeat, gpus, stage, batch, num_workers, train_size in product(*lists):
        nodes = math.ceil(gpus / own.gpus_per_node) if own.gpus_per_node else 1
        for factor in {"strong": [1], "weak": [gpus], "both": [1, gpus]}[own.scaling]:
            try:
                shape = submission.geometry(STAGES[stage], gpus, nodes, own.cpus_per_gpu)
                run = Run(STAGES[stage], shape, batch * factor, num_workers, train_size, repeat)
                check(run)
            except UserError as error:
                left_out[str(error).partition(":")[0]] += 1  # behind it is what a single job could do
            else:
                runs[run] = None  # once, also where strong and weak scaling or two equal words meet
    return list(runs), left_out


def _loaders(own: argparse.Namespace) -> list[int | None]:
    """The numbers of loader workers, with None for the resident loader."""
    loaders = own.loader or ("workers" if own.num_workers else "resident",)
    if own.num_workers and "workers" not in loaders:
        raise UserError("--num-workers needs --loader workers: add that, or leave it out.")
    of_each = {"resident": [None], "workers": own.num_workers or [0]}
    return [number for loader in loaders for number in of_each[loader]]


def _workers_here(opts: options.Options) -> int:
    """How many GPUs this machine has, or cores that stand in for them."""
    return (not opts.no_cuda and torch.cuda.device_count()) or len(os.sched_getaffinity(0))


def _check(request: Request, site: Site, most: float) -> None:
    """Raise a UserError if the job makes no sense, or needs more than the `most` workers found here."""
    gpus = request.geometry.nodes * request.geometry.gpus_per_node
    if gpus > most:
        raise UserError(f"{gpus} workers are more than the {most} found here")
    submission.check(request, site)


def _tell(sweep: Sweep, runs: list[Run], left_out: Counter[str], own: argparse.Namespace) -> None:
    """Print what is asked for, and what the comparison will lack."""
    for reason, count in left_out.items():
        print(f"left out ({count}): {reason}")
    todo = [run for run in runs if not sweep.finished(run.name)]
    if own.dry_run:
        width = max(len(run.name) for run in runs)
        for run in runs:
            print(f"{run.name:{width}}  {'to run' if run in todo else 'finished':8}  {run.shape}")
    for sentence in _without_one_device(runs, sweep.folder):
        print(sentence)
    hours = sum(run.gpus for run in todo) * own.time / 60
    print(
        f"{len(runs)} runs, {len(runs) - len(todo)} of them finished; the others take {hours:.1f} GPU-hours "
        f"if each needs its whole time limit of {own.time} minutes"
    )


def _without_one_device(runs: list[Run], folder: Path) -> list[str]:
    """A sentence for every batch size that has runs without an equal one on a single device."""
    known = {run.configuration for run in runs}
    known |= {earlier.name.rpartition("-r")[0] for earlier in folder.glob("*-r*")}
    shape, lacking = submission.geometry(STAGES["single"], gpus=1), {}
    for run in runs:
        ones = {replace(run, stage=stage, shape=shape) for stage in (STAGES["single"], run.stage)}
        if run.gpus > 1 and not {one.configuration for one in ones} & known:
            lacking.setdefault(run.batch_size, set()).add(run.configuration)
    return [
        f"no speedup for {', '.join(sorted(names))}: no equal run on 1 GPU. Add it, afterwards too, by the "
        f"same command with --stages single --gpus 1 --batch-size {batch_size}"
        for batch_size, names in lacking.items()
    ]


def _compare(sweep: Sweep, failed: list[str]) -> int:
    """Compare what has finished; returns the exit code of the sweep."""
    csvs = sweep.finished()
    code = 0
    if csvs:
        print(flush=True)
        code = subprocess.run([sys.executable, PLOT_RESULTS, *csvs, "--out", sweep.folder]).returncode
    if failed:
        print(f"failed: {', '.join(failed)}. The same command runs them again.", file=sys.stderr)
    return 1 if failed else code


def _list_of(kind: Callable[[str], object]) -> Callable[[str], tuple]:
    """An argparse type: values of `kind`, separated by commas."""
    return lambda text: tuple(kind(part.strip()) for part in text.split(","))


def _word_of(words: Iterable[str]) -> Callable[[str], str]:
    """An argparse type: one of `words`."""

    def word(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return word


def _parse() -> tuple[argparse.Namespace, list[str]]:
    """The sweep's own options, and what every run is told."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    numbers = _list_of(options.at_least(1))
    matrix = parser.add_argument_group("the lists")
    matrix.add_argument(
        "--stages",
        type=_list_of(_word_of(STAGES)),
        default=tuple(STAGES),
        metavar="LIST",
        help="of single, dp and ddp (default: all)",
    )
    matrix.add_argument(
        "--gpus", type=numbers, default=(1, 2), metavar="LIST", help="GPUs of a run (default: 1,2)"
    )
    matrix.add_argument(
        "--batch-size", type=numbers, default=(256,), metavar="LIST", help="batch sizes (default: 256)"
    )
    matrix.add_argument(
        "--scaling",
        choices=("strong", "weak", "both"),
        default="strong",
        help="strong: --batch-size is global, the same on every number of GPUs; weak: it is that of each GPU "
        "(default: strong)",
    )
    matrix.add_argument(
        "--loader",
        type=_list_of(_word_of(("resident", "workers"))),
        metavar="LIST",
        help="of resident and workers (default: resident, or workers where --num-workers is given)",
    )
    matrix.add_argument(
        "--num-workers",
        type=_list_of(options.at_least(0)),
        metavar="LIST",
        help="loader processes of each process, for --loader workers (default: 0)",
    )
    matrix.add_argument(
        "--train-size", type=numbers, default=(None,), metavar="LIST", help="training images (default: all)"
    )
    matrix.add_argument(
        "--repeats",
        type=options.at_least(1),
        default=1,
        metavar="N",
        help="of each, with another seed (default: 1)",
    )
    slurm = parser.add_argument_group("jobs")
    slurm.add_argument(
        "--max-jobs", type=options.at_least(1), default=4, metavar="N", help="in Slurm at a time (default: 4)"
    )
    slurm.add_argument(
        "--gpus-per-node",
        type=options.at_least(1),
        metavar="N",
        help="GPUs that a node has: ddp runs with more are spread over several (default: all on one node)",
    )
    slurm.add_argument(
        "--cpus-per-gpu", type=options.at_least(1), default=2, metavar="N", help="CPU cores (default: 2)"
    )
    slurm.add_argument("--partition", metavar="NAME", help="default: the site file's, or the cluster's")
    slurm.add_argument(
        "--time",
        type=submission.time_limit,
        default=submission.DEFAULT_MINUTES,
        metavar="LIMIT",
        help=f"of a job, as HH:MM:SS or in minutes (default: {submission.DEFAULT_MINUTES})",
    )
    slurm.add_argument("--dry-run", action="store_true", help="print the runs, and submit nothing")
    slurm.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the sweep (default: a new one in results/sweeps/)"
    )
    parser.add_argument(
        "--epochs",
        default=str(EPOCHS),
        metavar="N",
        help=f"of every run (default: {EPOCHS}, the first to warm up)",
    )
    try:
        own, arguments = parser.parse_known_args()
    except argparse.ArgumentError as error:
        raise UserError(f"{error}. See --help.") from None
    return own, ["--epochs", own.epochs, *arguments]


if __name__ == "__main__":
    errors.run(main)
