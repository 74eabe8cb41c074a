"""Trainings one after the other in the same processes, as PyTorch takes seconds to start; dropout is off.

usage: trainings.py TRAININGS.json, which is {folder: [port, script, options ...]}. What each prints goes to
folder/rank-N.txt.
"""

import json
import os
import runpy
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from torch import nn

from trainkit import model


def train(script: str, output: Path) -> None:
    """Run the main() of a script; `sys.argv` has its options."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        try:
            runpy.run_path(script)["main"]()
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    model.Dropout = lambda _: nn.Identity()
    for folder, (port, script, *options) in json.loads(Path(sys.argv[1]).read_text()).items():
        os.environ["MASTER_PORT"] = port
        sys.argv[1:] = [*options, "--results-dir", folder]
        train(script, Path(folder, f"rank-{os.environ['RANK']}.txt"))
