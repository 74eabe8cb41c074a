"""Computes the prices from the table of candidates, and the efficiency from the committed runs."""

import csv
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

from trainkit.record import records
from trainkit.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# Which of the six would you start?
prediction = F
# Letters of candidates.csv
nothing = B, C, E   # all that show nothing about two workers or four
cheapest = F        # of the others
# From the kit's second answer
efficiency = 92.7   # in %, of two workers
four = predicted    # of four workers: measured, predicted or unknown
"""
HINTS = """\
## 1

Seconds / 3600 are hours, and each of the workers costs as many. As for what a run shows: what does a
step on two workers contain that a step on one does not?

## 2

Workers exchange gradients. A run on one worker has no exchange, however long it is. And what does the
kit do with the first epoch of every run?

## 3

The first epoch is the warm-up, which is left out of every mean. So a run of one epoch measures
nothing. Three runs are left: the cheapest of them is the one with fewer workers and fewer epochs.
"""
SOLUTION = {
    "candidates.csv": """\
@@
-A,4,512,3,27,?
-B,1,512,12,98,?
-C,2,512,1,11,?
-D,2,512,12,98,?
-E,1,512,3,27,?
-F,2,512,3,27,?
+A,4,512,3,27,0.03
+B,1,512,12,98,0.0272
+C,2,512,1,11,0.00611
+D,2,512,12,98,0.0544
+E,1,512,3,27,0.0075
+F,2,512,3,27,0.015
""",
}
STARTS_WITH = "`prediction`"
WRONG = [
    ("candidates.csv", "F,2,512,3,27,0.015", "F,2,512,3,27,0.0075", "Each of the 2 workers"),
    ("candidates.csv", "A,4,512,3,27,0.03", "A,4,512,3,27,108", "seconds, not hours"),
    ("candidates.csv", "D,2,512,12,98,0.0544", "D,2,512,12,98,?", "still open"),
    ("answers.txt", "nothing = B, C, E", "nothing = B, E", "the warm-up"),
    ("answers.txt", "nothing = B, C, E", "nothing = C", "no exchange"),
    ("answers.txt", "nothing = B, C, E", "nothing = B, C, D, E", "has several workers"),
    ("answers.txt", "cheapest = F", "cheapest = E", "shows nothing"),
    ("answers.txt", "cheapest = F", "cheapest = A", "0.015 are fewer"),
    ("answers.txt", "efficiency = 92.7", "efficiency = 185", "is the speedup"),
    ("answers.txt", "four = predicted", "four = measured", "there is no run on four"),
    ("answers.txt", "four = predicted", "four = unknown", "twice as many"),
]  # fmt: skip
TABLE = Path(__file__).parent / "starter" / "candidates.csv"
CANDIDATES = {row["run"]: row for row in csv.DictReader(TABLE.read_text().splitlines())}
W32 = "results/sample/cpu-xeon-2-cores/scaling/w32.csv"
RECORDED = {W32: []}
WHY = {
    "C": "C has one epoch, which is the warm-up and is left out of every mean.",
    **dict.fromkeys("BE", "a run on one worker has no exchange, however long it is."),
}


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", *"abcdef").upper()
    prices = check_prices(workspace)
    check_choice(answers, prices)
    true = 100 * efficiency()
    answer = answers.number("efficiency")
    if is_close(answer, 2 * true):
        raise Wrong("`efficiency`: that is the speedup. Divide it by the number of workers.")
    if not is_close(answer, true):
        raise Wrong(f"`efficiency` is not {answer:g}: column `eff. %`, 2 devices, batch 512.")
    four = answers.word("four", "measured", "predicted", "unknown")
    if four == "measured":
        raise Wrong("`four`: there is no run on four workers.")
    if four == "unknown":
        raise Wrong("`four`: the kit predicts up to twice as many as were measured. See the column `note`.")
    return (
        f"You would have started {prediction}, for {prices[prediction]:.2g} worker-hours at most. F costs "
        f"{prices['F']:.2g}, and decides for two workers: {true:.0f} %, measured. Four are now predicted, "
        "with a wide interval, and the kit goes on to the run that tests it. So ask in this order: what is "
        "unknown, which runs would show it, and which of these is the cheapest. A, at twice the price, would "
        "have left two workers predicted."
    )


def check_prices(workspace: Workspace) -> dict[str, float]:
    """Return the worker-hours of each candidate, or say what is wrong with the learner's."""
    rows_by_run = {
        row["run"]: row
        for row in csv.DictReader(workspace.text("candidates.csv").splitlines())
        if row.get("run")
    }
    prices = {}
    for run, row in CANDIDATES.items():
        workers = int(row["workers"])
        seconds = int(row["seconds_at_most"])
        cell = Answers({run: (rows_by_run.get(run, {}).get("worker_hours") or "?").strip()})
        cell.file = "candidates.csv"
        if cell[run] == "?":
            raise Wrong(f"mine/candidates.csv: the worker_hours of {run} are still open.")
        hours = cell.number(run)
        true = workers * seconds / 3600
        if not is_close(hours, true, 0.04):
            if is_close(hours, true / workers, 0.04):
                raise Wrong(
                    f"{run}: {hours:g} are the hours of the run. Each of the {workers} workers costs as many."
                )
            if is_close(hours, 3600 * true):
                raise Wrong(f"{run}: {hours:g} are seconds, not hours.")
            raise Wrong(f"{run}: it is not {hours:g}, but seconds / 3600 times the workers.")
        prices[run] = true
    return prices


def check_choice(answers: Answers, prices: dict[str, float]) -> None:
    """Say what is wrong with the letters."""
    letters = set(re.sub(r"\bAND\b|[ ,]", "", answers["nothing"].upper()))
    for run in sorted(letters ^ WHY.keys()):
        if run not in prices:
            raise Wrong(f"`nothing`: there is no run {run}. Give letters, such as `A, B`.")
        if run in letters:
            raise Wrong(
                f"`nothing`: {run} has several workers, an exchange in every step, and more than one epoch."
            )
        raise Wrong(f"`nothing`: {WHY[run]}")
    cheapest = answers.word("cheapest", *"abcdef").upper()
    if cheapest in WHY:
        raise Wrong(f"`cheapest`: {cheapest} is cheap, and shows nothing.")
    if cheapest != "F":
        raise Wrong(
            f"`cheapest`: {cheapest} costs {prices[cheapest]:.2g} worker-hours. {prices['F']:.2g} are fewer."
        )


def efficiency() -> float:
    """Return the efficiency of two workers at batch 512, in the run that was made."""
    rows = records.read(Path(__file__).resolve().parents[3] / W32)
    speed_of_one_worker = speed(row for row in rows if (row["stage"], row["global_batch"]) == ("single", 512))
    return (
        speed(row for row in rows if row["run_id"] == "ddp-20261122-052237-b6e7be4c")
        / speed_of_one_worker
        / 2
    )


def speed(rows: Iterable[dict[str, object]]) -> float:
    """Return the median images/s of all epochs but the warm-up."""
    return statistics.median(row["images_per_s"] for row in rows if not row["warmup"])
