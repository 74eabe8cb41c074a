"""End a rank of a running job that has done nothing for as long as its user allows."""

import math
import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manygpus import job_folder
from manygpus.monitor import samples

# A process that uses less does nothing, nor does a GPU (sampled_job.py, findings/gpu_power.py).
IDLE_CORES = 0.05
IDLE_UTILISATION_PERCENT = 5
# States in /proc of a process that cannot go on: stopped, or waiting for a file system or a driver.
CANNOT_GO_ON = ("T", "D")


@dataclass
class IdleRanks:
    """The ranks of a node that do nothing, and since when.

    Attributes:
        most_seconds: for so long a rank may do nothing.
    """

    most_seconds: float
    _idle_since: dict[int, float] = field(default_factory=dict)

    def add(self, now: float, rows: Iterable[samples.Row]) -> list[int]:
        """Take a sample of the node at a time in seconds; return the ranks that have done nothing too long.

        Of several these are only those that cannot go on, if there are any: the others wait for them.
        """
        rows = list(rows)
        gpus = [row for row in rows if row["what"] == samples.GPU]
        ranks = {int(row["number"]): row for row in rows if row["what"] == samples.RANK}
        idle = {number for number, row in ranks.items() if _does_nothing(row, gpus)}
        self._idle_since = {number: self._idle_since.get(number, now) for number in idle}
        too_long = sorted(
            number for number, since in self._idle_since.items() if now - since >= self.most_seconds
        )
        return [number for number in too_long if ranks[number]["name"] in CANNOT_GO_ON] or too_long


def _does_nothing(rank: samples.Row, gpus: Iterable[samples.Row]) -> bool:
    """Return whether a rank does nothing, by its row and those of the GPUs of its node."""
    if rank["name"] == "T":
        return True
    cores = (rank["cores"], rank["loader_cores"], rank["other_cores"])
    return all(used < IDLE_CORES for used in cores) and not any(
        _may_compute(gpu, str(rank["number"])) for gpu in gpus
    )


def _may_compute(gpu: samples.Row, rank: str) -> bool:
    """Return whether a GPU computes for a rank, as far as that can be known."""
    if gpu.get("ranks") != "?" and rank not in str(gpu.get("ranks")).split("+"):
        return False
    utilisation = gpu.get("utilisation")
    return utilisation is None or math.isnan(utilisation) or utilisation >= IDLE_UTILISATION_PERCENT


def end(ranks: Mapping[int, int], node: str, seconds: float, job: Path) -> None:
    """Kill ranks, given with their processes, and note in the folder of their job why."""
    names = ", ".join(f"rank {rank} on {node}" for rank in ranks)
    text = f"{names} did nothing for {seconds:.0f} s: ended by the monitor (SITE_STALLED_SECONDS)\n"
    # Another node may have been first, and the disk may be full.
    with suppress(OSError), (job / job_folder.STALLED).open("x", encoding="utf-8") as file:
        file.write(text)
    for pid in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
