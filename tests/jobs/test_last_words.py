"""The last words of a job name the rank that died first, its node, and what it died of.

The ranks here train nothing: what they die of does not depend on it, and they start in no time.
"""

import re
import shlex
from pathlib import Path

import pytest
from checkout import Checkout
from cluster import RunningCluster
from test_failure_reason import GAVE_UP, WHO

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


HOW = "was killed|ended silently|aborted|gave up|left before the end"


def who_and_how(sentence: str) -> tuple[str, str]:
    """Return who has ended, and how; test_failure_reason.py has the whole sentences."""
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
    # Both at once: torchrun sends SIGTERM to the others as soon as it sees that one has ended.
    both = "pid = int((folder / 'pid-0').read_text()); os.kill(pid, signal.SIGABRT); os.kill(os.getpid(), 9)"
    plant(checkout, say(GAVE_UP["2.15"]) + WAIT, f"wait_for('said-0'); {both}")
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
