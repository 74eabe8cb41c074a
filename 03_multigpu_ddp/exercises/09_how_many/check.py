"""Computes the table from its published tokens/s, and the five choices from the table."""

import csv
import json
from pathlib import Path

from manygpus.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# By what factor are 256 GPUs faster than 128?
prediction = 1.5
# How many GPUs for each question?
fastest = 256
cheapest = 8
deadline = 32
budget = 128
rule = 64
# Sequences in one step of 256 GPUs
batch = 1024
"""
HINTS = """\
## 1

Two of the columns compare a row with the first row, and two describe the whole training. Which are which?
Begin with the row of 8 GPUs.

## 2

speedup(N) = tokens/s(N) / tokens/s(8), and efficiency(N) = 100 x speedup(N) / (N / 8). Minutes =
10,000,000,000 / tokens/s / 60. GPU-hours = minutes / 60 x N.

## 3

For each of the five questions, cross out the rows that are not allowed (3 hours are 180 minutes). From the
rows that are left, take the one with the fewest minutes, or with the fewest GPU-hours if the question asks
for those.
"""
SOLUTION = {
    "table.csv": """\
@@
-8,321200,?,?,?,?
-16,601755,?,?,?,?
-32,1131764,?,?,?,?
-64,1991183,?,?,?,?
-128,3385144,?,?,?,?
-256,4019297,?,?,?,?
+8,321200,1.00,100,519,69.2
+16,601755,1.87,93.7,277,73.9
+32,1131764,3.52,88.1,147,78.5
+64,1991183,6.20,77.5,83.7,89.3
+128,3385144,10.5,65.9,49.2,105
+256,4019297,12.5,39.1,41.5,177
""",
}
STARTS_WITH = "`prediction`"
WRONG = [
    ("table.csv", "77.5,83.7,89.3", "77.5,83.7,1.39", "for each of the 64 GPUs"),
    ("table.csv", "88.1", "113.5", "upside down"),
    ("table.csv", "88.1", "0.881", "is the fraction"),
    ("table.csv", "6.20,77.5", "6.20,9.68", "divides by all 64 GPUs"),
    ("table.csv", "1.87,93.7,277", "1.87,93.7,?", "still open"),
    ("table.csv", "1.87,93.7,277", "1.87,93.7,many", "table.csv, 16 GPUs: `minutes = many` is not a number"),
    ("table.csv", "1.87,93.7,277", "1.87,93.7,16617", "in seconds"),
    ("answers.txt", "cheapest = 8", "cheapest = 256", "8 GPUs take only 69.2 GPU-hours"),
    ("answers.txt", "deadline = 32", "deadline = 256", "32 GPUs take only 78.5 GPU-hours"),
    ("answers.txt", "deadline = 32", "deadline = 16", "does not allow that"),
    ("answers.txt", "budget = 128", "budget = 256", "176.9 GPU-hours"),
    ("answers.txt", "rule = 64", "rule = 256", "39 %"),
    ("answers.txt", "rule = 64", "rule = 100", "has no row"),
    ("answers.txt", "batch = 1024", "batch = 4", "of one GPU"),
    ("answers.txt", "batch = 1024", "batch = 32", "grows with the GPUs"),
]
TOKENS = 10_000_000_000
SEQUENCE_TOKENS = 4096
PUBLISHED = Path(__file__).resolve().parents[3] / "tools" / "bench" / "published.json"
SERIES = "HF ultrascale DP H100"
# What each question minimises, of the rows that it allows.
QUESTIONS = {
    "fastest": ("minutes", lambda row: True),
    "cheapest": ("gpu_hours", lambda row: True),
    "deadline": ("gpu_hours", lambda row: row["minutes"] <= 3 * 60),
    "budget": ("minutes", lambda row: row["gpu_hours"] <= 110),
    "rule": ("minutes", lambda row: row["efficiency"] >= 75),
}


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    predicted = answers.number("prediction")
    filled = {
        row["gpus"].removesuffix(".0"): row  # a spreadsheet's
        for row in csv.DictReader(workspace.text("table.csv").splitlines())
        if row.get("gpus")
    }
    table = published()
    for gpus, row in table.items():
        if str(gpus) not in filled:
            raise Wrong(f"mine/table.csv has no row for {gpus} GPUs: `reset` restores the starter.")
        check_row(filled[str(gpus)], gpus, row)
    for question in QUESTIONS:
        check_choice(question, answers, table)
    check_batch(answers.number("batch"))
    fastest, before = table[256], table[128]
    return (
        f"256 GPUs are {fastest['speedup'] / before['speedup']:.2f} times as fast as 128 (you predicted "
        f"{predicted:g}), and cost {fastest['gpu_hours'] / before['gpu_hours']:.2f} times as much. The five "
        "questions have five different answers, so decide what counts before you look for the best number. "
        "The batch also grew with the GPUs, from 32 sequences to 1,024, and no throughput shows whether 10 "
        "billion tokens are enough with that batch. Measure a short run of your training first: `python "
        "../slurm/sweep.py --gpus 1,2,4` makes such a table."
    )


def published() -> dict[int, dict[str, float]]:
    """Return what belongs in each row, by the number of GPUs."""
    (series,) = (series for series in json.loads(PUBLISHED.read_text()) if series["name"] == SERIES)
    points = series["points"]
    first = points[0]
    table = {}
    for point in points:
        gpus = point["gpus"]
        speedup = point["throughput"] / first["throughput"]
        minutes = TOKENS / (point["throughput"] * SEQUENCE_TOKENS) / 60
        table[gpus] = {
            "speedup": speedup,
            "efficiency": 100 * speedup / (gpus / first["gpus"]),
            "minutes": minutes,
            "gpu_hours": minutes / 60 * gpus,
        }
    return table


def check_row(filled: dict[str, str], gpus: int, true: dict[str, float]) -> None:
    """Say what is wrong with one row of the learner's table."""
    cells = Answers((name, (filled.get(name) or "?").strip()) for name in true)
    cells.file = f"table.csv, {gpus} GPUs"
    for name, value in true.items():
        where = f"{name} of {gpus} GPUs"
        if cells[name] == "?":
            raise Wrong(f"mine/table.csv: {where} is still open.")
        number = cells.number(name)
        if is_close(number, value):
            continue
        raise Wrong(f"{where}: {hint(name, number, value, gpus)}")


def hint(name: str, number: float, value: float, gpus: int) -> str:
    """Return what is wrong with a number, where the right one is `value`."""
    known = {
        "efficiency": {
            100 * 100 / value: "the division is upside down. Efficiency is seldom above 100 %.",
            value / 100: f"{number:g} is the fraction; the column is in percent.",
            value / 8: f"{number:g} divides by all {gpus} GPUs: the speedup is relative to 8.",
        },
        "minutes": {60 * value: f"{number:g} is in seconds.", value / 60: f"{number:g} is in hours."},
        "gpu_hours": {
            value
            / gpus: f"{number:g} are the hours of the job, but you pay them for each of the {gpus} GPUs.",
            60 * value: f"{number:g} are GPU-minutes.",
        },
    }
    for wrong, sentence in known.get(name, {}).items():
        if is_close(number, wrong):
            return sentence
    return f"it is not {number:g}. `hint how_many` has the formulas."


def check_choice(question: str, answers: Answers, table: dict[int, dict[str, float]]) -> None:
    """Say what is wrong with the number of GPUs chosen for one question."""
    least, allows = QUESTIONS[question]
    chosen = answers.number(question)
    if chosen not in table:
        numbers = ", ".join(map(str, table))
        raise Wrong(f"`{question} = {answers[question]}` has no row in the table: choose one of {numbers}.")
    row = table[chosen]
    took = f"{row['minutes']:.0f} minutes and {row['gpu_hours']:.1f} GPU-hours"
    sentence = f"`{question}`: {chosen:.0f} GPUs take {took}"
    if not allows(row):
        raise Wrong(
            f"{sentence}, at an efficiency of {row['efficiency']:.0f} %. The question does not allow that."
        )
    best = min((number for number in table if allows(table[number])), key=lambda number: table[number][least])
    if best != chosen:
        unit = "minutes" if least == "minutes" else "GPU-hours"
        better = f"{table[best][least]:.1f} {unit}"
        raise Wrong(f"{sentence}. That is allowed, but {best} GPUs take only {better}.")


def check_batch(batch: float) -> None:
    if batch == 4:
        raise Wrong(
            "`batch`: 4 sequences are the batch of one GPU. How many do all GPUs have together in a step?"
        )
    if batch != 1024:
        raise Wrong(
            "`batch`: each GPU keeps its 4 sequences (weak scaling), so the batch grows with the GPUs."
        )
