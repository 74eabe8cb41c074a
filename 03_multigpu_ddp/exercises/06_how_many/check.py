"""Computes the table from its images/s, and the five choices from the table."""

import csv
from pathlib import Path

from trainkit.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# How many times as fast as 8 GPUs are 16?
prediction = 1.5
# How many GPUs for each question?
fastest = 16
cheapest = 1
deadline = 2
budget = 8
rule = 4
"""
HINTS = """\
## 1

Two of the columns compare a row with another row, and two describe the whole training. Which are
which? Begin with the row of one GPU.

## 2

speedup(N) = images/s(N) / images/s(1), and efficiency(N) = 100 x speedup(N) / N. Minutes =
64,000,000 / images/s / 60. GPU-hours = minutes / 60 x N. None of them needs `weak_images_per_s`.

## 3

For each of the five questions, cross out the rows that are not allowed (8 hours are 480 minutes).
From the rows that are left, take the one with the fewest minutes, or with the fewest GPU-hours if the
question asks for those.
"""
SOLUTION = {
    "table.csv": """\
@@
-1,1280,1280,?,?,?,?
-2,2338,2467,?,?,?,?
-4,3984,4847,?,?,?,?
-8,6150,9609,?,?,?,?
-16,8445,19135,?,?,?,?
+1,1280,1280,1.00,100.0,833,13.9
+2,2338,2467,1.83,91.3,456,15.2
+4,3984,4847,3.11,77.8,268,17.8
+8,6150,9609,4.80,60.1,173,23.1
+16,8445,19135,6.60,41.2,126,33.7
""",
}
STARTS_WITH = "`prediction`"
WRONG = [
    ("table.csv", "60.1,173,23.1", "60.1,173,2.9", "each of the 8 GPUs"),
    ("table.csv", "77.8", "128.5", "upside down"),
    ("table.csv", "1.83,91.3", "1.93,91.3", "another training"),
    ("table.csv", "91.3,456", "91.3,?", "still open"),
    ("table.csv", "91.3,456", "91.3,many", "mine/table.csv, 2 GPUs: `minutes = many` is not a number"),
    ("answers.txt", "cheapest = 1", "cheapest = 16", "13.9 GPU-hours are fewer"),
    ("answers.txt", "deadline = 2", "deadline = 16", "15.2 GPU-hours are fewer"),
    ("answers.txt", "budget = 8", "budget = 16", "33.7 GPU-hours"),
    ("answers.txt", "rule = 4", "rule = 16", "41 %"),
]  # fmt: skip
IMAGES = 50 * 1_280_000
TABLE = Path(__file__).parent / "starter" / "table.csv"
# What each question minimises, of the rows that it allows.
QUESTIONS = {
    "fastest": ("minutes", lambda row: True),
    "cheapest": ("gpu_hours", lambda row: True),
    "deadline": ("gpu_hours", lambda row: row["minutes"] <= 8 * 60),
    "budget": ("minutes", lambda row: row["gpu_hours"] <= 25),
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
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    images_per_s_of_one = float(rows[0]["images_per_s"])
    table = {}
    for row in rows:
        gpus = int(row["gpus"])
        name = row["gpus"]
        if name not in filled:
            raise Wrong(f"mine/table.csv has no row for {gpus} GPUs: `reset` restores the starter.")
        table[gpus] = filled_in(gpus, float(row["images_per_s"]), images_per_s_of_one)
        check_row(
            filled[name],
            gpus,
            table[gpus],
            filled_in(gpus, float(row["weak_images_per_s"]), images_per_s_of_one),
        )
    for question in QUESTIONS:
        check_choice(question, answers, table)
    return (
        f"16 GPUs are {table[16]['speedup'] / table[8]['speedup']:.2f} times as fast as 8 (you predicted "
        f"{predicted:g}), and cost {table[16]['gpu_hours'] / table[8]['gpu_hours']:.2f} times as much. Five "
        "questions have five different answers: no table shows how many GPUs are best before you decide what "
        "counts. One GPU is nearly always the cheapest, and each GPU that you add costs GPU-hours and saves "
        "less time than the one before. Ask for what the deadline needs, and measure a short run first: "
        "`python ../slurm/sweep.py --gpus 1,2,4` makes such a table of your training."
    )


def filled_in(gpus: int, images_per_s: float, of_one: float) -> dict[str, float]:
    """Return what belongs in the gaps of one row."""
    minutes = IMAGES / images_per_s / 60
    speedup = images_per_s / of_one
    return {
        "speedup": speedup,
        "efficiency": 100 * speedup / gpus,
        "minutes": minutes,
        "gpu_hours": minutes / 60 * gpus,
    }


def check_row(filled: dict[str, str], gpus: int, true: dict[str, float], weak: dict[str, float]) -> None:
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
        if is_close(number, weak[name]):
            raise Wrong(
                f"{where}: {number:g} follows from weak_images_per_s. There, the global batch grows with the "
                "GPUs, which is another training: its 50 epochs have fewer steps, and may not learn as much."
            )
        if name == "efficiency" and is_close(number, 100 * 100 / value):
            raise Wrong(
                f"{where}: {number:g} is upside down. Efficiency is speedup / N, and seldom above 100 %."
            )
        if name == "efficiency" and is_close(number, value / 100):
            raise Wrong(f"{where}: {number:g} is the fraction; the column is in percent.")
        if name == "gpu_hours" and is_close(number, value / gpus):
            raise Wrong(
                f"{where}: {number:g} are the hours of the job, and each of the {gpus} GPUs costs as many."
            )
        if name in ("minutes", "gpu_hours") and is_close(number, value / 50):
            raise Wrong(f"{where}: {number:g} is for one epoch, and the training has 50.")
        raise Wrong(f"{where}: it is not {number:g}. `hint how_many` has the formulas.")


def check_choice(question: str, answers: Answers, table: dict[int, dict[str, float]]) -> None:
    """Say what is wrong with the number of GPUs chosen for one question."""
    least, allows = QUESTIONS[question]
    chosen = answers.number(question)
    if chosen not in table:
        raise Wrong(f"`{question} = {answers[question]}` has no row in the table: choose 1, 2, 4, 8 or 16.")
    row = table[chosen]
    took = f"{row['minutes']:.0f} minutes and {row['gpu_hours']:.1f} GPU-hours"
    sentence = f"`{question}`: {chosen:.0f} GPU(s) take {took}"
    if not allows(row):
        raise Wrong(
            f"{sentence}, at an efficiency of {row['efficiency']:.0f} %. The question does not allow that."
        )
    best = min((number for number in table if allows(table[number])), key=lambda number: table[number][least])
    if best != chosen:
        better = (
            f"{table[best][least]:.0f} minutes"
            if least == "minutes"
            else f"{table[best][least]:.1f} GPU-hours"
        )
        raise Wrong(f"{sentence}. That is allowed, but {better} are fewer: those of {best} GPU(s).")
