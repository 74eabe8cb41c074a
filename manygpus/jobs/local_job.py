"""A job on this machine: what scripts/job_env.sh does on a node, for processes that submitit starts here."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from manygpus import job_folder, launchers
from manygpus.monitor import samples

# submitit announces every step; the log should have only the stage's lines.
QUIET = {"SUBMITIT_LOG_LEVEL": "CRITICAL"}
DAY_MINUTES = 24 * 60
# In the folder of a job: what submitit's process that controls the ranks prints.
CONTROLLER_LOG = "controller.log"
# Device nodes of NVIDIA's GPUs, of AMD's, and of both in Windows' Linux.
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
# The variable with the GPUs of a job here, whatever submitit writes into CUDA_VISIBLE_DEVICES.
GPUS = "MANYGPUS_GPUS"
# On AMD's GPUs the first counts before the second.
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def variables(
    folder: Path, data_dir: Path, results_dir: Path, ranks: int, gpus: int, threads: int | None
) -> dict[str, str]:
    """Return the environment of a job's processes on this machine, as job_env.sh prepares it on a node.

    Args:
        folder: the job's folder, for the logs, checkpoints and notes.
        ranks: the number of processes. Those on CPUs get equal shares of the cores.
        gpus: the number of GPUs of the whole job, all visible to every rank: the first of those that the user
            has chosen.
        threads: the threads of each rank (default: OMP_NUM_THREADS, else an equal share of the cores).
    """
    if threads is None:
        share = max(len(os.sched_getaffinity(0)) // ranks, 1)
        threads = os.environ.get("OMP_NUM_THREADS", share)
    job_variables = {
        "MANYGPUS_DATA_DIR": str(data_dir),
        "MANYGPUS_RESULTS_DIR": str(results_dir),
        job_folder.VARIABLE: str(folder),
        GPUS: ",".join(_chosen_gpus(gpus)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(launchers.free_port()),
        "OMP_NUM_THREADS": str(threads),
        # A script that is killed leaves what it has printed.
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
        # A queue.py in the current folder is not for submitit.
        "PYTHONSAFEPATH": "1",
    }
    return outside_of_jobs() | QUIET | job_variables


def _chosen_gpus(count: int) -> list[str]:
    """Return the numbers of the first GPUs, of those that the user has chosen, if that is so."""
    for name in VISIBLE:
        if name in os.environ:
            return os.environ[name].split(",")[:count]
    return [str(index) for index in range(count)]


@contextmanager
def in_place(place: int, places: int, gpus: int) -> Iterator[None]:
    """Have the jobs that are started meanwhile run in one of several places of this machine.

    Each place has cores of its own, and begins with other GPUs of those that this machine has: with its own
    where there are enough for all places, and else it shares them.

    Args:
        place: its number, from 0 on.
        places: how many there are.
        gpus: the number of GPUs of this machine, or of those that its user has chosen.
    """
    cores_before, variables_before = os.sched_getaffinity(0), dict(os.environ)
    cores = sorted(cores_before)
    first, behind = (number * len(cores) // places for number in (place, place + 1))
    if gpus:
        chosen = _chosen_gpus(gpus)
        begin = place * gpus // places
        os.environ |= dict.fromkeys(VISIBLE, ",".join(chosen[begin:] + chosen[:begin]))
    # A machine with many GPUs may have fewer cores than places.
    os.sched_setaffinity(0, cores[first:behind] or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores_before)
        os.environ.clear()
        os.environ.update(variables_before)


@contextmanager
def in_the_background(output: Path) -> Iterator[None]:
    """Start processes in a session of their own, which write to the file `output`.

    Ctrl-C is for this process alone, which then ends the others in order, and a pipe to which it writes
    (`submit.py | tee`) closes when it ends. submitit has no option for what its process inherits.
    """
    popen = subprocess.Popen
    with output.open("ab") as file:
        subprocess.Popen = partial(
            popen, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            yield
        finally:
            subprocess.Popen = popen


def start_monitor(folder: Path, job_id: str, log: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Start the monitor of a job, whose ranks have this environment.

    It outlives this program, and ends the log.
    """
    environment = environment | dict.fromkeys(VISIBLE, environment[GPUS])
    sampled = folder / samples.FOLDER
    with log.open("ab") as output, (sampled / "log").open("w") as complaints:
        return subprocess.Popen(
            [sys.executable, "-m", "manygpus", "monitor", "--sample", sampled, "--until", job_id],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=complaints,
            start_new_session=True,
        )


def has_ended(job_id: str, folder: Path) -> bool:
    """Return whether the process that controls the ranks of the job in `folder` has ended."""
    try:
        command = Path("/proc", job_id, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return True
    # The number may now belong to another program.
    return os.fsencode(folder) not in command


class SubmititJob(NamedTuple):
    """What submitit has sent from a folder.

    Attributes:
        job_id: the number of the job; "" if there is none so far.
        by_slurm: whether Slurm has it.
    """

    job_id: str
    by_slurm: bool


def submitted(folder: Path) -> SubmititJob:
    """Return what submitit has sent from `folder`."""
    job_ids = [path.name.removesuffix("_submitted.pkl") for path in folder.glob("[0-9]*_submitted.pkl")]
    # A script's name has a dot in front if submit.py was killed.
    by_slurm = any(folder.glob("*submission*.sh"))
    return SubmititJob(job_ids[-1] if job_ids else "", by_slurm)


def outside_of_jobs() -> dict[str, str]:
    """Return this environment for another job, without what a launcher or the job that it is in has set."""
    in_a_job = "SLURM_JOB_ID" in os.environ
    variables = {}
    for name, value in os.environ.items():
        is_of_that_job = in_a_job and name.startswith("SLURM_") and name != "SLURM_CONF"
        if not is_of_that_job and not launchers.LEFT_BY_LAUNCHERS.fullmatch(name):
            variables[name] = value
    return variables


def without_sbatch_variables() -> dict[str, str]:
    """Return this environment for a job whose options are all in its script, or on its command line."""
    outside = outside_of_jobs()
    return {name: value for name, value in outside.items() if not name.startswith("SBATCH_")}


def new_name(job_name: str) -> str:
    """Make a folder name that no other job has had, as numbers are reused."""
    return f"{job_name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def gpus_here() -> int:
    """Count the GPUs that PyTorch sees here, without loading it, which is slow, if there can be none.

    The kit that is installed alone may have no PyTorch. Then those count that the machine has.

    Raises:
        UserError: if there are GPUs that PyTorch cannot use.
    """
    device_nodes = [path for name in GPU_DEVICES for path in Path("/dev").glob(name)]
    if not device_nodes:
        return 0
    try:
        from manygpus.devices import usable_gpus
    except ImportError:
        return len(device_nodes)
    return len(usable_gpus())
