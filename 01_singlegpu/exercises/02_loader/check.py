"""Compares the learner's table with the learner's runs."""

from typing import TYPE_CHECKING

from trainkit.workshop.work import Workspace, Wrong, check_alike, is_close

if TYPE_CHECKING:
    import pandas as pd

EXERCISES = "results/sample/cpu-xeon-2-cores/exercises"
RECORDED = {
    f"{EXERCISES}/strong_weak.csv": ["single-20261122-021517-5602262a"],  # resident
    f"{EXERCISES}/runs.csv": ["single-20261122-021127-4ffdbdd1"],  # without loader processes
}
ANSWERS = """\
# Before you run: how many times as fast is the resident loader? A number such as 3.
prediction = 3

# From your runs, without the first epoch (the warm-up):
resident_images_per_s = 1348
workers_images_per_s = 1217
times_as_fast = 1.11  # resident against workers
resident_seconds = 8.7  # of training, in one epoch
workers_seconds = 9.7
"""
HINTS = """\
## 1

What does a speed in images/s say about an epoch, and what else do you have to know? Look at the line above
the table, too.

## 2

An epoch has fewer images than `--train-size` says, since the last batch is dropped if it is not full. The
seconds of the evaluation (`eval s` in `mine/comparison.md`) do not belong to the training, and the first
epoch, the warm-up, is left out everywhere.

## 3

`times_as_fast` is `resident_images_per_s` divided by `workers_images_per_s`. With 11,776 images per epoch
and 1,000 images/s, an epoch takes 11.8 seconds. The CSV files in `mine/runs` have the seconds of every
epoch in the column `train_seconds`.
"""
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "workers_images_per_s = 1217", "workers_images_per_s = 1201", "Is the first epoch in"),
    ("answers.txt", "workers_images_per_s = 1217", "workers_images_per_s = 1348", "of the other loader"),
    ("runs/single-20261122-021517*.csv", ",fp32,", ",bf16,", "differ in precision"),
    ("answers.txt", "times_as_fast = 1.11", "times_as_fast = 0.90", "is upside down"),
    ("answers.txt", "times_as_fast = 1.11", "times_as_fast = 11", "does not fit your runs"),
    ("answers.txt", "workers_seconds = 9.7", "workers_seconds = 12.7", "includes the evaluation"),
    ("answers.txt", "resident_seconds = 8.7", "resident_seconds = 8.9", "an epoch trains 11,776 images"),
    ("answers.txt", "resident_seconds = 8.7", "resident_seconds = 26.4", "of one epoch after the warm-up"),
]


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    resident = workspace.row(loader="resident")
    workers = workspace.row(loader="workers", workers_per_loader=0)
    check_alike(resident, workers)
    for name, row, other in (("resident", resident, workers), ("workers", workers, resident)):
        _check_speed(f"{name}_images_per_s", answers, row, other)
        _check_seconds(f"{name}_seconds", answers, row)
    times = resident.images_per_s / workers.images_per_s
    answer = answers.number("times_as_fast")
    if not is_close(answer, times):
        mistake = "is upside down" if is_close(answer, 1 / times) else "does not fit your runs"
        raise Wrong(
            f"`times_as_fast = {answer:g}` {mistake}: divide the images/s of resident by the images/s of "
            "workers."
        )
    return (
        f"The resident loader is {times:.2f} times as fast here; you expected {prediction:g}. "
        f"{_loading(resident, workers)}"
    )


def _check_speed(name: str, answers: dict, row: "pd.Series", other: "pd.Series") -> None:
    answer = answers.number(name)
    if 0.995 * row.slowest <= answer <= 1.005 * row.fastest:
        return
    if 0.995 * other.slowest <= answer <= 1.005 * other.fastest:
        raise Wrong(f"`{name} = {answer:g}` is the speed of the other loader.")
    raise Wrong(
        f"`{name} = {answer:g}` is not between the slowest and the fastest epoch after the warm-up, "
        f"{row.slowest:,.0f} and {row.fastest:,.0f}. Is the first epoch in your number?"
    )


def _check_seconds(name: str, answers: dict, row: "pd.Series") -> None:
    answer = answers.number(name)
    rounding = 0.06
    if row.images / row.fastest - rounding <= answer <= row.images / row.slowest + rounding:
        return
    if is_close(answer, row.epoch_seconds + row.eval_seconds):
        raise Wrong(f"`{name} = {answer:g}` includes the evaluation, which is not training.")
    if row.images < answer * row.images_per_s < row.images + row.global_batch:
        raise Wrong(
            f"`{name} = {answer:g}`: an epoch trains {row.images:,} images, since its last batch is dropped."
        )
    raise Wrong(
        f"`{name} = {answer:g}`: the training of one epoch after the warm-up took {row.epoch_seconds:.1f} s."
    )


def _loading(resident: "pd.Series", workers: "pd.Series") -> str:
    seconds = workers.epoch_seconds - resident.epoch_seconds
    if seconds <= 0:
        return "So loading takes less time here than the chance difference between two runs."
    return (
        f"The difference of {seconds:.2f} s per epoch is loading: one process prepares about "
        f"{resident.images / seconds:,.0f} images per second. A device that trains faster than that waits "
        "for its images most of the time, and a second device would wait too. So look at the loader before "
        "you ask for more GPUs."
    )
