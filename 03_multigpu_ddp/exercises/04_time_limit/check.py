"""Reads the log of a job that was stopped and came back, and its one CSV."""

import re

from trainkit.record import records
from trainkit.workshop.work import Workspace, Wrong

ANSWERS = """\
# How many steps will the job do twice?
prediction = 15
# Of the first stop: where the job goes on
epoch = 3
step = 15
# Steps that were done twice
repeated = 0
# Steps that would have been lost without the signal, at least
lost = 15
# Epochs that the CSV marks as warmup
warmups = 3
"""
HINTS = """\
## 1

Look for three lines in the log: `stopped after`, `resumed from`, and the first `epoch` after
that. If there are none, the job has not been stopped yet: give it more epochs (or images), or wait.

## 2

`resumed from .../epoch-3-step-40.pt` means that 40 steps of epoch 3 were done, and the job goes on
with the 41st. Which steps does it then repeat? Without the signal, the newest checkpoint would be
`epoch-3-step-0.pt`.

## 3

Nothing is repeated: `repeated = 0`. `lost` is the same number as `step`. `warmups` is the number
of rows of the CSV with a 1 in the column `warmup`, the fifth: each new process has a first epoch.
"""
STARTS_WITH = "`prediction`"
_EXERCISES = "results/sample/cpu-xeon-2-cores/exercises"
RECORDED = {f"{_EXERCISES}/job.txt": [], f"{_EXERCISES}/runs.csv": ["ddp-20261122-023235-013c9ba4"]}
WRONG = [
    ("runs/job.txt", "resumed from", "began", "never says `resumed from`"),
    ("runs/job.txt", "stopped after", "went on after", "was not stopped"),
    ("runs/*.csv", "srun,2,", "srun,12,", "a gap"),
    ("answers.txt", "step = 15", "step = 0", "The name of the checkpoint"),
    ("answers.txt", "repeated = 0", "repeated = 15", "goes on with the next step"),
    ("answers.txt", "lost = 15", "lost = 0", "beginning of the epoch"),
    ("answers.txt", "warmups = 3", "warmups = 1", "Each time the job begins"),
]  # fmt: skip


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    predicted = answers.number("prediction")
    logs = [name for name in ("runs/job.txt", "job.txt") if (workspace.folder / name).exists()]
    if not logs:
        raise Wrong("There is no log mine/job.txt yet. Run the command of the README, or take `recorded`.")
    log = workspace.text(logs[0])
    if "stopped after" not in log:
        raise Wrong(
            "The job of mine/job.txt was not stopped: there is no line `stopped after ...`. If it ended "
            "before that, give it more --epochs. If it is still running, wait."
        )
    resumed = re.search(r"resumed from .*epoch-(\d+)-step-(\d+)\.pt", log)
    if not resumed:
        raise Wrong(
            "The job was stopped, but the log never says `resumed from`. `squeue` shows when it may start "
            "again. Without Slurm, run the same command once more, with --resume auto and the same "
            "--checkpoint-dir."
        )
    rows = rows_of_one_run(workspace)
    epochs = [row["epoch"] for row in rows]
    if epochs != list(range(1, len(epochs) + 1)):
        raise Wrong(f"The epochs in the CSV are {epochs}: there is a gap. Was the file edited?")
    epoch, step = map(int, resumed.groups())
    if epochs[-1] < epoch:
        raise Wrong(f"Epoch {epoch}, in which the job goes on, is not done yet: wait for its line.")
    warmups = sum(row["warmup"] for row in rows)
    if (answers.number("epoch"), answers.number("step")) != (epoch, step):
        raise Wrong(
            "The job does not go on at your `epoch` and `step`. The name of the checkpoint that it first "
            "resumed from has both."
        )
    if answers.number("repeated") != 0:
        raise Wrong(
            f"`repeated`: {step} steps of epoch {epoch} are in the checkpoint, with the optimizer, the "
            "random numbers and the losses so far. The job goes on with the next step."
        )
    if answers.number("lost") != step:
        raise Wrong(
            "`lost`: without the signal, the newest checkpoint is that of the last whole epoch, and the job "
            "would go back to the beginning of the epoch in which it was stopped. How many steps of that "
            "epoch were done? (The ten minutes of --checkpoint-minutes had not passed.)"
        )
    if answers.number("warmups") != warmups:
        raise Wrong(
            "`warmups`: count the rows of the CSV with a 1 in the column warmup. Each time the job "
            "begins, a new process has a first epoch, which says nothing about the speed."
        )
    return (
        f"One run, {len(rows)} epochs without a gap, {warmups} of them the first of a process: it went on "
        f"with step {step + 1} of epoch {epoch}, and no step was done twice (you predicted {predicted:g}). "
        f"Without the signal, the job would have lost {step} steps"
        f"{'' if step else ', as the signal came between two epochs'}; epochs of large models take hours. "
        "This needs the three lines in the job script, a program that reacts to USR2, and `scontrol requeue` "
        "at the end of the job (slurm/job_env.sh). It always costs the wait in the queue."
    )


def rows_of_one_run(workspace: Workspace) -> list[dict[str, object]]:
    """Return the rows of the only run in mine/runs, whose job may have started several times."""
    files = sorted((workspace.folder / "runs").glob("*.csv"))
    if not files:
        raise Wrong("No epoch is finished yet, so there is no CSV. Wait; without Slurm, run the line again.")
    try:
        runs = list(records.read_runs(files).values())
    except records.RecordError as error:
        raise Wrong(str(error)) from None
    if len(runs) != 1:
        raise Wrong(
            f"mine/runs has {len(runs)} runs. A job that comes back goes on with the run that it began. "
            "`reset` moves these files away; then run the job once, or take `recorded`."
        )
    return runs[0]
