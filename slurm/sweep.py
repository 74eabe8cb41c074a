"""Run every combination of the given lists as a separate job, then compare the results.

Try: python slurm/sweep.py --stages single,ddp --gpus 1,2,4 --batch-size 256,1024 --dry-run
"""

import argparse
import sys
from datetime import datetime

from trainkit import errors
from trainkit.advice.constraints import Constraints
from trainkit.config.command_line import (
    Parser,
    above_0,
    at_least,
    given,
    given_path,
    list_of,
    one_of,
    time_limit,
)
from trainkit.config.options import MOST_IMAGES
from trainkit.data import staging
from trainkit.errors import UserError, tell
from trainkit.jobs import local, submission, sweep
from trainkit.jobs.site import read_site
from trainkit.jobs.stages import STAGES

NOTES = """\
Lists are separated by commas. All other options go to every run unchanged, such as --recipe fast;
`python 03_multigpu_ddp/mnist_ddp.py --help` lists them.

To continue after a break, give the same command with the --out that the sweep has printed. Finished runs
are kept, jobs still in Slurm are watched again, failed ones are submitted again. Longer lists add runs.

All runs have one precision: with --precision auto the first run goes alone, and its choice holds for
the others. With another --precision none has to wait.

Every GPU comes with the same number of CPU cores (--cpus-per-gpu), and every process of single and
ddp has as many threads; the one process of dp has those of all its GPUs.

Jobs that share a node can slow each other down. --max-jobs 1, or `export SBATCH_EXCLUSIVE=exclusive` for
whole nodes, keeps them apart; on the practice cluster, where all nodes are one machine, only --max-jobs 1
does.

Without Slurm the runs are processes of this machine, one run at a time. Without GPUs, CPU cores stand
in for them, one thread each.

A sweep ends with how many GPUs to ask for (results/how_many_gpus.py)."""


# The options that a sweep of plain scripts accepts.
SHARED = {
    "plain", "gpus", "repeats", "max_jobs", "gpus_per_node", "cpus_per_gpu", "partition", "time", "local",
    "dry_run", "out",
}  # fmt: skip


def main() -> int:
    own, arguments = _parse()
    site = read_site()
    loaders = _loaders(own)
    stages = tuple(STAGES[name] for name in own.stages)
    if script := own.script or own.plain:
        stages = (STAGES["ddp"].with_script(script, plain=bool(own.plain)),)
    opts = submission.read_options(stages[0], arguments, site)
    if not script:
        staging.check(opts.dataset, opts.data_dir)  # once for all runs, as all of them need it
    why_here = submission.why_local(own.local)
    folder = own.out or opts.results_dir / "sweeps" / datetime.now().strftime("%Y%m%d-%H%M%S")
    asked = sweep.Sweep(
        folder.absolute(),
        tuple(arguments),
        opts,
        site,
        own.time or site.minutes or submission.DEFAULT_MINUTES,
        why_here,
        local.gpus_here() if why_here and not opts.no_cuda else 0,
        own.cpus_per_gpu,
        own.partition,
        bool(own.plain),
    )
    runs, left_out = asked.planned(
        sweep.Grid(
            stages,
            own.gpus,
            own.batch_size,
            loaders,
            own.train_size,
            own.repeats,
            own.scaling,
            own.gpus_per_node,
        )
    )
    for reason, count in left_out.items():
        tell(f"left out ({count}): {reason}")
    if own.dry_run:
        width = max(len(run.name) for run in runs)
        for run in runs:
            state = "finished" if asked.finished(run.name) else "to run"
            tell(f"{run.name:{width}}  {state:8}  {run.shape}")
        sweep.print_plan(asked, runs)
        return 0
    if why_here:
        tell(f"{why_here}: one run at a time, as processes of this machine")
    constraints = Constraints(
        own.target,
        deadline_s=own.deadline and 60 * own.deadline,
        budget_hours=own.budget,
        min_efficiency=own.min_efficiency / 100,
        gpus_per_node=own.gpus_per_node or max(own.gpus),
    )
    with asked.claim(stages[0].script if script else None):
        return sweep.run(asked, runs, own.max_jobs, constraints=None if own.plain else constraints)


def _loaders(own: argparse.Namespace) -> tuple[int | None, ...]:
    """Return the numbers of loader workers, with None for the resident loader."""
    loaders = own.loader or ("workers" if own.num_workers else "resident",)
    if own.num_workers and "workers" not in loaders:
        raise UserError("--num-workers needs --loader workers: add that, or leave it out.")
    of_each = {"resident": (None,), "workers": own.num_workers or (0,)}
    return tuple(number for loader in loaders for number in of_each[loader])


def _parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the sweep's own options, and the options for every run."""
    parser = Parser(description=__doc__, epilog=NOTES)
    numbers = list_of(at_least(1))
    matrix = parser.add_argument_group("the lists")
    trainings = matrix.add_mutually_exclusive_group()
    trainings.add_argument(
        "--stages",
        type=list_of(one_of(STAGES)),
        default=tuple(STAGES),
        metavar="LIST",
        help="of single, dp and ddp (default: all)",
    )
    trainings.add_argument(
        "--script", metavar="FILE.py", type=given,
        help="your own training instead, one process per GPU as in ddp",
    )  # fmt: skip
    trainings.add_argument(
        "--plain", metavar="FILE.py", type=given,
        help="a script that does not use the kit, on each of --gpus; after it come its own arguments "
        "(YOUR_TRAINING.md)",
    )  # fmt: skip
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
        type=list_of(one_of(("resident", "workers"))),
        metavar="LIST",
        help="of resident and workers (default: resident, or workers if --num-workers is given)",
    )
    matrix.add_argument(
        "--num-workers",
        type=list_of(at_least(0, 256)),
        metavar="LIST",
        help="loader processes of each process, for --loader workers (default: 0)",
    )
    matrix.add_argument(
        "--train-size",
        type=list_of(at_least(1, MOST_IMAGES)),
        default=(None,),
        metavar="LIST",
        help="images per epoch (default: all)",
    )
    matrix.add_argument(
        "--repeats",
        type=at_least(1, 1000),
        default=1,
        metavar="N",
        help="of each, with another seed (default: 1)",
    )
    answer = parser.add_argument_group("how many GPUs to ask for")
    wishes = "of the training that you plan: "
    answer.add_argument(
        "--target", type=above_0(100), metavar="PERCENT", help=f"{wishes}the test accuracy it is to reach"
    )
    answer.add_argument(
        "--deadline", type=time_limit, metavar="LIMIT", help=f"{wishes}its time, as HH:MM:SS or in minutes"
    )
    answer.add_argument("--budget", type=above_0(), metavar="HOURS", help=f"{wishes}its GPU-hours")
    answer.add_argument(
        "--min-efficiency",
        type=above_0(100),
        default=70,
        metavar="PERCENT",
        help=f"{wishes}its efficiency (default: 70)",
    )
    jobs = parser.add_argument_group("jobs")
    jobs.add_argument(
        "--max-jobs", type=at_least(1), default=4, metavar="N", help="in Slurm at a time (default: 4)"
    )
    jobs.add_argument(
        "--gpus-per-node",
        type=at_least(1),
        metavar="N",
        help="GPUs that a node has: ddp runs with more are spread over several (default: all on one node)",
    )
    jobs.add_argument(
        "--cpus-per-gpu", type=at_least(1), default=2, metavar="N", help="CPU cores (default: 2)"
    )
    jobs.add_argument("--partition", metavar="NAME", help="default: the site file's, or the cluster's")
    jobs.add_argument(
        "--time",
        type=time_limit,
        metavar="LIMIT",
        help="of a job, as HH:MM:SS or in minutes (default: the site file's, or "
        f"{submission.DEFAULT_MINUTES})",
    )
    jobs.add_argument("--local", action="store_true", help="run here, even if there is a Slurm")
    jobs.add_argument("--dry-run", action="store_true", help="print the runs, and submit nothing")
    jobs.add_argument(
        "--out",
        type=given_path,
        metavar="DIR",
        help="folder of the sweep (default: a new one in results/sweeps/)",
    )
    parser.add_argument(
        "--epochs",
        default=str(sweep.EPOCHS),
        metavar="N",
        help=f"of every run (default: {sweep.EPOCHS}, the first to warm up)",
    )
    mine, theirs = submission.split(sys.argv[1:])
    own, unknown = parser.parse_known_args(mine)
    if not own.plain:
        return own, ["--epochs", own.epochs, *unknown, *theirs]
    of_ours = vars(own).keys() - SHARED
    if wrong := unknown + [
        name for name in sorted(of_ours) if getattr(own, name) != parser.get_default(name)
    ]:
        option = "--" + wrong[0].removeprefix("--").replace("_", "-")
        parser.error(f"{option} is not for plain scripts: put the arguments of {own.plain} after its name")
    return own, theirs


if __name__ == "__main__":
    errors.run(main)
