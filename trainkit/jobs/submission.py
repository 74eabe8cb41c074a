"""Send a stage to Slurm, or run it here if there is no Slurm: the code that every submit.py shares.

submitit writes the batch script, calls sbatch and, on the nodes, calls `Rank` in every process. The
script sources slurm/job_env.sh, as the job scripts of the stages do, so both have the same site file,
environment, meeting point, return to the queue and explanation of a failure.

PyTorch and submitit are not loaded before they are needed: login nodes are slow and shared.
"""

import argparse
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from trainkit.jobs import local, slurm
from trainkit.jobs.following import Handle, LocalHandle, SlurmHandle, follow
from trainkit.jobs.sbatch_options import sbatch_options
from trainkit.jobs.site import Site, read_site
from trainkit.jobs.stages import REPOSITORY, STAGES, Resources, Stage, resources
from trainkit.rank import options, staging
from trainkit.runtime.command_line import Parser, at_least, given, time_limit
from trainkit.runtime.errors import UserError, tell
from trainkit.runtime.files import check_writable
from trainkit.schema.columns import SINGLE

if TYPE_CHECKING:
    import submitit

DEFAULT_MINUTES = 30


class UnansweredError(UserError):
    """Nobody knows whether Slurm has taken the job."""


@dataclass(frozen=True)
class Request:
    """A request for one job.

    `arguments` are options of the stage script. `minutes` is the time limit; it and `partition`
    override the site's SBATCH_TIMELIMIT and SBATCH_PARTITION. With `here` it does not go to Slurm;
    each process on this machine then has `threads` threads (`local.start`).
    """

    stage: Stage
    resources: Resources
    arguments: tuple[str, ...]
    minutes: int | None = None
    partition: str | None = None
    here: bool = False
    threads: int | None = None

    @property
    def job_name(self) -> str:
        """Return the job's name; a user's own script is not one of our trainings on MNIST."""
        return self.stage.label if self.stage.own else f"mnist-{self.stage.name}"


def submit(request: Request, site: Site, folder: Path) -> Handle:
    """Submit a job, or start local processes if there is no Slurm, without waiting for the end.

    Its logs go to `folder`, a `new_folder`.

    Raises:
        UserError: for options that the stage would refuse, missing data, a folder that cannot be
            written to, and a refusal by sbatch. Nothing was submitted then.
    """
    opts, to_slurm = check(request, site)
    results_dir = opts.results_dir.absolute()
    fix = "free the space, fix the permissions, or choose others, by --results-dir or in slurm/site.sh."
    check_writable(results_dir / "runs", "results", fix)
    check_writable(folder, "the job's logs", fix)  # a job without its log's folder fails without a log
    if not to_slurm:
        return local.start(
            request.stage.script,
            request.arguments,
            folder,
            opts.data_dir.absolute(),
            results_dir,
            ranks=request.resources.tasks,
            gpus=request.resources.gpus,
            threads=request.threads,
            minutes=request.minutes or DEFAULT_MINUTES,
            sampled=site.monitor,
            plain=request.stage.plain,
        )
    try:
        job_id = _send(request, site, folder, results_dir)
    except UnansweredError:  # a job without its log's folder fails without a log
        raise
    except UserError:
        shutil.rmtree(folder)
        raise
    handle = SlurmHandle(
        job_id,
        request.resources.tasks,
        folder / f"{job_id}_0_log.out",
        site.jobs_dir / job_id,
        None if request.stage.plain else results_dir / "runs",
    )
    # Not every Slurm refuses at once a job that it can never start.
    reason = handle.state().detail
    if reason in slurm.NEVER:
        handle.cancel()
        shutil.rmtree(folder)
        raise UserError(f"Slurm would never start the job ({reason}): {slurm.advice(reason)}.")
    return handle


def new_folder(request: Request, site: Site) -> Path:
    """Return a folder name that no other job has had; the folder is not created."""
    return site.jobs_dir / "submitit" / local.new_name(request.job_name)


def find(folder: Path, tasks: int, results: Path) -> Handle | None:
    """Return the job that was submitted with this `folder`; None if there is none.

    Its submitter may have been killed before sbatch named the job, or sbatch has not named it.
    """
    job_id, by_slurm = local.submitted(folder)
    if by_slurm and not job_id:
        job_id = _adopt(folder)
    if not job_id:
        return None
    log = folder / f"{job_id}_0_log.out"
    if by_slurm:
        return SlurmHandle(job_id, tasks, log, folder.parents[1] / job_id, results)
    return LocalHandle(job_id, tasks, log, folder, results, partial(local.has_ended, job_id, folder))


def preview(request: Request, site: Site) -> str:
    """Return what `submit` would do: the batch script that sbatch would get, or the local processes.

    Raises:
        UserError: as `submit`, as far as can be checked without writing anything.
    """
    opts, to_slurm = check(request, site)
    if not to_slurm:
        command = shlex.join(["python", str(request.stage.script), *request.arguments])
        would = f"would run as {request.resources.tasks} local process(es) of {command}"
        return f"{why_local(request.here)}: {would}"
    executor = _executor(request, site, site.jobs_dir / "submitit" / "preview", opts.results_dir)._executor
    overruled = " ".join(sorted(f"{name}={value}" for name, value in _overrides(request, site).items()))
    return (
        executor._make_submission_file_text(executor._submitit_command_str, uid="")
        + f"\n# From the environment, which overrules the lines above: {overruled or '(nothing)'}"
    )


def check(request: Request, site: Site) -> tuple[options.Options, bool]:
    """Return the options, checked as the stage will check them, and whether the job goes to Slurm.

    Raises:
        UserError: for a wrong option, missing data, resources that this machine lacks if it stands in
            for Slurm, and a job that sbatch cannot be given as it is meant.
    """
    arguments = [f"--checkpoint-dir={site.jobs_dir}", *request.arguments]
    opts = read_options(request.stage, arguments, site)
    if not request.stage.own:
        staging.check(opts.dataset, opts.data_dir)
    if not request.stage.plain:
        check_sizes(opts, request.stage, request.resources)
    if why_local(request.here):
        _check_machine(request, opts)
        return opts, False
    return opts, True


def why_local(here: bool) -> str:
    """Return why a job runs on this machine, as `here` requests; "" if it goes to Slurm."""
    why = "--local" if here else slurm.why_not_here()
    return why if here or not why else f"no Slurm here ({why})"


def read_options(stage: Stage, arguments: Sequence[str], site: Site) -> options.Options:
    """Parse the options of the stage, with the site's folders; a user's own script may have more.

    The options of a plain script are not parsed: only the site's folders are returned.

    Raises:
        UserError: if an option is unknown or makes no sense.
    """
    places = [f"--data-dir={site.data_dir}", f"--results-dir={site.results_dir}"]
    return options.parse(stage.label, [*places, *(() if stage.plain else arguments)], known_only=stage.own)


def check_sizes(opts: options.Options, stage: Stage, shape: Resources) -> None:
    """Check that the batch divides among processes or GPUs, and that our data sets have enough samples.

    Raises:
        UserError: if not.
    """
    available = None if stage.own else staging.TRAIN_IMAGES
    if stage.process_per_gpu:
        opts = opts.for_devices(shape.tasks)
    else:
        opts = opts.for_devices(0 if opts.no_cuda else shape.gpus, "GPUs")
    options.check_sizes(opts, available)


def _check_machine(request: Request, opts: options.Options) -> None:
    """Raise a UserError if this machine, which stands in for Slurm, lacks what is asked for."""
    if request.resources.nodes > 1:
        raise UserError(
            f"{why_local(request.here)}, and this machine is one node, not {request.resources.nodes}: leave "
            "out --nodes, or submit on a login node."
        )
    # Without GPUs, ranks on the CPU stand in for as many as requested.
    gpus = 0 if opts.no_cuda else local.gpus_here()
    if 0 < gpus < request.resources.gpus:
        on_cpu = "" if request.stage.plain else ", or add --no-cuda to train on its CPU"
        raise UserError(
            f"--gpus {request.resources.gpus} is more than the {gpus} GPU(s) of this machine: lower "
            f"it{on_cpu}."
        )


def _send(request: Request, site: Site, folder: Path, results_dir: Path) -> str:
    """Call sbatch, and return the job's number.

    Raises:
        UnansweredError: if sbatch cannot tell whether it is queued, and it is not there.
        UserError: if it refuses.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = _executor(request, site, folder, results_dir)
    variables = local.outside_of_jobs() | local.QUIET | _overrides(request, site)
    for name in ("WAIT", "OUTPUT", "ERROR", "ARRAY_INX"):  # submitit knows nothing of them, and would wait
        variables.pop(f"SBATCH_{name}", None)
    try:
        # submitit prints what sbatch says; here it becomes the text of the error.
        with patch.dict(os.environ, variables, clear=True), redirect_stderr(io.StringIO()):
            stage = request.stage
            return executor.submit(local.Rank(stage.script, request.arguments, plain=stage.plain)).job_id
    except (FailedJobError, FailedSubmissionError) as error:  # refused; or it names no job
        refusal = slurm.sbatch_message(str(error))[:1000]
    if refusal and not re.search(slurm.UNCLEAR, refusal):
        fix = f"{slurm.advice(refusal)}; --local runs it on this machine"
        raise UserError(f"Slurm did not take the job ({refusal}): {fix}.")
    if job_id := _adopt(folder, slurm.QUEUE_SECONDS):
        return job_id
    raise UnansweredError(
        f"Slurm may have taken the job or not (sbatch: {refusal or 'no word'}), and it is not in the queue "
        "so far: before you submit again, see whether `squeue --me --format='%i %o'` shows one with a script "
        f"in {folder}, and scancel it."
    )


def _adopt(folder: Path, seconds: float = 0) -> str:
    """Return the number of a queued job that was sent from `folder`, though sbatch did not name it; or "".

    On its node submitit waits a minute for the pickle to have the job's number in its name.
    """
    job_id = slurm.sent_from(folder, seconds)
    if job_id:
        (pickled,) = folder.glob("*.pkl")
        pickled.rename(folder / f"{job_id}_submitted.pkl")
    return job_id


def _executor(request: Request, site: Site, folder: Path, results_dir: Path) -> "submitit.AutoExecutor":
    """Return submitit's executor, with the options that the stage's job script gives sbatch and srun."""
    import submitit

    shape = request.resources

    # The text of slurm_python goes into the job's shell unchanged, so job_env.sh decides what it means.
    in_the_job = (
        '--cpus-per-task="$SLURM_CPUS_PER_TASK" "${SITE_SRUN_ARGS[@]}" '
        '"${SITE_CONTAINER[@]}" env PYTHONSAFEPATH=1 python'
    )
    executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_python=in_the_job)
    executor.update_parameters(
        name=request.job_name,
        nodes=shape.nodes,
        tasks_per_node=shape.tasks_per_node,
        timeout_min=request.minutes or site.minutes or DEFAULT_MINUTES,
        stderr_to_stdout=True,
        slurm_partition=request.partition,
        slurm_additional_parameters={
            **sbatch_options(site, shape),
            "signal": "USR2@60",
            "requeue": True,
        },
        slurm_setup=[
            "set -euo pipefail",
            *(["set -- --plain"] if request.stage.plain else []),
            f"source {shlex.quote(str(REPOSITORY / 'slurm' / 'job_env.sh'))}",
            f"TRAINKIT_RESULTS_DIR={shlex.quote(str(results_dir.absolute()))}",
        ],
        slurm_srun_args=[
            "--kill-on-bad-exit=1",
            "--wait=60",
            "--open-mode=append",  # rank 0 writes into the job script's log
        ],
    )
    return executor


def _overrides(request: Request, site: Site) -> dict[str, str]:
    """Return the SBATCH_* variables, which override the script's lines, so they include the options."""
    asked = {"SBATCH_PARTITION": request.partition, "SBATCH_TIMELIMIT": request.minutes}
    return site.sbatch | {name: str(value) for name, value in asked.items() if value}


def main(stage_name: str, description: str) -> int:
    """Submit the job that the command line of a submit.py asks for; return the exit code.

    Raises:
        UserError: for every mistake that the user can correct.
    """
    request, own = _parse(STAGES[stage_name], description)
    site = read_site()
    if own.dry_run:
        tell(preview(request, site))
        return 0
    handle = submit(request, site, new_folder(request, site))
    if isinstance(handle, LocalHandle):
        tell(f"{why_local(request.here)}: running as {request.resources.tasks} local process(es)")
    else:
        tell(f"job {handle.job_id} submitted: {request.resources}")
        if held := slurm.job_of_this_shell():
            tell(f"note: {held}")
    tell(handle.how_to_follow())
    return follow(handle) if own.wait else 0


def _parse(stage: Stage, description: str) -> tuple[Request, argparse.Namespace]:
    parser = Parser(
        description=description,
        epilog=f"All other options go to the training unchanged; `python {stage.script.name} --help` "
        "lists them.\nWhat follows -- always goes there: python submit.py -- --dry-run",
    )
    add = parser.add_argument
    own_script = f"your own training, such as a copy of {stage.script.name} with another model"
    add("--script", metavar="FILE.py", type=given, help=own_script)
    any_script = "a script that does not use the kit; everything after it is its own arguments"
    add("--plain", metavar="FILE.py", type=given, help=f"{any_script} (YOUR_TRAINING.md)")
    here = "" if stage.name == SINGLE else "; without Slurm, all GPUs of this machine, if it has any"
    gpus = f"GPUs of the whole job, shared equally by its nodes (default: {stage.default_gpus}{here}); "
    add("--gpus", type=at_least(0), metavar="N", help=f"{gpus}0: one process per node, on its CPU")
    add("--nodes", type=at_least(1), default=1, metavar="N", help="nodes (default: %(default)s)")
    cores = "CPU cores for each GPU's process and its loader (default: %(default)s)"
    add("--cpus-per-gpu", type=at_least(1), default=2, metavar="N", help=cores)
    add("--partition", metavar="NAME", help="partition (default: the site file's, or the cluster's)")
    limit = f"time limit, as HH:MM:SS or in minutes (default: the site file's, or {DEFAULT_MINUTES})"
    add("--time", type=time_limit, metavar="LIMIT", help=limit)
    add("--local", action="store_true", help="run it on this machine, even if there is a Slurm")
    add("--dry-run", action="store_true", help="print the batch script and submit nothing")
    add("--wait", action="store_true", help="show the job's state until it has ended")
    mine, theirs = split(sys.argv[1:])
    if mine[-2:] == ["--plain", "-m"]:
        parser.error("--plain takes a file, not a module: YOUR_TRAINING.md shows one that runs a module")
    own, unknown = parser.parse_known_args(mine)
    if own.plain and (unknown or own.script):
        wrong = unknown[0] if unknown else "--script"
        parser.error(f"{wrong} is not for plain scripts: put the arguments of {own.plain} after its name")
    if own.script or own.plain:
        stage = stage.with_script(own.script or own.plain, plain=bool(own.plain))
    for_the_stage = (*unknown, *theirs)
    if own.gpus is None:
        own.gpus = stage.default_gpus
        if stage.name != SINGLE and why_local(own.local) and "--no-cuda" not in for_the_stage:
            own.gpus = local.gpus_here() or stage.default_gpus
    shape = resources(stage, own.gpus, own.nodes, own.cpus_per_gpu)
    return Request(stage, shape, for_the_stage, own.time, own.partition, own.local), own


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split off what always goes to the training: what follows -- or a plain script."""
    for place, word in enumerate(arguments):
        if word == "--":
            return arguments[:place], arguments[place + 1 :]
        if word.partition("=")[0] == "--plain":
            end = place + (1 if "=" in word else 2)
            return arguments[:end], arguments[end:]
    return arguments, []
