"""Sample a node once a second while a job runs there, and write the samples (samples.py)."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainkit import job_folder
from trainkit.distributed import launchers as place
from trainkit.errors import reason
from trainkit.monitor.gpus import Gpus
from trainkit.monitor.processes import Processes
from trainkit.record import samples


def sample(
    folder: Path,
    variables: dict[str, str],
    stop: Callable[[float], bool],
    period: float = samples.PERIOD_SECONDS,
) -> None:
    """Add samples of this node to its file in `folder`, and what cannot be sampled to the file `notes` there.

    It ends only when `stop` says so: what cannot be read is an empty cell and a note, and after a full disk
    the samples resume.

    Args:
        folder: the folder `monitor` of the job.
        variables: of the environment, with their values, that identify the job's processes.
        stop: waits for at most so many seconds, and returns whether to end.
        period: seconds from one sample to the next. A sample that would be late is left out.
    """
    # So as not to take a core from a rank on waking up, as most programs do.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    node = place.node()
    notes = _Notes(folder / samples.NOTES, node)
    processes = gpus = writer = None
    began = time.monotonic()
    while True:
        rows, now = [], time.time()
        try:
            processes = processes or Processes(variables)
            rows += processes.sample()
        except Exception as error:  # of any kind: there may be GPUs to sample
            notes.tell(f"the processes cannot be looked at ({type(error).__name__}: {error})")
        try:
            gpus = gpus or Gpus(notes.tell)
            rows += gpus.sample(processes.ranks if processes else {})
        except Exception as error:
            notes.tell(f"the GPUs cannot be looked at ({type(error).__name__}: {error})")
        try:
            writer = writer or samples.Writer(folder, node)
            writer.add({"time": now} | row for row in rows)
        except OSError as error:
            notes.tell(f"samples are missing: {folder}/{node}.csv could not be written ({reason(error)})")
            writer = None
        if stop(period - (time.monotonic() - began) % period):
            return


class _Notes:
    """Sentences, each written once, also over restarts of the job."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node
        self._noted = set(job_folder.read(path).splitlines())

    def tell(self, sentence: str) -> None:
        line = f"{self._node}: {sentence}"
        if line not in self._noted:
            self._noted.add(line)
            with suppress(OSError):  # the disk may be full
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(f"{line}\n")
