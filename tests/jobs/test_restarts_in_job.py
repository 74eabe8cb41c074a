"""A job whose rank crashes or hangs starts again in its nodes; one whose error would return ends."""

import csv
import re
import sys
from pathlib import Path

from checkout import Checkout, wait_until
from cluster import running_cluster
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
    on_cluster.site("SITE_RESTARTS_IN_JOB=2\nSITE_STALLED_SECONDS=30\nSITE_MONITOR=on\n")
    job = on_cluster.submit("srun", *TRAINING)
    state, log = on_cluster.cluster.wait(job, timeout=600), on_cluster.log(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), log
    reasons = [line for line in log.splitlines() if line.startswith("why ")]
    assert len(reasons) == 2 and "rank 1 on n1 was killed" in reasons[0], log
    assert "SITE_STALLED_SECONDS" in reasons[1], log
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


WAITS = """
import os, sys, time
print("begun on", os.uname().nodename, *sys.argv[1:], flush=True)
if not sys.argv[1:]:
    open(f"of-rank-{os.environ['RANK']}.txt", "w").close()
    time.sleep(600)
"""


def test_a_node_fails_and_the_job_has_one_to_spare(tmp_path: Path) -> None:
    with running_cluster(nodes=3, gpus=0) as cluster:
        checkout = Checkout(tmp_path / "a checkout", cluster)
        (checkout.folder / "waits.py").write_text(WAITS)
        shape = ("--nodes", 2, "--gpus", 0, "--spare-nodes", 1, "--mem", "1G")
        words = ("--when-requeued", f"--resume={tmp_path}/of-rank-*", "--plain", checkout.folder / "waits.py")
        submit = (sys.executable, checkout.folder / "03_multigpu_ddp" / "submit.py")
        done = succeeded(checkout.run(*submit, *shape, *words, cwd=tmp_path))
        job = int(done.stdout.split()[1])
        wait_until(lambda: len([*tmp_path.glob("of-rank-*")]) == 2)
        cluster.run(["scontrol", "update", "nodename=n2", "state=down", "reason=planted"])
        state = cluster.wait(job)
        logs = [path.read_text() for path in sorted(checkout.folder.rglob(f"{job}_*_log.out"))]
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), logs
        assert "\nwhy     node n2 failed\n" in logs[0], logs
        began = [re.findall("begun on (n.)", log) for log in logs]
        assert began == [["n1", "n1"], ["n2", "n3"]], logs
