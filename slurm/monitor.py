"""What a job does with its GPUs, cores and memory: python slurm/monitor.py --help"""

import os
from functools import partial

from trainkit import errors, job_folder
from trainkit.monitor import cli

if __name__ == "__main__":
    own_job = os.environ.pop(job_folder.VARIABLE, None)  # where `run` would leave the notes of a rank
    errors.run(partial(cli.main, own_job))
