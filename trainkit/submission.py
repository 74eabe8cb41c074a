"""Send a stage to Slurm, or run it here where there is no Slurm: what every submit.py shares.

submitit writes the batch script, calls sbatch and, on the nodes, calls `Rank` in every process. The
script sources slurm/job_env.sh, as the job scripts of the stages do, so that both go the same way:
the same site file, environment, meeting point, return to the queue and explanation of a failure.
"""

import argparse
import io
import os
import random
import re
import runpy
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile

import submitit
import torch

from trainkit import batches, data, options
from trainkit.errors import UserError
from trainkit.jobs import NEVER, Handle, LocalHandle, SlurmHandle, follow
from trainkit.site import Site, read_site

REPOSITORY = Path(__file__).resolve().parents[1]
MEMORY_PER_GPU_GB = 4
DEFAULT_MINUTES = 30

# submitit announces every step; the log is to have the stage's lines only.
QUIET = {"SUBMITIT_LOG_LEVEL": "CRITICAL"}

# Words of sbatch, and what to do about them.
ADVICE = {
    "node configuration": "ask for fewer --gpus or more --nodes; `sinfo -o '%P %D %c %m %G'` shows what "
    "there is",
    "partition": "give one of those that `sinfo` lists, by --partition or in slurm/site.sh",
    "Invalid account": "give one of yours in slurm/site.sh",
    "contact": "see if `sinfo` answers, and submit again when it does",
}


@dataclass(frozen=True)
class Stage:
    """A stage, and what it runs on: one process per GPU, or one process with all GPUs of a node."""

    name: str
    script: Path
    default_gpus: int
    process_per_gpu: bool = False


STAGES = {
    stage.name: stage
    for stage in (
        Stage("single", REPOSITORY / "01_singlegpu" / "mnist_singlegpu.py", default_gpus=1),
        Stage("dp", REPOSITORY / "02_multigpu_dp" / "mnist_multigpu.py", default_gpus=2),
        Stage("ddp", REPOSITORY / "03_multigpu_ddp" / "mnist_ddp.py", default_gpus=2, process_per_gpu=True),
    )
}


@dataclass(frozen=True)
class Geometry:
    """The shape of a job, in Slurm's words."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int

    def __str__(self) -> str:
        return f"{self.nodes} node(s), {self.tasks} process(es), {self.gpus} GPU(s)"

    @property
    def tasks(self) -> int:
        """The processes of the whole job."""
        return self.nodes * self.tasks_per_node

    @property
    def gpus(self) -> int:
        """The GPUs of the whole job."""
        return self.nodes * self.gpus_per_node


def geometry(stage: Stage, gpus: int, nodes: int = 1, cpus_per_gpu: int = 2) -> Geometry:
    """The shape of a job of `stage` with `gpus` on all nodes together; 0: a process per node, on its CPU.

    Raises:
        UserError: if the stage cannot use that many, or they do not divide among the nodes.
    """
    if stage.name == "single" and gpus > 1:
        raise UserError(f"stage single uses 1 GPU, not {gpus}: use stage 02, 02_multigpu_dp, or 03.")
    if nodes > 1 and not stage.process_per_gpu:
        raise UserError(
            f"stage {stage.name} is one process and cannot leave its node: leave out --nodes {nodes}, or use "
            "stage 03, 03_multigpu_ddp."
        )
    if gpus % nodes:
        below, above = gpus // nodes * nodes, -(-gpus // nodes) * nodes
        raise UserError(
            f"--gpus {gpus} does not divide among {nodes} nodes: the nearest is {below or nodes} or {above}."
        )
    gpus_per_node = gpus // nodes
    tasks_per_node = max(gpus_per_node, 1) if stage.process_per_gpu else 1
    gpus_per_task = max(gpus_per_node // tasks_per_node, 1)
    return Geometry(nodes, tasks_per_node, gpus_per_node, cpus_per_gpu * gpus_per_task)


@dataclass(frozen=True)
class Rank:
    """What submitit calls in every process of a job: the stage script, as `srun python` would start it.

    It ends by SystemExit, with the stage's own exit code and last words. `visible_gpus` is for local
    processes, for which submitit sets CUDA_VISIBLE_DEVICES; on a node that is Slurm's business.
    """

    script: Path
    arguments: tuple[str, ...]
    visible_gpus: str | None = None

    def __call__(self) -> None:
        # submitit survives SIGTERM, and answers USR2 by putting the job back into the queue itself.
        # Here SIGTERM ends the process, and USR2 is for the stage (trainkit.checkpoint).
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        # Not by submitit's TorchDistributedEnvironment: it would show each process one GPU only, does
        # not expect MASTER_PORT to be set, and takes ports that the system hands out by itself.
        job = submitit.JobEnvironment()
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(job.global_rank), str(job.num_tasks)
        os.environ["LOCAL_RANK"] = str(job.local_rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(job.num_tasks // job.num_nodes)
        if self.visible_gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible_gpus
        sys.argv = [
            str(self.script),
            *("--data-dir", os.environ["DATA_DIR"], "--results-dir", os.environ["RESULTS_DIR"]),
            *("--checkpoint-dir", f"{os.environ['TRAINKIT_JOB_DIR']}/checkpoints", "--resume", "auto"),
            *self.arguments,
        ]
        runpy.run_path(str(self.script), run_name="__main__")


@dataclass(frozen=True)
class Request:
    """One job that is asked for.

    `arguments` are options of the stage script. `minutes` is the time limit; it and `partition`
    overrule the site's SBATCH_TIMELIMIT and SBATCH_PARTITION.
    """

    stage: Stage
    geometry: Geometry
    arguments: tuple[str, ...]
    minutes: int | None = None
    partition: str | None = None


def submit(request: Request) -> Handle:
    """Submit a job, or start local processes where there is no Slurm; it is not waited for.

    Raises:
        UserError: for options that the stage would refuse, data that is not there, a folder that
            cannot be written to, and what sbatch refuses. Nothing was submitted then.
    """
    site = read_site()
    opts = check(request, site)
    name = f"mnist-{request.stage.name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    # Made beforehand, since a job without its log's folder fails without a log; and new for every
    # job, since numbers of jobs come again.
    folder = site.jobs_dir / "submitit" / name
    results = opts.results_dir.absolute() / "runs"
    cluster = _cluster(request)
    for needed in (results, folder):
        _make_writable(needed)
    executor = _executor(request, folder, cluster)
    if cluster == "local":
        return LocalHandle(_start_here(executor, request, site, folder), folder, results)
    try:
        # submitit prints what sbatch says; here it becomes the text of the error.
        with _environment(_for_sbatch(request, site)), redirect_stderr(io.StringIO()):
            job = executor.submit(Rank(request.stage.script, request.arguments))
    except submitit.core.utils.FailedJobError as error:
        shutil.rmtree(folder)
        raise UserError(_told_by_sbatch(str(error))) from None
    handle = SlurmHandle(job, site.jobs_dir / job.job_id, results)
    # Not every Slurm refuses at once what it can never do.
    reason = handle.state().detail
    if reason in NEVER:
        handle.cancel()
        shutil.rmtree(folder)
        raise UserError(
            f"Slurm would never start the job ({reason}), so it was cancelled: "
            f"{ADVICE['node configuration']}, and `sinfo -o '%P %l'` how long a job may be."
        )
    return handle


def preview(request: Request) -> str:
    """What `submit` would do: the batch script that sbatch would get, or the local processes.

    Raises:
        UserError: as `submit`, as far as that can be told without writing anything.
    """
    site = read_site()
    check(request, site)
    if _cluster(request) == "local":
        command = shlex.join(["python", str(request.stage.script), *request.arguments])
        return f"no Slurm here: would run as {request.geometry.tasks} local process(es) of {command}"
    slurm = _executor(request, site.jobs_dir / "submitit" / "preview", "slurm")._executor
    overruled = " ".join(sorted(f"{name}={value}" for name, value in _overruling(request, site).items()))
    return (
        slurm._make_submission_file_text(slurm._submitit_command_str, uid="")
        + f"\n# From the environment, which overrules the lines above: {overruled or '(nothing)'}"
    )


def check(request: Request, site: Site) -> options.Options:
    """The stage's options, after the checks that the stage will make itself.

    Raises:
        UserError: with the stage's sentence on what is wrong with an option or the data.
    """
    places = {"data": site.data_dir, "results": site.results_dir, "checkpoint": site.jobs_dir}
    given = [f"--{name}-dir={place}" for name, place in places.items()]
    opts = options.parse(request.stage.name, [*given, *request.arguments])
    train_set, _ = data.load(opts.dataset, opts.data_dir)
    batches.training(train_set, opts, torch.device("cpu"), rank=0, world_size=request.geometry.tasks)
    if request.geometry.gpus and not opts.no_cuda:
        batches.check_divides(opts.batch_size, request.geometry.gpus, "GPUs")
    return opts


def _cluster(request: Request) -> str:
    """The name by which submitit knows the place to run at."""
    if shutil.which("sbatch"):
        return "slurm"
    if request.geometry.nodes > 1:
        raise UserError(
            "no Slurm here (sbatch is not on PATH), and this machine is one node, not "
            f"{request.geometry.nodes}: leave out --nodes, or submit on a login node."
        )
    return "local"


def _executor(request: Request, folder: Path, cluster: str) -> submitit.AutoExecutor:
    """submitit's executor, told what the stage's job script tells sbatch and srun."""
    stage, geometry = request.stage, request.geometry
    # The text of slurm_python goes into the job's shell as it is, so job_env.sh decides what it means.
    in_the_job = '"${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" python'
    executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_python=in_the_job)
    executor.update_parameters(
        name=f"mnist-{stage.name}",
        nodes=geometry.nodes,
        tasks_per_node=geometry.tasks_per_node,
        gpus_per_node=geometry.gpus_per_node or None,
        cpus_per_task=geometry.cpus_per_task,
        mem_gb=MEMORY_PER_GPU_GB * max(geometry.gpus_per_node, geometry.tasks_per_node),
        timeout_min=request.minutes or DEFAULT_MINUTES,
        stderr_to_stdout=True,
        slurm_partition=request.partition,
        slurm_additional_parameters={"signal": "USR2@60", "requeue": True},
        slurm_setup=[
            "set -euo pipefail",
            f"source {shlex.quote(str(REPOSITORY / 'slurm' / 'job_env.sh'))}",
            "export DATA_DIR RESULTS_DIR",
        ],
        slurm_srun_args=[
            f"--cpus-per-task={geometry.cpus_per_task}",
            "--kill-on-bad-exit=1",
            "--wait=60",
            "--open-mode=append",  # rank 0 writes into the job script's log
        ],
    )
    return executor


def _overruling(request: Request, site: Site) -> dict[str, str]:
    """The SBATCH_* variables. To sbatch they count more than the script's lines, so options are here too."""
    asked = {"SBATCH_PARTITION": request.partition, "SBATCH_TIMELIMIT": request.minutes}
    return site.sbatch | {name: str(value) for name, value in asked.items() if value}


def _for_sbatch(request: Request, site: Site) -> dict[str, str]:
    own = dict(os.environ)
    if "SLURM_JOB_ID" in own:  # an interactive job, whose shape must not pass on to the new one
        own = {name: own[name] for name in own if name == "SLURM_CONF" or not name.startswith("SLURM_")}
    return own | QUIET | _overruling(request, site)


def _start_here(executor: submitit.AutoExecutor, request: Request, site: Site, folder: Path) -> submitit.Job:
    """Start the processes on this machine, where nothing has prepared an environment for them."""
    geometry = request.geometry
    all_gpus = ",".join(map(str, range(geometry.gpus)))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")[: geometry.gpus]
    threads = max(len(os.sched_getaffinity(0)) // geometry.tasks, 1)
    environment = os.environ | QUIET | {
        "DATA_DIR": str(site.data_dir),
        "RESULTS_DIR": str(site.results_dir),
        "TRAINKIT_JOB_DIR": str(folder),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }  # fmt: skip
    rank = Rank(request.stage.script, request.arguments, ",".join(gpus))
    # Ctrl-C is for this process alone, which then ends the others in an orderly way.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _environment(environment):
            return executor.submit(rank)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Have these environment variables and no others; submitit starts its processes with ours."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _free_port() -> int:
    """A free port below those that the system hands out by itself (32768 and up)."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to ({error.strerror}): free the space, mend the permissions, or "
            "choose other folders, by --results-dir or in slurm/site.sh."
        ) from None


def _told_by_sbatch(text: str) -> str:
    """One sentence out of the lines that sbatch has printed, with what to do about it."""
    lines = [re.sub(r"^sbatch: (error: )?", "", line) for line in text.splitlines()]
    told = "; ".join(dict.fromkeys(lines))
    advice = next((advice for words, advice in ADVICE.items() if words in told), "see man sbatch")
    return f"Slurm did not take the job ({told}): {advice}."


def main(stage_name: str, description: str) -> int:
    """What a submit.py does with its command line; returns the exit code.

    Raises:
        UserError: for everything the user can mend.
    """
    request, own = _parse(STAGES[stage_name], description)
    if own.dry_run:
        print(preview(request))
        return 0
    handle = submit(request)
    if isinstance(handle, LocalHandle):
        print(f"no Slurm here: running as {request.geometry.tasks} local process(es)")
    else:
        print(f"job {handle.job_id} submitted: {request.geometry}")
    print(handle.how_to_follow(), flush=True)
    return follow(handle) if own.wait else 0


def _parse(stage: Stage, description: str) -> tuple[Request, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"All other options go to the training unchanged; `python {stage.script.name} --help` "
        "lists them.\nWhat stands behind -- goes there in any case: python submit.py -- --dry-run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--gpus",
        type=options.at_least(0),
        default=stage.default_gpus,
        metavar="N",
        help="GPUs of the whole job, shared equally by its nodes (default: %(default)s); "
        "0: one process per node, on its CPU",
    )
    parser.add_argument(
        "--nodes", type=options.at_least(1), default=1, metavar="N", help="nodes (default: %(default)s)"
    )
    parser.add_argument(
        "--cpus-per-gpu",
        type=options.at_least(1),
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
        help=f"time limit, as HH:MM:SS or in minutes (default: {DEFAULT_MINUTES})",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    parser.add_argument("--wait", action="store_true", help="show how the job is doing until it has ended")
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        own, for_the_stage = parser.parse_known_args(arguments[:end])
    except argparse.ArgumentError as error:
        raise UserError(f"{error}. See --help.") from None
    shape = geometry(stage, own.gpus, own.nodes, own.cpus_per_gpu)
    for_the_stage += arguments[end + 1 :]
    return Request(stage, shape, tuple(for_the_stage), own.time, own.partition), own


def time_limit(text: str) -> int:
    """An argparse type: Slurm's [days-]hours:minutes:seconds, rounded up, or minutes."""
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)|(\d+)", text)
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r} is neither HH:MM:SS nor a number of minutes")
    days, hours, minutes, seconds, only_minutes = (int(part or 0) for part in parts.groups())
    total = (days * 24 + hours) * 60 + minutes + -(-seconds // 60) + only_minutes
    if not total:
        raise argparse.ArgumentTypeError("it must be at least a minute")
    return total
