"""Run a program that does not use the kit, as a rank of a job.

`python -m manygpus.jobs.inside.run_plain --plain script.py` is `python script.py` with the variables of
torchrun. This process stays beside the program, hands it the signals of the job, and ends as it does. It runs
in the environment of the kit, and the program in its own, if it has one (--python).

Slurm sends USR2 a minute before the time limit. Linux ends a process that has no handler for it, so it is
ignored until the program has one. Many scripts wait for USR1 (Lightning unless told otherwise). So USR2 goes
to those of the program's processes that hear it, and as USR1 to those that hear only that.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from manygpus import errors, frozen_code, job_folder, launchers
from manygpus.errors import UserError
from manygpus.jobs.inside import main_shim
from manygpus.jobs.user_program import ACTIVE, Program, parse, python_of_job, without_the_kit
from manygpus.process import adopt_orphans, end_with
from manygpus.signals import STOP_SIGNALS, hears

# The exit code by which a process asks submitit to start its job again (LOCAL_REQUEUE_RETURN_CODE there).
SUBMITIT_STARTS_AGAIN = 144
# What torchrun sets for each rank.
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
# What this process may be sent, and hands on.
HANDED_ON = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, *STOP_SIGNALS}
# How Slurm finds the processes of a job (scripts/job_env.sh), and the way by which it signals all of them.
PROCTRACK = "MANYGPUS_PROCTRACK"
SIGNALS_ALL = "linuxproc"
# For what the program has left behind, to end by itself: as long as Slurm by default waits after SIGTERM
# (KillWait), and where nobody has asked it to end.
SECONDS_AFTER_SIGTERM = 30
SECONDS_AT_ITS_END = 2


def run(program: Program, arguments: Sequence[str], noted: bool = False) -> NoReturn:
    """Run the program, and end as it does; with `noted`, leave a note of how that was."""
    try:
        dist_env = launchers.read()
    except ValueError as error:
        errors.fail(str(error))
    job_folder.note("started")
    arguments = program.in_start(job_folder.restarts(), arguments, job_folder.here())
    command = _command(program, arguments)
    variables = _variables(program, dist_env)
    try:
        exit_code = _run_child(command, variables, with_its_own=not program.is_python)
    except OSError as error:
        errors.fail(f"{command[0]} does not start ({error.strerror}): correct its first line.")
    if not noted:
        _end_as(exit_code)
    if exit_code == 0:
        job_folder.note("finished")
        sys.exit(0)
    if exit_code < 0:
        died = job_folder.died_of(-exit_code)
        # As a shell tells of a signal.
        exit_code = 128 - exit_code
        # The table of a sweep has the code; why a job failed is the first line.
        ending = f"{died}\nexit code {exit_code}"
    else:
        ending = f"ended with exit code {exit_code}"
    job_folder.note("failed", f"rank {dist_env.rank} {ending}")
    sys.exit(1 if exit_code == SUBMITIT_STARTS_AGAIN else exit_code)


def _command(program: Program, arguments: Sequence[str]) -> list[str]:
    if not program.is_python:
        return [*program.starter, str(program.path), *arguments]
    name = [str(program.path)]
    if program.module:
        name = ["-m", str(program.user_folder), program.module]
    code = frozen_code.of(program.user_folder) if program.is_frozen else None
    if code:
        name = ["--frozen", str(code.checkout), str(code.folder), *name]
    return [str(program.python or python_of_job()), main_shim.__file__, *name, *arguments]


def _variables(program: Program, dist_env: launchers.DistEnv) -> dict[str, str]:
    """Return the environment of the program: with the variables of torchrun, and without some of the job's.

    A program that starts the ranks of its node itself gets NODE_RANK in their place: others take it for one
    of them, and start none (Lightning by LOCAL_RANK), or train on one GPU.
    """
    variables = dict(os.environ)
    # scripts/job_env.sh sets it, and the script has modules beside it.
    variables.pop("PYTHONSAFEPATH", None)
    # It may be left from a job that has sent this one.
    variables.pop(frozen_code.VARIABLE, None)
    if program.is_frozen:
        variables[frozen_code.VARIABLE] = str(program.user_folder)
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
        _put_first(variables, Path(python_of_job()).parent)
    return variables


def _put_first(variables: dict[str, str], folder: Path) -> None:
    """Have a shell script find the programs in this folder before all others."""
    variables["PATH"] = os.pathsep.join([str(folder), variables.get("PATH", os.defpath)])


def _leave_the_kits_environment(variables: dict[str, str], python: Path) -> None:
    """Change variables to those of the environment that a Python is in, as its activation would.

    `manygpus` itself is in that environment only if its user has installed it there.
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


def _run_child(command: Sequence[str], variables: dict[str, str], with_its_own: bool) -> int:
    """Run the command, hand on the signals that this process gets, and return the command's exit code.

    It is negative if a signal has ended the command: minus the number of the signal. What the command has
    left running is ended, as Slurm does at the end of a step.

    Args:
        command: its words.
        variables: its environment.
        with_its_own: whether its own processes get all signals, too: a shell does not hand them on.
    """
    this_process = os.getpid()
    waited_for = {signal.SIGCHLD, *HANDED_ON}

    def prepare() -> None:
        end_with(this_process)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)

    # The command inherits this. The job has held both signals back (scripts/job_env.sh).
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    adopt_orphans()
    child = subprocess.Popen(command, env=variables, preexec_fn=prepare, start_new_session=True)
    seconds = SECONDS_AT_ITS_END
    while child.returncode is None:
        received = signal.sigwaitinfo(waited_for)
        if received.si_signo in HANDED_ON:
            _hand_on(received, child.pid, with_its_own)
        if received.si_signo == signal.SIGTERM:
            seconds = SECONDS_AFTER_SIGTERM
        child.returncode = _reap(child.pid)
    _end_the_rest(seconds)
    return child.returncode


def _hand_on(received: signal.struct_siginfo, program: int, with_its_own: bool) -> None:
    """Send the program a signal, unless Slurm has sent it to all processes of the job."""
    number = received.si_signo
    has_it = os.environ.get(PROCTRACK) == SIGNALS_ALL and _is_slurm(received.si_pid)
    if number == signal.SIGUSR2:
        _hand_on_usr2(program, as_usr1_only=has_it)
    elif not has_it:
        send = os.killpg if with_its_own else os.kill
        send(program, number)


def _hand_on_usr2(program: int, as_usr1_only: bool) -> None:
    """Send USR2 to the processes of the program that hear it, and USR1 to those that hear only that.

    A forked process, such as a worker of a loader, has the handlers of its parent, whose signal it is.
    """
    commands: dict[int, list[str]] = {}
    root = psutil.Process(program)
    for process in [root, *root.children(recursive=True)]:
        hears_usr2 = hears(process.pid, signal.SIGUSR2)
        if not hears_usr2 and not hears(process.pid, signal.SIGUSR1):
            continue
        with suppress(psutil.Error):  # it has just ended
            commands[process.pid] = process.cmdline()
            is_forked = commands.get(process.ppid()) == commands[process.pid]
            if not is_forked and not (hears_usr2 and as_usr1_only):
                process.send_signal(signal.SIGUSR2 if hears_usr2 else signal.SIGUSR1)


def _is_slurm(pid: int) -> bool:
    """Return whether a signal from this process is one of Slurm's, and not one of torchrun's."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text() == "slurmstepd\n"
    return False


def _reap(program: int) -> int | None:
    """Forget the processes that have ended, and return the program's exit code, if it is one of them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def _end_the_rest(seconds: float) -> None:
    """Kill what the program has left running, if that has not ended by itself after so many seconds."""
    _, running = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=seconds)
    for process in running:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _end_as(exit_code: int) -> NoReturn:
    """End as the program has, also if it was by a signal: then srun and torchrun say so."""
    if exit_code >= 0:
        sys.exit(exit_code)
    # The program may have left its core, which is the one of interest.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = -exit_code
    with suppress(OSError):  # nobody can change what SIGKILL does
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    raise AssertionError


def main() -> NoReturn:
    """Run what the command line names (jobs/user_program.py)."""
    try:
        program, arguments = parse(sys.argv[1:])
    except UserError as error:
        errors.fail(str(error))
    run(program, arguments)


if __name__ == "__main__":
    main()
