"""Recomputes the true numbers, and the tables, from the committed runs behind them."""

import statistics
from pathlib import Path

from trainkit.record import records
from trainkit.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# Which table would you have believed? A letter
prediction = D
# The mistake in each: batch, warmup, busy, rank0 or upside_down
A = rank0
B = upside_down
C = batch
D = warmup
E = busy
# The number that should be in the bold cell: in percent, for D in images/s
A_true = 66.0
B_true = 94.4
C_true = 89.6
D_true = 1306
E_true = 94.4
"""
HINTS = """\
## 1

An efficiency above 100 % occurs twice, for two reasons. Divide the images/s of the table: is the printed
speedup right? If it is, how was the efficiency computed from it? And does each speed agree with
`epochs.csv`?

## 2

Compute the mean of epochs 2 and 3 of each run (epoch 1 is the warm-up), and compare it with the
tables' images/s: which differ, and by which factor? One is exactly half. One is the mean of three
epochs. One comes from a run whose epochs differ a lot from each other.

## 3

Efficiency = images/s of two / images/s of one / 2, from epochs 2 and 3, with the same global batch
in both. For E, there is a second run of one device at the same batch, whose epochs agree: take
that one. D_true is the mean of epochs 2 and 3 of 4 workers.
"""
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "C = batch", "C = upside_down", "both rows of table C"),
    ("answers.txt", "D = warmup", "D = busy", "epoch 1"),
    ("answers.txt", "E = busy", "E = upside_down", "follows correctly from the speedup"),
    ("answers.txt", "A = rank0", "A = batch", "exactly half"),
    ("answers.txt", "B = upside_down", "B = busy", "agree with epochs.csv"),
    ("answers.txt", "C_true = 89.6", "C_true = 98.6", "still the number in the table"),
    ("answers.txt", "A_true = 66.0", "A_true = 132", "divided by the number of devices"),
    ("answers.txt", "B_true = 94.4", "B_true = 0.944", "in percent"),
    ("answers.txt", "D_true = 1306", "D_true = 1240", "not 1240"),
]  # fmt: skip
SAMPLE = Path(__file__).resolve().parents[3] / "results" / "sample" / "cpu-xeon-2-cores"
RUNS = {  # file and run, by what epochs.csv calls them
    "one-64": ("width/runs.csv", "single-20261121-235235-50a33448"),
    "two-64": ("width/runs.csv", "ddp-20261121-235558-5918f389"),
    "one-256": ("width/runs.csv", "single-20261121-235310-46aedae6"),
    "two-256": ("width/runs.csv", "ddp-20261121-235625-2823ff25"),
    "one-1024": ("width/runs.csv", "single-20261121-235344-69ec62a3"),
    "one-1024-again": ("exercises/runs.csv", "single-20261122-022009-3de2a529"),
    "two-1024": ("width/runs.csv", "ddp-20261121-235645-456a5dec"),
    "workers-1": ("exercises/runs.csv", "single-20261122-021209-dfa6a2e8"),
    "workers-4": ("exercises/runs.csv", "single-20261122-021329-3f1d50f9"),
}
LIES = {"A": "rank0", "B": "upside_down", "C": "batch", "D": "warmup", "E": "busy"}
WHY = {
    "A": "Compare the images/s of table A with epochs.csv: one of them is exactly half.",
    "B": "The images/s of table B agree with epochs.csv, and its speedup agrees with them. What is left?",
    "C": "Do both rows of table C do the same work in a step?",
    "D": "How many epochs are in each mean of table D, and what is special about epoch 1?",
    "E": "The efficiency of table E follows correctly from the speedup. Are its speeds those of a machine "
    "with nothing else to do? Compare the epochs of each run, and the two runs of one device at batch 1024.",
}


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", "a", "b", "c", "d", "e").upper()
    for letter, lie in LIES.items():
        if answers.word(letter, *LIES.values()) != lie:
            raise Wrong(f"Table {letter} has another mistake. {WHY[letter]}")
    for letter, (false, true) in claims().items():
        answer = answers.number(f"{letter}_true")
        if is_close(answer, true, 0.015):
            continue
        if is_close(answer, false, 0.005):
            raise Wrong(
                f"`{letter}_true`: {answer:g} is still the number in the table. Compute it without the "
                "mistake."
            )
        if letter != "D" and is_close(answer, 2 * true, 0.015):
            raise Wrong(
                f"`{letter}_true`: {answer:g} is the speedup, not yet divided by the number of devices."
            )
        if is_close(answer, true / 100, 0.015):
            raise Wrong(f"`{letter}_true`: {answer:g} is the fraction. Give it in percent.")
        raise Wrong(
            f"`{letter}_true` is not {answer:g}: take the mean images/s of epochs 2 and 3 of each run, and "
            "the same global batch in both."
        )
    return (
        f"Five tables are wrong in five ways, with true numbers. You would have believed {prediction} "
        f"({LIES[prediction]}). Signs to look for: numbers that are too good (B, C, E) or too bad (A) to be "
        "true, unequal batches in one table (C), no mention of the warm-up (D), a baseline that was measured "
        "only once (E). The kit compares equal batches only, leaves out the first epoch, counts the images "
        "of all ranks, and marks an efficiency above 105 % and speeds that vary a lot. Below that, a busy "
        "machine can fool it, too."
    )


def speed(run: str, since: int = 2) -> float:
    """Return the mean images/s from the epoch `since` on."""
    return statistics.fmean(row["images_per_s"] for row in epochs(run)[since - 1 :])


def epochs(run: str) -> list[dict[str, object]]:
    """Return the rows of its record."""
    file, run_id = RUNS[run]
    return records.by_run(records.read(SAMPLE / file))[run_id]


def claims() -> dict[str, tuple[float, float]]:
    """Return for each table what its bold cell says, and what it should say."""
    true = {batch: 50 * speed(f"two-{batch}") / speed(f"one-{batch}") for batch in (64, 256, 1024)}
    return {
        "C": (50 * speed("two-1024") / speed("one-256"), true[256]),
        "D": (speed("workers-4", since=1), speed("workers-4")),
        "E": (50 * speed("two-1024") / speed("one-1024-again"), true[1024]),
        "A": (true[64] / 2, true[64]),
        "B": (100 * 100 / true[1024], true[1024]),
    }


def made() -> dict[str, str]:
    """Make the text of starter/epochs.csv and the tables of starter/tables.md; a test compares."""
    lines = ["run,devices,global_batch,loader_workers,epoch,images,train_seconds,images_per_s"]
    for name in RUNS:
        for row in epochs(name):
            columns = "devices", "global_batch", "workers_per_loader", "epoch", "images"
            cells = [
                *(row[column] for column in columns),
                f"{row['train_seconds']:.2f}",
                f"{row['images_per_s']:.0f}",
            ]
            lines.append(",".join(map(str, [name, *cells])))
    claimed = {letter: claim for letter, (claim, _) in claims().items()}
    pairs = {
        "C": (256, speed("one-256"), 1024, speed("two-1024")),
        "E": (1024, speed("one-1024-again"), 1024, speed("two-1024")),
        "A": (64, speed("one-64"), 64, speed("two-64") / 2),
        "B": (1024, speed("one-1024"), 1024, speed("two-1024")),
    }
    tables = {
        letter: f"| workers | global batch | images/s | speedup | efficiency |\n{'| --- ' * 5}|\n"
        f"| 1 | {batch} | {one:,.0f} | 1.00 | 100 % |\n"
        f"| 2 | {batches} | {two:,.0f} | {two / one:.2f} | **{claimed[letter]:.0f} %** |\n"
        for letter, (batch, one, batches, two) in pairs.items()
    }
    tables["D"] = (
        f"| loader workers | images/s |\n| --- | --- |\n| 1 | {speed('workers-1', since=1):,.0f} |\n"
        f"| 4 | **{claimed['D']:,.0f}** |\n"
    )
    return tables | {"epochs.csv": "\n".join(lines) + "\n"}
