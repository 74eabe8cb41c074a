"""Which ranks of a running job have done nothing for too long."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from manygpus import job_folder
from manygpus.monitor import idle_ranks, samples
from manygpus.monitor.idle_ranks import IdleRanks

BUSY, IDLE = 0.9, 0.0


def rank(number: int, cores: float, state: str = "S", **others: float) -> samples.Row:
    idle = {"loader_cores": 0.0, "other_cores": 0.0}
    return {"what": samples.RANK, "number": number, "name": state, "cores": cores} | idle | others


def gpu(ranks: str, utilisation: float | None) -> samples.Row:
    return {"what": samples.GPU, "number": 0, "ranks": ranks, "utilisation": utilisation}


@pytest.mark.parametrize(
    ("rows", "too_long"),
    [
        ([rank(0, BUSY), rank(1, IDLE)], [1]),
        ([rank(0, IDLE), rank(1, IDLE)], [0, 1]),
        ([rank(0, IDLE), rank(1, IDLE, state="T")], [1]),  # the other one waits for it
        ([rank(0, IDLE, state="D"), rank(1, IDLE)], [0]),
        ([rank(0, IDLE, loader_cores=BUSY), rank(1, IDLE, other_cores=BUSY)], []),
        ([rank(0, math.nan), rank(1, BUSY)], []),
        ([rank(0, IDLE), rank(1, IDLE), gpu("0", 100), gpu("1", 0)], [1]),  # NCCL waits on a busy GPU
        ([rank(10, IDLE), gpu("1", 100)], [10]),
        ([rank(0, IDLE), gpu("?", 100)], []),  # it may be this rank's
        ([rank(0, IDLE), gpu("0", None)], []),
        ([rank(0, IDLE, state="T"), gpu("0", 100)], [0]),
    ],
)
def test_a_rank_does_nothing(rows: list[samples.Row], too_long: list[int]) -> None:
    idle = IdleRanks(most_seconds=60)
    assert [idle.add(now, rows) for now in (0, 59)] == [[], []]
    assert idle.add(60, rows) == too_long
    assert idle.add(61, [rank(number, BUSY) for number in too_long]) == []
    assert idle.add(62, rows) == []


def test_it_is_killed_and_the_first_reason_is_told(tmp_path: Path) -> None:
    sleeping = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    for node, process in zip(("n1", "n2"), sleeping, strict=True):
        idle_ranks.end({1: process.pid}, node, 60, job=tmp_path)
        assert process.wait() == -9
    idle_ranks.end({1: sleeping[0].pid}, "n1", 60, job=tmp_path)  # it has ended
    assert job_folder.read(tmp_path / job_folder.STALLED).startswith("rank 1 on n1 did nothing for 60 s")
