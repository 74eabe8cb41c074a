"""The processes of a job on this node, and the resources they use, by psutil and /proc."""

import math
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trainkit import job_folder
from trainkit.distributed import launchers as place
from trainkit.monitor import memory
from trainkit.monitor.connections import Meetings
from trainkit.record import samples

SYS = Path("/sys")
WALK_EVERY = 10  # samples; and when a process is new
STRANGE = 10  # samples in which a process was not the job's: it may start as Slurm's, and become a task
# A DataLoader worker catches these, so that it can tell what killed it (torch/csrc/DataLoader.cpp).
CAUGHT_BY_LOADER_WORKERS = {signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGTERM}
# Parts of the command lines of processes that load PyTorch and are no ranks: Inductor's compile workers, the
# process from which multiprocessing forks others, and torchrun, also before it has started its ranks.
HELPERS = (
    b"torch/_inductor/",
    b"multiprocessing.forkserver",
    b"trainkit.distributed.torchrun",
    b"torch.distributed.run",
    b"bin/torchrun",
)
COMPUTES = 0.05  # cores, from which a process counts as one that computes
# A spawned loader worker is known by its signals only when it has imported all that its script does.
IMPORTS_SECONDS = 10
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
    in_shared_files: int = 0  # bytes of its share
    cpu_seconds: float = 0
    cores: float = 0
    threads: dict[str, tuple[int, int]] = field(default_factory=dict)  # ns on a core, ns waiting for one
    waiting: float | None = None
    torch: bool = False  # it has loaded PyTorch
    seconds_with_torch: float = 0
    loads_batches: bool = False  # it is a loader worker

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
        if self.torch:
            self.seconds_with_torch += seconds
        self.torch = self.torch or self._has_loaded_torch()
        self.loads_batches = self.torch and _caught_signals(self.pid) >= CAUGHT_BY_LOADER_WORKERS

    @property
    def memory(self) -> int:
        return max(self.resident - self.shared, 0)

    def _has_loaded_torch(self) -> bool:
        if b"/libtorch" not in (_proc(self.pid) / "maps").read_bytes():
            return False
        command = (_proc(self.pid) / "cmdline").read_bytes()
        return not any(helper in command for helper in HELPERS)

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


@dataclass
class Family:
    """A rank, its loader workers, and its other processes that have loaded PyTorch.

    Its script has started these itself, and they may be anything: ranks of their own (`mp.spawn`), or a pool.
    """

    rank: Process
    loaders: list[Process] = field(default_factory=list)
    others: list[Process] = field(default_factory=list)

    def processes(self) -> list[Process]:
        return [self.rank, *self.loaders, *self.others]

    def row(self, parents: dict[int, int]) -> dict[str, object]:
        """Return the cells of its rank's row; `parents`: of each process of the job, its parent."""
        loaders = [one for one in self.loaders if self._loads_for_the_rank(one, parents)]
        settled = (one for one in self.others if one.seconds_with_torch >= IMPORTS_SECONDS)
        computing = [one for one in settled if one.cores >= COMPUTES]
        return {
            "what": samples.RANK,
            "number": self.rank.rank,
            "name": self.rank.state,
            "memory_mb": sum(one.memory for one in self.processes()) / 1e6,
            "cores": self.rank.cores,
            "core_list": self.rank.core_list,
            "waiting": self.rank.waiting,
            "loaders": len(loaders),
            "loader_cores": sum(one.cores for one in loaders),
            "others": len(computing),
            "other_cores": sum(one.cores for one in computing),
        }

    def _loads_for_the_rank(self, loader: Process, parents: dict[int, int]) -> bool:
        """Return whether a loader worker is the rank's own, and not that of one of its other processes."""
        others = {process.pid for process in self.others}
        pid = loader.parent
        while pid in parents and pid != self.rank.pid and pid not in others:
            pid = parents[pid]
        return pid not in others


class Processes:
    """The processes whose environment has all of `variables`, except this one.

    A rank has loaded PyTorch, and so have its loader workers; torchrun is neither.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        self._mine = {f"{name}={value}" for name, value in variables.items()}
        self._processes: dict[int, Process] = {}
        self._strangers: Counter[int] = Counter()  # process -> samples in which it was not the job's
        self._torchruns: set[int] = set()
        self._moment = math.nan  # of the last sample
        self._samples = 0
        self._network_bytes = _network_bytes()
        self._meetings = Meetings()
        self._memory = memory.JobMemory()
        self._checkpoints = Path(variables.get(job_folder.VARIABLE, ""), job_folder.CHECKPOINTS)
        self._checkpoint_bytes = 0
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
            for process in self._processes.values():
                with suppress(OSError):  # it has ended
                    shares = memory.shares(process.pid)
                    process.shared = process.resident - shares.memory
                    process.in_shared_files = shares.in_shared_files
            self._checkpoint_bytes = memory.largest_checkpoint(self._checkpoints)
        self._samples += 1
        families = self._families()
        self.ranks = {process.pid: process.rank for family in families for process in family.processes()}
        before, self._network_bytes = self._network_bytes, _network_bytes()
        processes = self._processes.values()
        node = {
            "what": samples.NODE,
            "memory_mb": self._memory.used(processes) / 1e6,
            "memory_limit_mb": memory_limit() / 1e6,
            "cores": sum(one.cores for one in processes),
            "core_list": ",".join(sorted({one.core_list for one in processes})),
            "network_mb_s": (self._network_bytes - before) / seconds / 1e6,
            "shared_files_mb": self._memory.of_no_process(processes) / 1e6,
            "checkpoint_mb": self._checkpoint_bytes / 1e6,
        }
        parents = {process.pid: process.parent for process in processes}
        met = self._look_who_has_met(families)
        return [node, *(family.row(parents) | {"met": met[family.rank.rank]} for family in families)]

    def _look_who_has_met(self, families: list[Family]) -> dict[int, str]:
        """Return with whom each rank has had a connection; loader workers have those of their rank."""
        of_ranks = {one.rank.rank: [process.pid for process in (one.rank, *one.others)] for one in families}
        others = self._processes.keys() - self.ranks.keys()
        return self._meetings.look(of_ranks, others)

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

    def _families(self) -> list[Family]:
        """Return a family for each number of a rank in an environment; the oldest process is the rank."""
        processes = sorted(self._processes.values(), key=lambda process: process.started)
        its_own = [process for process in processes if process.by_torchrun]
        self._torchruns |= {process.parent for process in its_own} - {process.pid for process in its_own}
        families: dict[int, Family] = {}
        for process in processes:
            if not process.torch or process.pid in self._torchruns:
                continue
            family = families.setdefault(process.rank, Family(process))
            if process is not family.rank:
                (family.loaders if process.loads_batches else family.others).append(process)
        return [families[rank] for rank in sorted(families)]


def _proc(pid: int | str) -> Path:
    return Path(psutil.PROCFS_PATH, str(pid))


def _caught_signals(pid: int) -> set[int]:
    """Return the numbers of the signals that a process catches."""
    status = (_proc(pid) / "status").read_text(errors="replace")
    mask = int(status.partition("SigCgt:")[2].split()[0], 16)
    return {number for number in range(1, signal.NSIG) if mask >> (number - 1) & 1}


def _rank(variables: list[str]) -> tuple[int, bool]:
    """Return the rank of a process with these variables, and whether torchrun started it."""
    env = dict(variable.split("=", 1) for variable in variables if "=" in variable)
    return int(place.rank_of(env) or 0), place.launcher_of(env).name == "torchrun"


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
