"""How long a process takes until its first training step is done, and with what: one clock for all of it."""

import os
import time
from pathlib import Path

_done: list[tuple[str, float]] = []  # what has been done, and when
_told: list[bool] = []


def process_start() -> float:
    """When this process started, on the clock of `time.monotonic`, which nobody sets back (proc(5), stat)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def mark(what: str) -> None:
    """Note that `what` is done: the time since the last mark went into it."""
    _done.append((what, time.monotonic()))


def told(last: str) -> str:
    """The seconds from the start of the process until now, when `last` is done, and what went into what.

    Told once: what a process trains after that has no start of its own, and gets "".
    """
    if _told:
        return ""
    _told.append(True)
    mark(last)
    began = before = process_start()
    seconds: dict[str, float] = {}
    for what, moment in _done:
        seconds[what] = seconds.get(what, 0.0) + moment - before
        before = moment
    parts = ", ".join(f"{what} {part:.1f}" for what, part in seconds.items())
    return f"started in {before - began:.1f} s: {parts}"
