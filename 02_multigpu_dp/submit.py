"""Send stage 02 to Slurm as a job: one process that drives the GPUs of one node. Without Slurm, run it here.

Try: python submit.py --gpus 2 --wait --epochs 2
"""

from trainkit import errors
from trainkit.jobs import submission


def main() -> int:
    return submission.main("dp", __doc__)


if __name__ == "__main__":
    errors.run(main)
