"""The exercises of stage 01: what is done, what comes next, and a check of each.

Try: python exercises/check.py
"""

from pathlib import Path

from manygpus import entrypoint
from manygpus.workshop import exercises


@entrypoint
def main() -> int:
    return exercises.main(Path(__file__).resolve().parent, __doc__)


if __name__ == "__main__":
    main()
