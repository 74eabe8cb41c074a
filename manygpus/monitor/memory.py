"""The memory of a job on this node, of all kinds that count against --mem."""

import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

CGROUPS = Path("/sys/fs/cgroup")
# The cgroup of a job is the one around those of its steps (cgroup_v2.c and xcgroup.c of Slurm), whatever its
# name: job_12, or in version 2 from Slurm 26.05 on s3RDM8HC9BBM00.
CGROUP_OF_A_JOB = re.compile(r"(/.+?)/step_[^/]+(?:/|$)")
# In the folder of a cgroup, of version 2 or 1: the file with the bytes in use, and the lines of memory.stat
# with the bytes of cached files.
CACHED_BY_FILE_IN_USE = {
    "memory.current": ("inactive_file", "active_file"),
    "memory.usage_in_bytes": ("total_inactive_file", "total_active_file"),
}
# What a job may have asked Slurm for, in MiB, as the product of these variables.
ASKED_MIB = (("SLURM_MEM_PER_NODE",), ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"))


class HasMemory(Protocol):
    """A process: its share of the bytes in memory, and the part of this in shared files."""

    memory_bytes: int
    shared_file_bytes: int


class Shares(NamedTuple):
    """The bytes of a process, of which each process that shares some counts for an equal share."""

    memory_bytes: int
    shared_file_bytes: int  # 0 where the kernel does not tell


class JobMemory:
    """The memory that a job uses on this node: by its cgroup, or without one that of its processes."""

    def __init__(self) -> None:
        self._cgroup = _job_cgroup()
        self._shared_file_bytes_before = _shared_file_bytes()

    def used_bytes(self, processes: Iterable[HasMemory]) -> int:
        """Return the bytes in use."""
        if self._cgroup:
            with suppress(OSError, KeyError, ValueError):
                return _used_bytes_in_cgroup(self._cgroup)
        return sum(process.memory_bytes for process in processes)

    def bytes_of_no_process(self, processes: Iterable[HasMemory]) -> int:
        """Return the bytes written to files in memory since the job began that are in no process of the job.

        A cgroup counts those of its job. Without one nobody knows whose they are.
        """
        if self._cgroup:
            return 0
        written_bytes = _shared_file_bytes() - self._shared_file_bytes_before
        in_processes = sum(process.shared_file_bytes for process in processes)
        return max(written_bytes - in_processes, 0)


def shares(pid: int) -> Shares:
    """Return the bytes that a process has in its memory. For this the kernel walks through its pages.

    Raises:
        OSError: if the process has ended.
    """
    folder = Path(psutil.PROCFS_PATH, str(pid))
    # From Linux 4.14 on; before, each mapping has its own numbers.
    mappings = folder / "smaps_rollup"
    if not mappings.exists():
        mappings = folder / "smaps"
    text = mappings.read_text()

    def total_bytes(kind: str) -> int:
        kib = re.findall(rf"^{kind}: +(\d+) kB$", text, re.MULTILINE)
        return 1024 * sum(map(int, kib))

    return Shares(memory_bytes=total_bytes("Pss"), shared_file_bytes=total_bytes("Pss_Shmem"))


def largest_checkpoint_bytes(folder: Path) -> int:
    """Return the bytes of the largest file in a folder of checkpoints, or of the largest folder there."""
    largest = 0
    # There may be none yet, or one has just been removed.
    with suppress(OSError):
        for entry in folder.iterdir():
            files = entry.rglob("*") if entry.is_dir() else [entry]
            largest = max(largest, sum(file.stat().st_size for file in files if file.is_file()))
    return largest


def limit_bytes() -> int:
    """Return the bytes of memory that a job may use on this node: what it asked Slurm for, or all."""
    total = psutil.virtual_memory().total
    for names in ASKED_MIB:
        with suppress(KeyError, ValueError):
            asked = math.prod(int(os.environ[name]) for name in names) * 2**20
            # --mem=0 asks for all.
            return min(asked or total, total)
    return total


def _job_cgroup() -> Path | None:
    """Return the folder of the cgroup of this process's job; None if Slurm does not limit memory by one."""
    with suppress(OSError):
        for line in Path(psutil.PROCFS_PATH, "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            job = CGROUP_OF_A_JOB.match(path)
            if job and controllers in ("", "memory"):
                folder = CGROUPS / controllers / job[1].lstrip("/")
                if any((folder / name).exists() for name in CACHED_BY_FILE_IN_USE):
                    return folder
    return None


def _used_bytes_in_cgroup(folder: Path) -> int:
    """Return the bytes that a cgroup uses, without cached files, which the kernel drops where it has to."""
    name = next(name for name in CACHED_BY_FILE_IN_USE if (folder / name).exists())
    lines = (folder / "memory.stat").read_text().splitlines()
    bytes_by_kind = dict(line.split() for line in lines)
    cached_bytes = sum(int(bytes_by_kind[kind]) for kind in CACHED_BY_FILE_IN_USE[name])
    return int((folder / name).read_text()) - cached_bytes


def _shared_file_bytes() -> int:
    """Return the bytes of the files in each tmpfs, such as /dev/shm, of all users."""
    # A later mount at the same place hides an earlier one.
    types = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    bytes_by_device: dict[int, int] = {}
    for folder in (folder for folder, kind in types.items() if kind == "tmpfs"):
        # It may be gone, or in a folder of another user.
        with suppress(OSError):
            file_system = os.statvfs(folder)
            used_bytes = (file_system.f_blocks - file_system.f_bfree) * file_system.f_frsize
            bytes_by_device[Path(folder).stat().st_dev] = used_bytes
    return sum(bytes_by_device.values())
