"""Trainings one after the other in the same processes, as PyTorch takes seconds to start; dropout is off.

usage: trainings.py TRAININGS.json, a list of [folder, script, options ...]. What each prints goes to
folder/rank-N.txt.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from torch import nn

from trainkit import errors, model, network
from trainkit.files import replacing


def train(script: str, output: Path) -> None:
    """Run the main() of a script; `sys.argv` has its options."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        try:
            sys.path[0] = str(Path(script).parent)  # as Python does
            runpy.run_path(script)["main"]()
        except Exception:
            traceback.print_exc()
            os._exit(1)  # the others would wait in a group that is half left
    for number in errors.STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # the run's own keeps it alive, and its checkpoints locked
    gc.collect()


def agreed_port(path: Path) -> str:
    """One that is free now, also of the groups before, as rank 0 finds it; a new file tells the others."""
    if os.environ["RANK"] == "0":
        with replacing(path) as file:
            file.write(str(network.free_port()))
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


if __name__ == "__main__":
    model.Dropout = lambda _: nn.Identity()
    plan = Path(sys.argv[1])
    for number, (folder, script, *options) in enumerate(json.loads(plan.read_text())):
        os.environ["MASTER_PORT"] = agreed_port(plan.with_suffix(f".{number}"))
        sys.argv[1:] = [*map(str, options), "--results-dir", folder]
        train(script, Path(folder, f"rank-{os.environ['RANK']}.txt"))
