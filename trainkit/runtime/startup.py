"""The start of a process: whose end is also its own, and how long it takes to the first training step."""

import ctypes
import os
import signal
import time
from pathlib import Path

_done: list[tuple[str, float]] = []  # what has been done, and when
_printed: list[bool] = []


def process_start() -> float:
    """Return when this process started, by `time.monotonic`, which never goes back (proc(5), stat)."""
    ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent ends, however it does, or has ended."""
    ctypes.CDLL(None).prctl(1, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def mark(what: str) -> None:
    """Note that `what` is done, and took the time since the last mark."""
    _done.append((what, time.monotonic()))


def summary(last: str) -> str:
    """Format the seconds from the process's start until now, when `last` is done, and those of each part.

    Later calls return "": further trainings in the process did not start it.
    """
    if _printed:
        return ""
    _printed.append(True)
    mark(last)
    began = before = process_start()
    seconds: dict[str, float] = {}
    for what, moment in _done:
        seconds[what] = seconds.get(what, 0.0) + moment - before
        before = moment
    parts = ", ".join(f"{what} {part:.1f}" for what, part in seconds.items())
    return f"started in {before - began:.1f} s: {parts}"
