"""Computes the bounds from the run on one node and the doctor's times, and shows the run on two nodes."""

import statistics
from pathlib import Path

from trainkit.record import records
from trainkit.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# Two nodes, 256 images each: how many times the images/s of one worker with 256?
prediction = 1.5
# From the runs and from the doctor
step_ms = 191       # one worker, 256 images
exchange_ms = 401   # of all gradients, between two nodes
# The step on two nodes
longest_ms = 592    # the exchange after all computation
shortest_ms = 401   # both at the same time
# Images/s of both nodes together
least = 865
most = 1277
# From the kit
recommended = 1     # workers, at a global batch of 512
"""
HINTS = """\
## 1

The time of a step is the batch divided by images/s. How many bytes are 1,199,882 gradients? Which two
lines of the doctor are they between?

## 2

4.8 million bytes are a little more than the 4,194,304 of one line, and take longer in proportion:
multiply the seconds of that line by 4,799,528 / 4,194,304. The doctor measured the whole sum, with
everything that each rank sends for it.

## 3

Longest: step + exchange. Shortest: the larger of the two. In both cases, two nodes train 2 x 256
images.
"""
STARTS_WITH = "`prediction`"
_SLOW = "results/sample/cpu-xeon-2-cores/slow_network"
_DOCTOR = f"{_SLOW}/two_nodes/all_reduce/20261122-060146-2x2.tsv"
RECORDED = {f"{_SLOW}/one_node/runs.csv": [], _DOCTOR: []}
WRONG = [
    ("answers.txt", "step_ms = 191", "step_ms = 0.191", "in seconds"),
    ("answers.txt", "exchange_ms = 401", "exchange_ms = 802", "count the bytes twice"),
    ("answers.txt", "exchange_ms = 401", "exchange_ms = 100", "4 bytes each"),
    ("answers.txt", "exchange_ms = 401", "exchange_ms = 351", "4,194,304"),
    ("answers.txt", "longest_ms = 592", "longest_ms = 401", "then the exchange"),
    ("answers.txt", "longest_ms = 592", "longest_ms = 783", "compute at the same time"),
    ("answers.txt", "shortest_ms = 401", "shortest_ms = 592", "the longer one counts"),
    ("answers.txt", "shortest_ms = 401", "shortest_ms = 191", "before its gradients"),
    ("answers.txt", "least = 865", "least = 432", "both nodes"),
    ("answers.txt", "recommended = 1", "recommended = 2", "first line"),
]  # fmt: skip
REPOSITORY = Path(__file__).resolve().parents[3]
WEIGHTS = 1_199_882
BATCH = 256


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    step = 1000 * BATCH / speed("one_node")
    exchange = 1000 * exchange_seconds()
    check_parts(answers, step, exchange)
    check_bounds(answers, step, exchange)
    if answers.number("recommended") != 1:
        raise Wrong("`recommended`: see the first line that the kit prints. Does your `most` agree?")
    times = {batch: speed("two_nodes", batch) / speed("one_node", batch) for batch in (BATCH, 4 * BATCH)}
    two = speed("two_nodes")
    return (
        f"Measured on two nodes: {two:,.0f} images/s, a step of {2000 * BATCH / two:.0f} ms, between your "
        f"{answers['shortest_ms']} and {answers['longest_ms']}: DDP sends the first gradients while the "
        f"backward pass still computes the others. That is {times[BATCH]:.2f} times one worker (you said "
        f"{prediction:g}). Over this network, two nodes are slower than one, and your bounds showed that "
        "before the run: even `most` is less than one worker trains. So the kit recommends one. A larger "
        f"batch makes the step longer, but not the exchange: with {4 * BATCH} images on each, the factor is "
        f"{times[4 * BATCH]:.2f}. On your own cluster, two runs are enough for how_many_gpus.py to predict "
        "two nodes: `python ../slurm/doctor.py --job --nodes 2 --gpus 2`, and a short run on one GPU."
    )


def speed(folder: str, batch: int = BATCH) -> float:
    """Return the median images/s of the runs with that batch per worker, in all epochs but the warm-up."""
    rows = records.read(REPOSITORY / _SLOW / folder / "runs.csv")
    of_batch = [row for row in rows if row["batch_per_device"] == batch and not row["warmup"]]
    return statistics.median(row["images_per_s"] for row in of_batch)


def exchange_seconds() -> float:
    """Interpolate the exchange of all gradients between the two sizes of the doctor's around theirs."""
    seconds = {row["bytes"]: row["seconds"] for row in records.read_all_reduce(REPOSITORY / _DOCTOR)}
    less = max(size for size in seconds if size <= 4 * WEIGHTS)
    more = min(size for size in seconds if size > 4 * WEIGHTS)
    share = (4 * WEIGHTS - less) / (more - less)
    return seconds[less] + share * (seconds[more] - seconds[less])


def check_parts(answers: Answers, step: float, exchange: float) -> None:
    """Say what is wrong with the step on one node, and with the exchange; in ms."""
    answer = answers.number("step_ms")
    if not is_close(answer, step):
        unit = " That is in seconds." if is_close(answer, step / 1000) else ""
        raise Wrong(f"`step_ms` is not {answer:g}: divide 256 images by images/s, in milliseconds.{unit}")
    answer = answers.number("exchange_ms")
    if not is_close(answer, exchange, 0.05):
        hint = "look between the lines of 4,194,304 and 16,777,216 bytes."
        if is_close(answer, 2 * exchange, 0.05):
            hint = "you count the bytes twice. The doctor timed the whole sum, there and back."
        if is_close(answer, exchange / 4, 0.15):
            hint = "there are 1,199,882 gradients of 4 bytes each."
        if 0.8 * exchange < answer < exchange:
            hint = "that is the sum of 4,194,304 bytes, but there are 4,799,528."
        raise Wrong(f"`exchange_ms` is not {answer:g}: {hint}")


def check_bounds(answers: Answers, step: float, exchange: float) -> None:
    """Say what is wrong with the bounds of the step on two nodes, in ms, and with their images/s."""
    longest = answers.number("longest_ms")
    shortest = answers.number("shortest_ms")
    if is_close(longest, max(step, exchange), 0.05):
        raise Wrong(
            "`longest_ms`: that is only the larger of the two. First comes the step, then the exchange."
        )
    if is_close(longest, 2 * step + exchange, 0.05):
        raise Wrong("`longest_ms`: two nodes compute at the same time, so the step counts once, not twice.")
    if not is_close(longest, step + exchange, 0.04):
        raise Wrong(f"`longest_ms` is not {longest:g}: one comes after the other.")
    if is_close(shortest, step + exchange, 0.05):
        raise Wrong("`shortest_ms`: you add the two, but they run at the same time: the longer one counts.")
    if is_close(shortest, min(step, exchange), 0.05):
        raise Wrong("`shortest_ms`: no step ends before its gradients are exchanged: take the longer one.")
    if not is_close(shortest, max(step, exchange), 0.05):
        raise Wrong(f"`shortest_ms` is not {shortest:g}: take the longer of the two.")
    for name, bound, ms in (("least", "longest", longest), ("most", "shortest", shortest)):
        answer = answers.number(name)
        true = 2 * BATCH / ms * 1000
        if not is_close(answer, true):
            half = " That is one node: both nodes train 256 images." if is_close(answer, true / 2) else ""
            raise Wrong(
                f"`{name}` is not {answer:g}: divide the images of both nodes by the {bound} step.{half}"
            )
