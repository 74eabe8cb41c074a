"""The clock of a run: it stops when the work is done and not merely queued, on the slowest rank."""

import time

import torch

from trainkit.runtime import process_group
from trainkit.runtime.device import wait_for


def start(device: torch.device) -> float:
    """A clock that starts when every rank is here and every GPU idle; for `stop`."""
    process_group.barrier()
    wait_for(device)
    return time.perf_counter()


def stop(device: torch.device, started: float) -> float:
    """Seconds since `started`, on the slowest rank."""
    wait_for(device)
    return process_group.largest(time.perf_counter() - started, device)
