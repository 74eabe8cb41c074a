"""A practice cluster with a slow network, and the doctor's measurement of it, which stays in the results."""

import json
import sys
from pathlib import Path

import pytest
from checkout import copy_project
from cluster import RunningCluster, run_program, running_cluster

from trainkit.doctor.checkup import in_words
from trainkit.schema.records import RecordError, put_all_reduce, read_all_reduce

BYTES_PER_S = 100e6 / 8
AT_ONCE = 70 * 2**10  # what may pass without waiting after a pause


def test_an_exchange_takes_as_long_as_the_network_lets_it(cluster: RunningCluster, tmp_path: Path) -> None:
    """For a sum over two ranks each sends all of its bytes."""
    if cluster.run(["hostname"]).stdout != "login\n":
        pytest.skip("the nodes of this cluster are not hosts of their own")
    checkout = tmp_path / "a checkout"
    copy_project(checkout)
    (checkout / ".venv").symlink_to(sys.prefix)
    checkup = checkout / "trainkit" / "doctor" / "checkup_torch.py"
    checkup.write_text(checkup.read_text().replace("SLOW_SECONDS = 1.0", "SLOW_SECONDS = 0.05"))
    with running_cluster("--bandwidth", "100mbit", gpus=1) as slow:
        status = run_program("status", "--name", slow.name).stdout
        shape = ("--nodes", 2, "--gpus", 2)
        done = slow.run([sys.executable, checkout / "slurm" / "doctor.py", "--json", "--job", *shape])
    assert "with a network of 100 Mbit/s" in status
    told = json.loads(done.stdout)
    (kept,) = (checkout / "results" / "all_reduce").iterdir()
    measured = {row["bytes"]: row["seconds"] for row in read_all_reduce(kept)}
    assert 2**18 in measured
    assert max(measured) <= 2**20, "a sum of 1 MB takes more than 0.05 s, so there is no larger one"
    for size, seconds in measured.items():
        assert seconds > (size - AT_ONCE) / BYTES_PER_S
    slower = [finding for finding in told["findings"] if "slower than gigabit" in finding["message"]]
    assert [finding["level"] for finding in slower] == ["warning"]
    assert f"GB/s at {in_words(max(measured))}" in slower[0]["message"]


ROW = {"bytes": 1024, "seconds": 0.001, "ranks": 2, "nodes": 2, "backend": "gloo", "device_name": "CPU: one"}
ROW |= {"job": "7", "started_at": "2025-01-31T12:00:01Z"}


@pytest.mark.parametrize(
    ("column", "cell"), [("seconds", "0"), ("bytes", "1.5"), ("device_name", "\x1b[31mred")]
)
def test_a_cell_that_no_doctor_writes(column: str, cell: str, tmp_path: Path) -> None:
    put_all_reduce(tmp_path / "all_reduce" / "good.tsv", [ROW, ROW])
    assert read_all_reduce(tmp_path / "all_reduce" / "good.tsv") == [ROW, ROW]
    put_all_reduce(tmp_path / "bad.tsv", [ROW, ROW | {column: cell}])
    with pytest.raises(RecordError, match=rf"bad\.tsv: not read, line 3, column {column}: "):
        read_all_reduce(tmp_path / "bad.tsv")
