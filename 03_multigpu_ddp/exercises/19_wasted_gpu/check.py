"""Counts GPUs and ranks in the files of starter/, which do not change, and reads the corrected job script."""

import csv
import re
from pathlib import Path

from trainkit.record import samples
from trainkit.workshop.work import Answers, Workspace, Wrong, ask_slurm, is_close, requested

ANSWERS = """\
# From ended.txt alone: which job do you suspect? Its number.
prediction = 1

# From all files
job = 3        # its number
idle = 2       # how many of its GPUs
gpu_hours = 0.111  # of these GPUs
percent = 19.1    # of the GPU-hours of all four jobs
"""
HINTS = """\
## 1

`gres/gpu=2` in AllocTRES counts all GPUs of a job, on all of its nodes. For each job, compare that with its
ranks. Of the steps that `srun` started, count the training, not `env`, which only tried the environment.

## 2

`torchrun` is one task for Slurm, and starts a rank for each GPU: the samples show them all. Look at every
node of a job: its ranks count over all nodes.

## 3

For each job, compute GPUs - ranks. The hours are those of the whole job (Elapsed, in the line without a
dot): from its first second, the GPUs are yours and no other job can use them. In the script, `--ntasks`
counts over all nodes and `--gpus-per-node` on each.
"""
SOLUTION = {
    "wide.sh": """\
@@
-#SBATCH --ntasks=2                # one for each GPU of a node
+#SBATCH --ntasks-per-node=2       # one for each GPU of a node
""",
}
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "job = 3", "job = 1", "is torchrun"),
    ("answers.txt", "job = 3", "job = 4", "one for each"),
    ("answers.txt", "job = 3", "job = wide", "have the numbers 1, 2, 3, 4"),
    ("answers.txt", "idle = 2", "idle = 1", "all its nodes"),
    ("answers.txt", "gpu_hours = 0.111", "gpu_hours = 0.221", "all its GPUs cost"),
    ("answers.txt", "gpu_hours = 0.111", "gpu_hours = 0.0553", "hours of one GPU"),
    ("answers.txt", "gpu_hours = 0.111", "gpu_hours = 6.63", "hours:minutes:seconds"),
    ("answers.txt", "percent = 19.1", "percent = 50", "share of that job"),
    ("answers.txt", "percent = 19.1", "percent = 47.2", "not yet GPU-hours"),
    ("wide.sh", "--ntasks-per-node=2", "--ntasks=2", "correct its #SBATCH lines"),
    ("wide.sh", "--ntasks-per-node=2", "--ntasks=4", "one node may get 3"),
    ("wide.sh", "--ntasks-per-node=2", "--ntasks=3", "4 GPUs and 3 ranks"),
    ("wide.sh", "--ntasks-per-node=2", "--ntasks-per-node=4", "NCCL refuses"),
    ("wide.sh", "--nodes=2", "--nodes=1 --ntasks=4", "disagree"),
    ("wide.sh", "--nodes=2", "--nodes=2-2", "write one number"),
    ("wide.sh", "set -euo", "set -uo pipefail\n#SBATCH --ntasks=8\nset -euo", "the #SBATCH lines only"),
    ("wide.sh", "srun --cpus", "srun --ntasks=4 --cpus", "change the #SBATCH lines only"),
    ("one.sh", "--ntasks=2 ", "--ntasks-per-node=2 ", "mine/one.sh was right"),
]
STARTER = Path(__file__).parent / "starter"
COUNTS = {"nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gres"}
NOT_READ = {"ntasks-per-gpu", "gpus-per-task"}
TORCHRUN = "launch"
WASTEFUL = "wide"


class Job:
    """A job: its number, name, hours and GPUs from sacct, and its ranks from the samples."""

    def __init__(self, line: list[str]) -> None:
        self.number = line[0]
        self.name = line[1]
        elapsed = line[3]
        resources = line[-1]
        hours, minutes, seconds = map(int, elapsed.split(":"))
        self.hours = hours + minutes / 60 + seconds / 3600
        self.gpus = int(re.search(r"gres/gpu=(\d+)", resources)[1])
        with (STARTER / "samples.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["job"] == self.number]
        self.ranks = len({row["number"] for row in rows if row["what"] == samples.RANK})


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    lines = map(str.split, (STARTER / "sacct.txt").read_text().splitlines())
    jobs = [Job(line) for line in lines if line and line[0].isdigit()]
    wasteful = _check_job(answers, jobs)
    wasted = _check_hours(answers, wasteful, jobs)
    nodes, ranks = _check_script(workspace)
    asked = ask_slurm(workspace.folder / f"{wasteful.name}.sh", workspace.folder.parents[2])
    wasteful_job = ", as you had expected" if prediction == int(wasteful.number) else ""
    return (
        f"Job {wasteful.number}{wasteful_job}: {wasteful.gpus} GPUs and {wasteful.ranks} ranks. Its log "
        "shows no "
        f"error, and it trains like the others; but {wasted:.3f} GPU-hours were paid for nothing, which "
        f"would be {24 * (wasteful.gpus - wasteful.ranks)} in a training of a day. Your script asks for "
        f"{ranks} ranks on {nodes} node{'s' * (nodes > 1)}, with a GPU for each. {asked} Two habits find "
        "such jobs: compare the GPUs in AllocTRES with `ranks` in the log's line on what is trained, and "
        "read the lines at the end of the log that begin with `watch`."
    )


def _check_job(answers: Answers, jobs: list[Job]) -> Job:
    (wasteful_job,) = (job for job in jobs if job.gpus > job.ranks)
    answer = {job.number: job for job in jobs}.get(answers["job"].strip())
    if answer is None:
        raise Wrong(f"`job`: the jobs have the numbers {', '.join(job.number for job in jobs)}.")
    if answer.name == TORCHRUN:
        raise Wrong(
            f"`job`: the one task that Slurm counts in {answer.number} is torchrun. How many ranks did "
            "torchrun start? The samples show them."
        )
    if answer is not wasteful_job:
        raise Wrong(
            f"`job`: {answer.number} had {answer.gpus} GPUs and {answer.ranks} ranks, one for each. A job "
            "that "
            "is slow, or runs for long, need not waste a GPU."
        )
    idle = wasteful_job.gpus - wasteful_job.ranks
    if answers.number("idle") != idle:
        raise Wrong(
            f"`idle` is not {answers.number('idle'):g}: subtract its ranks from its GPUs, on all its nodes."
        )
    return wasteful_job


def _check_hours(answers: Answers, job: Job, jobs: list[Job]) -> float:
    idle = job.gpus - job.ranks
    answer = answers.number("gpu_hours")
    wasted_gpu_hours = idle * job.hours
    if not is_close(answer, wasted_gpu_hours, 0.03):
        hint = f"count {idle} GPUs for as long as the job had them, in hours."
        if is_close(answer, job.gpus * job.hours, 0.03):
            hint = "that is what all its GPUs cost. Two of them did work."
        if is_close(answer, job.hours, 0.03):
            hint = "these are the hours of one GPU."
        if is_close(answer, 60 * wasted_gpu_hours, 0.03) or is_close(answer, 3600 * wasted_gpu_hours, 0.03):
            hint = "Elapsed is hours:minutes:seconds, and an hour is 3600 seconds."
        raise Wrong(f"`gpu_hours` is not {answer:g}: {hint}")
    answer = answers.number("percent")
    paid = sum(each.gpus * each.hours for each in jobs)
    if not is_close(answer, 100 * wasted_gpu_hours / paid, 0.04):
        hint = "divide 100 x `gpu_hours` by the sum of GPUs x hours of all jobs."
        if is_close(answer, 50):
            hint = "that is their share of that job. What did all four cost?"
        if is_close(answer, 100 * wasted_gpu_hours / sum(each.hours for each in jobs), 0.03):
            hint = "the hours of a job are not yet GPU-hours: each job had several GPUs."
        raise Wrong(f"`percent` is not {answer:g}: {hint}")
    return wasted_gpu_hours


def _check_script(workspace: Workspace) -> tuple[int, int]:
    """Return the nodes that the script asks for, and its ranks on all of them."""
    for path in sorted(STARTER.glob("*.sh")):
        if path.stem != WASTEFUL and workspace.text(path.name) != path.read_text():
            raise Wrong(f"mine/{path.name} was right, but is changed. `reset` shows how it was.")
    name = f"mine/{WASTEFUL}.sh"
    before = (STARTER / f"{WASTEFUL}.sh").read_text()
    text = workspace.text(f"{WASTEFUL}.sh")
    if requested(text) == requested(before):
        raise Wrong(f"{name} still asks for the same as before: correct its #SBATCH lines.")
    if _commands(text) != _commands(before):
        raise Wrong(
            f"{name}: change the #SBATCH lines only. You pay for what they ask for, and srun follows them."
        )
    asked = requested(text)
    options = {key: _number(name, key, asked[key]) for key in asked if key in COUNTS | NOT_READ}
    nodes = options.get("nodes") or 1
    on_each = options.get("gpus-per-node") or options.get("gres") or options.get("gpus", 0) / nodes
    gpus = nodes * on_each
    ranks = options.get("ntasks", nodes * options.get("ntasks-per-node", 1))
    has = f"{name} asks for {gpus:g} GPUs and {ranks:g} ranks on {nodes:g} nodes"
    if ranks != nodes * options.get("ntasks-per-node", ranks / nodes):
        raise Wrong(f"{name}: --ntasks counts over all nodes, --ntasks-per-node on each, and they disagree.")
    if ranks < gpus:
        raise Wrong(f"{has}. --ntasks counts over all nodes, and --gpus-per-node on each.")
    if ranks > gpus:
        raise Wrong(f"{has}. NCCL refuses two ranks on one GPU.")
    if ranks < 2:
        raise Wrong(f"{has}. It was a training with several ranks: one rank is stage 01.")
    if ranks > nodes > 1 and "ntasks-per-node" not in options:
        raise Wrong(
            f"{has}, but does not say where: of {ranks:g} tasks, one node may get {ranks - 1:g}. Give the "
            "number per node, as with the GPUs."
        )
    return nodes, ranks


def _commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _number(name: str, key: str, value: str) -> int:
    """Return the count of `2` as of `gpu:a100:2`."""
    digits = value.rpartition(":")[2]
    if key in NOT_READ or not re.fullmatch(r"[1-9]\d{0,4}", digits):
        instead = "use --ntasks-per-node and --gpus-per-node" if key in NOT_READ else "write one number"
        raise Wrong(f"{name}: `--{key}={value}` is not what this check reads: {instead}.")
    return int(digits)
