"""Run every combination of the given lists as a separate job, then compare the results.

Try: python slurm/sweep.py --stages single,ddp --gpus 1,2,4 --batch-size 256,1024 --dry-run
"""

import argparse
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from manygpus import json_document
from manygpus.config.command_line import (
    Parser,
    above_0,
    add_json,
    at_least,
    given,
    given_path,
    list_of,
    one_of,
    time_limit,
    with_out,
)
from manygpus.config.options import MOST_IMAGES
from manygpus.data import staging
from manygpus.errors import UserError, entrypoint, print_line
from manygpus.jobs import local_job
from manygpus.jobs.site import read_site
from manygpus.jobs.stages import STAGES, Stage
from manygpus.jobs.submit import freezing, submission
from manygpus.jobs.submit.code_difference import difference
from manygpus.jobs.submit.freezing import named
from manygpus.jobs.submit.request import read_options
from manygpus.jobs.sweeps import execution, progress_table, varied_options
from manygpus.jobs.sweeps.metric import MAXIMIZE, MINIMIZE, metric
from manygpus.jobs.sweeps.plan import STRONG, Grid, PlannedRun
from manygpus.jobs.sweeps.sweep import Sweep
from manygpus.jobs.user_program import add_options

NOTES = """\
Lists are separated by commas. All other options go to every run unchanged, such as --recipe fast;
`python 03_multigpu_ddp/mnist_ddp.py --help` lists them.

To resume a sweep, give the same command with the --out that it has printed. Finished runs are kept,
jobs still in Slurm are watched again, all others are submitted again. Longer lists add runs.

In the arguments of a plain script, and in --when-requeued, {gpus}, {nodes}, {batch}, {batch/gpus} and
{folder}, the run's own folder, stand for those of each run:

    manygpus sweep --vary lr=0.1,0.01 --gpus 1,2 --batch-size 64 --plain train.py --batch {batch/gpus}

Every GPU comes with the same number of CPU cores (--cpus-per-gpu), and every process of single and
ddp has as many threads; the one process of dp has those of all its GPUs.

Jobs that share a node can slow each other down. --max-jobs 1, or `export SBATCH_EXCLUSIVE=exclusive` for
whole nodes, keeps them apart; on the practice cluster, where all nodes are one machine, only --max-jobs 1
does.

Without Slurm, and with --local, the runs are processes of this machine, one run at a time. With
--max-jobs 4 four run at a time, each with its part of the cores, and with its own GPUs, or a share if
there are too few. Without GPUs, CPU cores stand in for them, one thread each. In Slurm, --per-job 4 lets four
at a time share a job.

A sweep ends with how many GPUs to ask for (results/how_many_gpus.py)."""


# Of schemas/sweep.json.
SCHEMA_VERSION = 1
# The state of a run of a dry run that has not finished.
TO_RUN = "to_run"
DEFAULT_BATCH_SIZES = (256,)
# Jobs of Slurm that run at a time. On one machine, runs at a time slow each other down.
DEFAULT_MAX_JOBS = 4
# Who varies an option expects a run for each value, not one more for each of two numbers of GPUs.
DEFAULT_GPUS, DEFAULT_GPUS_WITH_VARY = (1, 2), (1,)
# The options that a sweep of plain scripts has, too.
OPTIONS_OF_PLAIN_SWEEPS = {
    "plain",
    "python",
    "one_process_per_node",
    "when_requeued",
    "gpus",
    "batch_size",
    "scaling",
    "vary",
    "chdir",
    "metric",
    "goal",
    "no_freeze",
    "repeats",
    "max_jobs",
    "per_job",
    "gpus_per_job",
    "gpus_per_node",
    "cpus_per_gpu",
    "partition",
    "time",
    "local",
    "dry_run",
    "json",
    "out",
    *(name.replace("-", "_") for name in submission.PASSED_ON),
}


@entrypoint
def main() -> int:
    own_options, arguments = _parse()
    with json_document.notes_on_stderr() if own_options.json else nullcontext():
        exit_code, document = _plan_and_run(own_options, arguments)
    if own_options.json:
        json_document.print_document(document)
    return exit_code


def _plan_and_run(own_options: argparse.Namespace, arguments: list[str]) -> tuple[int, dict[str, object]]:
    """Plan the runs, and run them unless it is a dry run; return the exit code, and the sweep as JSON."""
    is_users_own = bool(own_options.script or own_options.plain)
    if is_users_own:
        stages = (submission.choose_stage(STAGES["ddp"], own_options),)
    else:
        stages = tuple(STAGES[name] for name in own_options.stages)
    grid = _grid(own_options, stages)
    planned_sweep = _sweep(own_options, stages[0], arguments)
    if not is_users_own:
        # Once for all runs, as all of them need it.
        staging.check(planned_sweep.opts.dataset, planned_sweep.opts.data_dir)
    planned_sweep, about_code = _with_its_code(planned_sweep, stages[0], own_options)
    runs, left_out = planned_sweep.planned(grid)
    if planned_sweep.per_job > 1:
        _check_shared_jobs(planned_sweep, runs)
    for reason, count in left_out.items():
        print_line(f"left out ({count}): {reason}")
    max_jobs = own_options.max_jobs or DEFAULT_MAX_JOBS
    if own_options.dry_run:
        _print_runs(planned_sweep, runs, max_jobs)
        _warn_of_shared_files(planned_sweep, runs)
        print_line("\n".join(about_code))
        documents = [_planned_as_json(planned_sweep, run) for run in runs]
        return 0, _as_json(planned_sweep, documents, left_out)
    _warn_of_shared_files(planned_sweep, runs)
    if planned_sweep.why_here:
        print_line(f"{planned_sweep.why_here}: {_places(planned_sweep, runs)}, as processes of this machine")
    with planned_sweep.claim(stages[0].words if is_users_own else ()):
        print_line("\n".join(about_code))
        planned_sweep.freeze()
        exit_code = execution.run(
            planned_sweep,
            runs,
            max_jobs,
            report=partial(_report, own_options=own_options),
        )
    documents = [row.as_json() for row in progress_table.rows(planned_sweep.folder, planned_sweep.metric)]
    return exit_code, _as_json(planned_sweep, documents, left_out)


def _as_json(
    planned_sweep: Sweep, runs: list[dict[str, object]], left_out: Mapping[str, int]
) -> dict[str, object]:
    """Return a sweep with these runs as schemas/sweep.json describes it."""
    metric_of_sweep = planned_sweep.metric
    return {
        "schema_version": SCHEMA_VERSION,
        "folder": planned_sweep.folder,
        "metric": {"name": metric_of_sweep.text, "goal": metric_of_sweep.goal} if metric_of_sweep else None,
        "left_out": [{"reason": reason, "runs": count} for reason, count in left_out.items()],
        "runs": runs,
    }


def _planned_as_json(planned_sweep: Sweep, run: PlannedRun) -> dict[str, object]:
    """Return a run of a dry run."""
    return {
        "run": run.name,
        "settings": varied_options.values(run.settings),
        "gpus": run.shape.gpus,
        "nodes": run.shape.nodes,
        "global_batch": run.batch_size,
        "state": progress_table.FINISHED if planned_sweep.has_finished(run) else TO_RUN,
        "command": [*run.stage.command, *planned_sweep.script_arguments(run)],
    }


def _check_shared_jobs(planned_sweep: Sweep, runs: list[PlannedRun]) -> None:
    """Raise a UserError if runs cannot share jobs."""
    if planned_sweep.why_here:
        raise UserError(
            f"--per-job is for jobs of Slurm ({planned_sweep.why_here}): on this machine --max-jobs says how "
            "many runs share it."
        )
    if any(run.shape.nodes > 1 for run in runs):
        raise UserError("--per-job is for runs on one node: leave it out, or --gpus-per-node.")
    most = max(run.shape.gpus for run in runs)
    if planned_sweep.gpus_per_job and planned_sweep.gpus_per_job < most:
        raise UserError(f"--gpus-per-job {planned_sweep.gpus_per_job}, and a run needs {most}: raise it.")


def _places(planned_sweep: Sweep, runs: list[PlannedRun]) -> str:
    """Return how many runs this machine has at a time, and whether they share its GPUs."""
    places = planned_sweep.places
    if places == 1:
        return "one run at a time"
    needed = places * max(run.shape.gpus for run in runs)
    if planned_sweep.gpus_here and needed > planned_sweep.gpus_here:
        return f"{places} runs at a time, which share {planned_sweep.gpus_here} GPU(s)"
    its_own = "cores and GPUs" if planned_sweep.gpus_here else "cores"
    return f"{places} runs at a time, each with its own {its_own}"


def _grid(own_options: argparse.Namespace, stages: tuple[Stage, ...]) -> Grid:
    """Return the lists of which every combination is run.

    Raises:
        UserError: for lists that contradict each other.
    """
    batch_sizes = own_options.batch_size
    if batch_sizes is None:
        batch_sizes = (None,) if own_options.plain else DEFAULT_BATCH_SIZES
    return Grid(
        stages=stages,
        gpus=own_options.gpus,
        batch_sizes=batch_sizes,
        num_workers=_loaders(own_options),
        train_sizes=own_options.train_size,
        repeats=own_options.repeats,
        scaling=own_options.scaling,
        gpus_per_node=own_options.gpus_per_node,
        settings=varied_options.combinations(own_options.vary),
    )


def _sweep(own_options: argparse.Namespace, stage: Stage, arguments: list[str]) -> Sweep:
    """Return what all runs share.

    Raises:
        UserError: for arguments that the stage refuses, or that runs cannot share.
    """
    site = read_site()
    opts = read_options(stage, arguments, site)
    why_here = submission.why_local(own_options.local)
    folder = own_options.out or opts.results_dir / "sweeps" / datetime.now().strftime("%Y%m%d-%H%M%S")
    return Sweep(
        folder=folder.absolute(),
        arguments=tuple(arguments),
        opts=opts,
        site=site,
        minutes=own_options.time or site.minutes or submission.DEFAULT_MINUTES,
        why_here=why_here,
        command_to_resume=with_out(folder, own_options.out),
        gpus_here=local_job.gpus_here() if why_here and not opts.no_cuda else 0,
        places=own_options.max_jobs or 1 if why_here else 1,
        per_job=own_options.per_job,
        gpus_per_job=own_options.gpus_per_job,
        cpus_per_gpu=own_options.cpus_per_gpu,
        partition=own_options.partition,
        passed_on=submission.passed_on(own_options),
        plain=bool(own_options.plain),
        chdir=own_options.chdir,
        metric=metric(own_options.metric, own_options.goal) if own_options.metric else None,
    )


def _with_its_code(
    planned_sweep: Sweep, stage: Stage, own_options: argparse.Namespace
) -> tuple[Sweep, tuple[str, ...]]:
    """Return the sweep with a copy of its code, if there is to be one, and what is told of that."""
    code, about_code = freezing.planned_copy(
        stage,
        planned_sweep.folder,
        planned_sweep.site.jobs_dir,
        no_freeze=own_options.no_freeze,
        dry_run=own_options.dry_run,
    )
    changed = difference(code.code).names if code and code.is_there else []
    if changed:
        note = (
            f"note: since the sweep began, {named(changed)} changed: its runs go on with the code of then; "
            "--no-freeze runs today's"
        )
        about_code = (*about_code, note)
    return replace(planned_sweep, code=code), about_code


def _print_runs(planned_sweep: Sweep, runs: list[PlannedRun], max_jobs: int) -> None:
    width = max(len(run.name) for run in runs)
    for run in runs:
        state = "finished" if planned_sweep.has_finished(run) else "to run"
        print_line(f"{run.name:{width}}  {state:8}  {run.shape}")
        if run.stage.is_users_own or run.settings:
            command = [*run.stage.command, *planned_sweep.script_arguments(run)]
            print_line(f"    {shlex.join(command)}")
    execution.print_plan(planned_sweep, runs, max_jobs)


def _warn_of_shared_files(planned_sweep: Sweep, runs: list[PlannedRun]) -> None:
    """Say that the runs of a plain script share a working folder, unless they have one of their own."""
    names = varied_options.in_braces(planned_sweep.arguments)
    if (
        planned_sweep.plain
        and len(runs) > 1
        and not planned_sweep.chdir
        and varied_options.FOLDER not in names
    ):
        print_line(
            f"note: all runs start in {Path.cwd()}, and one that saves there may be taken up by the next: "
            "put {folder}, the run's own folder, among the arguments of the script, or add --chdir, which "
            "starts each run in its own"
        )


def _report(csvs: list[Path], out: Path, own_options: argparse.Namespace) -> int:
    """Compare the runs, and say how many GPUs the training that the user plans should ask for."""
    # They load pandas, which is needed here only: login nodes are slow.
    from manygpus.reports.advice.answer import compare_and_answer
    from manygpus.reports.advice.choice import Constraints

    if own_options.plain:
        return compare_and_answer(csvs, out, constraints=None)
    constraints = Constraints(
        target=own_options.target,
        deadline_s=own_options.deadline and 60 * own_options.deadline,
        budget_hours=own_options.budget,
        min_efficiency=own_options.min_efficiency / 100,
        gpus_per_node=own_options.gpus_per_node or max(own_options.gpus),
    )
    return compare_and_answer(csvs, out, constraints)


def _loaders(own_options: argparse.Namespace) -> tuple[int | None, ...]:
    """Return the numbers of loader workers, with None for the resident loader.

    Raises:
        UserError: for numbers of workers without the loader that has some.
    """
    loaders = own_options.loader
    if loaders is None:
        loaders = ("workers",) if own_options.num_workers else ("resident",)
    if own_options.num_workers and "workers" not in loaders:
        raise UserError("--num-workers needs --loader workers: add that, or leave out --num-workers.")
    numbers: list[int | None] = []
    for loader in loaders:
        if loader == "resident":
            numbers.append(None)
        else:
            numbers += own_options.num_workers or (0,)
    return tuple(numbers)


def _parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the sweep's own options, and the arguments of every run."""
    parser = Parser(description=__doc__, epilog=NOTES)
    _add_lists(parser)
    _add_metric(parser)
    _add_constraints(parser)
    _add_jobs(parser)
    parser.add_argument(
        "--epochs",
        default=str(execution.EPOCHS),
        metavar="N",
        help=f"epochs of every run, with the first as warm-up (default: {execution.EPOCHS})",
    )
    own_options, unknown, for_training = submission.parse_with_program(parser)
    if bool(own_options.metric) != bool(own_options.goal):
        parser.error(
            f"--metric and --goal go together: --goal {MINIMIZE} if the lowest number is the best, as of a "
            f"loss, --goal {MAXIMIZE} if the highest is"
        )
    if own_options.gpus_per_job and own_options.per_job == 1:
        parser.error("--gpus-per-job is for --per-job: say how many runs share a job")
    if own_options.gpus is None:
        own_options.gpus = DEFAULT_GPUS_WITH_VARY if own_options.vary else DEFAULT_GPUS
    settings = [setting for option in own_options.vary for choice in option.choices for setting in choice]
    for setting in settings:
        if not setting.value and setting.name not in varied_options.in_braces(for_training):
            parser.error(
                f"--vary {setting.name} has an empty value: put {{{setting.name}}} among the arguments of "
                "the script, where that value leaves it out"
            )
    if own_options.plain:
        _refuse_for_plain(parser, own_options, unknown)
        _check_batch_of_plain(own_options, for_training)
        return own_options, for_training
    if own_options.chdir:
        parser.error("--chdir is for plain scripts: ours write nothing where they start")
    for setting in settings:
        if setting.name.replace("-", "_") in vars(own_options):
            parser.error(f"--vary {setting.name}: sweep.py itself has an option of that name")
    return own_options, ["--epochs", own_options.epochs, *unknown, *for_training]


def _add_lists(parser: Parser) -> None:
    """Add the lists of which every combination is run."""
    numbers = list_of(at_least(1))
    matrix = parser.add_argument_group("the lists")
    trainings = matrix.add_mutually_exclusive_group()
    trainings.add_argument(
        "--stages",
        type=list_of(one_of(STAGES)),
        default=tuple(STAGES),
        metavar="LIST",
        help="which of single, dp and ddp to run (default: all)",
    )
    trainings.add_argument(
        "--script",
        metavar="FILE.py",
        type=given,
        help="your own training instead, one process per GPU as in ddp",
    )
    trainings.add_argument(
        "--plain",
        metavar="PROGRAM",
        type=given,
        help="a script that does not use the kit, on each of --gpus: train.py, -m package.train, or a "
        "program such as run.sh; after it come its own arguments (YOUR_TRAINING.md)",
    )
    add_options(matrix)
    matrix.add_argument(
        "--gpus", type=numbers, metavar="LIST", help="numbers of GPUs (default: 1,2; with --vary 1)"
    )
    matrix.add_argument(
        "--batch-size",
        type=numbers,
        metavar="LIST",
        help="batch sizes (default: 256); a plain script gets them as {batch} or {batch/gpus}",
    )
    matrix.add_argument(
        "--vary",
        type=varied_options.varied,
        action="append",
        default=[],
        metavar="NAME=LIST",
        help="values of an option of the script; each replaces {NAME} in its arguments, or follows them as "
        "--NAME VALUE; brackets and quotes protect commas; NAME alone is a flag, with and without; "
        "NAME,NAME=[VALUE,VALUE],[VALUE,VALUE] vary together; FILE.yaml has lists by their names; may be "
        "given several times",
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
        help="which of resident and workers to use (default: resident, or workers if --num-workers is given)",
    )
    matrix.add_argument(
        "--num-workers",
        type=list_of(at_least(0, 256)),
        metavar="LIST",
        help="loader processes per rank, for --loader workers (default: 0)",
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
        help="runs of each, with different seeds (default: 1)",
    )


def _add_metric(parser: Parser) -> None:
    """Add the number by which runs are compared."""
    table = parser.add_argument_group("the table of the runs, the best first")
    table.add_argument(
        "--metric",
        metavar="NAME",
        type=given,
        help="a column of the record, such as test_accuracy, the words in front of a number in the log, such "
        "as val_loss, or a regular expression whose group marks the number: 'val_loss=([\\d.]+)'; in the log "
        "the last one counts",
    )
    table.add_argument(
        "--goal", choices=(MINIMIZE, MAXIMIZE), help="whether the lowest or the highest number is the best"
    )


def _add_constraints(parser: Parser) -> None:
    """Add what the answer to how many GPUs to ask for is to keep to."""
    answer = parser.add_argument_group("how many GPUs to ask for")
    wishes = "for the training that you plan: "
    answer.add_argument(
        "--target", type=above_0(100), metavar="PERCENT", help=f"{wishes}the test accuracy to reach"
    )
    answer.add_argument(
        "--deadline",
        type=time_limit,
        metavar="LIMIT",
        help=f"{wishes}the time it may take, as HH:MM:SS or in minutes",
    )
    answer.add_argument(
        "--budget", type=above_0(), metavar="HOURS", help=f"{wishes}the GPU-hours it may cost"
    )
    answer.add_argument(
        "--min-efficiency",
        type=above_0(100),
        default=70,
        metavar="PERCENT",
        help=f"{wishes}the least efficiency (default: 70)",
    )


def _add_jobs(parser: Parser) -> None:
    """Add how the runs are sent as jobs."""
    jobs = parser.add_argument_group("jobs")
    jobs.add_argument(
        "--max-jobs",
        type=at_least(1),
        metavar="N",
        help=f"runs at a time (default: {DEFAULT_MAX_JOBS} jobs in Slurm, one run on this machine)",
    )
    jobs.add_argument(
        "--per-job",
        type=at_least(1),
        default=1,
        metavar="N",
        help="runs that share a job, on one node: it asks Slurm for what N runs need, and does its part of "
        "all runs, N at a time (default: 1)",
    )
    jobs.add_argument(
        "--gpus-per-job",
        type=at_least(1),
        metavar="N",
        help="for --per-job: the GPUs of such a job, which its runs share if they are fewer than the runs "
        "need (default: those of the runs)",
    )
    jobs.add_argument(
        "--gpus-per-node",
        type=at_least(1),
        metavar="N",
        help="GPUs per node: ddp runs with more are spread over several nodes (default: all on one node)",
    )
    jobs.add_argument(
        "--cpus-per-gpu", type=at_least(1), default=2, metavar="N", help="CPU cores per GPU (default: 2)"
    )
    jobs.add_argument(
        "--partition", metavar="NAME", help="partition (default: the site file's, or the cluster's)"
    )
    jobs.add_argument(
        "--time",
        type=time_limit,
        metavar="LIMIT",
        help="time limit of a job, as HH:MM:SS or in minutes (default: the site file's, or "
        f"{submission.DEFAULT_MINUTES})",
    )
    jobs.add_argument(
        "--chdir",
        action="store_true",
        help="start each run of a plain script in its own folder, instead of here",
    )
    submission.add_no_freeze(jobs)
    jobs.add_argument("--local", action="store_true", help="run on this machine, even if there is a Slurm")
    jobs.add_argument("--dry-run", action="store_true", help="print the runs, and submit nothing")
    add_json(jobs, "the runs, and at the end how they went,")
    jobs.add_argument(
        "--out",
        type=given_path,
        metavar="DIR",
        help="folder of the sweep (default: a new one in results/sweeps/)",
    )
    submission.add_sbatch_options(parser)


def _check_batch_of_plain(own_options: argparse.Namespace, arguments: list[str]) -> None:
    """Check that a batch size has a place in the arguments of a plain script, and the other way round.

    Raises:
        UserError: if not.
    """
    names = varied_options.in_braces(arguments) & {varied_options.BATCH, varied_options.BATCH_PER_GPU}
    script = own_options.plain
    if own_options.batch_size and not names:
        raise UserError(
            f"--batch-size has no place in the arguments of {script}: put {{batch}} or {{batch/gpus}} there, "
            f"as in --plain {script} --batch {{batch/gpus}}."
        )
    if names and not own_options.batch_size:
        raise UserError(
            f"the arguments of {script} have {{{min(names)}}}: give --batch-size in front of --plain."
        )
    if own_options.scaling != STRONG and not names:
        raise UserError(f"--scaling needs --batch-size, and {{batch}} among the arguments of {script}.")


def _refuse_for_plain(parser: Parser, own_options: argparse.Namespace, unknown: list[str]) -> None:
    """Refuse options that mean nothing to a script that does not use the kit.

    Raises:
        UserError: for the first of them.
    """
    misplaced = [*unknown]
    for name in sorted(vars(own_options).keys() - OPTIONS_OF_PLAIN_SWEEPS):
        if getattr(own_options, name) != parser.get_default(name):
            misplaced.append(name)
    if misplaced:
        option = "--" + misplaced[0].removeprefix("--").replace("_", "-")
        script = own_options.plain
        parser.error(f"{option} is not for plain scripts: put the arguments of {script} after its name")
