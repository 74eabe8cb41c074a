"""Which rows of a comparison are doubtful, why, and what to do about it."""

import pandas as pd

from trainkit.compare import variants
from trainkit.record.columns import DDP

FEWEST_EPOCHS = 2  # measured, the warm-up not among them
MOST_EFFICIENCY = 1.05
MOST_DIFFERENCE = 0.1  # of one DDP worker and stage single, which do the same work

# The marks of the table; what each says of the measurement, how it shows, and what helps.
MARKS = {
    "q": (
        "the machine was not quiet",
        "one DDP worker differs by more than 10 % from single, whose work it does, or an efficiency passes "
        "105 %",
        "measure again with --repeats 3, on an idle machine or own nodes (export SBATCH_EXCLUSIVE=exclusive)",
    ),
    "e": (
        "too little was measured",
        "fewer than two epochs after the warm-up, of the row or of its run on one device",
        "give --epochs 3 or more",
    ),
    "s": (
        "the measurements scatter",
        "min..max, of the row or of its run on one device, is wider than the difference of the two",
        "give more --epochs and --repeats 3, on an idle machine or own nodes",
    ),
    "r": (
        "the learning rates differ",
        "at equal epochs they are not those of its run on one device, so neither is the training",
        "have the schedule count samples or epochs, not steps of all ranks",
    ),
    "a": (
        "the arguments differ",
        "its script had other arguments than that of its run on one device, which no other column explains",
        "give both the same, but for what belongs to the number of devices",
    ),
    "c": (
        "the script was changed",
        "the script's text is not the same in all runs of the row, or in its run on one device",
        "run all with one version of it",
    ),
}


def doubt(row: tuple, ones: list[tuple]) -> str:
    """Return the marks of a row of a comparison; `ones` are its baselines, the rows on one device."""
    one_worker = row.stage == DDP and row.devices == 1
    found = {
        "q": any(
            row.images_per_s > MOST_EFFICIENCY * row.devices * one.images_per_s
            or (one_worker and abs(row.images_per_s / one.images_per_s - 1) > MOST_DIFFERENCE)
            for one in ones
        ),
        "e": min(run.steady_epochs for run in (row, *ones)) < FEWEST_EPOCHS,
        "s": row.devices > 1
        and any(
            max(run.fastest - run.slowest for run in (row, one)) > abs(row.images_per_s - one.images_per_s)
            for one in ones
        ),
        "r": any(variants.other_rates(row.rates, one.rates) for one in ones),
        "a": any(row.arguments != one.arguments for one in ones if one.stage == row.stage),
        "c": _several_scripts([row, *(one for one in ones if one.stage == row.stage)]),
    }
    return "".join(mark for mark, holds in found.items() if holds)


def _several_scripts(runs: list[tuple]) -> bool:
    return len({digest for run in runs for digest in run.scripts.split()}) > 1


def legend(table: pd.DataFrame) -> list[str]:
    """Return what each mark in the table means, a line each."""
    return [f"doubt {mark}: {what} ({shows})." for mark, (what, shows, _) in _marks_in(table)]


def sentence(table: pd.DataFrame) -> str:
    """Name the rows whose speeds are not to be relied on, and what to do; nothing if no row is marked."""
    reasons = [f"{what} (rows with doubt {mark}): {helps}" for mark, (what, _, helps) in _marks_in(table)]
    return f" Do not rely on every speed: {'; '.join(reasons)}, in runs of your own." if reasons else ""


def _marks_in(table: pd.DataFrame) -> list[tuple[str, tuple[str, str, str]]]:
    return [(mark, texts) for mark, texts in MARKS.items() if table.doubt.str.contains(mark).any()]
