"""What a log ends with: the errors of ranks, and the last line of the script among those of others."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT

from manygpus.jobs import job_log

RAISES = """
class BadData(Exception): pass
try:
    {}["a"]
except KeyError:
    raise BadData("the data is broken")
"""
# The beginning of a script; "" if it raises before the group exists.
GROUP = """
import os, torch.distributed as dist
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo")
"""
BAR = "import sys; print(end='\\r 40%|####      | 4/10', file=sys.stderr)\n"
KILLED = b"\r 30%|###| 3/10\r 40%|####| 4/10srun: error: n1: task 0: Killed\nslurmstepd-n1: error: *** STEP\n"


@pytest.mark.parametrize("before", ["", BAR, GROUP + BAR], ids=["plain", "bar", "bar of a group"])
def test_the_error_of_a_traceback(before: str, tmp_path: Path) -> None:
    """Whatever its class is called, behind PyTorch's prefix, a progress bar and the labels of srun."""
    done = subprocess.run(
        [sys.executable, "-c", before + RAISES], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert ("[rank0]: " in done.stderr) == before.startswith(GROUP)
    for label in ("", "0: "):
        printed = "".join(f"{label}{line}\n" for line in done.stderr.rstrip("\n").split("\n"))
        (tmp_path / "job.log").write_text(f"Traceback\n{printed}srun: error: n1: task 0: Exited\n")
        logs = job_log.read(tmp_path / "job.log")
        assert job_log.error_of(0, logs, ranks=1).endswith("BadData: the data is broken")
        assert job_log.last_line(logs[0]).endswith("BadData: the data is broken")
        # Where several ranks share the log, one of another rank is not this rank's.
        assert bool(job_log.error_of(1, logs, ranks=2)) == (not before.startswith(GROUP))


def test_ranks_that_share_a_log_have_their_own_errors() -> None:
    """Of those without a prefix the first counts, and none of torchrun, which repeats that a rank failed."""
    lines = [
        "ValueError: early",
        "[rank1]: ValueError: of 1",
        "[rank0]: ValueError: of 0",
        "KeyError: 'late'",
    ]
    lines.append("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
    logs = {0: lines}
    errors = [job_log.error_of(rank, logs, ranks=3) for rank in (0, 1, 2, None)]
    assert errors == ["ValueError: of 0", "ValueError: of 1", "ValueError: early", "ValueError: early"]
    assert job_log.error_of(None, {0: lines[-1:]}, ranks=3) == ""
    # One task whose script starts the ranks itself, of which the second has failed first.
    assert job_log.error_of(0, logs, ranks=1) == "ValueError: early"
    assert job_log.error_of(0, {0: lines[1:3]}, ranks=1) == "ValueError: of 1"


def test_the_last_line_is_that_of_the_script(tmp_path: Path) -> None:
    log = tmp_path / "7_0_log.out"
    log.write_bytes(b"script  train.py\nepoch 1\n" + KILLED + b"\nwatch   short\nwhy     rank 0 was killed\n")
    assert job_log.last_line(job_log.last_lines(log)) == "40%|####| 4/10"
    log.write_bytes(b"[rank1]: ValueError: planted\nit ended\n")
    assert job_log.last_line(job_log.last_lines(log), said=["it ended"]) == "ValueError: planted"


def test_each_rank_has_its_log_and_only_the_end_is_read(tmp_path: Path) -> None:
    for name, text in {"7_0": "a", "7_10": "b", "70_1": "c", "job": "d"}.items():
        (tmp_path / f"{name}_log.out").write_text(f"{text}\n")
    assert job_log.read(tmp_path / "7_0_log.out") == {0: ["a"], 10: ["b"]}
    assert job_log.read(tmp_path / "job_log.out") == {0: ["d"]}
    with (tmp_path / "7_0_log.out").open("a") as file:
        file.truncate(10 * job_log.MOST_OF_A_LOG_BYTES)
        file.write("\nValueError: at the end\n")
    logs = job_log.read(tmp_path / "7_0_log.out")
    assert "a" not in logs[0] and job_log.error_of(0, logs, ranks=2) == "ValueError: at the end"
    printed = b"\n# in_job log 7_0_log.out\nx\n\n# in_job log 7_10_log.out\ny\n"
    assert {rank: [line for line in lines if line] for rank, lines in job_log.parse(printed).items()} == {
        0: ["x"],
        10: ["y"],
    }
