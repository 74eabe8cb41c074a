"""Sample a node once a second while a job runs there, and write the samples (samples.py)."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manygpus import job_folder, launchers
from manygpus.errors import reason
from manygpus.monitor import idle_ranks, samples
from manygpus.monitor.gpus import Gpus
from manygpus.monitor.idle_ranks import IdleRanks
from manygpus.monitor.processes import Processes


def sample(
    folder: Path,
    variables: dict[str, str],
    stop: Callable[[float], bool],
    period_seconds: float = samples.PERIOD_SECONDS,
    most_idle_seconds: float = 0,
) -> None:
    """Add samples of this node to its file in `folder`, and what cannot be sampled to the file `notes` there.

    It ends only when `stop` says so: what cannot be read is an empty cell and a note, and after a full disk
    the samples resume.

    Args:
        folder: the folder `monitor` of the job.
        variables: the variables of the environment, with their values, that identify the job's processes.
        stop: waits for at most so many seconds, and returns whether to end.
        period_seconds: the time from one sample to the next. A sample that would be late is left out.
        most_idle_seconds: a rank that has done nothing for so long is ended; 0: none is.
    """
    _yield_cores_to_the_ranks()
    monitor = _NodeMonitor(folder, variables, most_idle_seconds)
    began = time.monotonic()
    while True:
        monitor.add_sample()
        until_next = period_seconds - (time.monotonic() - began) % period_seconds
        if stop(until_next):
            return


def _yield_cores_to_the_ranks() -> None:
    """Take no core from a rank on waking up, as most programs do."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _NodeMonitor:
    """Samples this node. What cannot be looked at, or written, is tried again at the next sample."""

    def __init__(self, folder: Path, variables: dict[str, str], most_idle_seconds: float) -> None:
        self._folder = folder
        self._variables = variables
        self._node = launchers.node()
        self._notes = _Notes(folder / samples.NOTES, self._node)
        self._processes: Processes | None = None
        self._gpus: Gpus | None = None
        self._writer: samples.Writer | None = None
        self._idle_ranks = IdleRanks(most_idle_seconds) if most_idle_seconds else None

    def add_sample(self) -> None:
        now = time.time()
        process_rows = self._process_rows()
        gpu_rows = self._gpu_rows()
        rows = process_rows + (gpu_rows or [])
        try:
            if self._writer is None:
                self._writer = samples.Writer(self._folder, self._node)
            self._writer.add({"time": now} | row for row in rows)
        except OSError as error:
            path = f"{self._folder}/{self._node}.csv"
            self._notes.add(f"samples are missing: {path} could not be written ({reason(error)})")
            self._writer = None
        # Where the GPUs cannot be read, a rank that waits for its own would seem to do nothing.
        if self._idle_ranks and gpu_rows is not None:
            self._end_ranks(self._idle_ranks.add(time.monotonic(), rows))

    def _end_ranks(self, ranks: list[int]) -> None:
        if ranks:
            pids = {rank: self._processes.pids[rank] for rank in ranks}
            idle_ranks.end(pids, self._node, self._idle_ranks.most_seconds, job=self._folder.parent)

    def _process_rows(self) -> list[samples.Row]:
        try:
            if self._processes is None:
                self._processes = Processes(self._variables)
            return self._processes.sample()
        except Exception as error:  # of any kind: there may be GPUs to sample
            self._notes.add(f"the processes cannot be read ({type(error).__name__}: {error})")
            return []

    def _gpu_rows(self) -> list[samples.Row] | None:
        """Return a row for each GPU; None if they cannot be read."""
        try:
            if self._gpus is None:
                self._gpus = Gpus(self._notes.add)
            return self._gpus.sample(self._processes.ranks if self._processes else {})
        except Exception as error:  # of any kind: there may be processes to sample
            self._notes.add(f"the GPUs cannot be read ({type(error).__name__}: {error})")
            return None


class _Notes:
    """Sentences, each written once, also over restarts of the job."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node
        self._noted = set(job_folder.read(path).splitlines())

    def add(self, sentence: str) -> None:
        line = f"{self._node}: {sentence}"
        if line in self._noted:
            return
        self._noted.add(line)
        # The disk may be full.
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(f"{line}\n")
