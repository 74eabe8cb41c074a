"""Computes the numbers from the given traces, and asks the kit for its verdict on them."""

import runpy
import statistics
from pathlib import Path

from trainkit.monitor.verdict import judge
from trainkit.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# From the table alone: which job wastes the most, a, b or c?
prediction = b

a_cause = launch_bound
a_power = 20    # percent of its limit
a_cure = batch

b_cause = stalled_rank
b_rank = 2
b_waits = 67    # seconds of 100, of one of the others
b_cure = rank

c_cause = shared_cores
c_core = 50     # percent
c_cure = cores
"""
HINTS = """\
## 1

Compare the ranks of each job with each other, and a GPU's power with its limit. Which columns differ
between ranks, and which are the same although they should differ?

## 2

Compare the `own_seconds` of the ranks of `b`. If a rank waits in NCCL, its GPU is at 100 % but takes little
power: a kernel that waits is also a kernel. In `c`, look at the `core_list` of both ranks.

## 3

`a`: 143 of 700 W, hardly any waiting for data, and 64 images in a step: each kernel ends before the next one
is started. `b`: of 12 seconds, rank 2 works for 11.2 itself, and rank 0 for 4.0. `c`: both ranks may use only
core 0.
"""
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "a_cause = launch_bound", "a_cause = nothing", "of its limit"),
    ("answers.txt", "a_cause = launch_bound", "a_cause = waiting_for_loader", "`data_seconds`"),
    ("answers.txt", "a_power = 20", "a_power = 24", "utilisation"),
    ("answers.txt", "a_power = 20", "a_power = 143", "in watts"),
    ("answers.txt", "a_cure = batch", "a_cure = fewer", "64 images"),
    ("answers.txt", "b_cause = stalled_rank", "b_cause = nothing", "that waits is also a kernel"),
    ("answers.txt", "b_cause = stalled_rank", "b_cause = idle_gpu", "by utilisation alone"),
    ("answers.txt", "b_cause = stalled_rank", "b_cause = waiting_for_loader", "`data_seconds`"),
    ("answers.txt", "b_rank = 2", "b_rank = 0", "waits itself"),
    ("answers.txt", "b_waits = 67", "b_waits = 33", "For how long did it not"),
    ("answers.txt", "b_waits = 67", "b_waits = 7", "of rank 2"),
    ("answers.txt", "b_waits = 67", "b_waits = 3", "its batches"),
    ("answers.txt", "b_cure = rank", "b_cure = fewer", "would still have to be done"),
    ("answers.txt", "c_cause = shared_cores", "c_cause = nothing", "two ranks"),
    ("answers.txt", "c_core = 50", "c_core = 0.5", "in percent"),
    ("answers.txt", "c_core = 50", "c_core = 99", "both ranks together"),
    ("answers.txt", "c_core = 50", "c_core = 60", "it waited"),
    ("answers.txt", "c_cure = cores", "c_cure = batch", "another core"),
]
REPOSITORY = Path(__file__).resolve().parents[3]
GIVEN = {
    "a/monitor": "results/sample/h100/traces/launch_bound_64_tf32",
    "b/monitor": "results/sample/traces/gpu_slow_rank",
    "c/monitor": "results/sample/traces/cpu_shared_cores",
}
CAUSES = ("idle_gpu", "waiting_for_loader", "launch_bound", "memory_full", "throttled")
CAUSES += ("shared_cores", "stalled_rank", "nothing")
CURES = {"a": "batch", "b": "rank", "c": "cores"}
NUMBERS = {
    "a": [("gpu", "power_w"), ("gpu", "power_limit_w"), ("gpu", "utilisation")],
    "b": [("rank", "own_seconds"), ("rank", "data_seconds"), ("epoch", "train_seconds")],
    "c": [("rank", "cores"), ("rank", "waiting")],
}
values = runpy.run_path(str(Path(__file__).parent / "starter" / "look.py"))["values"]


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", *CURES)
    for job in CURES:
        _check_cause(answers, job)
        _check_number(answers, job)
        _check_cure(answers, job)
    return (
        f"By utilisation, you suspected {prediction}. All three jobs waste something, and what their users "
        "looked at did not show it: the core of `a` is busy starting kernels, the busiest GPUs of `b` are "
        "those that wait, and the core of `c` is full because two ranks take turns on it. So first look at "
        "images/s, then at power and its limit, then for the rank or GPU that differs from the others; the "
        "lines that begin with `watch` do that at the end of each job. For `a`, one GPU is enough, or too "
        "much: with 64 images in a step, no GPU could be full."
    )


def _check_cause(answers: Answers, job: str) -> None:
    name = f"{job}_cause"
    answer = answers.word(f"{job}_cause", *CAUSES)
    if answer == judge(_trace(job)).findings[0].kind:
        return
    if answer == "waiting_for_loader":
        waited = _means(job, "rank", "data_seconds")
        (trained,) = _means(job, "epoch", "train_seconds")
        raise Wrong(
            f"`{name}`: its ranks wait for batches for {max(waited):.1f} of {trained:.1f} s of an epoch "
            "(`data_seconds`). That is not the cause."
        )
    if answer == "throttled":
        raise Wrong(f"`{name}`: the column `throttled` has the reason why a clock is low; `-` means none.")
    if answer == "memory_full":
        raise Wrong(
            f"`{name}`: compare `memory_mb` with `memory_limit_mb`. And a full memory alone wastes nothing."
        )
    hints = {
        "a": "how much of its limit is its power? A GPU at work takes more than half of its limit.",
        "b": "that judges by utilisation alone. In NCCL, a kernel that waits is also a kernel: what do the "
        "`own_seconds` of its ranks show?",
        "c": "that core is busy, with two ranks. Look at `core_list` and `waiting`.",
    }
    raise Wrong(f"`{name} = {answer}`: {hints[job]}")


def _check_number(answers: Answers, job: str) -> None:
    check_of = {"a": _check_power, "b": _check_waits, "c": _check_core}
    check_of[job](answers, *(_means(job, *column) for column in NUMBERS[job]))


def _check_power(answers: Answers, power: list[float], limit: list[float], utilisation: list[float]) -> None:
    answer = answers.number("a_power")
    true_percent = 100 * power[0] / limit[0]
    if is_close(answer, true_percent, 0.06):
        return
    hint = "divide `power_w` by `power_limit_w`, times 100."
    if is_close(answer, power[0], 0.06):
        hint = "that is in watts."
    if is_close(answer, utilisation[0], 0.05):
        hint = "that is its utilisation."
    raise Wrong(f"`a_power` is not {answer:g}: {hint}")


def _check_waits(answers: Answers, own_seconds: list[float], data: list[float], trained: list[float]) -> None:
    slowest = own_seconds.index(max(own_seconds))
    if answers.number("b_rank") != slowest:
        raise Wrong("`b_rank`: that rank has little work, and waits itself: see `own_seconds`.")
    answer = answers.number("b_waits")
    true_percent = 100 * (1 - min(own_seconds) / trained[0])
    if is_close(answer, true_percent, 0.03):
        return
    hint = "subtract the `own_seconds` of rank 0 from `train_seconds`, divide by `train_seconds`, times 100."
    if is_close(answer, 100 - true_percent, 0.03):
        hint = "for so long it worked. For how long did it not?"
    if is_close(answer, 100 * (1 - max(own_seconds) / trained[0]), 0.1):
        hint = f"that is the wait of rank {slowest}. How long do the others wait for it?"
    if is_close(answer, 100 * data[0] / trained[0], 0.1):
        hint = "for so long it waited for its batches. It waits for more than these."
    raise Wrong(f"`b_waits` is not {answer:g}: {hint}")


def _check_core(answers: Answers, cores: list[float], waiting: list[float]) -> None:
    answer = answers.number("c_core")
    true_percent = 100 * statistics.fmean(cores)
    if is_close(answer, true_percent, 0.05):
        return
    hint = "the `cores` of a rank are those that it used."
    if is_close(answer, true_percent / 100, 0.05):
        hint = "give it in percent."
    if is_close(answer, 2 * true_percent, 0.05):
        hint = "that is how much of the core both ranks together used."
    if is_close(answer, 100 * waiting[0], 0.05):
        hint = "that is the share of the time in which it waited for a core."
    raise Wrong(f"`c_core` is not {answer:g}: {hint}")


def _check_cure(answers: Answers, job: str) -> None:
    answer = answers.word(f"{job}_cure", "workers", "batch", "cores", "rank", "admin", "fewer")
    if answer == CURES[job]:
        return
    hints = {
        "a": "it has one GPU, and 64 images in a step are too few for that.",
        "b": "without the rank that the others wait for, its work would still have to be done.",
        "c": "each rank has all that it needs, except another core.",
    }
    raise Wrong(f"`{job}_cure = {answer}`: {hints[job]}")


def _trace(job: str) -> Path:
    return REPOSITORY / GIVEN[f"{job}/monitor"]


def _means(job: str, kind: str, column: str) -> list[float]:
    """Return the means of each GPU or rank, in the order of their numbers."""
    of_each = values(_trace(job), kind, column)
    return [statistics.fmean(values_of_one) for _, values_of_one in sorted(of_each.items())]
