"""The answers are in the files of starter/, which do not change."""

from trainkit.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# Before you open sacct.txt: how many of its 2 cores did job 3 keep busy, on average?
prediction = 2

# Job 3:
images_per_s = 178  # after the warm-up
busy_cores = 0.66    # from sacct, on average
memory_mb = 808     # the most that the training used; a K in sacct is about a thousandth of an MB

# Job 4:
exit_code = 137  # as its log says
signal = 9     # the number of the signal that this exit code stands for
why = memory        # what ended it? error, time, memory or user
"""
HINTS = """\
## 1

The first epoch is the warm-up, so two epochs are left: take the number halfway between their speeds. In
sacct, `3.1` is what the second `srun` of the job started: the training.

## 2

`Elapsed` is hours:minutes:seconds; `TotalCPU` here is minutes:seconds, of all cores together. If one core is
busy all the time, TotalCPU is equal to Elapsed. An exit code above 128 is 128 plus the number of a signal.

## 3

91 s of CPU time in 139 s are 0.66 cores. For job 4, look at the first line after the two lines on what is
trained, and compare ReqMem with MaxRSS in sacct.
"""
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "images_per_s = 178", "images_per_s = 170", "includes the first epoch"),
    ("answers.txt", "images_per_s = 178", "images_per_s = 154", "includes the first epoch"),
    ("answers.txt", "busy_cores = 0.66", "busy_cores = 1.52", "upside down"),
    ("answers.txt", "busy_cores = 0.66", "busy_cores = 0.33", "share of the two"),
    ("answers.txt", "busy_cores = 0.66", "busy_cores = 2", "is what the job was given"),
    ("answers.txt", "busy_cores = 0.66", "busy_cores = 0.6", "minutes and seconds"),
    ("answers.txt", "memory_mb = 808", "memory_mb = 4.9", "of the job script"),
    ("answers.txt", "memory_mb = 808", "memory_mb = 8000", "asked for"),
    ("answers.txt", "exit_code = 137", "exit_code = 0", "begins with `ended`"),
    ("answers.txt", "signal = 9", "signal = 15", "minus 128"),
    ("answers.txt", "why = memory", "why = time", "30 minutes"),
    ("answers.txt", "why = memory", "why = user", "first line"),
]
IMAGES_PER_S = (154, 227, 130)  # of the three epochs of job 3
ELAPSED_SECONDS = 139
CPU_SECONDS = 91.4
MEGABYTES = 808


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    _check_speed(answers.number("images_per_s"))
    _check_cores(answers.number("busy_cores"))
    _check_memory(answers.number("memory_mb"))
    if answers.number("exit_code") != 137:
        raise Wrong("`exit_code`: it is in the last line of job-4.txt, which begins with `ended`.")
    if answers.number("signal") != 9:
        raise Wrong("`signal`: an exit code above 128 means a signal, whose number is the code minus 128.")
    why = answers.word("why", "error", "time", "memory", "user")
    if why == "time":
        raise Wrong("`why = time`: the job ran for less than a minute, and its script asks for 30 minutes.")
    if why != "memory":
        raise Wrong(f"`why = {why}`: read the first line of job-4.txt that begins with slurmstepd.")
    return (
        f"Job 3 kept {CPU_SECONDS / ELAPSED_SECONDS:.2f} of its 2 cores busy; you expected {prediction:g}. "
        "The "
        "machine had other work, so the training was slow. On a cluster, where the cores are yours alone, "
        "the same numbers mean that the training waits: for a loader, a disk, or a GPU. Job 4 had asked for "
        f"600 MB, but the training takes {MEGABYTES}. Signal 9 cannot be caught: the process ends without a "
        "message, so look for the reason in Slurm's lines, and compare MaxRSS with ReqMem. For the next job, "
        "ask for half as much again as sacct shows."
    )


def _check_speed(answer: float) -> None:
    _, *steady = IMAGES_PER_S
    if is_close(answer, sum(steady) / 2):
        return
    if is_close(answer, sum(IMAGES_PER_S) / 3) or is_close(answer, IMAGES_PER_S[0]):
        raise Wrong(f"`images_per_s = {answer:g}` includes the first epoch, which is the warm-up.")
    raise Wrong(f"`images_per_s = {answer:g}`: take the median of epochs 2 and 3, which is their mean.")


def _check_cores(answer: float) -> None:
    true = CPU_SECONDS / ELAPSED_SECONDS
    if is_close(answer, true, 0.05):
        return
    if is_close(answer, 1 / true, 0.05):
        raise Wrong(f"`busy_cores = {answer:g}` is upside down: divide the CPU's seconds by the clock's.")
    if is_close(answer, true / 2, 0.05):
        raise Wrong(f"`busy_cores = {answer:g}` is the share of the two cores: how many cores is that?")
    if answer == 2:
        raise Wrong(
            "`busy_cores = 2` is what the job was given (AllocCPUS). How long did it compute (TotalCPU)?"
        )
    raise Wrong(
        f"`busy_cores = {answer:g}`: divide TotalCPU by Elapsed, both in seconds. 01:31.435 is in minutes "
        "and "
        "seconds."
    )


def _check_memory(answer: float) -> None:
    if is_close(answer, MEGABYTES, 0.04):
        return
    if is_close(answer, 4.9, 0.05):
        raise Wrong(f"`memory_mb = {answer:g}` is that of the job script (3.batch); the training is 3.1.")
    if 7000 < answer < 9000:
        raise Wrong(
            f"`memory_mb = {answer:g}` is what the job asked for (ReqMem). How much did it use (MaxRSS)?"
        )
    raise Wrong(f"`memory_mb = {answer:g}`: take the MaxRSS of 3.1; 1,000K is about one MB.")
