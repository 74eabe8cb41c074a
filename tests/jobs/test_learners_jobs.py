"""Exercises that end with a job of the learner: where there is a Slurm, they are done when it has run."""

import re
from pathlib import Path

from checkout import Checkout

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
