"""The last words of a job name the rank that died first, its node, and what it died of.

The ranks here train nothing: what they die of does not depend on it, and they start in no time.
"""

import re
import shlex
from pathlib import Path

import pytest
from checkout import Checkout
from cluster import RunningCluster

from manygpus import job_folder
from manygpus.jobs.inside import failure_reason

# Ranks that note that they have started, wait for each other, and then do what is planted for each.
RANKS = """
import atexit, os, signal, sys, time
from pathlib import Path
from manygpus import errors

folder, rank = Path(os.environ["MANYGPUS_JOB_DIR"]), os.environ.get("RANK") or os.environ["SLURM_PROCID"]

def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)

def kill(*names):
    for pid in [int((folder / name).read_text()) for name in names]:
        os.kill(pid, signal.SIGKILL)

@errors.entrypoint
def main():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # these have no checkpoint to save
    (folder / "writing").with_suffix("." + rank).write_text(str(os.getpid()))
    (folder / "writing").with_suffix("." + rank).rename(folder / ("pid-" + rank))
    wait_for(*("pid-" + number for number in FATES))
    exec(FATES[rank])

main()
"""
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
CUDA = "CUDA error: an illegal memory access was encountered"
BROKEN = (
    "[rank{rank}]:[E519 12:00:30.123456789 ProcessGroupNCCL.cpp:2197] [PG ID 0 PG GUID 0(default_pg) "
    f"Rank {{rank}}] Process group watchdog thread terminated with exception: {CUDA}\n"
    "CUDA kernel errors might be asynchronously reported at some other API call\n"
)
WAIT = "time.sleep(600)"


def plant(checkout: Checkout, *fates: str) -> None:
    """What each rank does after all have started."""
    of_each = {str(rank): fate for rank, fate in enumerate(fates)}
    script = checkout.folder / "03_multigpu_ddp" / "fates.py"
    script.write_text(f"FATES = {of_each!r}\n{RANKS}")


def say(text: str) -> str:
    """What a rank does first, to be followed by something else."""
    write = f"sys.stderr.write({text!r}.format(rank=rank)); sys.stderr.flush()"
    return f"{write}; (folder / f'said-{{rank}}').touch(); "


WHO = r"(?:rank|torchrun) [\d,]+(?: on n\d)?"
HOW = "was killed|ended silently|aborted|gave up|left before the end"


def who_and_how(sentence: str) -> tuple[str, str]:
    """Return who has ended, and how; test_what_launchers_and_nccl_print has the whole sentences."""
    return re.search(WHO, sentence)[0], re.search(HOW, sentence)[0]


def ends(log: str) -> list[tuple[str, str]]:
    """Return who ended and how, by the last lines of a job's log: the first one, then the others."""
    lines = [line for line in log.splitlines() if line.startswith(("why     ", "then    "))]
    return list(map(who_and_how, lines))


@pytest.fixture
def checkout(tmp_path: Path, cluster: RunningCluster) -> Checkout:
    return Checkout(tmp_path / "a [checkout]", cluster)


def test_srun_of_several_dead_and_in_a_log_with_an_earlier_life(checkout: Checkout) -> None:
    """One that lost its peers and one that srun ended are not among them."""
    log = checkout.folder / "job.log"
    log.write_text("srun: error: n1: task 1: Killed\n")
    lost = "wait_for('dying'); time.sleep(0.5); raise RuntimeError('gloo')"
    plant(checkout, WAIT, lost, WAIT, "(folder / 'dying').touch(); kill('pid-2', 'pid-3')")
    options = ("--nodes=2", "--ntasks-per-node=2", f"--output={log}")
    job = checkout.submit("srun", "fates.py", sbatch=options)
    assert checkout.cluster.wait(job)["JobState"] == "FAILED", log.read_text()
    assert sorted(ends(log.read_text())) == [("rank 2 on n2", "was killed"), ("rank 3 on n2", "was killed")]
    assert log.read_text().splitlines()[-3].startswith("why     rank ")


def test_without_the_lines_of_srun_the_notes_tell(checkout: Checkout) -> None:
    # Rank 1 dies once rank 0 has noted its loss: srun ends the others at once, noted or not.
    plant(checkout, "raise RuntimeError('gloo')", "wait_for('rank-0.lost'); kill('pid-1')")
    log = checkout.fail("srun", "fates.py", sbatch=("--nodes=2", "--ntasks-per-node=1", "--error=/dev/null"))
    assert ends(log) == [("rank 1 on n2", "ended silently")], log


def test_torchrun_of_several_dead_and_of_itself(checkout: Checkout) -> None:
    """A torchrun that was killed is no rank, though srun counts it as its task."""
    abort = "wait_for('said-0'); os.kill(int((folder / 'pid-0').read_text()), signal.SIGABRT); "
    plant(checkout, say(GAVE_UP["2.15"]) + WAIT, abort + "kill('pid-1')")
    log = checkout.fail("torchrun", "fates.py")
    assert sorted(ends(log)) == [("rank 0", "gave up"), ("rank 1 on n1", "was killed")], log
    plant(checkout, "os.kill(os.getppid(), signal.SIGKILL); " + WAIT, WAIT)
    log = checkout.fail("torchrun", "fates.py")
    assert ends(log) == [("torchrun 0 on n1", "was killed")], log


def test_submitit_and_a_death_without_a_signal(checkout: Checkout) -> None:
    plant(checkout, WAIT, WAIT, "os._exit(3)", WAIT)
    checkout.fake("sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    done = checkout.submit_py("ddp", "--script", "fates.py", "--gpus", 4, "--nodes", 2, "--wait")
    assert done.returncode == 1
    assert who_and_how(done.stderr.splitlines()[-1]) == ("rank 2 on n2", "ended silently"), done.stderr
    assert re.search(r"exit code 3 \(in \d+_2_log.out\)\n$", done.stderr), done.stderr


def test_which_failed_first_is_no_matter_of_clocks(checkout: Checkout, tmp_path: Path) -> None:
    """The note of the first is an hour ahead, and that of the second was written before the job."""
    clocks = """
def clocks():
    wait_for('rank-0.failed')
    now = time.time()
    os.utime(folder / 'rank-1.failed', (now + 3600,) * 2)
    os.utime(folder / 'rank-0.failed', (now - 3600,) * 2)
atexit.register(clocks)
sys.exit(0)"""
    for place in (checkout, Checkout(tmp_path / "without Slurm")):
        plant(place, "wait_for('rank-1.failed'); raise ValueError('the second')", clocks)
        done = place.submit_py("ddp", "--script", "fates.py", "--gpus", 2, "--wait")
        assert done.returncode == 1
        assert who_and_how(done.stderr.splitlines()[-1]) == ("rank 1", "left before the end"), done.stderr
        assert re.search(r"exit code 0 \(in \d+_1_log.out\)\n$", done.stderr), done.stderr


@pytest.mark.parametrize("launcher", ["srun", "submitit"])
def test_nccl_gave_up_and_no_core_is_dumped(launcher: str, checkout: Checkout) -> None:
    """The rank that the others wait for does not say so; with submitit each rank has a log of its own."""
    checkout.site("ulimit -S -c hard")
    together = "wait_for('said-0', 'said-2', 'said-3'); os.abort()"
    gave_up = say(GAVE_UP["2.4" if launcher == "srun" else "2.15"]) + together
    plant(checkout, gave_up, WAIT, gave_up, gave_up)
    if launcher == "srun":
        log = checkout.fail("srun", "fates.py", sbatch=("--nodes=2", "--ntasks-per-node=2"))
        reasons = [line for line in log.splitlines() if line.startswith("why     ")]
    else:
        done = checkout.submit_py("ddp", "--script", "fates.py", "--gpus", 4, "--nodes", 2, "--wait")
        reasons = done.stderr.splitlines()[-1:]
    (reason,) = reasons
    assert "gave up" in reason and "rank 0,2,3 waited for rank 1 on n1" in reason
    assert not list(checkout.folder.rglob("core*"))


def test_python_is_in_the_container_only(checkout: Checkout) -> None:
    """Both at the beginning and at the end it is asked there."""
    outside = checkout.folder / "outside"
    outside.mkdir()
    (outside / "python").write_text("#!/bin/sh\nexit 127\n")
    (outside / "python").chmod(0o755)
    container = f'echo words of a container; PATH=${{PATH//"{outside}:"/}}; exec "$@"'
    checkout.site(
        f"activate_environment() {{ PATH='{outside}':$PATH; }}\n"
        f"SITE_CONTAINER=(bash -c {shlex.quote(container)} bash)\n"
    )
    plant(checkout, say(BROKEN) + "os.abort()", WAIT)
    log = checkout.fail("srun", "fates.py", sbatch=("--nodelist=n1",))
    assert "\nmeet at n1:" in log and log.startswith("job     "), log
    assert ends(log) == [("rank 0 on n1", "aborted")] and CUDA in log, log
    assert " with exit code 134\n" in log, log


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
