"""Run a script that does not use the kit, as a rank of a job.

`python -m trainkit.jobs.plain script.py ...` is `python script.py ...` with the variables of torchrun, and
holds no signal back. USR2, which comes a minute before the time limit, ends no script (jobs/as_main.py).
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
from trainkit.jobs import as_main
from trainkit.process import end_with
from trainkit.signals import STOP_SIGNALS

# The exit code by which a process asks submitit to start its job again (LOCAL_REQUEUE_RETURN_CODE there).
SUBMITIT_STARTS_AGAIN = 144


def run(script: Path, arguments: Sequence[str], noted: bool = False) -> NoReturn:
    """Run the script in place of this process, or with `noted` in a child, whose exit code is noted."""
    try:
        dist_env = launchers.read()
    except ValueError as error:
        errors.fail(str(error))
    _set_variables(dist_env)
    job_folder.note("started")
    _let_signals_through()
    command = [sys.executable, as_main.__file__, str(script.absolute()), *arguments]
    if not noted:
        os.execv(sys.executable, command)
    exit_code = _run_child(command)
    if exit_code == 0:
        job_folder.note("finished")
        sys.exit(0)
    if exit_code < 0:
        how = job_folder.died_of(-exit_code)
        # As a shell tells of a signal.
        exit_code = 128 - exit_code
    else:
        how = f"ended with exit code {exit_code}"
    job_folder.note("failed", f"rank {dist_env.rank} {how}")
    sys.exit(1 if exit_code == SUBMITIT_STARTS_AGAIN else exit_code)


def _set_variables(dist_env: launchers.DistEnv) -> None:
    """Set the variables that torchrun would set, and undo one of the job's."""
    os.environ["RANK"] = str(dist_env.rank)
    os.environ["LOCAL_RANK"] = str(dist_env.local_rank)
    os.environ["WORLD_SIZE"] = str(dist_env.world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(dist_env.local_world_size)
    # slurm/job_env.sh sets it, and the script has modules beside it.
    os.environ.pop("PYTHONSAFEPATH", None)


def _let_signals_through() -> None:
    """Have SIGTERM end the script as usual, and USR2 do nothing, until the script decides otherwise."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _run_child(command: Sequence[str]) -> int:
    """Run the command, hand it the signals that this process gets, and return its exit code.

    It is negative if a signal has ended the command: minus the number of the signal.
    """
    end_with_this_process = partial(end_with, os.getpid())
    child = subprocess.Popen(command, preexec_fn=end_with_this_process)

    def hand_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in STOP_SIGNALS:
        signal.signal(number, hand_on)
    return child.wait()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("error: job scripts call this, with a script's name.")
    run(Path(sys.argv[1]), sys.argv[2:])
