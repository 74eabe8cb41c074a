"""slurm/jobs.py lists what jobs have left, and removes what nobody needs, and nothing else."""

import os
import subprocess
from pathlib import Path

from checkout import Checkout
from cluster import RunningCluster
from conftest import succeeded
from filelock import FileLock

OWN = """
import sys, time
from trainkit import errors
errors.run(lambda: time.sleep(int(sys.argv[-1])))
"""
CHECKPOINT = "checkpoints/epoch-3-step-0.pt"


def make(folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(bytes(10_000_000 if file == CHECKPOINT else 0))


def listed(checkout: Checkout) -> dict[str, list[str]]:
    """Size, state and what there is to go on from, of every job listed."""
    done = succeeded(checkout.python("slurm/jobs.py"))
    lines = [line.split("  ") for line in done.stdout.split("\n\n")[0].splitlines()[1:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {name: rest for name, _, *rest in cells}


def test_the_jobs_of_a_cluster(tmp_path: Path, cluster: RunningCluster) -> None:
    checkout = Checkout(tmp_path / "a checkout", cluster)
    (checkout.folder / "01_singlegpu" / "mine.py").write_text(OWN)
    runs = str(checkout.submit("single", "mine.py", 600))
    waits = str(checkout.submit("single", "mine.py", 0, sbatch=("--hold",)))
    ended = str(checkout.submit("single", "mine.py", 0))
    succeeded(checkout.submit_py("single", "--script", "mine.py", "--wait", 0))
    (logs,) = (checkout.folder / "results/jobs/submitit").iterdir()
    of_submit_py = next(logs.glob("*_submission.sh")).name.partition("_")[0]
    cluster.wait(int(ended))
    jobs = checkout.folder / "results" / "jobs"
    make(jobs / "9999", "rank-0.started", CHECKPOINT, "checkpoints/epoch-2-step-10.pt")  # forgotten by Slurm
    make(jobs / "9998", "rank-0.finished", "rank-1.finished", CHECKPOINT)  # with --keep-checkpoints
    make(jobs / f"{runs}-20250101-120000", "rank-0.failed")
    make(jobs / waits, "rank-0.finished")  # of an older job of that number
    # Of a submission that was killed on its way back from Slurm.
    make(jobs / "submitit/lost-20250101-120000-abcdef", f"{waits}_submitted.pkl", ".submission_file_0af3.sh")
    mine = ("2024", "7-holidays", "submitit/photos", "thesis")
    for name in mine:
        make(jobs / name, "image.jpg")
    make(jobs / "2024", "model.pkl")  # as submitit's files are called, too
    (jobs / "7777").symlink_to(jobs / "9998")

    found = listed(checkout)
    finished = {ended, of_submit_py, f"submitit/{logs.name}"}
    assert {name: found[name][1] for name in finished} == dict.fromkeys(finished, "COMPLETED")
    assert (found[runs][1], found[waits][1]) == ("RUNNING", "PENDING")
    assert found["9999"] == ["10.0 MB", "GONE", "to go on from: epoch-3-step-0.pt"]
    removable = {*finished, f"{runs}-20250101-120000"}
    stays = {runs, waits, "submitit/lost-20250101-120000-abcdef"}
    assert set(found) == {*removable, *stays, "9998", "9999"}

    succeeded(checkout.python("slurm/jobs.py", "--remove"))
    assert set(listed(checkout)) == {*stays, "9998", "9999"}
    done = checkout.python("slurm/jobs.py", "--remove", "--unfinished")
    assert "9998 (GONE, 10.0 MB) removed\n" in done.stdout
    assert set(listed(checkout)) == stays
    assert all((jobs / name / "image.jpg").exists() for name in mine)
    assert (jobs / "7777").is_symlink()
    cluster.run(["scancel", runs, waits])


def test_what_may_still_be_needed_stays(tmp_path: Path) -> None:
    """Slurm does not answer, or is not here; a local run; one of another machine; checkpoints in use."""
    checkout = Checkout(tmp_path / "a checkout")
    jobs, ending = checkout.folder / "results" / "jobs", "20250101-120000-abcdef"
    make(jobs / "7", "rank-0.finished")
    make(jobs / f"7-{ending[:15]}", "rank-0.started", CHECKPOINT)
    for name in ("runs", "killed", "elsewhere", "starts"):
        make(jobs / "submitit" / f"{name}-{ending}", "3_submitted.pkl", "rank-0.started")
    for name, machine in (("elsewhere", "another-machine"), ("killed", os.uname().nodename)):
        (jobs / f"submitit/{name}-{ending}/rank-0.started").write_text(f"{machine}\n")
    (jobs / f"submitit/starts-{ending}/3_submitted.pkl").rename(jobs / f"submitit/starts-{ending}/0af3.pkl")
    runs = os.environ | {"TRAINKIT_JOB_DIR": str(jobs / f"submitit/runs-{ending}")}
    with (
        subprocess.Popen(["sleep", "600"], env=runs) as running,
        FileLock(jobs / f"7-{ending[:15]}" / "checkpoints" / ".lock"),
    ):
        states = {name: row[1] for name, row in listed(checkout).items()}
        done = checkout.python("slurm/jobs.py", "--remove", "--unfinished")
        running.kill()
    assert states == {
        "7": "unknown",
        f"7-{ending[:15]}": "ended",
        f"submitit/runs-{ending}": "RUNNING",
        f"submitit/killed-{ending}": "ended",
        f"submitit/elsewhere-{ending}": "unknown",
        f"submitit/starts-{ending}": "unknown",
    }
    assert (
        f"7-{ending[:15]} (ended, 10.0 MB) cannot be removed: a run is at work with its checkpoints"
        in done.stdout
    )
    assert done.returncode == 1
    for command in ("sbatch", "scontrol"):
        checkout.fake(command, "echo no answer >&2; exit 1")
    assert listed(checkout)["7"][1] == "unknown"
    done = checkout.python("slurm/jobs.py", "--unfinished")
    assert done.stderr == "error: --unfinished says what --remove removes: give both, or none.\n"
    done = checkout.python("slurm/jobs.py", "--used", "--remove")
    assert done.stderr == "error: --used shows jobs and --remove removes them: give one of them.\n"
