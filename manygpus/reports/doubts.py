"""Which rows of a comparison are doubtful, why, and what to do about it."""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from manygpus.record.columns import DDP
from manygpus.reports import variants

# Measured epochs of a row or of its baseline: the warm-up is not among them.
FEWEST_EPOCHS = 2
# An efficiency above this share means that the baseline, or the row, was disturbed.
MOST_EFFICIENCY = 1.05
# The largest relative difference of one DDP worker and stage single, which do the same work.
MOST_DIFFERENCE = 0.1

# A row of a comparison, as `DataFrame.itertuples` gives it.
TableRow = tuple


@dataclass(frozen=True)
class Doubt:
    """A reason to doubt a speed.

    Args:
        mark: its letter in the table.
        problem: what it says of the measurement.
        evidence: how it shows.
        remedy: what helps.
        holds: returns whether it holds for a row, given its baselines, the rows on one device.
    """

    mark: str
    problem: str
    evidence: str
    remedy: str
    holds: Callable[[TableRow, list[TableRow]], bool]


def _was_not_quiet(row: TableRow, baselines: list[TableRow]) -> bool:
    for baseline in baselines:
        speedup = row.images_per_s / baseline.images_per_s
        if speedup > MOST_EFFICIENCY * row.devices:
            return True
        if row.stage == DDP and row.devices == 1 and abs(speedup - 1) > MOST_DIFFERENCE:
            return True
    return False


def _has_too_few_epochs(row: TableRow, baselines: list[TableRow]) -> bool:
    return any(run.steady_epochs < FEWEST_EPOCHS for run in [row, *baselines])


def _scatters(row: TableRow, baselines: list[TableRow]) -> bool:
    if row.devices == 1:
        return False
    for baseline in baselines:
        spread = max(row.fastest - row.slowest, baseline.fastest - baseline.slowest)
        if spread > abs(row.images_per_s - baseline.images_per_s):
            return True
    return False


def _has_other_rates(row: TableRow, baselines: list[TableRow]) -> bool:
    return any(variants.other_rates(row.rates, baseline.rates) for baseline in baselines)


def _has_other_arguments(row: TableRow, baselines: list[TableRow]) -> bool:
    return any(variants.other_arguments(row, baseline) for baseline in baselines)


def _has_several_scripts(row: TableRow, baselines: list[TableRow]) -> bool:
    digests = set(row.scripts.split())
    for baseline in baselines:
        if baseline.stage == row.stage:
            digests.update(baseline.scripts.split())
    return len(digests) > 1


# In the order of the marks in the table.
DOUBTS = (
    Doubt(
        mark="q",
        problem="the machine was not quiet",
        evidence="one DDP worker differs by more than 10 % from single, although both do the same work, or "
        "an efficiency exceeds 105 %",
        remedy="measure again with --repeats 3, on an idle machine or exclusive nodes "
        "(export SBATCH_EXCLUSIVE=exclusive)",
        holds=_was_not_quiet,
    ),
    Doubt(
        mark="e",
        problem="too little was measured",
        evidence="fewer than two epochs after the warm-up, of the row or of its run on one device",
        remedy="give --epochs 3 or more",
        holds=_has_too_few_epochs,
    ),
    Doubt(
        mark="s",
        problem="the measurements scatter",
        evidence="min..max, of the row or of its run on one device, is wider than the difference between the "
        "two",
        remedy="give more --epochs and --repeats 3, on an idle machine or exclusive nodes",
        holds=_scatters,
    ),
    Doubt(
        mark="r",
        problem="the learning rates differ",
        evidence="in equal epochs they differ from those of its run on one device, so the trainings differ",
        remedy="have the schedule count samples or epochs, not steps of all ranks",
        holds=_has_other_rates,
    ),
    Doubt(
        mark="a",
        problem="the arguments differ",
        evidence="the arguments of its script differ from those of its run on one device, which no other "
        "column explains",
        remedy="give both the same arguments, except for those that belong to the number of devices",
        holds=_has_other_arguments,
    ),
    Doubt(
        mark="c",
        problem="the script was changed",
        evidence="the text of the script differs between runs of the row, or from that of its run on one "
        "device",
        remedy="run all of them with the same version",
        holds=_has_several_scripts,
    ),
)


def marks(row: TableRow, baselines: list[TableRow]) -> str:
    """Return the marks of a row of a comparison; `baselines` are the rows on one device."""
    return "".join(doubt.mark for doubt in DOUBTS if doubt.holds(row, baselines))


def legend(table: pd.DataFrame) -> list[str]:
    """Return what each mark in the table means, and what helps, a line each."""
    return [
        f"doubt {doubt.mark}: {doubt.problem} ({doubt.evidence}). What helps: {doubt.remedy}."
        for doubt in _doubts_in(table)
    ]


def sentence(table: pd.DataFrame) -> str:
    """Name the rows whose speeds are not to be relied on, and why; "" if no row is marked."""
    reasons = [f"{doubt.mark} ({doubt.problem})" for doubt in _doubts_in(table)]
    return f"Do not rely on the speed of rows with doubt {', '.join(reasons)}." if reasons else ""


def _doubts_in(table: pd.DataFrame) -> list[Doubt]:
    return [doubt for doubt in DOUBTS if table.doubt.str.contains(doubt.mark).any()]
