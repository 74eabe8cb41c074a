"""Send stage 01 to Slurm as a job: one process on one GPU. Where there is no Slurm, run it here.

Try: python submit.py --wait --epochs 2
"""

from trainkit import errors
from trainkit.jobs import submission


def main() -> int:
    return submission.main("single", __doc__)


if __name__ == "__main__":
    errors.run(main)
