"""Check whether jobs can work here, before one fails: python slurm/doctor.py --help

Any Python from 3.10 on will do, without packages, and an older one if .venv is there: the job's own
environment is among the things looked at. So manygpus/jobs/doctor/cli.py is started from here, in whose
folder manygpus is found.
"""

import os
import sys
from pathlib import Path
from runpy import run_path

if __name__ == "__main__":
    # What a login node has by itself may be older: then the kit's own Python takes over.
    if sys.version_info < (3, 10):  # noqa: UP036
        run_path(str(Path(__file__).resolve().parents[1] / "manygpus" / "kit_python.py"))["take_over"]()
    # A script of the user's is found from here.
    os.environ["MANYGPUS_USER_FOLDER"] = str(Path.cwd())
    # `-m` looks in the current folder first, before it finds any other manygpus.
    os.chdir(Path(__file__).resolve().parents[1])
    os.execv(sys.executable, [sys.executable, "-m", "manygpus.jobs.doctor.cli", *sys.argv[1:]])
