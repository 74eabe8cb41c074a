"""A job whose rank crashes or hangs starts again in its nodes; one whose error would return ends."""

import csv

from checkout import Checkout
from conftest import rows_of, succeeded

TRAINING = ("--epochs", 3, "--train-size", 400, "--batch-size", 40, "--test-size", 100, "--width", 4)
# An epoch has ten steps, so each start comes one epoch further than the one before.
FAULTS = """
from manygpus import job_folder
fault = {0: signal.SIGKILL, 1: signal.SIGSTOP}.get(job_folder.restarts())
if fault and faults.rank() == 1:
    faults.before_step(15, lambda optimizer: faults.signal_itself(fault))
"""


def test_a_rank_is_killed_and_later_another_hangs(on_cluster: Checkout) -> None:
    """The third start ends the training. Nobody waits in the queue, and each epoch counts once."""
    on_cluster.plant("ddp", FAULTS)
    on_cluster.site("SITE_RESTARTS_IN_JOB=2\n")
    job = on_cluster.submit("srun", *TRAINING, "--timeout", 10)
    state, log = on_cluster.cluster.wait(job, timeout=600), on_cluster.log(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), log
    reasons = [line for line in log.splitlines() if line.startswith("why ")]
    assert len(reasons) == 2 and "rank 1 on n1 was killed" in reasons[0] and "--timeout" in reasons[1], log
    resumed = [line.rpartition("/")[2] for line in log.splitlines() if line.startswith("resumed from ")]
    assert resumed == ["epoch-2-step-0.pt", "epoch-3-step-0.pt"], log
    assert log.count("\nended   ") == 3 and log.rstrip().endswith("with exit code 0"), log
    assert [row["epoch"] for row in rows_of(on_cluster.folder / "results")] == [1, 2, 3]
    listed = succeeded(on_cluster.python("slurm/jobs.py", job)).stdout.splitlines()[1].split()
    assert "done" in listed and "2" in listed, listed


CRASHES = """
import os, signal, sys
print("begun in", os.path.basename(os.getcwd()), *sys.argv[1:], flush=True)
if "--resume" not in sys.argv:
    open("model-1.txt", "w").close()
    if sys.argv[1] == "1":
        sys.exit("an error of the script")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_scripts_that_resume_by_their_arguments(on_cluster: Checkout) -> None:
    """In the array of a sweep; one of them has an error that would return."""
    (on_cluster.folder / "crashes.py").write_text(CRASHES)
    words = ("--vary", "seed=0,1", "--chdir", "--out", on_cluster.folder / "crashed", "--when-requeued")
    script = ("--resume model-*.txt", "--plain", "crashes.py", "{seed}")
    assert on_cluster.python("slurm/sweep.py", *words, *script).returncode == 1
    with (on_cluster.folder / "crashed" / "sweep.csv").open() as file:
        rows = {row["seed"]: row for row in csv.DictReader(file)}
    assert {seed: row["exit_code"] for seed, row in rows.items()} == {"0": "0", "1": "1"}
    again = f"begun in {rows['0']['run']} 0 --resume model-1.txt"
    assert rows["0"]["last_line"] == again
    assert rows["1"]["last_line"] == "an error of the script"


def test_a_job_of_submit_py(on_cluster: Checkout) -> None:
    (on_cluster.folder / "crashes.py").write_text(CRASHES)
    words = ("--wait", "--when-requeued", "--resume model-*.txt", "--plain", "crashes.py", "0")
    done = succeeded(on_cluster.submit_py("single", *words))
    (log,) = on_cluster.folder.rglob("*_0_log.out")
    assert "0 --resume model-1.txt\n" in log.read_text(), done.stdout + log.read_text()
