"""Send stage 03 to Slurm as a job: a process for each GPU of one or more nodes. Without Slurm, run it here.

Try: python submit.py --gpus 4 --nodes 2 --wait --epochs 2
"""

from trainkit import errors
from trainkit.jobs import submission


def main() -> int:
    return submission.main("ddp", __doc__)


if __name__ == "__main__":
    errors.run(main)
