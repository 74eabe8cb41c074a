"""Runs a script whose rank 1 gets USR2 in one of its optimizer steps, counted from 1.

usage: stops.py STEP SCRIPT [options of the script]
"""

import os
import runpy
import signal
import sys
from itertools import count
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

if __name__ == "__main__":
    _, step, *sys.argv = sys.argv
    numbers = count(1)

    def stop(*_: object) -> None:
        if next(numbers) == int(step) and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR2)

    register_optimizer_step_post_hook(stop)
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as Python does
    runpy.run_path(sys.argv[0], run_name="__main__")
