"""The clock of a run: it stops when the work is done and not merely queued, on the slowest rank."""

import time

import torch

from trainkit import world


def start(device: torch.device) -> float:
    """A clock that starts when every rank is here and every GPU idle; for `stop`."""
    world.barrier()
    wait_for(device)
    return time.perf_counter()


def stop(device: torch.device, started: float) -> float:
    """Seconds since `started`, on the slowest rank."""
    wait_for(device)
    return world.largest(time.perf_counter() - started, device)


def moment(device: torch.device) -> float | torch.cuda.Event:
    """A moment of the GPU's own time, where there is one, as the CPU is ahead of it; for `between`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(began: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    """Seconds from one moment to the other; a GPU has to be at the later one."""
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000


def wait_for(device: torch.device) -> None:
    """Until a GPU has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
