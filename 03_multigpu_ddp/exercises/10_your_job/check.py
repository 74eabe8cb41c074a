"""Reads what the learner's job has left in its folder: what it ran, how it ended, and the verdict on it."""

from pathlib import Path

from manygpus import job_folder
from manygpus.jobs.site import read_site
from manygpus.jobs.watch import job_list
from manygpus.jobs.watch.job_list import JobRow
from manygpus.monitor import samples
from manygpus.workshop.work import Workspace, Wrong

ANSWERS = """\
# Before you submit: how many seconds will the job run, from its start to its end?
prediction = 120

# The number of the job, as `python ../slurm/jobs.py` lists it
job = 11
# The first line of its log that begins with `watch`, without that word
verdict = waiting for a core takes 82 % of the time of ranks 0, 1 on n1
"""
HINTS = """\
## 1

The doctor's lines that begin with FAULT say what to do. `--python` is the Python of your environment, which
`which python` prints when the environment is active. The arguments of your script follow its name.

## 2

`submit.py` prints where the log is. If the job has failed, the line `why` at the end of the log names the
rank that failed first, and its error. Correct the script, submit it again, and take the number of the new
job.

## 3

In the folder of the stage, `python ../slurm/jobs.py` lists the jobs of this checkout, with the latest last.
Its last column is the first line of the verdict.
"""
STARTS_WITH = "`prediction`"
RECORDED = {"03_multigpu_ddp/exercises/10_your_job/recorded": []}
VERDICT = "waiting for a core takes 82 % of the time of ranks 0, 1 on n1"
WRONG = [
    ("answers.txt", "job = 11", "job = train", "is not a number"),
    ("answers.txt", "job = 11", "job = 99999999", "no job 99999999"),
    ("answers.txt", VERDICT, "next time --mem=2G would be enough", "line 2 of the verdict"),
    ("answers.txt", VERDICT, "the loader", "not the first line"),
    ("answers.txt", VERDICT, "waiting", "copy the whole line"),
    ("runs/11/outcome.json", '"exit_code": 0', '"exit_code": 1', "has failed: exit code 1"),
    ("runs/11/script.json", ".../train.py", ".../mnist_ddp.py", "a training of this project"),
]
OURS = ("mnist_singlegpu", "mnist_multigpu", "mnist_ddp")
STARTER = "10_your_job"


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    job = answers["job"].strip()
    if not job.isdecimal():
        raise Wrong(
            f"`job = {job}` is not a number. `python ../slurm/jobs.py` lists the numbers of your jobs."
        )
    recorded = workspace.folder / "runs" / job
    row, folder = (_recorded(job, recorded), recorded) if recorded.is_dir() else _of_this_checkout(job)
    script = _check_script(job, folder)
    _check_end(row)
    _check_verdict(answers["verdict"].removeprefix("watch"), folder)
    ranks = len({path.stem for path in folder.glob("rank-*")})
    whose = ""
    if recorded.is_dir():
        whose = " That was our job, on the practice cluster: run your own as soon as you can."
    elif STARTER in script.path:
        whose = " That was our script: tomorrow, do the same with yours."
    took = "unknown" if row.seconds is None else f"{row.seconds:.0f} seconds"
    return (
        f"Job {job} ran {script.label} with {ranks} rank(s), in {script.python}, and ended well. It took "
        f"{took}; you predicted {prediction:g}. Next time, ask for half as much again in --time, and do what "
        f"the verdict says before you add GPUs.{whose}"
    )


def _recorded(job: str, folder: Path) -> JobRow:
    return job_list.of_folder(job, folder, job_folder.read_outcome(folder), status=None)


def _of_this_checkout(job: str) -> tuple[JobRow, Path]:
    """Return the row of the job in the list of jobs, and the job's folder."""
    site = read_site()
    rows = {row.number: row for row in job_list.jobs(site)}
    if job not in rows:
        there_are = f"the jobs are {', '.join(rows)}" if rows else "no job has been submitted from here yet"
        raise Wrong(f"There is no job {job} of this checkout: {there_are}.")
    local = next((site.jobs_dir / "submitit").glob(f"*/{job}_submitted.pkl"), None)
    by_slurm = site.jobs_dir / job
    return rows[job], by_slurm if by_slurm.is_dir() or local is None else local.parent


def _check_script(job: str, folder: Path) -> job_folder.Script:
    script = job_folder.read_script(folder)
    if script is None:
        raise Wrong(
            f"Job {job} has not begun yet, or left no record of its script: wait, or submit it again."
        )
    if Path(script.path).stem in OURS or not (folder / job_folder.PLAIN).exists():
        raise Wrong(
            f"Job {job} ran {script.label}, a training of this project. Write your own script after --plain."
        )
    return script


def _check_end(row: JobRow) -> None:
    if row.state in ("queued", "running"):
        raise Wrong(f"Job {row.number} is {row.state}: wait for its end. {row.note}")
    if row.state == "stopped":
        raise Wrong(f"Job {row.number} was stopped, and has saved: {row.note}. Let it run to its end.")
    if row.state != "done":
        raise Wrong(f"Job {row.number} has {row.state}: {row.note}. The line `why` in its log says more.")


def _check_verdict(answer: str, folder: Path) -> None:
    log_lines = job_folder.read(folder / samples.FOLDER / samples.TOLD).splitlines()
    lines = [line.removeprefix("watch").strip() for line in log_lines]
    if not lines:
        return  # a site may have switched the monitor off
    answer = " ".join(answer.split())
    said = [number for number, line in enumerate(lines, start=1) if line.startswith(answer[:30])]
    if not said:
        raise Wrong(
            "`verdict` is not the first line of the verdict: copy the first line of the log that begins with "
            "`watch`."
        )
    if len(answer) < min(30, len(lines[said[0] - 1])):
        raise Wrong(f"`verdict = {answer}`: copy the whole line. It also says how much, and where.")
    if said[0] > 1:
        raise Wrong(
            f"`verdict` is line {said[0]} of the verdict. The first line is the worst that was found."
        )
