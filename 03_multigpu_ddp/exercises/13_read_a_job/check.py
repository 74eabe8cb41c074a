"""Compares the answers with the logs and the tables of starter/, and reads the corrected job script."""

import re
from pathlib import Path
from typing import NamedTuple

from manygpus.workshop.work import Answers, Workspace, Wrong, ask_slurm, is_close, requested

ANSWERS = """\
# Before you open the files: how many of the four ranks wrote a traceback?
prediction = 1

# 1. Jobs 3 and 4
busy_cores = 0.66  # of job 3, on average
memory_mb = 808    # of job 3: the most that its training used
signal = 9         # of job 4
why = memory       # of job 4: error, time, memory or user

# 2. The job with four ranks
rank = 2
node = n2
how = killed       # exception, killed, network, time_limit or hung
line = 40          # the number of a line of ranks.txt

# 3. The four jobs with GPUs
job = 3            # the number of the one with idle GPUs
idle = 2           # how many of its GPUs
gpu_hours = 0.111  # of these GPUs
"""
HINTS = """\
## 1

If one core is busy all the time, TotalCPU is equal to Elapsed. `3.1` is what the second `srun` of job 3
started: the training. An exit code above 128 is 128 plus the number of a signal.

## 2

A rank that is killed cannot write any more, so the ranks that write a traceback were still alive. Only the
launcher sees how each task ends: look for the lines that begin with `srun: error`. Here, srun's task N is
rank N.

## 3

For each of the four jobs, compare `gres/gpu` in the line whose number has no dot with the NTasks of the
training. Elapsed in that line is how long you pay for the GPUs. In the script, `--ntasks` counts over all
nodes, and `--gpus-per-node` on each.
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
    ("answers.txt", "busy_cores = 0.66", "busy_cores = 1.52", "upside down"),
    ("answers.txt", "busy_cores = 0.66", "busy_cores = 0.33", "share of the two"),
    ("answers.txt", "busy_cores = 0.66", "busy_cores = 2", "is what the job was given"),
    ("answers.txt", "memory_mb = 808", "memory_mb = 4.9", "to the job script"),
    ("answers.txt", "memory_mb = 808", "memory_mb = 8000", "asked for"),
    ("answers.txt", "signal = 9", "signal = 15", "minus 128"),
    ("answers.txt", "why = memory", "why = time", "30 minutes"),
    ("answers.txt", "why = memory", "why = user", "first line"),
    ("answers.txt", "rank = 2", "rank = 3", "Rank 3 wrote a traceback, so it was still"),
    ("answers.txt", "node = n2", "node = n1", "is in the line of srun"),
    ("answers.txt", "how = killed", "how = network", "what the others see"),
    ("answers.txt", "how = killed", "how = exception", "writes a traceback"),
    ("answers.txt", "line = 40", "line = 16", "a rank that complains"),
    ("answers.txt", "job = 3", "job = 1", "is torchrun"),
    ("answers.txt", "job = 3", "job = 4", "one for each"),
    ("answers.txt", "job = 3", "job = wide", "have the numbers 1, 2, 3, 4"),
    ("answers.txt", "idle = 2", "idle = 1", "all its nodes"),
    ("answers.txt", "gpu_hours = 0.111", "gpu_hours = 0.221", "all its GPUs cost"),
    ("answers.txt", "gpu_hours = 0.111", "gpu_hours = 6.63", "hours:minutes:seconds"),
    ("wide.sh", "--ntasks-per-node=2", "--ntasks=2", "correct its #SBATCH lines"),
    ("wide.sh", "--ntasks-per-node=2", "--ntasks=4", "one node may get 3 of 4"),
    ("wide.sh", "--ntasks-per-node=2", "--ntasks-per-node=4", "NCCL refuses"),
    ("wide.sh", "srun --cpus", "srun --ntasks=4 --cpus", "change the #SBATCH lines only"),
    ("one.sh", "--ntasks=2 ", "--ntasks-per-node=2 ", "mine/one.sh was right"),
]
STARTER = Path(__file__).parent / "starter"
ELAPSED_SECONDS = 139  # of job 3
CPU_SECONDS = 91.4
MEGABYTES = 808
HOW = {
    "network": "`Connection closed by peer` is what the others see when a process is gone, for any reason. "
    "Did the launcher lose the node as well?",
    "exception": "A rank that ends with an exception writes a traceback. Did this rank write one?",
    "time_limit": "At its time limit, Slurm ends the whole job, and the log says DUE TO TIME LIMIT. One word "
    "in the launcher's line says what happened to this task.",
    "hung": "A rank that hangs still exists: the others wait for it until --timeout, and no rank closes a "
    "connection.",
}

COUNTS = {"nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gres"}
NOT_READ = {"ntasks-per-gpu", "gpus-per-task"}
TORCHRUN = "launch"
WASTEFUL = "wide"


class Job(NamedTuple):
    """A job of sacct_gpus.txt: its GPUs on all nodes, and the ranks of its training."""

    number: str
    name: str
    hours: float
    gpus: int
    ranks: int


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    _check_memory_and_cores(answers)
    tracebacks = _check_ranks(answers)
    wasteful, wasted = _check_gpus(answers)
    nodes, ranks = _check_script(workspace)
    asked = ask_slurm(workspace.folder / f"{WASTEFUL}.sh", workspace.folder.parents[2])
    return (
        f"Job 3 kept only {CPU_SECONDS / ELAPSED_SECONDS:.2f} of its 2 cores busy, so its training waits: "
        "for other programs, a loader, a disk or a GPU. Signal 9 cannot be caught, so a process that it "
        "ends leaves no message. Slurm's lines, and MaxRSS beside ReqMem, say why it ended. Of the four "
        f"ranks {tracebacks} wrote a traceback (you predicted {prediction:g}), but these only complain that "
        f"rank 2 is gone. Job {wasteful.number} ended without an error, but paid {wasted:.3f} GPU-hours for "
        "GPUs without a rank. So compare the GPUs in AllocTRES with the ranks of each job. Your script asks "
        f"for {ranks} ranks on {nodes} node{'s' * (nodes > 1)}. {asked}"
    )


def _check_memory_and_cores(answers: Answers) -> None:
    _check_cores(answers.number("busy_cores"))
    _check_memory(answers.number("memory_mb"))
    if answers.number("signal") != 9:
        raise Wrong("`signal`: an exit code above 128 means a signal, whose number is the code minus 128.")
    why = answers.word("why", "error", "time", "memory", "user")
    if why == "time":
        raise Wrong("`why = time`: the job ran for less than a minute, but its script asks for 30 minutes.")
    if why != "memory":
        raise Wrong(f"`why = {why}`: read the first line of killed.txt that begins with slurmstepd.")


def _check_cores(answer: float) -> None:
    true = CPU_SECONDS / ELAPSED_SECONDS
    if is_close(answer, true, 0.05):
        return
    if is_close(answer, 1 / true, 0.05):
        raise Wrong(f"`busy_cores = {answer:g}` is upside down: divide TotalCPU by Elapsed, in seconds.")
    if is_close(answer, true / 2, 0.05):
        raise Wrong(f"`busy_cores = {answer:g}` is the share of the two cores. How many cores is that?")
    if answer == 2:
        raise Wrong(
            "`busy_cores = 2` is what the job was given (AllocCPUS). How long did it compute (TotalCPU)?"
        )
    raise Wrong(
        f"`busy_cores = {answer:g}`: divide TotalCPU by Elapsed, both in seconds. 01:31.435 is 1 minute and "
        "31.435 seconds."
    )


def _check_memory(answer: float) -> None:
    if is_close(answer, MEGABYTES, 0.04):
        return
    if is_close(answer, 4.9, 0.05):
        raise Wrong(f"`memory_mb = {answer:g}` belongs to the job script (3.batch); the training is 3.1.")
    if 7000 < answer < 9000:
        raise Wrong(
            f"`memory_mb = {answer:g}` is what the job asked for (ReqMem). How much did it use (MaxRSS)?"
        )
    raise Wrong(f"`memory_mb = {answer:g}`: take the MaxRSS of 3.1; 1,000K is about one MB.")


def _check_ranks(answers: Answers) -> int:
    """Return how many ranks wrote a traceback."""
    log = (STARTER / "ranks.txt").read_text()
    killed = re.search(r"srun: error: (\w+): task (\d+): Killed", log)
    rank = int(killed[2])
    complained = sorted(set(map(int, re.findall(r"\[rank(\d)\]: Traceback", log))))
    answer = answers.number("rank")
    if answer in complained:
        raise Wrong(
            f"Rank {answer:.0f} wrote a traceback, so it was still alive: it complains that a different rank "
            "is gone. Which rank complains first is chance. Look for the rank that wrote nothing, and for "
            "what the launcher says."
        )
    if answer != rank:
        raise Wrong(f"There is no rank {answers['rank']} in this job: its four ranks are 0 to 3.")
    if answers["node"].strip() != killed[1]:
        raise Wrong(f"The node of rank {rank} is in the line of srun that says how the rank ended.")
    ending = answers.word("how", "killed", *HOW)
    if ending != "killed":
        raise Wrong(HOW[ending])
    if answers.number("line") != 1 + log[: killed.start()].count("\n"):
        raise Wrong(
            f"`line` is not {answers['line']}: the first lines with an error are from a rank that complains. "
            f"Which line is the first to name rank {rank}?"
        )
    return len(complained)


def _check_gpus(answers: Answers) -> tuple[Job, float]:
    """Return the job with idle GPUs, and the GPU-hours of these."""
    jobs = _jobs()
    (wasteful,) = (job for job in jobs if job.gpus > job.ranks)
    answer = {job.number: job for job in jobs}.get(answers["job"].strip())
    if answer is None:
        raise Wrong(f"`job`: the jobs have the numbers {', '.join(job.number for job in jobs)}.")
    if answer.name == TORCHRUN:
        raise Wrong(
            f"`job`: the only task that Slurm counts in job {answer.number} is torchrun, which starts "
            f"{answer.ranks} ranks."
        )
    if answer is not wasteful:
        raise Wrong(
            f"`job`: job {answer.number} had {answer.gpus} GPUs and {answer.ranks} ranks, one for each."
        )
    idle = wasteful.gpus - wasteful.ranks
    if answers.number("idle") != idle:
        raise Wrong(
            f"`idle` is not {answers.number('idle'):g}: subtract the ranks of the job from its GPUs, on all "
            "its nodes."
        )
    wasted = idle * wasteful.hours
    gpu_hours = answers.number("gpu_hours")
    if not is_close(gpu_hours, wasted, 0.03):
        hint = f"multiply {idle} GPUs by the hours of the job."
        if is_close(gpu_hours, wasteful.gpus * wasteful.hours, 0.03):
            hint = "that is what all its GPUs cost, but two of them worked."
        if is_close(gpu_hours, 60 * wasted, 0.03) or is_close(gpu_hours, 3600 * wasted, 0.03):
            hint = "Elapsed is hours:minutes:seconds, and an hour has 3600 seconds."
        raise Wrong(f"`gpu_hours` is not {gpu_hours:g}: {hint}")
    return wasteful, wasted


def _jobs() -> list[Job]:
    lines = [line.split() for line in (STARTER / "sacct_gpus.txt").read_text().splitlines()[2:]]
    jobs = []
    for number, name, _, elapsed, _, resources in (line for line in lines if "." not in line[0]):
        hours, minutes, seconds = map(int, elapsed.split(":"))
        gpus = int(re.search(r"gres/gpu=(\d+)", resources)[1])
        # The first `env` only tries the environment; the training is the last one.
        tasks = [int(line[5]) for line in lines if line[0].startswith(f"{number}.") and line[1] == "env"]
        ranks = gpus if name == TORCHRUN else tasks[-1]
        jobs.append(Job(number, name, hours + minutes / 60 + seconds / 3600, gpus, ranks))
    return jobs


def _check_script(workspace: Workspace) -> tuple[int, int]:
    """Return the nodes that the script asks for, and its ranks on all of them."""
    for path in sorted(STARTER.glob("*.sh")):
        if path.stem != WASTEFUL and workspace.text(path.name) != path.read_text():
            raise Wrong(f"mine/{path.name} was right, but you have changed it. `reset` restores it.")
    name = f"mine/{WASTEFUL}.sh"
    before = (STARTER / f"{WASTEFUL}.sh").read_text()
    text = workspace.text(f"{WASTEFUL}.sh")
    if requested(text) == requested(before):
        raise Wrong(f"{name} still asks for the same resources as before: correct its #SBATCH lines.")
    if _commands(text) != _commands(before):
        raise Wrong(
            f"{name}: change the #SBATCH lines only. You pay for what they ask for, and srun obeys them."
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
        raise Wrong(f"{has}. Keep it a training with several ranks: one rank is stage 01.")
    if ranks > nodes > 1 and "ntasks-per-node" not in options:
        raise Wrong(
            f"{has}, but does not say where: one node may get {ranks - 1:g} of {ranks:g} tasks. Give the "
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
