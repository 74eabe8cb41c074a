"""Run a program that does not use the kit, as a rank of a job.

`python -m trainkit.jobs.plain --plain script.py` is `python script.py` with the variables of torchrun, and
holds no signal back. USR2, which comes a minute before the time limit, ends no script (jobs/as_main.py).
This module runs in the environment of the kit, and the program in its own, if it has one (--python).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainkit import errors, job_folder
from trainkit.distributed import launchers
from trainkit.errors import UserError
from trainkit.jobs import as_main
from trainkit.jobs.program import ACTIVE, Program, parse, without_the_kit
from trainkit.process import end_with
from trainkit.signals import STOP_SIGNALS

# The exit code by which a process asks submitit to start its job again (LOCAL_REQUEUE_RETURN_CODE there).
SUBMITIT_STARTS_AGAIN = 144
# What torchrun sets for each rank.
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")


def run(program: Program, arguments: Sequence[str], noted: bool = False) -> NoReturn:
    """Run the program in place of this process, or with `noted` in a child, whose exit code is noted."""
    try:
        dist_env = launchers.read()
    except ValueError as error:
        errors.fail(str(error))
    job_folder.note("started")
    arguments = program.in_start(job_folder.restarts(), arguments, job_folder.here())
    command = _command(program, arguments)
    variables = _variables(program, dist_env)
    _let_signals_through()
    try:
        if not noted:
            os.execve(command[0], command, variables)
        exit_code = _run_child(command, variables, with_its_own=not program.is_python)
    except OSError as error:
        errors.fail(f"{command[0]} does not start ({error.strerror}): correct its first line.")
    if exit_code == 0:
        job_folder.note("finished")
        sys.exit(0)
    if exit_code < 0:
        died = job_folder.died_of(-exit_code)
        # As a shell tells of a signal.
        exit_code = 128 - exit_code
        # The table of a sweep has the code; why a job failed is the first line.
        how = f"{died}\nexit code {exit_code}"
    else:
        how = f"ended with exit code {exit_code}"
    job_folder.note("failed", f"rank {dist_env.rank} {how}")
    sys.exit(1 if exit_code == SUBMITIT_STARTS_AGAIN else exit_code)


def _command(program: Program, arguments: Sequence[str]) -> list[str]:
    if not program.is_python:
        return [*program.starter, str(program.path), *arguments]
    name = [str(program.path)]
    if program.module:
        name = ["-m", str(program.user_folder), program.module]
    return [str(program.python or sys.executable), as_main.__file__, *name, *arguments]


def _variables(program: Program, dist_env: launchers.DistEnv) -> dict[str, str]:
    """Return the environment of the program: with the variables of torchrun, and without some of the job's.

    A program that starts the ranks of its node itself gets NODE_RANK in their place: others take it for one
    of them, and start none (Lightning by LOCAL_RANK), or train on one GPU.
    """
    variables = dict(os.environ)
    # slurm/job_env.sh sets it, and the script has modules beside it.
    variables.pop("PYTHONSAFEPATH", None)
    if program.one_process_per_node:
        for name in OF_A_RANK:
            variables.pop(name, None)
        variables["NODE_RANK"] = str(dist_env.rank)
    else:
        variables["RANK"] = str(dist_env.rank)
        variables["LOCAL_RANK"] = str(dist_env.local_rank)
        variables["WORLD_SIZE"] = str(dist_env.world_size)
        variables["LOCAL_WORLD_SIZE"] = str(dist_env.local_world_size)
    if program.python:
        _leave_the_kits_environment(variables, program.python)
    elif not program.is_python:
        _put_first(variables, Path(sys.executable).parent)
    return variables


def _put_first(variables: dict[str, str], folder: Path) -> None:
    """Have a shell script find the programs in this folder before all others."""
    variables["PATH"] = os.pathsep.join([str(folder), variables.get("PATH", os.defpath)])


def _leave_the_kits_environment(variables: dict[str, str], python: Path) -> None:
    """Change variables to those of the environment that a Python is in, as its activation would.

    `trainkit` itself is in that environment only if its user has installed it there.
    """
    folders = variables.get("PATH", os.defpath).split(os.pathsep)
    for name in ACTIVE:
        active = variables.pop(name, None)
        if active:
            folders = [folder for folder in folders if Path(folder) != Path(active, "bin")]
    variables["PATH"] = os.pathsep.join(folders)
    _put_first(variables, python.parent)
    environment = python.parents[1]
    for name, mark in ACTIVE.items():
        if (environment / mark).exists():
            variables[name] = str(environment)
    python_path = without_the_kit(variables.pop("PYTHONPATH", ""))
    if python_path:
        variables["PYTHONPATH"] = python_path


def _let_signals_through() -> None:
    """Have SIGTERM end the script as usual, and USR2 do nothing, until the script decides otherwise."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _run_child(command: Sequence[str], variables: dict[str, str], with_its_own: bool) -> int:
    """Run the command, hand it the signals that this process gets, and return its exit code.

    With `with_its_own` its own processes get them, too, as from Slurm: a shell does not hand them on. The
    exit code is negative if a signal has ended the command: minus the number of the signal.
    """
    this_process = os.getpid()

    def prepare() -> None:
        end_with(this_process)
        if with_its_own:
            os.setpgid(0, 0)

    child = subprocess.Popen(command, preexec_fn=prepare, env=variables)
    send = partial(os.killpg, child.pid) if with_its_own else child.send_signal

    def hand_on(number: int, frame: FrameType | None) -> None:
        send(number)

    for number in STOP_SIGNALS:
        signal.signal(number, hand_on)
    return child.wait()


def main() -> NoReturn:
    """Run what the command line names (jobs/program.py)."""
    try:
        program, arguments = parse(sys.argv[1:])
    except UserError as error:
        errors.fail(str(error))
    run(program, arguments)


if __name__ == "__main__":
    main()
