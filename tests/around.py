"""Runs a script of ours with something else in it.

usage: around.py without-dropout SCRIPT [options]    the only thing that differs between 1 and N ranks
       around.py stop-in-step STEP SCRIPT [options]  rank 1 gets USR2 in this optimizer step, counted from 1
       around.py count-waits SCRIPT [options]        how often the CPU would have waited for a GPU
"""

import os
import runpy
import signal
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.rank import model
from trainkit.rank.run import Agreement

# .item(), nonzero(), selections by a mask: the CPU needs to know numbers, or how many there are.
WAITING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}


class Waits(TorchDispatchMode):
    """Counts such calls by their names, but for copies and meetings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(
        self, call: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        name = call.overloadpacket.__name__
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in WAITING or by_mask:
            self.seen[name] += 1
        return call(*args, **kwargs or {})


def stop_in(step: int) -> None:
    numbers = count(1)

    def stop(*_: object) -> None:
        if next(numbers) == step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR2)

    register_optimizer_step_post_hook(stop)


if __name__ == "__main__":
    _, how, *sys.argv = sys.argv
    if how == "stop-in-step":
        step, *sys.argv = sys.argv
        stop_in(int(step))
    if how == "without-dropout":
        model.Dropout = lambda _: nn.Identity()
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as Python does
    if how == "count-waits":
        Agreement.due = lambda self: False  # as often as the clock wants
        main = runpy.run_path(sys.argv[0])["main"]
        with Waits() as waits:
            main()
        print("waits:", sorted(waits.seen.items()))
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
