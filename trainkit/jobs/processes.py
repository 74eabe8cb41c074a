"""The processes of a job on this node, and what they take of it: from /proc, and the job's cgroup.

Cheap enough for once a second: what stays the same is read once, and the walk through the pages of a process,
which tells what it shares with others, comes only as often as it costs next to nothing.
"""

import math
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainkit import samples

PROC, SYS = Path("/proc"), Path("/sys")
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
WALK_SECONDS, WALK_PAUSE = 10, 2_000  # at least so long between two walks, and so many times what one took
USED = ("cores", "loader_cores", "waiting", "network_mb_s", "disk_mb_s")  # since the sample before
ETHERNET, INFINIBAND = "class/net/*/device", "class/infiniband/*/ports/*/counters/port_*_data"


class Stat(NamedTuple):
    """What counts here of /proc/PID/stat."""

    state: str
    parent: int
    cpu_seconds: float
    started: int  # clock ticks after the boot
    stack: int  # its address: exec changes it, and fork keeps it


@dataclass
class Process:
    """One of the job's, and what it used since the sample before."""

    pid: int
    rank: int  # by its environment
    by_torchrun: bool  # started by it
    stat: Stat
    disk_bytes: int  # in all
    is_copy: bool  # of its parent, with which it shares what it does not change
    resident: int  # bytes; of a copy without those of files
    shared: int  # bytes of these that count as other processes'
    cores: float = 0
    disk_bytes_s: float = 0
    torch: bool = False  # it has loaded PyTorch
    is_torchrun: bool = False
    threads: dict[str, tuple[int, int]] = field(default_factory=dict)  # ns on a core, ns waiting for one

    @property
    def memory(self) -> int:
        return max(self.resident - self.shared, 0)


class Processes:
    """Those whose environment has all of `mine`, without this one.

    A rank has loaded PyTorch; its descendants that have, too, are its loader workers; torchrun is neither.
    """

    def __init__(self, mine: dict[str, str]) -> None:
        self._marks = [f"\0{name}={value}\0".encode() for name, value in mine.items()]
        self._processes: dict[int, Process] = {}
        self._others: dict[int, int] = {}  # process -> in how many samples it was there
        self._moment = self._booted = self._next_walk = 0.0  # of the last sample: s, and ticks after the boot
        self._node = _Node()
        self._network_bytes = self._node.network_bytes()
        self.ranks: dict[int, int] = {}  # process -> rank, of loader workers, too

    def sample(self) -> list[dict[str, object]]:
        """A row of the node, and one of each rank; the first ones have none of `USED`."""
        now, booted = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS
        first, seconds = not self._moment, now - self._moment
        self._find()
        self._look(seconds)
        if now >= self._next_walk:
            self._walk(now)
        families = self._families()
        self.ranks = {one.pid: rank.rank for rank, workers in families for one in (rank, *workers)}
        rows = [self._node_row(seconds), *(_rank_row(*family) for family in families)]
        self._moment, self._booted = now, booted
        if first:
            rows = [{name: value for name, value in row.items() if name not in USED} for row in rows]
        return rows

    def _find(self) -> None:
        """See whether new processes are the job's, and again after 2, 4, 8 ... samples.

        Slurm prepares a task in a process of its own, which becomes the task when all is ready.
        """
        there = {int(entry.name) for entry in os.scandir(PROC) if entry.name.isdecimal()}
        self._others = {pid: count + 1 for pid, count in self._others.items() if pid in there}
        for pid in there - self._processes.keys() - {os.getpid()}:
            count = self._others.setdefault(pid, 1)
            if count & (count - 1) == 0:
                with suppress(OSError):  # it is another user's, or has ended
                    self._adopt(pid)

    def _adopt(self, pid: int) -> None:
        environment = b"\0" + Path(PROC, str(pid), "environ").read_bytes()
        if not all(mark in environment for mark in self._marks):
            return
        stat, disk_bytes = _stat(pid), _disk_bytes(pid)
        if stat.started > self._booted > 0:  # all that it has used was used since the last sample
            stat, disk_bytes = stat._replace(cpu_seconds=0), 0
        parent = self._processes.get(stat.parent)
        is_copy = parent is not None and parent.stat.stack == stat.stack
        resident = _resident(pid, is_copy)
        self._processes[pid] = Process(
            pid,
            _rank(environment),
            by_torchrun=b"\0TORCHELASTIC_RUN_ID=" in environment,
            stat=stat,
            disk_bytes=disk_bytes,
            is_copy=is_copy,
            resident=resident,
            shared=resident if is_copy else 0,
        )
        del self._others[pid]

    def _look(self, seconds: float) -> None:
        for pid, process in list(self._processes.items()):
            before = process.stat
            try:
                process.stat, disk_bytes = _stat(pid), _disk_bytes(pid)
                process.resident = _resident(pid, process.is_copy)
            except OSError:  # it has ended
                del self._processes[pid]
                continue
            now = process.stat
            if now.state in "ZX" or (now.started, now.stack) != (before.started, before.stack):
                del self._processes[pid]  # perhaps until it is found again, as another program
                continue
            process.cores = (now.cpu_seconds - before.cpu_seconds) / seconds
            process.disk_bytes_s = (disk_bytes - process.disk_bytes) / seconds
            process.disk_bytes = disk_bytes
            process.torch = process.torch or _has_torch(pid)

    def _walk(self, now: float) -> None:
        """Have pages of several processes count as an equal share with each of them."""
        began = time.thread_time()
        for process in self._processes.values():
            with suppress(OSError):
                told = Path(PROC, str(process.pid), "smaps_rollup").read_text()
                if own := re.search(r"^Pss:\s+(\d+)", told, re.MULTILINE):
                    process.shared = process.resident - int(own[1]) * 1024
        self._next_walk = now + max(WALK_SECONDS, WALK_PAUSE * (time.thread_time() - began))

    def _families(self) -> list[tuple[Process, list[Process]]]:
        """Each rank and its loader workers."""
        parents = {one.pid: self._processes.get(one.stat.parent) for one in self._processes.values()}
        for process in self._processes.values():
            parent = parents[process.pid]
            if process.by_torchrun and parent and not parent.by_torchrun:
                parent.is_torchrun = True
        families: dict[int, tuple[Process, list[Process]]] = {}
        for process in self._processes.values():
            if not process.torch or process.is_torchrun:
                continue
            rank, above = process, parents[process.pid]
            while above and not above.is_torchrun:
                if above.torch and above.rank == process.rank:
                    rank = above
                above = parents[above.pid]
            workers = families.setdefault(rank.pid, (rank, []))[1]
            if process is not rank:
                workers.append(process)
        return sorted(families.values(), key=lambda family: family[0].rank)

    def _node_row(self, seconds: float) -> dict[str, object]:
        processes = self._processes.values()
        before, self._network_bytes = self._network_bytes, self._node.network_bytes()
        memory, disk = self._node.memory_of_the_job(), sum(one.disk_bytes_s for one in processes)
        return {
            "what": samples.NODE,
            "memory_mb": (sum(one.memory for one in processes) if memory is None else memory) / 1e6,
            "memory_limit_mb": self._node.memory_limit / 1e6,
            "cores": sum(one.cores for one in processes),
            "core_list": _ranges(set().union(*map(_allowed, self._processes))),
            "network_mb_s": (self._network_bytes - before) / seconds / 1e6,
            "disk_mb_s": disk / 1e6 if self._node.counts_disks else None,
        }


def _rank_row(rank: Process, workers: list[Process]) -> dict[str, object]:
    return {
        "what": samples.RANK,
        "number": rank.rank,
        "name": rank.stat.state,
        "memory_mb": sum(one.memory for one in (rank, *workers)) / 1e6,
        "cores": rank.cores,
        "core_list": _ranges(_allowed(rank.pid)),
        "waiting": _waiting(rank),
        "loaders": len(workers),
        "loader_cores": sum(one.cores for one in workers),
    }


def _waiting(process: Process) -> float | None:
    """Of the time that its threads could run, the share in which they waited; None if no thread could.

    Kernels without this count say 0 of both, or nothing.
    """
    before, process.threads = process.threads, {}
    ran = waited = 0
    with suppress(OSError):
        for thread in os.scandir(f"{PROC}/{process.pid}/task"):
            with suppress(OSError):  # it has ended
                cells = _read(f"{thread.path}/schedstat").split()
                now = process.threads[thread.name] = int(cells[0]), int(cells[1])
                then = before.get(thread.name, (0, 0))
                ran, waited = ran + now[0] - then[0], waited + now[1] - then[1]
    return waited / (ran + waited) if ran + waited else None


def _rank(environment: bytes) -> int:
    for name in (b"RANK", b"SUBMITIT_LOCAL_GLOBALID", b"SLURM_PROCID"):
        if found := re.search(rb"\0%b=(\d+)\0" % name, environment):
            return int(found[1])
    return 0


def _has_torch(pid: int) -> bool:
    """Inductor's processes, which compile, have it too, but are no loader workers."""
    folder = Path(PROC, str(pid))
    with suppress(OSError):
        is_there = b"/libtorch" in (folder / "maps").read_bytes()
        return is_there and b"torch/_inductor/" not in (folder / "cmdline").read_bytes()
    return False


def _allowed(pid: int) -> set[int]:
    with suppress(OSError):
        return os.sched_getaffinity(pid)
    return set()


def _ranges(cores: Iterable[int]) -> str:
    """Cores as in 0-1,4."""
    ends: list[list[int]] = []
    for core in sorted(cores):
        if ends and core == ends[-1][1] + 1:
            ends[-1][1] = core
        else:
            ends.append([core, core])
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ends)


def _stat(pid: int) -> Stat:
    """The cells come after the name of the program, which may hold anything (proc(5))."""
    cells = _read(f"{PROC}/{pid}/stat").rpartition(b")")[2].split()
    return Stat(
        state=cells[0].decode().upper(),
        parent=int(cells[1]),
        cpu_seconds=(int(cells[11]) + int(cells[12])) / TICKS,
        started=int(cells[19]),
        stack=int(cells[25]),
    )


def _resident(pid: int, is_copy: bool) -> int:
    _, resident, of_files, *_ = map(int, _read(f"{PROC}/{pid}/statm").split())
    return (resident - is_copy * of_files) * PAGE


def _disk_bytes(pid: int) -> int:
    """Read and written, beyond what the page cache has served."""
    with suppress(OSError):
        cells = _read(f"{PROC}/{pid}/io").split()
        return int(cells[9]) + int(cells[11])
    return 0


def _read(path: str) -> bytes:
    """A small file of /proc, by three system calls.

    Raises:
        OSError: also if it is empty, as those of a process that has just ended.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        if text := os.read(file, 4096):
            return text
    finally:
        os.close(file)
    raise ProcessLookupError(path)


class _Node:
    """What is of the whole node, or of the whole job on it."""

    def __init__(self) -> None:
        cgroups = memory_cgroups()
        jobs = [place for place, cgroup in enumerate(cgroups) if cgroup.name.startswith("job_")]
        self._cgroup = cgroups[jobs[0]] if jobs else None
        self.memory_limit = memory_limit(cgroups[jobs[0] :] if jobs else cgroups)  # not those of its steps
        self.counts_disks = (PROC / "self/io").exists()  # the kernel may be built without
        self._rdma = list(SYS.glob(INFINIBAND))
        self._interfaces = {path.parent.name for path in SYS.glob(ETHERNET)}
        if self._rdma:  # which counts what goes as IP over InfiniBand, too
            self._interfaces = {name for name in self._interfaces if not name.startswith("ib")}

    def memory_of_the_job(self) -> int | None:
        """Bytes, without the files that the kernel may drop; None where no cgroup counts those of the job."""
        if not self._cgroup:
            return None
        try:
            told = dict(line.split() for line in (self._cgroup / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return None
        files = (told.get(f"total_{name}", told.get(name, 0)) for name in ("active_file", "inactive_file"))
        used = _number(self._cgroup / "memory.current") or _number(self._cgroup / "memory.usage_in_bytes")
        return used and used - sum(map(int, files))

    def network_bytes(self) -> int:
        """Over the interfaces that are devices; else over all but lo; else over lo. And by RDMA."""
        sums = {}
        for line in (PROC / "net/dev").read_text().splitlines()[2:]:
            name, _, cells = line.partition(":")
            sums[name.strip()] = int(cells.split()[0]) + int(cells.split()[8])
        counted = self._interfaces & sums.keys() or sums.keys() - {"lo"} or sums.keys()
        return sum(sums[name] for name in counted) + sum(4 * (_number(path) or 0) for path in self._rdma)


def memory_cgroups() -> list[Path]:
    """Those of this process, the innermost first: version 1, or 2."""
    with suppress(OSError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = SYS / "fs/cgroup"
            if "memory" in controllers.split(","):
                root /= "memory"
            elif controllers or not (root / "cgroup.controllers").exists():
                continue
            folder = root / path.lstrip("/")
            return [one for one in (folder, *folder.parents) if one.is_relative_to(root)]
    return []


def memory_limit(cgroups: Iterable[Path]) -> int:
    """Bytes that a job may take of this node, by `cgroups`, by what it asked for, and by what there is."""
    names = ("memory.max", "memory.limit_in_bytes")
    limits = [_number(cgroup / name) for cgroup in cgroups for name in names]
    total = int((PROC / "meminfo").read_text().split()[1]) * 1024
    return min(limit for limit in (*limits, _asked_for(), total) if limit)


def _asked_for() -> int:
    """Bytes that the job has asked Slurm for on this node; 0: all, or nobody knows."""
    for names in (("SLURM_MEM_PER_NODE",), ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")):
        with suppress(KeyError, ValueError):
            return math.prod(int(os.environ[name]) for name in names) * 2**20
    return 0


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):  # such as max, for no limit
        return int(path.read_text())
    return None
