"""The processes of a job on this node, and the resources they use, by psutil and /proc."""

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from manygpus import job_folder, launchers
from manygpus.monitor import memory, samples
from manygpus.monitor.connections import Meetings
from manygpus.ranges import format_ranges

SYS = Path("/sys")
# The kernel walks through all pages of a process for its share of shared memory, so it is asked rarely: every
# so many samples, and when a process is new.
SAMPLES_PER_WALK = 10
# A process may start as Slurm's, and become a task of the job: it is looked at in so many samples.
SAMPLES_TO_JOIN = 10
# A DataLoader worker catches these, so that it can tell what killed it (torch/csrc/DataLoader.cpp).
CAUGHT_BY_LOADER_WORKERS = {signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGTERM}
# The process from which multiprocessing forks others, which then have its command line.
FORK_SERVER = b"multiprocessing.forkserver"
# Parts of the command lines of others that load PyTorch and are no ranks: Inductor's compile workers, and
# torchrun, also before it has started its ranks.
HELPERS = (
    b"torch/_inductor/",
    b"manygpus.distributed.torchrun",
    b"torch.distributed.run",
    b"bin/torchrun",
)
TORCH_LIBRARY = b"/libtorch"
# From so many cores on a process counts as one that computes.
COMPUTING_CORES = 0.05
# A spawned loader worker is known by its signals only when it has imported all that its script does.
IMPORT_SECONDS = 10
ETHERNET_DEVICES = "class/net/*/device"
INFINIBAND_COUNTERS = "class/infiniband/*/ports/*/counters/port_*_data"
BYTES_PER_INFINIBAND_WORD = 4


class CpuTimes(NamedTuple):
    """How long a thread has run so far, and how long it has waited for a core, in ns."""

    running: int
    waiting: int


@dataclass
class Process:
    """A process of the job, and what it has used, in all and since the last sample.

    Attributes:
        pid: its number.
        rank: the rank that its environment names.
        by_torchrun: whether torchrun has started it.
        parent: the number of the process that has started it.
        started: when it was started, in seconds since 1970.
        state: its state in /proc, such as R.
        core_list: the cores that it may use.
        resident_bytes: its bytes in memory.
        other_bytes: the part of these that counts for other processes: each has an equal share.
        shared_file_bytes: the bytes of shared files in its share.
        cpu_seconds: the time that it has used, all its cores together.
        cores: how many cores it uses.
        threads: the times of its threads, by their numbers.
        waiting: the share of the time its threads could run that they waited; None if unknown.
        has_torch: whether it has loaded PyTorch.
        seconds_with_torch: the time since it was seen with PyTorch.
        loads_batches: whether it is a loader worker.
    """

    pid: int
    rank: int = 0
    by_torchrun: bool = False
    parent: int = 0
    started: float = 0
    state: str = ""
    core_list: str = ""
    resident_bytes: int = 0
    other_bytes: int = 0
    shared_file_bytes: int = 0
    cpu_seconds: float = 0
    cores: float = 0
    threads: dict[str, CpuTimes] = field(default_factory=dict)
    waiting: float | None = None
    has_torch: bool = False
    seconds_with_torch: float = 0
    loads_batches: bool = False

    @property
    def memory_bytes(self) -> int:
        """Return its share of the bytes in memory."""
        return max(self.resident_bytes - self.other_bytes, 0)

    @property
    def is_settled(self) -> bool:
        """Return whether it has had the time to become a loader worker."""
        return self.seconds_with_torch >= IMPORT_SECONDS

    def update(self, seconds: float) -> None:
        """Read its current state, `seconds` after the last sample.

        Raises:
            psutil.Error, OSError: if it has ended.
        """
        process = psutil.Process(self.pid)
        with process.oneshot():
            self.parent = process.ppid()
            self.started = process.create_time()
            cpu_times = process.cpu_times()
        self.core_list = format_ranges(process.cpu_affinity())
        self.resident_bytes = process.memory_info().rss
        self.state = self._read_state()
        cpu_seconds = cpu_times.user + cpu_times.system
        self.cores = (cpu_seconds - self.cpu_seconds) / seconds
        self.cpu_seconds = cpu_seconds
        waiting = self._read_waiting()
        # The first value is for its whole life.
        self.waiting = waiting if seconds > 0 else None
        if self.has_torch:
            self.seconds_with_torch += seconds
        else:
            self.has_torch = self._has_loaded_torch()
        self.loads_batches = self.has_torch and _caught_signals(self.pid) >= CAUGHT_BY_LOADER_WORKERS

    def walk_through_pages(self) -> None:
        """Read its shares of what it has in memory together with others."""
        # It may have ended.
        with suppress(OSError):
            shares = memory.shares(self.pid)
            self.other_bytes = self.resident_bytes - shares.memory_bytes
            self.shared_file_bytes = shares.shared_file_bytes

    def _read_state(self) -> str:
        # The name, in brackets, may contain anything.
        after_the_name = (_proc(self.pid) / "stat").read_text(errors="replace").rpartition(") ")[2]
        return after_the_name[0].upper()

    def _has_loaded_torch(self) -> bool:
        if TORCH_LIBRARY not in (_proc(self.pid) / "maps").read_bytes():
            return False
        command = _command_line(self.pid)
        if FORK_SERVER in command:
            return command == _command_line(self.parent)
        return not any(helper in command for helper in HELPERS)

    def _read_waiting(self) -> float | None:
        """Return the share of its threads' runnable time that they waited; None if no thread was runnable.

        Kernels without this count report 0 for both, or nothing.
        """
        threads: dict[str, CpuTimes] = {}
        running = 0
        waiting = 0
        for path in _proc(self.pid).glob("task/*/schedstat"):
            # It may have ended.
            with suppress(OSError, ValueError):
                ran, waited = path.read_text().split()[:2]
                times = CpuTimes(running=int(ran), waiting=int(waited))
                number = path.parent.name
                before = self.threads.get(number, CpuTimes(running=0, waiting=0))
                running += times.running - before.running
                waiting += times.waiting - before.waiting
                threads[number] = times
        self.threads = threads
        runnable = running + waiting
        return waiting / runnable if runnable else None


@dataclass
class Family:
    """A rank, its loader workers, and its other processes that have loaded PyTorch.

    Its script has started these itself, and they may be anything: ranks of their own (`mp.spawn`), or a pool.
    """

    rank: Process
    loaders: list[Process] = field(default_factory=list)
    others: list[Process] = field(default_factory=list)

    @property
    def processes(self) -> list[Process]:
        return [self.rank, *self.loaders, *self.others]

    def add(self, process: Process) -> None:
        """Add a process that is not the rank."""
        if process.loads_batches:
            self.loaders.append(process)
        else:
            self.others.append(process)

    def row(self, parents: Mapping[int, int], met: str) -> samples.Row:
        """Return the row of its rank.

        Args:
            parents: the parent of each process of the job.
            met: whom it has had a connection with.
        """
        loaders = [loader for loader in self.loaders if self._loads_for_the_rank(loader, parents)]
        computing = [
            process for process in self.others if process.is_settled and process.cores >= COMPUTING_CORES
        ]
        return {
            "what": samples.RANK,
            "number": self.rank.rank,
            "name": self.rank.state,
            "memory_mb": sum(process.memory_bytes for process in self.processes) / 1e6,
            "cores": self.rank.cores,
            "core_list": self.rank.core_list,
            "waiting": self.rank.waiting,
            "loaders": len(loaders),
            "loader_cores": sum(loader.cores for loader in loaders),
            "others": len(computing),
            "other_cores": sum(process.cores for process in computing),
            "met": met,
        }

    def _loads_for_the_rank(self, loader: Process, parents: Mapping[int, int]) -> bool:
        """Return whether a loader worker is the rank's own, and not that of one of its other processes."""
        others = {process.pid for process in self.others}
        ancestor = loader.parent
        while ancestor in parents and ancestor != self.rank.pid and ancestor not in others:
            ancestor = parents[ancestor]
        return ancestor not in others


class Processes:
    """The processes whose environment has all of `variables`, except this one.

    A rank has loaded PyTorch, and so have its loader workers; torchrun is neither.

    Attributes:
        ranks: the rank of each of its processes, also of its loader workers, by the process's number.
        pids: the number of the process that is the rank itself, by the rank.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        self.ranks: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self._variables = {f"{name}={value}" for name, value in variables.items()}
        self._processes: dict[int, Process] = {}
        # In how many samples a process was not the job's.
        self._strange_samples: Counter[int] = Counter()
        self._torchruns: set[int] = set()
        self._sampled_at = math.nan
        self._samples = 0
        self._network_bytes = _network_bytes()
        self._meetings = Meetings()
        self._memory = memory.JobMemory()
        self._checkpoints = Path(variables.get(job_folder.VARIABLE, ""), job_folder.CHECKPOINTS)
        self._checkpoint_bytes = 0

    def sample(self) -> list[samples.Row]:
        """Return a row for the node and one for each rank; use since the last sample is NaN at first."""
        now = time.monotonic()
        seconds = now - self._sampled_at
        self._sampled_at = now
        self._update_processes(seconds)
        families = self._families()
        self.ranks = {process.pid: process.rank for family in families for process in family.processes}
        self.pids = {family.rank.rank: family.rank.pid for family in families}
        parents = {process.pid: process.parent for process in self._processes.values()}
        met = self._look_who_has_met(families)
        rows = [self._node_row(seconds)]
        rows += [family.row(parents, met[family.rank.rank]) for family in families]
        return rows

    def _update_processes(self, seconds: float) -> None:
        """Find the processes of the job, and read what they use."""
        pids = psutil.pids()
        self._strange_samples = Counter({pid: self._strange_samples[pid] for pid in pids})
        known = self._processes
        self._processes = {}
        for pid in pids:
            if self._strange_samples[pid] < SAMPLES_TO_JOIN:
                process = self._update_process(known.get(pid) or Process(pid), seconds)
                if process:
                    self._processes[pid] = process
        has_new_processes = self._processes.keys() - known.keys()
        if self._samples % SAMPLES_PER_WALK == 0 or has_new_processes:
            for process in self._processes.values():
                process.walk_through_pages()
            self._checkpoint_bytes = memory.largest_checkpoint_bytes(self._checkpoints)
        self._samples += 1

    def _update_process(self, process: Process, seconds: float) -> Process | None:
        """Return a process of the job; None if it is not the job's, is another user's, or has ended."""
        self._strange_samples[process.pid] += 1
        try:
            variables = os.fsdecode((_proc(process.pid) / "environ").read_bytes()).split("\0")
            if process.pid == os.getpid() or not self._variables.issubset(variables):
                return None
            environment = dict(variable.split("=", 1) for variable in variables if "=" in variable)
            process.rank = int(launchers.rank_of(environment) or 0)
            launcher = launchers.launcher_of(environment)
            process.by_torchrun = isinstance(launcher, launchers.TorchElastic)
            process.update(seconds)
        except (OSError, psutil.Error):
            return None
        self._strange_samples[process.pid] = 0
        return process

    def _families(self) -> list[Family]:
        """Return a family for each number of a rank in an environment; the oldest process is the rank."""
        processes = sorted(self._processes.values(), key=lambda process: process.started)
        by_torchrun = [process for process in processes if process.by_torchrun]
        self._torchruns |= {process.parent for process in by_torchrun}
        self._torchruns -= {process.pid for process in by_torchrun}
        families: dict[int, Family] = {}
        for process in processes:
            if not process.has_torch or process.pid in self._torchruns:
                continue
            if process.rank in families:
                families[process.rank].add(process)
            else:
                families[process.rank] = Family(process)
        return [families[rank] for rank in sorted(families)]

    def _look_who_has_met(self, families: list[Family]) -> dict[int, str]:
        """Return with whom each rank has had a connection; loader workers have those of their rank."""
        pids_of_ranks = {
            family.rank.rank: [process.pid for process in (family.rank, *family.others)]
            for family in families
        }
        others = self._processes.keys() - self.ranks.keys()
        return self._meetings.look(pids_of_ranks, others)

    def _node_row(self, seconds: float) -> samples.Row:
        processes = self._processes.values()
        network_bytes = _network_bytes()
        new_network_bytes = network_bytes - self._network_bytes
        self._network_bytes = network_bytes
        return {
            "what": samples.NODE,
            "memory_mb": self._memory.used_bytes(processes) / 1e6,
            "memory_limit_mb": memory.limit_bytes() / 1e6,
            "cores": sum(process.cores for process in processes),
            "core_list": ",".join(sorted({process.core_list for process in processes})),
            "network_mb_s": new_network_bytes / seconds / 1e6,
            "shared_files_mb": self._memory.bytes_of_no_process(processes) / 1e6,
            "checkpoint_mb": self._checkpoint_bytes / 1e6,
        }


def _proc(pid: int) -> Path:
    return Path(psutil.PROCFS_PATH, str(pid))


def _command_line(pid: int) -> bytes:
    return (_proc(pid) / "cmdline").read_bytes()


def _caught_signals(pid: int) -> set[int]:
    """Return the numbers of the signals that a process catches."""
    status = (_proc(pid) / "status").read_text(errors="replace")
    mask = int(status.partition("SigCgt:")[2].split()[0], 16)
    return {number for number in range(1, signal.NSIG) if mask >> (number - 1) & 1}


def _network_bytes() -> int:
    """Count the bytes both ways, over the hardware interfaces, else over all but lo; and by RDMA."""
    infiniband_words = sum(_read_counters(SYS.glob(INFINIBAND_COUNTERS)))
    counters = psutil.net_io_counters(pernic=True)
    hardware = {path.parent.name for path in SYS.glob(ETHERNET_DEVICES)} & counters.keys()
    if infiniband_words:
        # They include IP over InfiniBand.
        hardware = {name for name in hardware if not name.startswith("ib")}
    names = hardware or counters.keys() - {"lo"}
    ethernet_bytes = sum(counters[name].bytes_sent + counters[name].bytes_recv for name in names)
    return ethernet_bytes + BYTES_PER_INFINIBAND_WORD * infiniband_words


def _read_counters(paths: Iterable[Path]) -> list[int]:
    """Read counters; those of a virtual card cannot be."""
    counts: list[int] = []
    for path in paths:
        with suppress(OSError, ValueError):
            counts.append(int(path.read_text()))
    return counts
