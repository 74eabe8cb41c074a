"""The memory of a job on this node, of all kinds that count against --mem."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

CGROUPS = Path("/sys/fs/cgroup")
SHARED_FILES = Path("/dev/shm")
OF_A_JOB = re.compile(r"(.*/job_\d+)(?:/|$)")  # Slurm's name for the cgroup of all steps of a job
# In the folder of a cgroup, of version 2 or 1: the file with the bytes in use, and lines of memory.stat.
FILES = {
    "memory.current": ("inactive_file", "active_file"),
    "memory.usage_in_bytes": ("total_inactive_file", "total_active_file"),
}


class HasMemory(Protocol):
    """The bytes of a process: its share of what is in memory, and the part of this in shared files."""

    memory: int
    in_shared_files: int


class Shares(NamedTuple):
    """The bytes of a process, of which each process that shares some counts for an equal share."""

    memory: int
    in_shared_files: int  # 0 where the kernel does not tell


class JobMemory:
    """The memory that a job uses on this node: by its cgroup, or without one that of its processes."""

    def __init__(self) -> None:
        self._cgroup = _job_cgroup()
        self._before = _written_to_shared_files()

    def used(self, processes: Iterable[HasMemory]) -> int:
        """Return the bytes in use."""
        if self._cgroup:
            with suppress(OSError, KeyError, ValueError):
                return _used_in_cgroup(self._cgroup)
        return sum(one.memory for one in processes)

    def of_no_process(self, processes: Iterable[HasMemory]) -> int:
        """Return the bytes written to /dev/shm since the job began that are in no process of the job.

        A cgroup counts those of its job. Without one nobody knows whose they are.
        """
        if self._cgroup:
            return 0
        written = _written_to_shared_files() - self._before
        return max(written - sum(one.in_shared_files for one in processes), 0)


def shares(pid: int) -> Shares:
    """Return the bytes that a process has in its memory. For this the kernel walks through its pages.

    Raises:
        OSError: if the process has ended.
    """
    folder = Path(psutil.PROCFS_PATH, str(pid))
    rollup = folder / "smaps_rollup"  # from Linux 4.14 on; before, each mapping has its own numbers
    text = (rollup if rollup.exists() else folder / "smaps").read_text()

    def total(kind: str) -> int:
        return 1024 * sum(map(int, re.findall(rf"^{kind}: +(\d+) kB$", text, re.MULTILINE)))

    return Shares(memory=total("Pss"), in_shared_files=total("Pss_Shmem"))


def largest_checkpoint(folder: Path) -> int:
    """Return the bytes of the largest file in a folder of checkpoints, or of the largest folder there."""
    largest = 0
    with suppress(OSError):  # there is none yet, or one has just been removed
        for entry in folder.iterdir():
            files = entry.rglob("*") if entry.is_dir() else [entry]
            largest = max(largest, sum(file.stat().st_size for file in files if file.is_file()))
    return largest


def _job_cgroup() -> Path | None:
    """Return the folder of the cgroup of this process's job; None if Slurm does not limit memory by one."""
    with suppress(OSError):
        for line in Path(psutil.PROCFS_PATH, "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            job = OF_A_JOB.match(path)
            if job and controllers in ("", "memory"):
                folder = CGROUPS / controllers / job[1].lstrip("/")
                if any((folder / name).exists() for name in FILES):
                    return folder
    return None


def _used_in_cgroup(folder: Path) -> int:
    """Return the bytes that a cgroup uses, without cached files, which the kernel drops where it has to."""
    name = next(name for name in FILES if (folder / name).exists())
    lines = (folder / "memory.stat").read_text().splitlines()
    bytes_of = dict(line.split() for line in lines)
    return int((folder / name).read_text()) - sum(int(bytes_of[kind]) for kind in FILES[name])


def _written_to_shared_files() -> int:
    """Return the bytes of all files in /dev/shm, of all users."""
    try:
        facts = os.statvfs(SHARED_FILES)
    except OSError:
        return 0
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize
