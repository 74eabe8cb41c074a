"""Runs a stage script with dropout switched off: the only thing that differs between 1 and N ranks.

usage: without_dropout.py STAGE_SCRIPT [options of the stage]
"""

import runpy
import sys
from pathlib import Path

from torch import nn

from trainkit.rank import model

if __name__ == "__main__":
    model.Dropout = lambda _: nn.Identity()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as Python does
    runpy.run_path(sys.argv[0], run_name="__main__")
