"""The processes of a job on this node, and the resources they use, by psutil and /proc."""

import math
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trainkit.runtime import place
from trainkit.schema import samples

SYS = Path("/sys")
WALK_EVERY = 10  # samples; and when a process is new
STRANGE = 10  # samples in which a process was not the job's: it may start as Slurm's, and become a task
ETHERNET, INFINIBAND = "class/net/*/device", "class/infiniband/*/ports/*/counters/port_*_data"


@dataclass
class Process:
    """A process of the job, and what it has used, in all and since the last sample."""

    pid: int
    rank: int = 0  # by its environment
    by_torchrun: bool = False  # started by it
    parent: int = 0
    started: float = 0  # s, since 1970
    state: str = ""
    core_list: str = ""
    resident: int = 0  # bytes
    shared: int = 0  # bytes of these that count for other processes: each has an equal share
    cpu_seconds: float = 0
    cores: float = 0
    threads: dict[str, tuple[int, int]] = field(default_factory=dict)  # ns on a core, ns waiting for one
    waiting: float | None = None
    torch: bool = False  # it has loaded PyTorch

    def update(self, seconds: float) -> None:
        """Read its current state, `seconds` after the last sample.

        Raises:
            psutil.Error, OSError: if it has ended.
        """
        process = psutil.Process(self.pid)
        with process.oneshot():
            self.parent, self.started = process.ppid(), process.create_time()
            cpu = process.cpu_times()
        cores = {*process.cpu_affinity()}
        starts = sorted(core for core in cores if core - 1 not in cores)
        ends = sorted(core for core in cores if core + 1 not in cores)
        ranges = (f"{a}-{b}" if a < b else str(a) for a, b in zip(starts, ends, strict=True))
        self.core_list = ",".join(ranges)
        self.resident = process.memory_info().rss
        self.state = (_proc(self.pid) / "stat").read_text(errors="replace").rpartition(") ")[2][0].upper()
        before, self.cpu_seconds = self.cpu_seconds, cpu.user + cpu.system
        self.cores = (self.cpu_seconds - before) / seconds
        waiting = self._waiting()
        self.waiting = waiting if seconds > 0 else None  # the first value is for its whole life
        # Inductor's compile, and are not loader workers.
        self.torch = self.torch or (
            b"/libtorch" in (_proc(self.pid) / "maps").read_bytes()
            and b"torch/_inductor/" not in (_proc(self.pid) / "cmdline").read_bytes()
        )

    @property
    def memory(self) -> int:
        return max(self.resident - self.shared, 0)

    def _waiting(self) -> float | None:
        """Return the share of its threads' runnable time that they waited; None if no thread was runnable.

        Kernels without this count report 0 for both, or nothing.
        """
        before, self.threads = self.threads, {}
        ran = waited = 0
        for path in _proc(self.pid).glob("task/*/schedstat"):
            with suppress(OSError, ValueError):  # it has ended
                now = tuple(map(int, path.read_text().split()[:2]))
                then = before.get(path.parent.name, (0, 0))
                ran, waited = ran + now[0] - then[0], waited + now[1] - then[1]
                self.threads[path.parent.name] = now
        return waited / (ran + waited) if ran + waited else None


class Processes:
    """The processes whose environment has all of `variables`, except this one.

    A rank has loaded PyTorch; descendants that have it too are its loader workers; torchrun is neither.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        self._mine = {f"{name}={value}" for name, value in variables.items()}
        self._processes: dict[int, Process] = {}
        self._strangers: Counter[int] = Counter()  # process -> samples in which it was not the job's
        self._torchruns: set[int] = set()
        self._moment = math.nan  # of the last sample
        self._samples = 0
        self._network_bytes = _network_bytes()
        self.ranks: dict[int, int] = {}  # process -> rank, also of loader workers

    def sample(self) -> list[dict[str, object]]:
        """Return a row for the node and one for each rank; use since the last sample is NaN at first."""
        now = time.monotonic()
        seconds, self._moment = now - self._moment, now
        before, pids = self._processes, psutil.pids()
        self._strangers = Counter({pid: self._strangers[pid] for pid in pids if pid in self._strangers})
        found = [self._of_the_job(pid, seconds) for pid in pids if self._strangers[pid] < STRANGE]
        self._processes = {process.pid: process for process in found if process}
        if self._samples % WALK_EVERY == 0 or self._processes.keys() - before.keys():
            for process in self._processes.values():  # for this the kernel walks through its pages
                with suppress(psutil.Error):  # it has ended
                    pss = psutil.Process(process.pid).memory_full_info().pss
                    process.shared = process.resident - pss
        self._samples += 1
        families = self._families()
        self.ranks = {process.pid: process.rank for family in families for process in family}
        before, self._network_bytes = self._network_bytes, _network_bytes()
        processes = self._processes.values()
        node = {
            "what": samples.NODE,
            "memory_mb": sum(one.memory for one in processes) / 1e6,
            "memory_limit_mb": memory_limit() / 1e6,
            "cores": sum(one.cores for one in processes),
            "core_list": ",".join(sorted({one.core_list for one in processes})),
            "network_mb_s": (self._network_bytes - before) / seconds / 1e6,
        }
        return [node, *(_rank_row(*family) for family in families)]

    def _of_the_job(self, pid: int, seconds: float) -> Process | None:
        """Return a process of the job; None if it is not the job's, is another user's, or has ended."""
        self._strangers[pid] += 1
        try:
            variables = os.fsdecode((_proc(pid) / "environ").read_bytes()).split("\0")
            if pid == os.getpid() or not self._mine.issubset(variables):
                return None
            process = self._processes.get(pid) or Process(pid)
            process.rank, process.by_torchrun = _rank(variables)
            process.update(seconds)
        except (OSError, psutil.Error):
            return None
        self._strangers[pid] = 0
        return process

    def _families(self) -> list[list[Process]]:
        """Return each rank with its loader workers, which have its number and started later."""
        processes = sorted(self._processes.values(), key=lambda process: process.started)
        its_own = [process for process in processes if process.by_torchrun]
        self._torchruns |= {process.parent for process in its_own} - {process.pid for process in its_own}
        families: dict[int, list[Process]] = {}
        for process in processes:
            if process.torch and process.pid not in self._torchruns:
                families.setdefault(process.rank, []).append(process)
        return [families[rank] for rank in sorted(families)]


def _rank_row(rank: Process, *workers: Process) -> dict[str, object]:
    return {
        "what": samples.RANK,
        "number": rank.rank,
        "name": rank.state,
        "memory_mb": sum(one.memory for one in (rank, *workers)) / 1e6,
        "cores": rank.cores,
        "core_list": rank.core_list,
        "waiting": rank.waiting,
        "loaders": len(workers),
        "loader_cores": sum(one.cores for one in workers),
    }


def _proc(pid: int | str) -> Path:
    return Path(psutil.PROCFS_PATH, str(pid))


def _rank(variables: list[str]) -> tuple[int, bool]:
    """Return the rank of a process with these variables, and whether torchrun started it."""
    env = dict(variable.split("=", 1) for variable in variables if "=" in variable)
    rank = place.rank_of(env) or ""
    return int(rank) if rank.isdecimal() else 0, place.launcher_of(env) == "torchrun"


def _network_bytes() -> int:
    """Count the bytes both ways, over the hardware interfaces, else over all but lo; and by RDMA."""
    words = 0  # of four bytes
    for path in SYS.glob(INFINIBAND):
        with suppress(OSError, ValueError):  # a virtual card
            words += int(path.read_text())
    of_each = psutil.net_io_counters(pernic=True)
    devices = {path.parent.name for path in SYS.glob(ETHERNET)} & of_each.keys()
    if words:  # which include IP over InfiniBand
        devices = {name for name in devices if not name.startswith("ib")}
    counted = [of_each[name] for name in devices or of_each.keys() - {"lo"}]
    return sum(one.bytes_sent + one.bytes_recv for one in counted) + 4 * words


def memory_limit() -> int:
    """Return the bytes of memory that a job may use on this node: what it asked Slurm for, or all."""
    total = psutil.virtual_memory().total
    for names in (("SLURM_MEM_PER_NODE",), ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")):
        with suppress(KeyError, ValueError):
            asked = math.prod(int(os.environ[name]) for name in names) * 2**20
            return min(asked or total, total)  # --mem=0 asks for all
    return total
