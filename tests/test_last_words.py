"""The last words of a job name the rank that died first, its node, and what it died of.

The ranks here train nothing: what they die of does not depend on it, and they start in no time.
"""

from pathlib import Path

import pytest
from checkout import Checkout
from cluster import RunningCluster

# Ranks that note that they have started, wait for each other, and then do what is planted for each.
RANKS = """
import atexit, os, signal, sys, time
from pathlib import Path
from trainkit import errors

folder, rank = Path(os.environ["TRAINKIT_JOB_DIR"]), os.environ.get("RANK") or os.environ["SLURM_PROCID"]

def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)

def kill(*names):
    for pid in [int((folder / name).read_text()) for name in names]:
        os.kill(pid, signal.SIGKILL)

def main():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # these have no checkpoint to save
    (folder / "writing").with_suffix("." + rank).write_text(str(os.getpid()))
    (folder / "writing").with_suffix("." + rank).rename(folder / ("pid-" + rank))
    wait_for(*("pid-" + number for number in FATES))
    exec(FATES[rank])

errors.run(main)
"""
KILLED = "was killed (by hand, or for want of memory: --mem)"
WAIT = "time.sleep(600)"


def plant(checkout: Checkout, *fates: str) -> None:
    """What each rank does after all have started."""
    of_each = {str(rank): fate for rank, fate in enumerate(fates)}
    script = checkout.folder / "03_multigpu_ddp" / "fates.py"
    script.write_text(f"FATES = {of_each!r}\n{RANKS}")


def verdict(log: str) -> list[str]:
    """What the end of the job's log tells, without `why` and `then`."""
    return [line[8:] for line in log.splitlines() if line.startswith(("why     ", "then    "))]


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
    first, then = verdict(log.read_text())
    assert {first, then} in (
        {f"rank {rank} on n2 {KILLED}", f"rank {5 - rank} on n2 was killed"} for rank in (2, 3)
    )
    assert log.read_text().splitlines()[-3].startswith("why     rank ")


def test_without_the_lines_of_srun_the_notes_tell(checkout: Checkout) -> None:
    plant(checkout, "raise RuntimeError('gloo')", "kill('pid-1')")
    log = checkout.fail("srun", "fates.py", sbatch=("--nodes=2", "--ntasks-per-node=1", "--error=/dev/null"))
    assert verdict(log) == [
        "rank 1 on n2 ended without a word: killed (by hand, or for want of memory: --mem)?"
    ], log


def test_torchrun_of_several_dead_and_of_itself(checkout: Checkout) -> None:
    """A torchrun that was killed is no rank, though srun counts it as its task."""
    plant(checkout, WAIT, "kill('pid-0'); os.abort()")
    log = checkout.fail("torchrun", "fates.py")
    dead = sorted(line.partition(" (")[0] for line in verdict(log))
    assert dead == ["rank 0 on n1 was killed", "rank 1 on n1 aborted"], log
    plant(checkout, "os.kill(os.getppid(), signal.SIGKILL); " + WAIT, WAIT)
    log = checkout.fail("torchrun", "fates.py")
    assert verdict(log) == [f"torchrun 0 on n1 {KILLED}"], log


def test_submitit_and_a_death_without_a_signal(checkout: Checkout) -> None:
    plant(checkout, WAIT, WAIT, "os._exit(3)", WAIT)
    checkout.fake("sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    done = checkout.submit_py("ddp", "--script", "fates.py", "--gpus", 4, "--nodes", 2, "--wait")
    assert done.returncode == 1
    assert done.stderr.endswith(" failed: rank 2 on n2 ended without a word, with exit code 3\n"), done.stderr


@pytest.mark.parametrize("slurm", [True, False], ids=["Slurm", "local"])
def test_which_failed_first_is_no_matter_of_clocks(
    slurm: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The note of the first is an hour ahead, and that of the second was written before the job."""
    checkout = Checkout(tmp_path / "a checkout", request.getfixturevalue("cluster") if slurm else None)
    clocks = """
def clocks():
    wait_for('rank-0.failed')
    now = time.time()
    os.utime(folder / 'rank-1.failed', (now + 3600,) * 2)
    os.utime(folder / 'rank-0.failed', (now - 3600,) * 2)
atexit.register(clocks)
sys.exit(0)"""
    plant(checkout, "wait_for('rank-1.failed'); raise ValueError('the second')", clocks)
    done = checkout.submit_py("ddp", "--script", "fates.py", "--gpus", 2, "--wait")
    assert done.returncode == 1
    assert done.stderr.endswith(" failed: error on rank 1: left before the end, with exit code 0\n"), (
        done.stderr
    )
