"""A machine of processes that are only files: a /proc and a /sys to be looked at, on a clock of its own."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from manygpus.monitor import processes

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
TOTAL_KB = 8_000_000
RESIDENT_KB = 1_000_000
MEMORY_FIELDS = (
    "MemTotal",
    "MemFree",
    "MemAvailable",
    "Buffers",
    "Cached",
    "Shmem",
    "Active",
    "Inactive",
)
# Masks of the signals that a process catches: SIGINT alone, and those of a loader worker.
CATCHES_SIGINT = 0x2
CATCHES_WHAT_A_LOADER_DOES = 0x44C2


class FakeMachine:
    """Writes the files of its processes into a folder. `now` is its clock, in seconds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.now = 1000.0
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(folder / "proc"))
        monkeypatch.setattr(processes, "SYS", folder / "sys")
        monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: [0, 1])
        memory = {name: TOTAL_KB if name.startswith("Mem") else 0 for name in MEMORY_FIELDS}
        self.write(
            {
                "proc/meminfo": "".join(f"{name}: {kb} kB\n" for name, kb in memory.items()),
                "proc/stat": "btime 0\n",
                "proc/1/environ": "",
                "proc/self/mounts": "",
                "proc/filesystems": "",  # read by psutil 5.9
                "proc/net/dev": "-\n-\nlo: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
            }
        )

    def write(self, files: Mapping[str, str]) -> None:
        """Write files, each by its path on the machine."""
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, errors="surrogateescape")

    def process(
        self,
        pid: int = 7,
        cpu_seconds: float = 0,
        environment: str = "JOB=1",
        parent: int = 1,
        share_kb: int = RESIDENT_KB,
        is_loader: bool = False,
        command: str = "",
        threads: Mapping[str, str] | None = None,
    ) -> None:
        """Write a process that has loaded PyTorch and has 1 GB resident. A larger number has started later.

        Args:
            pid: its number.
            cpu_seconds: that it has used so far.
            environment: its variables, with spaces in between.
            parent: the process that has started it.
            share_kb: of the memory that it has resident, its share.
            is_loader: whether it catches the signals that a loader worker does.
            command: its command line, with zero bytes in between.
            threads: the text of schedstat of each of its threads.
        """
        ticks = round(cpu_seconds * TICKS_PER_SECOND)
        cells = ["R", str(parent), *["0"] * 9, str(ticks), *["0"] * 7, str(500 + pid), *["0"] * 30]
        pages = RESIDENT_KB * 1024 // os.sysconf("SC_PAGE_SIZE")
        caught = CATCHES_WHAT_A_LOADER_DOES if is_loader else CATCHES_SIGINT
        files = {
            "environ": environment.replace(" ", "\0"),
            # The kernel cuts names within a letter.
            "stat": f"{pid} (a) \udcc3) {' '.join(cells)}",
            "statm": f"{pages} {pages} 0 0 0 0 0",
            "maps": "/lib/libtorch.so",
            "cmdline": command,
            "status": f"Name: a\nSigCgt:\t{caught:016x}\n",
            "smaps_rollup": f"Rss: {RESIDENT_KB} kB\nPss: {share_kb} kB\n",
        }
        files |= {f"task/{name}/schedstat": text for name, text in (threads or {}).items()}
        self.write({f"proc/{pid}/{name}": text for name, text in files.items()})

    def end(self, pid: int) -> None:
        """End a process."""
        shutil.rmtree(self.folder / "proc" / str(pid))
