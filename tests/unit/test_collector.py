"""The monitor sees what a real job does on its node, and goes on whatever it cannot see."""

import math
import resource
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import ENVIRONMENT, stage_command
from monitoring import (
    NODE,
    Row,
    notes_so_far,
    rows_so_far,
    running_monitor,
    start_monitor,
    wait_until,
    with_nvidia_smi,
)

from manygpus.monitor import samples

FULL_AT_BYTES = 1000


@pytest.mark.usefixtures("mnist_dir")
def test_ranks_and_their_loader_workers(tmp_path: Path) -> None:
    """Of a real training under torchrun, which is no rank itself."""
    options = ("--no-cuda", "--epochs", 100, "--loader", "workers", "--num-workers", 1)
    command = stage_command("ddp", *options, "--results-dir", tmp_path, processes=2)
    environment = ENVIRONMENT | {"MANYGPUS_JOB_DIR": str(tmp_path)}
    job = psutil.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    busy_rows: dict[str, Row] = {}

    def both_work() -> bool:
        for row in rows_so_far(tmp_path, samples.RANK):
            if row["cores"] > 0 and row["loader_cores"] > 0:
                busy_rows[row["number"]] = row
        return busy_rows.keys() == {"0", "1"}

    try:
        with running_monitor(tmp_path, period=0.25):
            wait_until(both_work, job)
            node = rows_so_far(tmp_path, samples.NODE)[-1]
    finally:
        for process in [*job.children(recursive=True), job]:
            with suppress(psutil.NoSuchProcess):  # its parent has seen that another one ended
                process.kill()
        job.communicate()
    for row in busy_rows.values():
        assert row["loaders"] > 0
        assert 50 < row["memory_mb"] < node["memory_mb"] < node["memory_limit_mb"]
        assert row["name"] in ("R", "S", "D")
        assert row["core_list"][0].isdecimal()
        assert math.isnan(row["waiting"]) or 0 <= row["waiting"] <= 1
    assert node["cores"] > 0
    assert node["network_mb_s"] >= 0
    assert notes_so_far(tmp_path) == []


def test_a_monitor_that_is_killed_continues_in_the_same_file(tmp_path: Path) -> None:
    """And notes nothing twice, such as that the GPU is not there."""
    environment = {"CUDA_VISIBLE_DEVICES": "0"} | with_nvidia_smi(tmp_path)
    with start_monitor(tmp_path, **environment) as monitor:
        wait_until(lambda: len(rows_so_far(tmp_path)) > 2, monitor)
        monitor.kill()
    rows = rows_so_far(tmp_path)
    notes = notes_so_far(tmp_path)
    path = tmp_path / samples.FOLDER / f"{NODE}.csv"
    with path.open("a") as file:
        # As if killed while it wrote.
        file.write("1795338532.112,node,,,10")
    with running_monitor(tmp_path, most=2, **environment) as monitor:
        monitor.wait(60)
    assert rows_so_far(tmp_path)[: len(rows)] == rows
    assert len(rows_so_far(tmp_path)) == len(rows) + 2
    assert path.read_text().count("time,what") == 1
    assert len(notes) == 1 and notes_so_far(tmp_path) == notes


def test_a_disk_that_was_full_gets_the_samples_after_that(tmp_path: Path) -> None:
    """The limit on the size of a file stands in for the disk: there is space for a part of a line."""
    path = tmp_path / samples.FOLDER / f"{NODE}.csv"
    with running_monitor(tmp_path, FILE_LIMIT=str(FULL_AT_BYTES)) as monitor:
        wait_until(lambda: path.exists() and path.stat().st_size == FULL_AT_BYTES, monitor)
        time.sleep(0.3)
        no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(monitor.pid, resource.RLIMIT_FSIZE, no_limit)
        wait_until(lambda: len(rows_so_far(tmp_path)) > 2, monitor)
