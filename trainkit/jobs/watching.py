"""A live view of a job: its newest samples, in the columns of samples.py, and its verdict so far."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.analysis import waste, watched
from trainkit.errors import UserError, printable
from trainkit.samples import GPU, NODE, RANK

PAUSE = 2  # s between two looks
GONE = 3  # s: what has no sample for so long, while its node has, is gone
SHOWN = {
    NODE: ("cores", "memory_mb", "memory_limit_mb", "network_mb_s", "disk_mb_s"),
    GPU: ("ranks", "utilisation", "power_w", "power_limit_w", "memory_mb", "memory_limit_mb", "throttled"),
    RANK: ("name", "cores", "waiting", "loaders", "loader_cores", "memory_mb"),
}


def watch(folder: Path, name: str, ended: Callable[[], bool]) -> None:
    """Show the job called `name`, with its samples in `folder`, until it has `ended`.

    Raises:
        UserError: if it has ended without a sample.
    """
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    over = False
    while not over:
        over = ended()
        try:
            job = watched.Job(folder)
            told = [*(_table(what, job) for what in SHOWN), waste.judge_job(job).lines(name)]
        except UserError as error:
            if over:
                raise
            told = [[str(error)]]
        lines = [time.strftime("%H:%M:%S"), *(line for lines in told for line in lines)]
        try:
            print(clear + "\n".join(lines), flush=True)
        except OSError:  # nobody reads it any more: `| head` has ended, or its disk is full
            return
        if not over:
            time.sleep(PAUSE)


def _table(what: str, job: watched.Job) -> list[str]:
    """The newest sample of each node, GPU or rank."""
    now = {node: rows[-1]["time"] for (node, _), rows in job.rows[NODE].items()}
    newest = {place: rows[-1] for place, rows in sorted(job.rows[what].items())}
    cells = [
        [printable(node if what == NODE else f"{node} {number}"), *(_text(row[name]) for name in SHOWN[what])]
        for (node, number), row in newest.items()
        if row["time"] > now.get(node, 0) - GONE
    ]
    columns = zip([what, *SHOWN[what]], *cells, strict=True)
    aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    return [*("  ".join(line) for line in zip(*aligned, strict=True)), ""] if cells else []


def _text(cell: str | float) -> str:
    if isinstance(cell, str):
        return printable(cell) or "-"
    return "-" if cell != cell else f"{cell:,.0f}" if cell >= 100 else f"{cell:.2f}"
