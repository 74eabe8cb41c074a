"""Exercises that end with a job of the learner: where there is a Slurm, they are done when it has run."""

import re
import signal
from pathlib import Path

import psutil
import pytest
from checkout import Checkout, wait_until

from manygpus.workshop.exercises import Exercise


def check(on_cluster: Checkout, folder: Path) -> str:
    """Return what the check of an exercise says."""
    stage = folder.parents[1]
    return on_cluster.run("python", "exercises/check.py", "check", folder.name, cwd=stage).stdout


def test_a_job_script_is_done_when_its_job_has_run(on_cluster: Checkout) -> None:
    folder = on_cluster.folder / "01_singlegpu" / "exercises" / "02_jobscript"
    exercise = Exercise(folder)
    exercise.begin()
    for name, text in exercise.solution.items():
        text = text.replace("#SBATCH --job-name=first\n", "").replace("first-%j.log", "%x-%j.log")
        (folder / "mine" / name).write_text(text)
    stage = folder.parents[1]
    (stage / "mnist-single-1.log").write_text("The log of a different job.\n")
    assert "submit it, and check again" in check(on_cluster, folder)
    submitted = on_cluster.run("sbatch", "--parsable", folder / "mine" / "job.sh", cwd=stage)
    on_cluster.cluster.wait(int(submitted.stdout))
    said = check(on_cluster, folder)
    assert "jobscript: done." in said and "with 2 cores" in said, said


def test_a_training_of_ones_own_is_done_when_its_job_has_run(on_cluster: Checkout) -> None:
    folder = on_cluster.folder / "03_multigpu_ddp" / "exercises" / "10_your_job"
    on_cluster.site("SITE_MONITOR=on\n")
    Exercise(folder).begin()
    script = folder / "mine" / "train.py"
    done = on_cluster.submit_py("ddp", "--gpus", 2, "--wait", "--plain", script, "--steps", 5)
    (job,) = re.findall(r"job (\d+) submitted", done.stdout)
    verdict = (on_cluster.folder / "results" / "jobs" / job / "monitor" / "told").read_text().splitlines()
    answers = f"prediction = 30\njob = {job}\nverdict = {verdict[0]}\n"
    (folder / "mine" / "answers.txt").write_text(answers)
    said = check(on_cluster, folder)
    assert "your_job: done." in said and "train.py with 2 rank(s)" in said, said
    (folder / "mine" / "answers.txt").write_text(answers.replace(f"job = {job}", "job = 0"))
    assert "There is no job 0" in check(on_cluster, folder)


TIME_LIMIT = Path("03_multigpu_ddp") / "exercises" / "07_time_limit"
EPOCH = re.compile(r"^epoch (\d+): loss", re.MULTILINE)
IN_PLACE = '        torch.save(state | {"epoch": epoch + 1, "best": best}, last)\n'
WHOLE = IN_PLACE.replace("last)", 'last.with_suffix(".new"))\n        last.with_suffix(".new").replace(last)')


@pytest.fixture
def commands(on_cluster: Checkout) -> dict[str, str]:
    """The lines of the exercise's page that submit, by a word of each; the images and job.sh are ready.

    The script is the starter, which has no handler, but does not write in place.
    """
    folder = on_cluster.folder / TIME_LIMIT
    stage = folder.parents[1]
    Exercise(folder).begin()
    script = folder / "mine" / "train.py"
    assert IN_PLACE in script.read_text()
    script.write_text(script.read_text().replace(IN_PLACE, WHOLE))
    digits = folder / "mine" / "digits.py"  # so few images that an epoch is short
    digits.write_text(digits.read_text().replace("train=6_000", "train=640"))
    assert not on_cluster.run("python", digits).returncode
    job = (
        (stage / "plain_slurm.sh")
        .read_text()
        .replace("resumable_ddp.py", f"{folder.relative_to(stage)}/mine/train.py")
    )
    for asked in (
        "nodes=1",
        "ntasks-per-node=2",
        "gpus-per-node=2",
        "cpus-per-task=2",
        "mem=16G",
        "time=00:30:00",  # the signal comes from scancel
    ):
        name = asked.partition("=")[0]
        job = re.sub(rf"^#SBATCH --{name}=\S+", f"#SBATCH --{asked}", job, flags=re.MULTILINE)
    (folder / "mine" / "job.sh").write_text(job)
    page = (folder / "README.md").read_text()
    lines = re.findall(r"^.*\bsbatch .*--epochs ", page, re.MULTILINE)
    without_end = [f"{line}{10**6}{'; done' if 'do sbatch' in line else ''}" for line in lines]
    words = ("job.txt", "singleton", "array", "TRAIN_FOR")
    return {word: next(line for line in without_end if word in line) for word in words}


def submit(on_cluster: Checkout, command: str) -> list[str]:
    """The numbers of the jobs that a command of the page submits."""
    done = on_cluster.run("bash", "-euc", command, cwd=on_cluster.folder / TIME_LIMIT.parts[0])
    return re.findall(r"Submitted batch job (\d+)", done.stdout)


def wait_for_epochs(log: Path, count: int) -> list[int]:
    """Wait until so many epochs are in a log, and return their numbers."""

    def epochs() -> list[int]:
        return [int(number) for number in EPOCH.findall(log.read_text() if log.exists() else "")]

    wait_until(lambda: len(epochs()) >= count)
    return epochs()


def test_a_training_that_resumes_is_done_when_its_job_has_come_back(
    on_cluster: Checkout, commands: dict[str, str]
) -> None:
    folder = on_cluster.folder / TIME_LIMIT
    for name, text in Exercise(folder).solution.items():
        (folder / "mine" / name).write_text(text)
    assert "submit it as the README says" in check(on_cluster, folder)
    (job,) = submit(on_cluster, commands["job.txt"])
    log = folder / "mine" / "job.txt"
    wait_for_epochs(log, 1)
    on_cluster.cluster.run(["scancel", "--signal=USR2", job])
    wait_until(lambda: "DUE TO JOB REQUEUE" in log.read_text())
    epochs = wait_for_epochs(log, len(EPOCH.findall(log.read_text())) + 1)
    on_cluster.cluster.run(["scancel", job])  # the check trains, too
    said = " ".join(check(on_cluster, folder).split())
    assert "time_limit: done." in said and "it went back to the queue after epoch" in said, said
    assert epochs == list(range(1, len(epochs) + 1)), log.read_text()


@pytest.mark.parametrize("way", ["singleton", "array"])
def test_a_chain_of_jobs_goes_on_where_the_one_before_was_ended(
    way: str, on_cluster: Checkout, commands: dict[str, str]
) -> None:
    stage = on_cluster.folder / TIME_LIMIT.parts[0]
    submitted = submit(on_cluster, commands[way])
    jobs = submitted if way == "singleton" else [f"{submitted[0]}_{task}" for task in (1, 2, 3)]
    first, second, third = (stage / f"slurm-{job}.out" for job in jobs)
    wait_for_epochs(first, 1)
    assert not second.exists()  # one at a time
    on_cluster.cluster.run(["scancel", jobs[0]])
    wait_for_epochs(second, 1)
    assert not third.exists()
    on_cluster.cluster.run(["scancel", *submitted])
    epochs = wait_for_epochs(first, 1) + wait_for_epochs(second, 1)
    assert sorted(set(epochs)) == list(range(1, max(epochs) + 1)), epochs
    assert len(epochs) - len(set(epochs)) <= 1  # an epoch may be reported, and not saved yet


def test_a_job_that_ends_its_training_before_the_limit_comes_back_without_a_handler(
    on_cluster: Checkout, commands: dict[str, str]
) -> None:
    stage = on_cluster.folder / TIME_LIMIT.parts[0]
    assert "TRAIN_FOR=40s " in commands["TRAIN_FOR"]
    # However slow this machine is, the time is over when there has been an epoch.
    (job,) = submit(on_cluster, commands["TRAIN_FOR"].replace("40s", "1h"))
    log = stage / f"slurm-{job}.out"
    wait_for_epochs(log, 1)
    for process in psutil.process_iter(["name", "cwd"]):
        if (process.info["name"], process.info["cwd"]) == ("timeout", str(stage)):
            process.send_signal(signal.SIGALRM)  # as its own clock does
    wait_until(lambda: "DUE TO JOB REQUEUE" in log.read_text())
    seen = len(EPOCH.findall(log.read_text()))
    epochs = wait_for_epochs(log, seen + 1)
    on_cluster.cluster.run(["scancel", job])
    # An epoch may be reported, and not saved yet.
    assert epochs[: seen + 1] in ([*range(1, seen + 2)], [*range(1, seen + 1), seen]), epochs
