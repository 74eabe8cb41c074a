"""USR2 and SIGTERM at any moment of a job: it saves, and resumes later, or it ends with nothing lost."""

import re
from pathlib import Path
from textwrap import dedent, indent

import pytest
import torch
from checkout import Checkout
from cluster import RunningCluster
from conftest import Script, assert_same_end, places, rows_of, succeeded

SMALL = ("--test-size", 100, "--width", 4, "--precision", "fp32")
TRAINING = (*SMALL, "--epochs", 2, "--train-size", 800, "--batch-size", 40, "--save-model", "--lr", 0.1)


def when(start: int, code: str) -> str:
    """Return code that runs in this start of a job only: 0 for the first one."""
    condition = f"if os.environ.get('SLURM_RESTART_COUNT', '0') == '{start}':"
    return f"{condition}\n{indent(dedent(code).strip(), '    ')}"


@pytest.fixture(scope="module")
def never_stopped(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the same training in one go."""
    folder = tmp_path_factory.mktemp("never-stopped")
    succeeded(script("ddp", *TRAINING, "--results-dir", folder, ranks=2))
    return folder


# Each rank sends the signals to itself, so that they come at that very moment.
USR2, TERM = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGUSR2", "SIGTERM"))
AT_EACH_SAVE = f"""
save = torch.save

def save_and_hear(*arguments, **named):
    {USR2}
    save(*arguments, **named)

torch.save = save_and_hear
"""
# Where a rank is, what is planted for it, and how the log tells of it.
MOMENTS = {
    "importing": (USR2, "stopped after step 1 of epoch 1"),
    # While the group forms: rank 0 comes later.
    "meeting": (
        f"threading.Timer(0.3, lambda: {TERM}).start() if faults.rank() == 1 else time.sleep(1)",
        "stopped after ",
    ),
    # At the first step, and at every step after it.
    "training": (f"faults.before_every_step(lambda optimizer: ({USR2}, {TERM}))", "stopped after step "),
    "saving": (AT_EACH_SAVE, "stopped after "),
}
JOBS = {"srun": ["importing", "training"], "torchrun": ["meeting"], "submitit": ["saving"]}
# Ends at the first signal, and asks for the way back. It loads no PyTorch: the signals are Slurm's.
# It notes them in a file, as srun, which Slurm ends with it, may lose the last words.
WAITS = f"""
import os, signal, sys, time
from pathlib import Path

def stop(number, _):
    Path(os.environ["MANYGPUS_JOB_DIR"], "heard").write_text(signal.Signals(number).name)
    Path(os.environ["MANYGPUS_JOB_DIR"], "stopped").touch()
    sys.exit()

for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, stop)
{when(0, "time.sleep(600)")}
print("came back")
"""
LIMITS = {"SIGUSR2": ("--time=2", "--signal=USR2@30"), "SIGTERM": ("--time=1", "--signal=CONT@30")}


@pytest.fixture(scope="module")
def limited(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, list[int]]:
    """A checkout and its jobs with these limits, which they reach while other tests use the other node."""
    checkout = Checkout(tmp_path_factory.mktemp("limited") / "a checkout", cluster)
    (checkout.script("single").parent / "waits.py").write_text(WAITS)
    return checkout, [
        checkout.submit("single", "--plain", "waits.py", sbatch=("--nodelist=n2", *limit))
        for limit in LIMITS.values()
    ]


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("launcher", JOBS)
def test_a_signal_at_any_moment(launcher: str, on_cluster: Checkout, never_stopped: Path) -> None:
    """One job, which is stopped at another moment after every start, and ends where the others end."""
    expected = []
    for start, moment in enumerate(JOBS[launcher]):
        planted, tells = MOMENTS[moment]
        on_cluster.plant("ddp", when(start, planted), at_import=moment == "importing")
        expected.append(tells)
    # During the requeue: the batch script gets SIGTERM from it anyway, and here once more before.
    # By the site file, as on the nodes Slurm's own commands come before those of `fake`.
    on_cluster.site('scontrol() { [[ $1 != requeue ]] || kill -TERM $$; command scontrol "$@"; }\n')

    training = (*TRAINING, "--checkpoint-minutes", 1e-6)
    if launcher == "submitit":
        done = succeeded(on_cluster.submit_py("ddp", *training, "--wait"))
        assert done.stdout.splitlines()[-1].startswith("done: results: ")
        job = int(done.stdout.split()[1])
    else:
        job = on_cluster.submit(launcher, *training)
    state = on_cluster.cluster.wait(job, timeout=300)
    (path,) = (*on_cluster.folder.rglob(f"*-{job}.log"), *on_cluster.folder.rglob(f"{job}_0_log.out"))
    log = path.read_text()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", str(len(expected))), log
    stops = [line for line in log.splitlines() if line.startswith("stopped after")]
    assert len(stops) == len(expected) and all(map(str.startswith, stops, expected)), log
    assert "Traceback" not in log

    assert [row["epoch"] for row in rows_of(on_cluster.folder / "results")] == [1, 2]
    assert_same_end(on_cluster.folder / "results", never_stopped, loss=1e-4)
    assert [path.name for path in on_cluster.checkpoints.glob("*.pt")] == ["epoch-3-step-0.pt"]


def test_a_signal_while_the_ranks_evaluate(
    on_cluster: Checkout, script: Script, never_stopped: Path, tmp_path: Path
) -> None:
    """Without Slurm, which makes no difference there."""
    planted = f"""
        from torch.nn.modules.module import register_module_forward_hook

        def stop_the_next_pass(optimizer):
            register_module_forward_hook(lambda *_: {TERM})

        faults.after_step({800 // 40}, stop_the_next_pass)  # the last one of the epoch
    """
    on_cluster.plant("ddp", planted)
    arguments = (*TRAINING, *places(tmp_path))
    assert "stopped after epoch 1" in script(on_cluster.script("ddp"), *arguments, ranks=2).stdout
    assert "resumed from" in succeeded(script("ddp", *arguments, ranks=2)).stdout
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1, 2]
    assert_same_end(tmp_path, never_stopped, loss=1e-4)


def test_a_preempted_job_saves_and_comes_back_by_itself(on_cluster: Checkout) -> None:
    """A job of the partition urgent takes its node. Its ranks get SIGTERM; the batch script hears nothing."""
    on_cluster.plant("single", when(0, "faults.before_every_step(lambda optimizer: time.sleep(2))"))
    job = on_cluster.submit("single", *TRAINING, sbatch=("--nodelist=n1", "--exclusive"))
    on_cluster.wait_for("\nstage single", job)
    urgent = on_cluster.cluster.submit(
        "--partition=urgent", "--nodelist=n1", "--exclusive", "--wrap=true", cwd="/tmp"
    )
    state = on_cluster.cluster.wait(job, timeout=300)
    log = on_cluster.log(job)
    assert (state["JobState"], state["Restarts"] in "12") == ("COMPLETED", True), log
    assert "stopped after step" in log
    assert log.count("resumed from") == 1
    if state["Restarts"] == "1":  # newer Slurm starts it once more by itself (seen: 24.11)
        on_cluster.cluster.run(["scontrol", "requeue", job])
        assert on_cluster.cluster.wait(job, timeout=300)["Restarts"] == "2"
        log = on_cluster.log(job)
    assert "this job has already ended well, and does nothing more" in log
    assert on_cluster.cluster.wait(urgent)["JobState"] == "COMPLETED"
    assert [row["epoch"] for row in rows_of(on_cluster.folder / "results")] == [1, 2]


def test_a_job_that_ends_well_while_it_is_preempted_trains_once(on_cluster: Checkout) -> None:
    """Newer Slurm (seen: 24.11) starts it again, and it does nothing more then."""
    on_cluster.plant("single", when(0, "faults.after_epoch(2, lambda: time.sleep(6))"))
    job = on_cluster.submit("single", *TRAINING, sbatch=("--nodelist=n1", "--exclusive"))
    on_cluster.wait_for("epoch 2/2", job)
    urgent = on_cluster.cluster.submit(
        "--partition=urgent", "--nodelist=n1", "--exclusive", "--wrap=true", cwd="/tmp"
    )
    assert on_cluster.cluster.wait(urgent)["JobState"] == "COMPLETED"
    state = on_cluster.cluster.wait(job)
    log = on_cluster.log(job)
    assert state["JobState"] == "COMPLETED", log
    assert log.count("does nothing more") == int(state["Restarts"]), log
    assert [row["epoch"] for row in rows_of(on_cluster.folder / "results")] == [1, 2]


def test_scancel_saves_and_the_job_stays_away(on_cluster: Checkout) -> None:
    on_cluster.site("activate_environment() { trap '' TERM HUP; }\n")  # as some scripts do
    on_cluster.plant("ddp", "faults.before_every_step(lambda optimizer: time.sleep(0.05))")
    job = on_cluster.submit("srun", *TRAINING, "--epochs", 1000)
    on_cluster.wait_for("epoch 1/", job)
    on_cluster.cluster.run(["scancel", "--batch", "--signal=USR1", job])  # some scripts ask for it
    on_cluster.wait_for("epoch 2/", job)
    on_cluster.cluster.run(["scancel", job])
    state = on_cluster.cluster.wait(job)
    log = on_cluster.log(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), log
    assert (
        f"if it does not come back by itself, submit again with --checkpoint-dir {on_cluster.checkpoints}"
        in log
    )
    done = len(rows_of(on_cluster.folder / "results"))
    newest = max(on_cluster.checkpoints.glob("*.pt"), key=lambda path: path.stat().st_mtime)
    assert torch.load(newest, weights_only=True)["epoch"] == done + 1


def test_the_time_limit_requeues_the_job(limited: tuple[Checkout, list[int]]) -> None:
    """Both by USR2 before the limit and, where that was missed, by SIGTERM at the limit.

    Slurm looks every 30 s and sends USR2 up to 30 s early (PERIODIC_TIMEOUT in its sources): with @30 it
    comes 60 to 90 s after the start.
    """
    checkout, jobs = limited
    for heard, job in zip(LIMITS, jobs, strict=True):
        state, log = checkout.cluster.wait(job, timeout=400), checkout.log(job)
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), log
        assert (checkout.folder / "results" / "jobs" / str(job) / "heard").read_text() == heard, log
        assert re.search("^came back", log, re.MULTILINE), log
