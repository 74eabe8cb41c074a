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
from typing import NoReturn

from trainkit import errors, job_folder
from trainkit.distributed import launchers
from trainkit.jobs import as_main
from trainkit.process import end_with
from trainkit.signals import STOP_SIGNALS


def run(script: Path, arguments: Sequence[str], noted: bool = False) -> NoReturn:
    """Run the script in place of this process, or with `noted` in a child, whose exit code is noted."""
    try:
        dist_env = launchers.read()
    except ValueError as error:
        errors.fail(str(error))
    variables = {"RANK": dist_env.rank, "LOCAL_RANK": dist_env.local_rank}
    variables |= {"WORLD_SIZE": dist_env.world_size, "LOCAL_WORLD_SIZE": dist_env.local_world_size}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ.pop("PYTHONSAFEPATH", None)  # by slurm/job_env.sh: the script has modules beside it
    job_folder.note("started")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    command = [sys.executable, as_main.__file__, str(script.absolute()), *arguments]
    if not noted:
        os.execv(sys.executable, command)
    child = subprocess.Popen(command, preexec_fn=partial(end_with, os.getpid()))
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    how = job_folder.died_of(-code) if code < 0 else f"ended with exit code {code}"
    job_folder.note("failed" if code else "finished", f"rank {dist_env.rank} {how}" if code else "")
    code = code if code >= 0 else 128 - code
    sys.exit(1 if code == 144 else code)  # by 144 submitit would start the job again


if __name__ == "__main__":
    script, *arguments = sys.argv[1:] or sys.exit("error: job scripts call this, with a script's name.")
    run(Path(script), arguments)
