"""The clock of a run: it stops when the slowest rank's work is done, not merely queued."""

import time

import torch

from manygpus.devices import wait_for
from manygpus.distributed import process_group


def start(device: torch.device) -> float:
    """Start a clock when every rank has arrived and every GPU is idle; return the time for `stop`."""
    process_group.barrier()
    wait_for(device)
    return time.perf_counter()


def stop(device: torch.device, started: float) -> float:
    """Return the seconds since `started`, on the slowest rank."""
    wait_for(device)
    return max(process_group.gather(time.perf_counter() - started))
