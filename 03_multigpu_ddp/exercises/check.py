"""The exercises of stage 03: what is done, what comes next, and a check of each.

Try: python exercises/check.py
"""

from pathlib import Path

from trainkit import errors
from trainkit.workshop import exercises


def main() -> int:
    return exercises.main(Path(__file__).resolve().parent, __doc__)


if __name__ == "__main__":
    errors.run(main)
