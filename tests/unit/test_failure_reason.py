"""Why a job has failed, read from what srun, torchrun, NCCL and gloo print, and from the notes of its ranks.

tests/jobs/test_last_words.py lets ranks die of it in real jobs.
"""

import re
from pathlib import Path

import pytest

from manygpus import job_folder
from manygpus.jobs.inside import failure_reason

# What a rank prints before NCCL aborts it: it waited for --timeout (PyTorch 2.4, 2.15), or its GPU failed.
TIMEOUT = (
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, "
    "NumelIn=1199882, NumelOut=1199882, Timeout(ms)=30000) ran for 30001 milliseconds before timing out."
)
GAVE_UP = {
    "2.4": f"[rank{{rank}}]:[E519 12:00:30.123456 ProcessGroupNCCL.cpp:607] {TIMEOUT}\n",
    "2.15": "[rank{rank}]:[E519 12:01:30.123456789 ProcessGroupNCCL.cpp:2197] [PG ID 0 PG GUID 0(default_pg) "
    f"Rank {{rank}}] Process group watchdog thread terminated with exception: {TIMEOUT}\n"
    "Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:760\n",
}
# A rank or a torchrun, as a reason begins.
WHO = r"(?:rank|torchrun) [\d,]+(?: on n\d)?"
BY_SRUN = """srun: error: n2: tasks 1,3: Out Of Memory
srun: error: n1: tasks 0-2: Terminated
srun: error: n1: task 0: Segmentation fault
"""
BY_TORCHRUN = """Failures:
  host      : n1.site
  rank      : 0 (local_rank: 0)
  exitcode  : 3 (pid: 7)
Root Cause (first observed failure):
  host      : n2.site
  rank      : 2 (local_rank: 0)
  exitcode  : -11 (pid: 8)
======
"""
BY_NCCL = "".join(GAVE_UP["2.15"].format(rank=rank) for rank in range(4))
MEMORY = "was killed because memory ran out: ask for more --mem"
SIGNALS = [f"rank 1 on n1 {MEMORY}", f"rank 3 on n2 {MEMORY}", "rank 0 on n1 died: Segmentation fault"]
# The node whose rank failed first may print last, after the grace time of its others.
BY_TWO_TORCHRUNS = """Root Cause (first observed failure):
  time      : 2026-11-28_15:52:02
  host      : n1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 7)
======
Root Cause (first observed failure):
  time      : 2026-11-28_15:51:58
  host      : n2
  rank      : 2 (local_rank: 0)
  exitcode  : 3 (pid: 8)
======
srun: error: n2: task 1: Exited with exit code 1
srun: error: n1: task 0: Killed
"""
NOT_MET = """error: the torchruns could not meet
srun: error: n2: task 1: Exited with exit code 1
srun: error: n1: task 0: Killed
"""
# srun may tell of the node first whose rank has lost the other one.
LOST = """[rank1]: torch.distributed.DistBackendError: NCCL error (of 1)
[rank2]: gloo.BadDataError: planted
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer
srun: error: n1: tasks 0-1: Exited with exit code 1
srun: error: n2: task 2: Exited with exit code 1
"""
MISMATCH = "[enforce fail at pair.cc:464] op.preamble.length <= op.nbytes. 100 vs 8. Is there a mismatch?"
BY_GLOO = f"""terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  {MISMATCH}
srun: error: n1: task 0: Aborted (core dumped)
"""
LEFT = "srun: error: First task exited 60s ago\nsrun: error: n1: task 1: Killed\n"
TOGETHER = "rank 1 on n1 was ended by srun, 60 s after another rank left: have all ranks end together"
BY_TIME = ["rank 2 on n2 ended silently, with exit code 3", "rank 0 on n1 ended silently, with exit code 1"]
FIRST_TO_EXIT = [
    "torchrun 1 on n2 ended with exit code 1: error: the torchruns could not meet",
    "torchrun 0 on n1 was killed (by hand, or because memory ran out: --mem)",
]
CODES = ["rank 2 on n2 died of signal SIGSEGV", "rank 0 on n1 ended silently, with exit code 3"]


@pytest.mark.parametrize(
    ("launcher", "printed", "reasons", "exit_code"),
    [
        ("srun", BY_SRUN, SIGNALS, 137),
        ("srun", LEFT, [TOGETHER], 137),
        ("srun", BY_GLOO, [f"rank 0 on n1 aborted ({MISMATCH})"], 134),
        ("torchrun", BY_TORCHRUN, CODES, 139),
        ("torchrun", BY_TWO_TORCHRUNS, BY_TIME, 3),
        ("torchrun", NOT_MET, FIRST_TO_EXIT, 1),
        ("", BY_NCCL, ["NCCL gave up after --timeout: rank 0,1,2,3 waited for each other"], 0),
    ],
)
def test_what_launchers_and_nccl_print(
    launcher: str, printed: str, reasons: list[str], exit_code: int, tmp_path: Path
) -> None:
    for rank in range(4):
        (tmp_path / f"rank-{rank}.started").write_text(f"n{rank // 2 + 1}\n")
    found_reasons = failure_reason.Evidence(tmp_path, {0: printed.splitlines()}, launcher).reasons()
    assert [reason.text for reason in found_reasons] == reasons and found_reasons[0].exit_code == exit_code
    # What a rank could still say itself comes first.
    (tmp_path / "rank-5.failed").write_text("error on rank 5\n")
    for ending, code in {"Exited with exit code 3": 3, "Aborted": 1, "Terminated": 1}.items():
        of_rank_5 = [f"srun: error: n3: task 5: {ending}"] if launcher == "srun" else []
        (first, *_) = failure_reason.Evidence(
            tmp_path, {0: printed.splitlines() + of_rank_5}, launcher
        ).reasons()
        assert first == failure_reason.Reason("error on rank 5", rank=5, exit_code=code if of_rank_5 else 1)


def test_a_rank_that_lost_another_was_not_the_first(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank-{rank}.started").touch()
    reasons = failure_reason.Evidence(tmp_path, {0: LOST.splitlines()}, "srun").reasons()
    assert [reason.rank for reason in reasons] == [2, 0, 1] and "BadDataError: planted" in reasons[0].text
    (_, *others) = failure_reason.sentences(reasons)
    assert others == [f"then    rank {rank} on n1 ended with exit code 1" for rank in (0, 1)]


GLOO = "error on rank {}: lost the other ranks ([/pytorch/third_party/gloo/gloo/transport/tcp/{}"
WAITED = "unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete)."
CLOSED = "pair.cc:561] Connection closed by peer [10.0.0.1]:9949."
# How srun and torchrun end the one that hung, or tell of it.
HUNG = {
    "srun": "srun: error: n1: tasks 0,2: Exited with exit code 1\nsrun: error: n2: task 1: {}",
    "torchrun": "  host      : n2\n  rank      : 1 (local_rank: 0)\n  exitcode  : {} (pid: 7)",
}


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("fate", ["stopped for a while", "killed"])
def test_gloo_gave_up_and_names_who_hung(launcher: str, fate: str, tmp_path: Path) -> None:
    """The ranks that have timed out were waiting; as recorded of four ranks, one of which hung."""
    for rank in (0, 2):
        (tmp_path / f"rank-{rank}.lost").write_text(GLOO.format(rank, WAITED))
    if fate == "killed":
        (tmp_path / "rank-1.started").write_text("n2")
        ending = {"srun": "Killed", "torchrun": "-9"}[launcher]
    else:
        (tmp_path / "rank-1.lost").write_text(GLOO.format(1, CLOSED))
        ending = {"srun": "Exited with exit code 1", "torchrun": "1"}[launcher]
    logs = {0: HUNG[launcher].format(ending).splitlines()}
    first, *_ = failure_reason.Evidence(tmp_path, logs, launcher).reasons()
    assert "rank 0,2 waited for rank 1 on n2" in first.text
    (tmp_path / "rank-1.started").unlink(missing_ok=True)
    (tmp_path / "rank-1.lost").write_text(GLOO.format(1, WAITED))  # all have waited: nobody is named
    (reason,) = failure_reason.Evidence(tmp_path, {}, launcher).reasons()
    assert not re.search(WHO, reason.text)


@pytest.mark.parametrize(
    ("error", "ranks", "remedy"),
    [
        ("torch.distributed.DistNetworkError: port: 29511, name: EADDRINUSE", 2, "--one-process-per-node"),
        ("torch.distributed.DistNetworkError: port: 29511, name: EADDRINUSE", 1, ""),
        ("RuntimeError: [enforce fail] Unable to find address for: ^lo", 1, "SITE_NETWORK_INTERFACE"),
    ],
)
def test_what_to_do_about_an_error_of_a_plain_script(
    error: str, ranks: int, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / job_folder.PLAIN).touch()
    for rank in range(ranks):
        (tmp_path / f"rank-{rank}.started").touch()
    printed = [error, "srun: error: n1: task 0: Exited with exit code 1"]
    (reason,) = failure_reason.Evidence(tmp_path, {0: printed}, "srun").reasons()
    assert reason.text.partition(error)[2].startswith(": " if remedy else "") and remedy in reason.text
    assert ("--one" in reason.text or "SITE_" in reason.text) == bool(remedy)


@pytest.mark.parametrize("words", ["Invalid --no-kill specification", "Unable to create step for job 7: x"])
def test_srun_that_starts_nothing_says_why(words: str, tmp_path: Path) -> None:
    """But for what it says of a rank or a node that has failed."""
    others = ["srun: error: n1: task 0: Killed", "srun: error: Node failure on n2"]
    (reason,) = failure_reason.Evidence(tmp_path, {0: [*others, f"srun: error: {words}"]}, "srun").reasons()
    assert words in reason.text and "SLURM_" in reason.text
    reason, *_ = failure_reason.Evidence(tmp_path, {0: others}, "srun").reasons()
    assert "SLURM_" not in reason.text


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_command_that_is_not_there(launcher: str, tmp_path: Path) -> None:
    """In place of the ranks' Python; one that a rank has called itself is another matter."""
    printed = ["srun: error: n1: tasks 0-1: Exited with exit code 127"]
    (reason,) = failure_reason.Evidence(tmp_path, {0: printed}, launcher).reasons()
    assert "SITE_CONTAINER" in reason.text
    (tmp_path / "rank-0.started").write_text("n1\n")
    reason, *_ = failure_reason.Evidence(tmp_path, {0: printed}, launcher).reasons()
    assert re.match("(rank|torchrun) 0 on n1 ended silently", reason.text)
