"""The clock of a run: it stops when the work is done and not merely queued, on the slowest rank."""

import time

import torch

from trainkit import world


def start(device: torch.device) -> float:
    """A clock that starts when every rank is here and every GPU idle; for `stop`."""
    world.barrier()
    _wait_for(device)
    return time.perf_counter()


def stop(device: torch.device, started: float) -> float:
    """Seconds since `started`, on the slowest rank."""
    _wait_for(device)
    return world.largest(time.perf_counter() - started, device)


def moment(device: torch.device) -> float | torch.cuda.Event:
    """Now, by the GPU's own time where there is one: the CPU is ahead of it. For `between`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(began: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    """Seconds from one `moment` to another. A GPU has to be idle."""
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
