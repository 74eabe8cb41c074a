"""What a job does with its GPUs, cores and memory: python slurm/monitor.py --help"""

import os

from trainkit import errors
from trainkit.jobs import monitor

if __name__ == "__main__":
    os.environ.pop("TRAINKIT_JOB_DIR", None)  # or it would leave the notes of a rank in a job that it watches
    errors.run(monitor.main)
