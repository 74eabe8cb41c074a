"""How the runs of a plain script have ended, as a table: a script may write no record that tells it.

When it ends, each run keeps its row in its own folder, so that a sweep that resumes has those of earlier
calls.
"""

import csv
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainkit import job_folder
from trainkit.files import replacing
from trainkit.jobs import job_log
from trainkit.jobs.following import Handle, LocalHandle

# In the folder of a run; in that of the sweep.
ROW, TABLE = "ended.json", "sweep.csv"
# Of the last line of a log, in characters: the whole is in the CSV.
MOST_OF_A_LINE = 60


@dataclass(frozen=True)
class Row:
    """How a run has ended.

    Attributes:
        settings: what it varies besides GPUs and batch size (--vary).
        batch: the global batch size; None if the script is given none.
        state: finished or failed.
        seconds: how long its last start took; None if that is not known.
        exit_code: None if it is not known, as of a job that was killed with its node.
        last_line: the last one that the script itself has printed, on rank 0 or on the rank that failed.
    """

    run: str
    settings: dict[str, str]
    gpus: int
    nodes: int
    batch: int | None
    state: str
    seconds: float | None
    exit_code: int | None
    last_line: str


@dataclass(frozen=True)
class Measured:
    """What is known of a job that has ended; see `Row`."""

    seconds: float | None
    exit_code: int | None
    last_line: str


def measured(handle: Handle) -> Measured:
    """Return what is known of a job that has ended."""
    if isinstance(handle, LocalHandle):
        rank = next(iter(job_folder.notes(handle.folder, "failed")), 0)
        return Measured(
            _seconds_here(handle.folder), _exit_code_here(handle), job_log.last_line(_log(handle, rank))
        )
    outcome = job_folder.read_outcome(handle.folder)
    if outcome is None:
        return Measured(None, None, job_log.last_line(_log(handle, 0)))
    lines = _log(handle, outcome.failed_rank or 0)
    return Measured(outcome.seconds, outcome.exit_code, job_log.last_line(lines, said=outcome.said))


def _log(handle: Handle, rank: int) -> list[str]:
    return job_log.last_lines(job_log.of_rank(handle.log.parent, handle.job_id, rank))


def _seconds_here(folder: Path) -> float | None:
    """Return how long a job on this machine took, by the times of its notes."""
    notes = job_folder.notes(folder, "finished", "failed", "lost")
    ended = [note.stat().st_mtime for note in notes.values()]
    if not ended:
        return None
    return round(max(ended) - (folder / job_folder.SCRIPT).stat().st_mtime, 1)


def _exit_code_here(handle: LocalHandle) -> int | None:
    """Return the exit code of a job on this machine: that of the rank that failed first."""
    if len(job_folder.notes(handle.folder, "finished")) == handle.tasks:
        return 0
    note = handle.folder / (job_folder.first_failed(handle.folder) or "none")
    # jobs/plain.py writes it.
    code = re.search(r"exit code (\d+)", job_folder.read(note))
    return int(code[1]) if code else None


def keep(folder: Path, row: Row) -> None:
    """Write the row of a run into its folder."""
    with replacing(folder / ROW) as file:
        json.dump(asdict(row), file, indent=1)


def read(folder: Path) -> Row | None:
    """Return the row of the run in `folder`; None if it has not ended so far."""
    with suppress(OSError, ValueError, TypeError):
        return Row(**json.loads((folder / ROW).read_text(encoding="utf-8")))
    return None


def has_finished(folder: Path) -> bool:
    """Return whether the run in `folder` has ended well."""
    row = read(folder)
    return row is not None and row.state == "finished"


def write(sweep: Path) -> list[tuple[str, ...]]:
    """Write the rows of all runs of a sweep to its CSV; return them as text to print, the titles first."""
    of_folders = [read(path.parent) for path in sweep.glob(f"*/{ROW}")]
    rows = [row for row in of_folders if row]
    rows.sort(key=lambda row: (row.gpus, row.batch or 0, row.run))
    names = list(dict.fromkeys(name for row in rows for name in row.settings))
    titles = ("run", *names, "gpus", "nodes", "batch", "state", "seconds", "exit_code", "last_line")
    table = [_cells(row, names) for row in rows]
    with replacing(sweep / TABLE) as file:
        csv.writer(file, lineterminator="\n").writerows([titles, *table])
    shown = [titles]
    for cells in table:
        line = cells[-1]
        if len(line) > MOST_OF_A_LINE:
            line = f"{line[: MOST_OF_A_LINE - 3]}..."
        shown.append((*cells[:-1], line))
    return shown


def _cells(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    varied = [row.settings.get(name) for name in names]
    cells = (row.run, *varied, row.gpus, row.nodes, row.batch, row.state, row.seconds, row.exit_code)
    return (*("" if cell is None else str(cell) for cell in cells), row.last_line)
