"""What the kernel knows of this process: its start, with whose end it is to end, and who its children are."""

import ctypes
import os
import signal
import time
from pathlib import Path


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


def adopt_orphans() -> None:
    """Have the processes of this one's children become its own when their parents have ended (prctl(2))."""
    ctypes.CDLL(None).prctl(36, 1)
