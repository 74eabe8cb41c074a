"""Reads the log of a training that was killed, stopped by a signal, and resumed."""

import re
from typing import NamedTuple

from manygpus.workshop.work import Workspace, Wrong

ANSWERS = """\
# After kill -9, with --save-every 100: at most how many steps will the training do twice?
prediction = 100

# Where it resumed after kill -9
epoch = 1
step = 100
# A stop by a signal: after how many steps of the epoch it stopped, and after how many it then resumed
saved_after = 160
resumed_after = 160
# Killed with kill -9 after step 599 of an epoch, how many steps would it do twice?
repeated = 99
# USR2, TERM or KILL
never_caught = KILL
"""
HINTS = """\
## 1

Look for the lines `resumed from` and `saved and stopped`. A training that a signal has stopped prints
`saved and stopped` before it ends. A training that was killed with `kill -9` prints nothing.

## 2

`resumed from ...: epoch 1, 100 of 937 steps done` means that the training resumes with step 101 of epoch 1.
If there is no such line, no checkpoint had been saved: let the training run longer, and kill it again.

## 3

With --save-every 100, the newest checkpoint before step 599 is that of step 500. At a signal the training
saves the step in which it stops, so nothing is done twice. `man 7 signal` says which signals cannot be
caught.
"""
STARTS_WITH = "`prediction`"
RECORDED = {"03_multigpu_ddp/exercises/07_time_limit/recorded": []}
WRONG = [
    ("runs/time_limit.txt", "resumed from", "began with", "never says `resumed from`"),
    ("runs/time_limit.txt", "saved and stopped", "ended", "no limit has stopped the training"),
    ("answers.txt", "step = 100", "step = 160", "does not resume at"),
    ("answers.txt", "saved_after = 160", "saved_after = 100", "`saved and stopped`"),
    ("answers.txt", "resumed_after = 160", "resumed_after = 100", "next `resumed from`"),
    ("answers.txt", "repeated = 99", "repeated = 0", "no signal"),
    ("answers.txt", "repeated = 99", "repeated = 599", "every 100 steps"),
    ("answers.txt", "= KILL", "= TERM", "has a handler"),
]
TOLD_WHEN_DONE = [
    ("answers.txt", "160\nresumed_after = 160", "280\nresumed_after = 280", "saved after step 280"),
    ("answers.txt", "= KILL", "= SIGKILL", "saved after step 160"),
]
SAVE_EVERY = 100
RESUMED = re.compile(r"resumed from \S+: epoch (\d+), (\d+) of (\d+) steps done")
STOPPED = re.compile(r"saved and stopped in epoch (\d+) after (\d+) of (\d+) steps")


class Resume(NamedTuple):
    """Where a training resumed, and where a signal had stopped it before; None after a kill."""

    epoch: int
    step: int
    stopped: tuple[int, int] | None


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    predicted = answers.number("prediction")
    names = ("runs/time_limit.txt", "job.txt")
    logs = [name for name in names if (workspace.folder / name).exists()]
    if not logs:
        raise Wrong("There is no log mine/job.txt yet. Run the commands of the README, or use `recorded`.")
    resumes = _resumes(workspace.text(logs[0]))
    killed = next((resume for resume in resumes if resume.stopped is None), None)
    limits = [resume for resume in resumes if resume.stopped]
    if killed is None:
        raise Wrong(
            "In the log, no training resumes after a kill: each `resumed from` follows a `saved and "
            "stopped`. Kill a rank with kill -9 when a checkpoint has been saved, and start the training "
            "again. If you have done that, one of the starts saved in a different folder: give all of them "
            "the same MANYGPUS_JOB_DIR, in one shell."
        )
    if not limits:
        raise Wrong(
            "In the log, no limit has stopped the training: no `resumed from` follows a `saved and stopped`."
        )
    answered = answers.number("epoch"), answers.number("step")
    if answered != (killed.epoch, killed.step):
        raise Wrong(
            "After kill -9 the training does not resume at your `epoch` and `step`. Both are in the first "
            "`resumed from` that no `saved and stopped` precedes."
        )
    saved_after = answers.number("saved_after")
    limited = next((resume for resume in limits if resume.stopped[1] == saved_after), None)
    if limited is None:
        raise Wrong("`saved_after`: the number is in a line `saved and stopped` of the log.")
    _check_limit(answers.number("resumed_after"), limited)
    _check_repeated(answers.number("repeated"))
    signals = ("usr2", "term", "kill")
    answer = answers.word("never_caught", *signals, *(f"sig{name}" for name in signals))
    if answer.removeprefix("sig") != "kill":
        raise Wrong("`never_caught`: the script has a handler for that one, in STOP_SIGNALS, and saves.")
    return (
        f"After kill -9 the training returned to step {killed.step} of epoch {killed.epoch}, its newest "
        f"checkpoint: up to {SAVE_EVERY} steps are done twice, if the kill comes while one is written (you "
        f"predicted {predicted:g}). At the limit it was warned, saved after step {limited.step}, and resumed "
        "with the next one. So save regularly for ends that nobody announces, and at a signal for those that "
        "Slurm announces. Write a new file before you replace the old one."
    )


def _resumes(log: str) -> list[Resume]:
    """Return every place where the training resumed."""
    resumes = []
    stopped = None
    for line in log.splitlines():
        if match := STOPPED.search(line):
            stopped = int(match[1]), int(match[2])
        elif match := RESUMED.search(line):
            resumes.append(Resume(int(match[1]), int(match[2]), stopped))
            stopped = None
    if not resumes:
        raise Wrong(
            "The log never says `resumed from`. Start the same command again after the kill. If no "
            "checkpoint had been saved by then, let the training run longer."
        )
    return resumes


def _check_limit(resumed_after: float, limited: Resume) -> None:
    stopped_in, after = limited.stopped
    if resumed_after != limited.step:
        raise Wrong(
            f"`resumed_after`: in the next `resumed from` after that line, {limited.step} steps are done."
        )
    if (stopped_in, after) != (limited.epoch, limited.step):
        raise Wrong(
            f"The training stopped in epoch {stopped_in} after {after} steps, but resumed in epoch "
            f"{limited.epoch} after {limited.step}: was the checkpoint moved, or the log edited?"
        )


def _check_repeated(repeated: float) -> None:
    if repeated == 0:
        raise Wrong(
            "`repeated`: kill -9 sends no signal that the program could catch, so step 599 is not saved."
        )
    if repeated not in (SAVE_EVERY - 1, SAVE_EVERY):
        raise Wrong(
            f"`repeated`: the training saves every {SAVE_EVERY} steps. Which checkpoint is the newest, and "
            "which steps follow it?"
        )
