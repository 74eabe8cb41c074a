"""Sampled jobs that a test writes and changes, and what their verdict finds."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import traces
from traces import Gpu, SyntheticJob

from manygpus.monitor import samples
from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.verdict import judge

Row = dict[str, str]
Change = Callable[[Row], Row | None]
MakeJob = Callable[..., Path]


def write_job(folder: Path, gpus: list[Gpu], record: bool = True, **fields: object) -> Path:
    """Write a job of these GPUs, and return its folder.

    Args:
        folder: the folder of its samples; what is there goes.
        gpus: of each node.
        record: whether its training has left a record.
        fields: others of a `SyntheticJob`.
    """
    traces.write(folder, SyntheticJob(gpus, **fields))
    if not record:
        shutil.rmtree(folder / "training")
    return folder


def has_asked(folder: Path, asked: str, ended: str = "0") -> None:
    """Write what a job script would have written: what it asked for, and its exit code."""
    (folder / samples.ASKED).write_text(asked)
    (folder / samples.ENDED).write_text(ended)


# --- changes of its samples -------------------------------------------------------------------------


def change(folder: Path, change_row: Change) -> None:
    """Write every sample again as `change_row` returns it, or leave it out where that is None."""
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            rows = [change_row(row) for row in csv.DictReader(file)]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, samples.COLUMNS)
            writer.writeheader()
            writer.writerows(row for row in rows if row)


def with_cells(cells: Row, kind: str) -> Change:
    """Return a change that puts these cells into the rows of one kind."""
    return lambda row: row | cells if row["what"] == kind else row


def without(*kinds: str) -> Change:
    """Return a change that leaves out the rows of some kinds."""
    return lambda row: None if row["what"] in kinds else row


def first_seconds(seconds: float) -> Change:
    """Return a change that keeps the first seconds of a job."""
    return lambda row: row if float(row["time"]) < traces.BEGAN_AT_SECONDS + seconds else None


# --- its verdict ------------------------------------------------------------------------------------


def kinds_of(folder: Path) -> list[str]:
    """Return the kinds of all findings, the worst first."""
    return [finding.kind for finding in judge(folder).findings]


def only_finding(folder: Path) -> Finding:
    """Return the one finding that there is."""
    (finding,) = judge(folder).findings
    return finding


def finding_of(folder: Path, kind: str) -> Finding:
    """Return the finding of a kind."""
    (finding,) = (finding for finding in judge(folder).findings if finding.kind == kind)
    return finding
