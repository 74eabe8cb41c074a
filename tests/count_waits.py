"""Runs a stage script and prints how often the CPU would have waited for a GPU, but for copies and meetings.

usage: count_waits.py STAGE_SCRIPT [options of the stage]
"""

import runpy
import sys
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.rank.agreement import Agreement

# .item(), nonzero(), selections by a mask: the CPU needs to know numbers, or how many there are.
WAITING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}


class Waits(TorchDispatchMode):
    """Counts such calls by their names."""

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


if __name__ == "__main__":
    Agreement.due = lambda self: False  # as often as the clock wants
    sys.argv = sys.argv[1:]
    main = runpy.run_path(sys.argv[0])["main"]
    with Waits() as waits:
        main()
    print("waits:", sorted(waits.seen.items()))
    sys.exit()
