"""A rank uses no more threads than its share of its cores."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, rows_of, stage_command

from trainkit import machine


@pytest.fixture
def own() -> Iterator[set[int]]:
    """The cores of this process, with a thread on each."""
    before, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(len(cores))
    yield cores
    torch.set_num_threads(before)


def test_cores_are_shared_with_the_ranks_of_this_host_only(own: set[int]) -> None:
    elsewhere = ("another boot", own)
    machine.limit_threads([machine.cores(), elsewhere, elsewhere])
    assert torch.get_num_threads() == len(own)
    machine.limit_threads([machine.cores(), machine.cores(), elsewhere])
    assert torch.get_num_threads() == max(1, len(own) // 2)
    machine.limit_threads([machine.cores()])  # it is lowered, and never raised
    assert torch.get_num_threads() == max(1, len(own) // 2)


@pytest.mark.full
def test_one_process_with_more_threads_than_cores(tmp_path: Path) -> None:
    core = str(min(os.sched_getaffinity(0)))
    small = ("--epochs", 1, "--train-size", 64, "--test-size", 64, "--no-cuda", "--results-dir", tmp_path)
    command = ["taskset", "--cpu-list", core, *stage_command("single", *small)]
    done = subprocess.run(command, env=ENVIRONMENT | {"OMP_NUM_THREADS": "3"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["threads_per_worker"] for row in rows_of(tmp_path)] == [1]
