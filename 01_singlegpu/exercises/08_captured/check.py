"""Compares the answers with the recorded traces: their verdicts, and the records of their trainings."""

import statistics
from pathlib import Path

from trainkit.monitor.issues import LaunchBound
from trainkit.monitor.verdict import judge
from trainkit.record import records
from trainkit.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# Before you look: which batch gains more, 64 or 1024?
prediction = 64

# From the verdicts: the milliseconds that you expect a captured step to take
step_64 = 0.59
step_1024 = 2.03

# As measured
gain_64 = 4.5    # times the images/s
gain_1024 = 1.5  # times the images/s
power_64 = 32    # percent of the limit
next = batch     # batch, graph or nothing
"""
HINTS = """\
## 1

In a step of 10 ms with a utilisation of 30 %, kernels run for 3 ms. The other 7 ms are gaps.

## 2

The images/s before: 64 images in 2.46 ms are 64 / 0.00246. Divide the images/s in traces.csv by that.

## 3

At 98 %, a kernel runs nearly all the time. The power shows how much work each kernel does: 227 of 700 W.
"""
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "step_64 = 0.59", "step_64 = 1.87", "that is the length of the gaps"),
    ("answers.txt", "step_1024 = 2.03", "step_1024 = 2.99", "with its gaps"),
    ("answers.txt", "gain_64 = 4.5", "gain_64 = 0.22", "upside down"),
    ("answers.txt", "gain_1024 = 1.5", "gain_1024 = 4.5", "of the other batch"),
    ("answers.txt", "power_64 = 32", "power_64 = 98", "utilisation"),
    ("answers.txt", "power_64 = 32", "power_64 = 227", "in watts"),
    ("answers.txt", "next = batch", "next = nothing", "two thirds of its power"),
    ("answers.txt", "next = batch", "next = graph", "no gaps left"),
]
TRACES = Path(__file__).parents[3] / "results" / "sample" / "h100" / "traces"
EAGER = {64: "launch_bound_64_tf32", 1024: "batch_1024_bf16"}
CAPTURED = {64: "captured_64_tf32", 1024: "captured_1024_bf16"}


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", *map(str, EAGER))
    for batch in EAGER:
        _check_step(answers, batch)
    gains = {batch: _speed(CAPTURED[batch]) / _speed(EAGER[batch]) for batch in EAGER}
    for batch, other in ((64, 1024), (1024, 64)):
        _check_gain(answers, batch, gains[batch], gains[other])
    _check_power(answers)
    _check_next(answers.word("next", "batch", "graph", "nothing"))
    return (
        f"You expected batch {prediction} to gain more. With 64 images, a captured step is {gains[64]:.1f} "
        f"times as fast; with 1024, {gains[1024]:.1f} times. The utilisation of the eager step showed that "
        "in advance: a graph removes the gaps and nothing else. Short kernels remain: at 98 % utilisation, "
        "the GPU takes a third of its power. The remedy for those is a larger batch, or a compiler that "
        "joins kernels. At 4096 there are no gaps, and a graph gains nothing."
    )


def _evidence(trace: str) -> LaunchBound:
    """Return the numbers of the worst finding."""
    return judge(TRACES / trace).findings[0].evidence


def _speed(trace: str) -> float:
    """Return the images/s of the median epoch after the warm-up."""
    (path,) = (TRACES / trace / "training").glob("*.csv")
    return statistics.median(row["images_per_s"] for row in records.read(path) if not row["warmup"])


def _check_step(answers: Answers, batch: int) -> None:
    name = f"step_{batch}"
    answer = answers.number(f"step_{batch}")
    evidence = _evidence(EAGER[batch])
    busy = evidence.power.utilisation_percent
    step = 1000 * evidence.step_seconds
    if is_close(answer, step * busy / 100, 0.06):
        return
    hint = "multiply the milliseconds of a step by the share of the time in which a kernel runs."
    if is_close(answer, step - step * busy / 100, 0.03):
        hint = "that is the length of the gaps. How long do kernels run?"
    elif is_close(answer, step, 0.03):
        hint = "that is the step as it is, with its gaps."
    raise Wrong(f"`{name}` is not {answer:g}: {hint}")


def _check_gain(answers: Answers, batch: int, gain: float, other: float) -> None:
    answer = answers.number(f"gain_{batch}")
    if is_close(answer, gain, 0.06):
        return
    hint = "divide the images/s of the captured training by those of the eager one."
    if is_close(answer, 1 / gain, 0.06):
        hint = "that is upside down."
    elif is_close(answer, other, 0.06):
        hint = "that is the gain of the other batch."
    raise Wrong(f"`gain_{batch}` is not {answer:g}: {hint}")


def _check_power(answers: Answers) -> None:
    answer = answers.number("power_64")
    power = _evidence(CAPTURED[64]).power
    if is_close(answer, 100 * power.power_w / power.limit_w, 0.04):
        return
    hint = "divide the watts by the limit, times 100."
    if is_close(answer, power.power_w, 0.03):
        hint = "that is in watts."
    elif is_close(answer, power.utilisation_percent, 0.03):
        hint = "that is its utilisation."
    raise Wrong(f"`power_64` is not {answer:g}: {hint}")


def _check_next(answer: str) -> None:
    if answer == "nothing":
        raise Wrong(
            "`next = nothing`: the GPU leaves two thirds of its power unused. What gives each kernel more "
            "work?"
        )
    if answer == "graph":
        raise Wrong("`next = graph`: at 98 % utilisation, there are no gaps left that a graph could remove.")
