"""What every submit.py shares: the command line, the checks, and what surrounds the call of submitit.

The executor, its parameters and the call of `submit` stand in the submit.py of each stage. `sending`
surrounds them: it checks the request, prepares the environment, and turns a refusal into one sentence.
Without Slurm, sweeps and `make compare` start their runs by the same submit.py (executor.py); with Slurm they
send job scripts (`send_script`).

PyTorch and submitit are not loaded before they are needed: login nodes are slow and shared.
"""

import argparse
import io
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from manygpus import job_folder, project
from manygpus.config import options
from manygpus.config.command_line import PROGRAM, Parser, at_least, given, time_limit
from manygpus.config.known_datasets import DATASETS
from manygpus.data import staging
from manygpus.errors import UserError, print_line
from manygpus.files import check_writable, explained
from manygpus.jobs import job_log, local_job, slurm
from manygpus.jobs.git_checkout import version_of
from manygpus.jobs.site import DEFAULT_MINUTES, read_site
from manygpus.jobs.stages import STAGES, Resources, Stage, resources
from manygpus.jobs.submit import freezing, job_script, partition_limits, waiting
from manygpus.jobs.submit.request import Request, new_folder
from manygpus.jobs.submit.slurm_options import of_variables
from manygpus.jobs.user_program import (
    add_options,
    from_options,
    misplaced,
    note_on_environment,
    python_of_job,
    split,
)
from manygpus.jobs.watch.job_status import Handle, LocalHandle, SlurmHandle
from manygpus.monitor import samples
from manygpus.record.columns import SINGLE

if TYPE_CHECKING:
    import submitit

# So long Slurm is asked for the reason of a job that waits: where no other job is before it, 24.11 gives one
# after up to 2 seconds.
REASON_SECONDS = 3
# The options that users of sbatch type. For some of them it has no variable: SBATCH_DEPENDENCY does nothing
# (seen: 22.05).
PASSED_ON = (
    "account",
    "constraint",
    "dependency",
    "exclude",
    "job-name",
    "mail-type",
    "mail-user",
    "mem",
    "nodelist",
    "qos",
    "reservation",
)


# Where there are no stages.
EPILOG = (
    "PROGRAM is train.py, or any other program, such as run.sh or torchrun. Each process of the job runs it "
    "with the\nPython of your shell, and with the variables of torchrun. All words after it are its own "
    "arguments. Results and logs are\nin results/ of the project: the nearest folder, from here upwards, "
    "that has slurm/site.sh, else this one.\n`manygpus init` writes slurm/site.sh; "
    "~/.config/manygpus/site.sh holds for projects that have none."
)


@dataclass
class Submission:
    """What `sending` hands out: it is given submitit's `job`, and then has its `handle`."""

    job: "submitit.Job | None" = None
    handle: Handle | None = None


@contextmanager
def sending(request: Request) -> Iterator[Submission]:
    """Check the request and make its folder; surround the call of submitit.

    It prepares the environment, for sbatch or for the processes here. After the call it cancels a job that
    Slurm can never start, and starts the monitor of processes here.

    Raises:
        UserError: for options that the stage would refuse, missing data, more than the partition allows, a
            folder that cannot be written to; after the call, if sbatch refuses the job, or does not
            say whether it has taken it.
    """
    folders = f"--results-dir, {project.site_name()}"
    fix = f"free the space, fix the permissions, or choose different folders ({folders})."
    check(request)
    project.hide_results(request.site.results_dir)
    check_writable(request.results_dir / "runs", "results", fix)
    if not request.why_here:
        check_limits(request)
    # A job without its log's folder fails without a log.
    check_writable(request.folder, "the job's logs", fix)
    send = _starting_here if request.why_here else _sending_to_slurm
    # The files of the check fit on a disk, or into a quota, that those of the job then fill.
    with explained(f"the job's files cannot be written to {request.folder}", fix):
        if request.code:
            request.code.write()
        with send(request) as sent:
            yield sent


@contextmanager
def _starting_here(request: Request) -> Iterator[Submission]:
    sent = Submission()
    variables = local_job.variables(
        request.folder,
        request.options.data_dir.absolute(),
        request.results_dir,
        # One process that starts the ranks itself has as many as GPUs.
        ranks=max(request.resources.tasks, request.resources.gpus),
        gpus=request.resources.gpus,
        threads=request.threads,
    )
    if request.code and request.code.kit:
        others = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
        variables["PYTHONPATH"] = os.pathsep.join([str(request.code.kit), *others])
    job_folder.prepare(request.folder, plain=request.stage.plain)
    job_folder.keep_script(request.folder, _script_here(request))
    if request.restart:
        variables["SLURM_RESTART_COUNT"] = str(request.restart)
    samples.prepare(request.folder / samples.FOLDER, None)
    if request.site.monitor:
        # The ranks note there where their records are.
        (request.folder / samples.FOLDER).mkdir(exist_ok=True)
    background = local_job.in_the_background(request.folder / local_job.CONTROLLER_LOG)
    with background, _environment(variables), _working_dir(request.working_dir):
        yield sent
    job = sent.job
    log = job.paths.stdout
    monitor = None
    if request.site.monitor:
        monitor = local_job.start_monitor(request.folder, job.job_id, log, variables)
    sent.handle = LocalHandle(
        job_id=job.job_id,
        tasks=request.resources.tasks,
        log=log,
        folder=request.folder,
        results=request.records_dir,
        has_ended=job.done,
        monitor=monitor,
    )


def _script_here(request: Request) -> job_folder.Script:
    """Return what a job on this machine runs; for a job of Slurm its node asks git."""
    stage = request.stage
    if stage.program:
        script = stage.program.described(request.arguments, python=python_of_job())
        folder = stage.program.folder
    else:
        script = job_folder.Script(path=str(stage.script), arguments=[*request.arguments])
        folder = stage.script.parent
    script = replace(script, run_name=request.run_name, array_element=request.in_job)
    if request.code:
        return script.with_code(request.code.code)
    commit, repository = version_of(folder.resolve())
    return replace(script, commit=commit, repository=repository)


@contextmanager
def _sending_to_slurm(request: Request) -> Iterator[Submission]:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    sent = Submission()
    variables = local_job.outside_of_jobs() | local_job.QUIET | request.sbatch_variables
    try:
        # submitit prints what sbatch says; here it becomes the text of the error.
        with _environment(variables), redirect_stderr(io.StringIO()):
            yield sent
        job_id = sent.job.job_id
    except (FailedJobError, FailedSubmissionError) as error:
        # sbatch has refused it, or names no job.
        refusal = slurm.sbatch_message(str(error))[:1000]
        if slurm.is_unclear(refusal):
            raise UserError(
                f"it is not known whether Slurm has accepted the job (sbatch: {refusal}). Before you submit "
                "again, check whether `squeue --me --format='%i %o'` shows one with a script in "
                f"{request.folder}, and scancel it: it would not find its files."
            ) from None
        shutil.rmtree(request.folder)
        raise _refused(refusal) from None
    sent.handle = SlurmHandle(
        job_id=job_id,
        tasks=request.resources.tasks,
        log=job_log.of_rank(request.folder, job_id),
        folder=request.site.jobs_dir / job_id,
        results=request.records_dir,
    )
    try:
        check_start(sent.handle)
    except UserError:
        shutil.rmtree(request.folder)
        raise


def send_script(script: Path) -> str:
    """Send a job script, and return the number of the job, or of the array.

    Raises:
        UserError: if sbatch refuses it, or does not say whether it has taken it.
    """
    # The script itself has all options, and the user's shell may have some for other jobs.
    environment = local_job.without_sbatch_variables()
    done = slurm.ask("sbatch", "--parsable", str(script), env=environment)
    if done.returncode == 0:
        # The name of the cluster may follow.
        return done.stdout.strip().partition(";")[0]
    refusal = slurm.sbatch_message(done.stderr)[:1000]
    if slurm.is_unclear(refusal):
        raise UserError(
            f"it is not known whether Slurm has accepted {script} ({refusal}): give the same command again "
            "in a minute, which looks for its jobs in the queue."
        )
    raise _refused(refusal)


def _refused(refusal: str) -> UserError:
    """Return the error of a job that Slurm has refused, so that no job is left of it."""
    fix = f"{slurm.advice(refusal)}; --local runs it on this machine"
    return UserError(f"Slurm did not accept the job ({refusal}): {fix}.")


def check_start(handle: SlurmHandle) -> None:
    """Cancel a job, or the array that it is of, if Slurm can never start it.

    Raises:
        UserError: if that is so.
    """
    # Where other jobs are before it, Slurm may give the reason later, and then `follow` tells it.
    reason = handle.reason(REASON_SECONDS)
    if slurm.never_starts(reason):
        slurm.ask("scancel", handle.job_id.partition("_")[0])
        raise UserError(f"Slurm would never start the job ({reason}): {slurm.advice(reason)}.")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these environment variables and no others for a while: submitit hands on those of its caller."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _working_dir(folder: Path | None) -> Iterator[None]:
    """Work in `folder` for a while, if there is one: processes that are started then start there."""
    before = Path.cwd()
    if folder:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def preview(request: Request) -> None:
    """Print what would be done: a job script that asks for the same, or the local processes.

    On stderr, as the script may be redirected to a file, notes say when Slurm would start the job.

    Raises:
        UserError: as `sending`, as far as can be checked without writing anything.
    """
    check(request)
    if request.why_here:
        command = shlex.join([*request.stage.command, *request.arguments])
        processes = f"{request.resources.tasks} local process(es)"
        print_line(f"{request.why_here}: would run as {processes} of {command}")
        print_line("\n".join(request.about_code))
        return
    check_limits(request)
    script = job_script.of_one_job(request)
    print_line(script)
    for sentence in _forecast(request, script):
        print_line(f"note: {sentence}", sys.stderr)


def _forecast(request: Request, script: str) -> Iterator[str]:
    """Yield when Slurm would start this job script, and how long earlier jobs of this size have waited."""
    trial = slurm.test_only([], local_job.without_sbatch_variables(), script=script)
    if not trial.start:
        remedy = slurm.advice(trial.refusal)
        yield f"Slurm does not say when it would start this job ({trial.refusal}): {remedy}"
        return
    end = trial.start + timedelta(minutes=request.timeout_min)
    place = ", in the place of other jobs" if trial.preempts else ""
    start = f"the start of this job, by Slurm's estimate: {waiting.from_now(trial.start)}{place}"
    yield f"{start}; its end, at the latest: {end:%Y-%m-%d %H:%M} (--time)"
    if not waiting.is_now(trial.start):
        yield waiting.CAUTION
    shape = request.resources
    waits = waiting.of_size(slurm.waits(waiting.DAYS), shape)
    if waits:
        size = f"your jobs with {shape.gpus} GPU(s) on {shape.nodes} node(s)"
        yield f"in the last {waiting.DAYS} days {size} waited {waiting.typical(waits)}"


def check(request: Request) -> None:
    """Check all that can be checked before a job is sent, as the stage will check it.

    Raises:
        UserError: for a wrong option, missing data, resources that this machine lacks if it stands in
            for Slurm, and a job that sbatch cannot be given as it is meant.
    """
    opts = request.options
    if not request.stage.is_users_own:
        staging.check(opts.dataset, opts.data_dir)
    if not request.stage.plain:
        check_sizes(opts, request.stage, request.resources)
    if request.why_here:
        _check_machine(request)


def check_limits(request: Request) -> None:
    """Raise a UserError if the partition does not allow what the job asks for."""
    asked = {
        "nodes": str(request.resources.nodes),
        "time": str(request.timeout_min),
        **request.sbatch_options,
        **of_variables(request.sbatch_variables),
    }
    beyond = partition_limits.excess(asked)
    if beyond:
        remedy = slurm.advice(beyond.reason)
        raise UserError(f"Slurm would never start the job ({beyond.reason}: {beyond.limit}): {remedy}.")


def why_local(here: bool) -> str:
    """Return why a job runs on this machine, as `here` requests; "" if it goes to Slurm."""
    if here:
        return "--local"
    why_not = slurm.why_not_here()
    return f"no Slurm here ({why_not})" if why_not else ""


def check_sizes(opts: options.Options, stage: Stage, shape: Resources) -> None:
    """Check that the batch divides among processes or GPUs, and that our data sets have enough samples.

    Raises:
        UserError: if not.
    """
    if stage.process_per_gpu:
        opts = opts.resolve_batch_size(shape.tasks)
    else:
        opts = opts.resolve_batch_size(0 if opts.no_cuda else shape.gpus, "GPUs")
    available_images = None if stage.is_users_own else DATASETS[opts.dataset].train_images
    options.check_sizes(opts, available_images)


def _check_machine(request: Request) -> None:
    """Raise a UserError if this machine, which stands in for Slurm, lacks what is asked for."""
    shape = request.resources
    if shape.nodes > 1:
        raise UserError(
            f"{request.why_here}, and this machine is one node, not {shape.nodes}: leave out --nodes, or "
            "submit on a login node."
        )
    # Without GPUs, ranks on the CPU stand in for as many as requested.
    gpus = 0 if request.options.no_cuda else local_job.gpus_here()
    if 0 < gpus < shape.gpus:
        fix = "lower it"
        if not request.stage.plain:
            fix += ", or add --no-cuda to train on its CPU"
        raise UserError(f"--gpus {shape.gpus} is more than the {gpus} GPU(s) of this machine: {fix}.")


def parse(stage_name: str, description: str) -> tuple[Request, argparse.Namespace]:
    """Read the command line of a submit.py: the job that it asks for, and its own options.

    Raises:
        UserError: for a mistake in it, or in slurm/site.sh.
    """
    stage = STAGES[stage_name]
    parser = _parser(stage, description)
    own_options, unknown, for_training = parse_with_program(parser)
    if own_options.plain and (unknown or own_options.script):
        parser.error(
            f"{misplaced(unknown[0] if unknown else '--script', own_options.plain)}; for further options of "
            "sbatch, save the script of --dry-run, and submit that"
        )
    stage = choose_stage(stage, own_options)
    arguments = (*unknown, *for_training)
    why_here = why_local(own_options.local)
    gpus = own_options.gpus
    if gpus is None:
        gpus = stage.default_gpus
        if stage.name != SINGLE and why_here and "--no-cuda" not in arguments:
            gpus = local_job.gpus_here() or gpus
    if own_options.spare_nodes and own_options.spare_nodes >= own_options.nodes:
        parser.error("--spare-nodes has to be less than --nodes")
    if own_options.avoid_slow_nodes and own_options.nodes == 1:
        parser.error("--avoid-slow-nodes compares nodes: give --nodes 2 or more")
    site = read_site()
    request = Request(
        stage=stage,
        resources=resources(stage, gpus, own_options.nodes, own_options.cpus_per_gpu),
        arguments=arguments,
        site=site,
        folder=new_folder(site, stage),
        minutes=own_options.time,
        partition=own_options.partition,
        passed_on=passed_on(own_options),
        why_here=why_here,
        spare_nodes=own_options.spare_nodes,
        avoids_slow_nodes=own_options.avoid_slow_nodes,
    )
    code, about_code = freezing.planned_copy(
        stage, request.folder, site.jobs_dir, no_freeze=own_options.no_freeze, dry_run=own_options.dry_run
    )
    request = replace(request, about_code=about_code)
    return request.with_code(code) if code else request, own_options


def parse_with_program(parser: Parser) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Read a command line that may name a program of the user.

    Returns:
        The options of the command itself, those that it does not know, and the arguments of the program or
        the stage.

    Raises:
        UserError: for a mistake in it.
    """
    own_words, for_training = split(sys.argv[1:], parser)
    own_options, unknown = parser.parse_known_args(own_words)
    if not project.IS_CHECKOUT and unknown:
        parser.error(f"{unknown[0]} is no option of {parser.prog}: put the script's arguments after its name")
    if not project.IS_CHECKOUT and not own_options.plain and not own_options.script:
        parser.error(f"name the script to run, after the options: {parser.prog} --gpus 2 train.py")
    return own_options, unknown, for_training


def choose_stage(stage: Stage, own_options: argparse.Namespace) -> Stage:
    """Return the stage with the user's own script, where a command line has --script or --plain.

    Raises:
        UserError: if it is not there, cannot be started, or options for --plain are given without that.
    """
    if own_options.plain:
        folders = [Path.cwd(), stage.script.parent] if project.IS_CHECKOUT else [Path.cwd()]
        return stage.with_program(from_options(own_options, folders))
    plain_options = (own_options.python, own_options.when_requeued, own_options.one_process_per_node or None)
    if plain_options != (None, None, None):
        raise UserError(
            "--python, --when-requeued and --one-process-per-node are for plain scripts: put them before "
            f"{'--plain' if project.IS_CHECKOUT else 'the script'}."
        )
    return stage.with_script(own_options.script) if own_options.script else stage


def _parser(stage: Stage, description: str) -> Parser:
    parser = Parser()
    is_subcommand = parser.prog.startswith(f"{PROGRAM} ")
    called_as = parser.prog if is_subcommand else "python submit.py"
    parser.description = description.replace("python submit.py", called_as)
    if project.IS_CHECKOUT:
        parser.epilog = (
            "All other options are passed to the training unchanged; "
            f"`python {stage.script.name} --help` lists them.\n"
            f"So is everything after --, as in: {called_as} -- --dry-run"
        )
    else:
        parser.usage = "%(prog)s [OPTION ...] PROGRAM [ARGUMENT ...]"
        parser.epilog = EPILOG
    parser.add_argument(
        "--script",
        metavar="FILE.py",
        type=given,
        help=f"your own training, such as a copy of {stage.script.name} with a different model",
    )
    parser.add_argument(
        "--plain",
        metavar="PROGRAM",
        type=given,
        help="a script that does not use the kit: train.py, -m package.train, or a program such as run.sh; "
        "everything after it is its own arguments (YOUR_TRAINING.md)",
    )
    add_options(parser)
    without_slurm = "" if stage.name == SINGLE else "; without Slurm, all GPUs of this machine, if it has any"
    parser.add_argument(
        "--gpus",
        type=at_least(0),
        metavar="N",
        help="GPUs of the whole job, split equally over its nodes (default: "
        f"{stage.default_gpus}{without_slurm}); 0: one process per node, on its CPU",
    )
    parser.add_argument(
        "--nodes", type=at_least(1), default=1, metavar="N", help="nodes (default: %(default)s)"
    )
    parser.add_argument(
        "--spare-nodes",
        type=at_least(0),
        default=0,
        metavar="N",
        help="nodes that the job holds besides, to start again on them when others fail (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--avoid-slow-nodes",
        action="store_true",
        help="measure the nodes before the ranks start, and go back to the queue without a node that is slow "
        "or does not answer (slurm/RESUME.md)",
    )
    parser.add_argument(
        "--cpus-per-gpu",
        type=at_least(1),
        default=2,
        metavar="N",
        help="CPU cores for each GPU's process and its loader (default: %(default)s)",
    )
    parser.add_argument(
        "--partition", metavar="NAME", help="partition (default: the site file's, or the cluster's)"
    )
    parser.add_argument(
        "--time",
        type=time_limit,
        metavar="LIMIT",
        help=f"time limit, as HH:MM:SS or in minutes (default: the site file's, or {DEFAULT_MINUTES})",
    )
    parser.add_argument(
        "--local", action="store_true", help="run it on this machine, even if there is a Slurm"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print a job script for sbatch, and submit nothing"
    )
    add_no_freeze(parser)
    parser.add_argument("--wait", action="store_true", help="show the job's state until it has ended")
    add_sbatch_options(parser)
    return parser


def add_no_freeze(parser: argparse._ActionsContainer) -> None:
    """Add --no-freeze."""
    parser.add_argument(
        "--no-freeze",
        action="store_true",
        help="run the files as they are when the job starts, and not a copy of the script's git checkout as "
        "it is now (slurm/REFERENCE.md)",
    )


def add_sbatch_options(parser: Parser) -> None:
    """Add the options that are passed on to sbatch."""
    group = parser.add_argument_group("passed on to sbatch, where there is Slurm")
    for name in PASSED_ON:
        group.add_argument(f"--{name}", metavar="VALUE", type=given, help=f"as sbatch --{name}")


def passed_on(own_options: argparse.Namespace) -> dict[str, str]:
    """Return the options of a command line that are passed on to sbatch, and their values."""
    values = {name: getattr(own_options, name.replace("-", "_")) for name in PASSED_ON}
    return {name: value for name, value in values.items() if value is not None}


def announce(request: Request, job: Handle) -> None:
    """Print what was sent, and how to follow it."""
    if request.why_here:
        print_line(f"{request.why_here}: running as {request.resources.tasks} local process(es)")
    else:
        print_line(f"job {job.job_id} submitted: {request.resources}")
        held_by_this_shell = slurm.job_of_this_shell()
        if held_by_this_shell:
            print_line(f"note: {held_by_this_shell}")
    for sentence in request.about_code:
        print_line(sentence)
    for sentence in request.site.misspelt:
        print_line(f"note: {sentence}")
    if request.stage.program:
        note = note_on_environment(request.stage.program)
        if note:
            print_line(f"note: {note}")
    print_line(job.how_to_follow())
