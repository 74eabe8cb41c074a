"""The CSV that every run writes, with the columns of columns.py: a writer that survives a kill, a reader.

One file per run, one row per epoch; next to it `<run_id>.ranks.tsv`, a row per epoch and device, and, for a
training with its own metrics, `<run_id>.metrics.tsv`, a row per epoch and metric. The files are replaced as a
whole after every epoch, so a kill or a full disk never leaves half a row. A CSV
with the rows of many runs is read as well. This module also has the file of a job of the doctor, a row per
size of its all-reduce.
"""

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from trainkit.runtime.errors import UserError, reason
from trainkit.runtime.files import check_writable, explained, locked, replacing
from trainkit.schema.columns import ABOVE_0, COLUMNS, FLOAT32, LONGEST, WORKERS, number, text

SCHEMA_VERSION = 1
# Column -> the reader of its cells, which refuses those that no run writes.
Columns = dict[str, Callable[[str], object]]
OF_A_RUN: Columns = {name: column.read for name, column in COLUMNS.items()}
# Of the ranks' file: how long the rank worked by itself (compute_time.py), and waited for its batches.
RANK_COLUMNS: Columns = {
    "epoch": OF_A_RUN["epoch"],
    "rank": number(int, 0, WORKERS),
    "host": text(),
    "device": text(),
    "device_name": text(),
    "own_seconds": number(float, 0, LONGEST, nan=True),
    "data_seconds": number(float, 0, LONGEST, nan=True),
    "peak_memory_mb": OF_A_RUN["peak_memory_mb"],
}
# Of the file of a training with its own metrics.
METRIC_COLUMNS: Columns = {
    "epoch": OF_A_RUN["epoch"],
    "metric": text(),
    "of": text(),
    "value": number(float, -FLOAT32, FLOAT32, nan=True),
}
# Of the file that a job of the doctor leaves: the seconds that a sum of `bytes` over all ranks takes.
ALL_REDUCE_COLUMNS: Columns = {
    "bytes": number(int, 1),
    "seconds": number(float, ABOVE_0, LONGEST),
    "ranks": OF_A_RUN["devices"],
    "nodes": OF_A_RUN["nodes"],
    "backend": text(),
    "device_name": text(),
    "job": text(),
    "started_at": text(),
}
SLOW = 1.25  # a rank is called slow from this many times the median of the others on
# What a training of one's own, or its environment, may choose freely.
NAMES = ("run_id", "stage", "dataset", "model", "settings", "global_batch", "job_id", "node_list")
NAMES += ("precision", "devices", "batch_per_device")


class RecordError(UserError):
    """A CSV that cannot be used; the text names the file and the reason."""


class RunFiles:
    """Writes `<results_dir>/runs/<run_id>.csv`.

    `rows` are the rows so far, `of_ranks` and `metrics` those of the files next to it.

    Args:
        results_dir: created if it does not exist.
        facts: the columns that are the same in every row of the run.

    Raises:
        UserError: if the directory cannot be written to, or a name or setting of the run could not be read
            back: before the training, not after an epoch whose result would be lost.
    """

    def __init__(self, results_dir: Path, facts: dict[str, object]) -> None:
        self.path = results_dir / "runs" / f"{facts['run_id']}.csv"
        for name in NAMES:
            try:
                OF_A_RUN[name](str(facts[name]))
            except ValueError as error:
                raise UserError(f"the {name} cannot be recorded ({error}): give another.") from None
        self._facts = facts | {"schema_version": SCHEMA_VERSION}
        self.rows: list[dict[str, object]] = []
        self.of_ranks: list[dict[str, object]] = []
        self.metrics: list[dict[str, object]] = []
        fix = "free the space, fix the permissions, or give another --results-dir."
        check_writable(self.path.parent, "results", fix)
        self._claim(self.path)

    def add(
        self,
        of_ranks: Iterable[dict[str, object]] = (),
        metrics: Iterable[dict[str, object]] = (),
        **row: object,
    ) -> None:
        """Append the row of one epoch, those of its devices and its metrics, and replace the files.

        Raises:
            UserError: if a number makes no sense, or they cannot be written; earlier epochs are kept.
        """
        metrics = [*metrics]
        try:
            _check(self._facts | row, "its row", OF_A_RUN)
            for one in metrics:
                _check(one, "its metrics", METRIC_COLUMNS)
        except ValueError as error:
            raise UserError(
                f"epoch {row['epoch']} cannot be recorded ({error}): correct the numbers of the training. "
                "The earlier epochs are recorded."
            ) from None
        # In place of those of an earlier try, which could not be written.
        self.rows[row["epoch"] - 1 :] = [self._facts | row]
        self._keep_before(row["epoch"])
        self.of_ranks += of_ranks
        self.metrics += metrics
        self._write()

    def may_continue(self, facts: dict[str, object], rows: list[dict[str, object]]) -> bool:
        """Return whether the file of the run with `facts` is missing, or has just these `rows`.

        From then on no other process may write it.
        """
        path = self.path.with_name(f"{facts['run_id']}.csv")
        same = not path.exists() or self.later_rows(facts, rows) == []
        return same and self._claim(path)

    def later_rows(
        self, facts: dict[str, object], rows: list[dict[str, object]]
    ) -> list[dict[str, object]] | None:
        """Return what the file of the run with `facts` has after `rows`, or None if it lacks those."""
        try:
            found = read(self.path.with_name(f"{facts['run_id']}.csv"))
        except RecordError:
            return None
        known, written = ([(row["epoch"], row.get("recorded_at", "")) for row in of] for of in (rows, found))
        same = found[0]["started_at"] == facts["started_at"] and written[: len(known)] == known
        return found[len(known) :] if same else None

    def _claim(self, path: Path) -> bool:
        """Return whether no other process writes this record; none may from now on."""
        with suppress(UserError):
            self._lock = locked(path.with_name(f".{path.stem}.lock"), "held")
            return True
        return False

    def go_on(self, facts: dict[str, object], rows: list[dict[str, object]]) -> None:
        """Continue the file of an earlier process of the run, which had written `rows`, and those next to it.

        `facts`, including `run_id`, keep their values from there.

        Raises:
            UserError: if the file cannot be written.
            ValueError: if no run has written these rows.
        """
        if [row["epoch"] for row in rows] != [*range(1, len(rows) + 1)]:
            raise ValueError("its rows are not those of epoch 1, 2 and so on")
        self.path = self.path.with_name(f"{facts['run_id']}.csv")
        self._facts |= facts
        self.rows = [self._facts | row for row in rows]
        for row in self.rows:
            _check(row, f"its row of epoch {row['epoch']}", OF_A_RUN)
        self.of_ranks = self._earlier(read_ranks, "ranks")
        self.metrics = self._earlier(read_metrics, "metrics")
        self._keep_before(len(rows) + 1)
        self._claim(self.path)
        if rows:
            self._write()

    def _keep_before(self, epoch: int) -> None:
        self.of_ranks = [row for row in self.of_ranks if row["epoch"] < epoch]
        self.metrics = [row for row in self.metrics if row["epoch"] < epoch]

    def _earlier(self, read: Callable[[Path], list], kind: str) -> list[dict[str, object]]:
        with suppress(RecordError):
            return read(self.path)
        with suppress(OSError):  # there is none
            beside(self.path, kind).rename(beside(self.path, f"{kind}.damaged"))
        return []

    def _write(self) -> None:
        fix = "free the space or give another --results-dir. The earlier epochs are recorded."
        with explained(f"{self.path} cannot be written", fix):
            put_table(self.path, COLUMNS, self.rows)
            parts = ("ranks", RANK_COLUMNS, self.of_ranks), ("metrics", METRIC_COLUMNS, self.metrics)
            for kind, columns, rows in parts:
                if rows:
                    put_table(beside(self.path, kind), columns, rows, delimiter="\t")


def beside(path: Path, kind: str = "ranks") -> Path:
    """Return the file with the rows of the ranks, or with the "metrics", of a run's CSV."""
    return path.with_name(f"{path.stem}.{kind}.tsv")


def verdict_file(path: Path) -> Path:
    """Return the file with the verdict on the job of a run, for the run's CSV."""
    return path.with_name(f"{path.stem}.monitor.json")


def read(path: Path) -> list[dict[str, object]]:
    """Read the rows of a CSV of one or more runs, each cell as its column says.

    Raises:
        RecordError: if the file cannot be read, is empty or damaged, has another schema, or has a cell that
            no run writes.
    """
    return _read(path, OF_A_RUN)


def read_ranks(path: Path) -> list[dict[str, object]]:
    """Read the rows of the ranks next to a run's CSV, each cell as `RANK_COLUMNS` says.

    Raises:
        RecordError: as `read`.
    """
    return _read(beside(path), RANK_COLUMNS, delimiter="\t")


def read_metrics(path: Path) -> list[dict[str, object]]:
    """Read the rows of the metrics next to a run's CSV, each cell as `METRIC_COLUMNS` says.

    Raises:
        RecordError: as `read`.
    """
    return _read(beside(path, "metrics"), METRIC_COLUMNS, delimiter="\t")


def by_run(rows: Iterable[dict[str, object]]) -> dict[str, list[dict[str, object]]]:
    """Group the rows of a file by the `run_id` of their run."""
    found: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        found.setdefault(row["run_id"], []).append(row)
    return found


def ends_with(rows: list[dict[str, object]]) -> dict[str, object]:
    """Return the row of a run with the weights that it ends with: of its best epoch, or else the last."""
    best = rows[-1]["best_epoch"]  # of a script with a validation
    return next((row for row in rows if row["epoch"] == best), rows[-1])


def read_all_reduce(path: Path) -> list[dict[str, object]]:
    """Read the rows that the doctor wrote, each cell as `ALL_REDUCE_COLUMNS` says.

    Raises:
        RecordError: as `read`.
    """
    return _read(path, ALL_REDUCE_COLUMNS, delimiter="\t")


def slow_rank(of_ranks: Iterable[dict[str, object]]) -> str:
    """Return a clause that names a rank that holds up the others, by its mean seconds over all epochs.

    "" if none is `SLOW`, if there is only one rank, or if the seconds of one are unknown.
    """
    by_rank: dict[int, list[tuple[float, str]]] = {}
    for row in of_ranks:
        by_rank.setdefault(row["rank"], []).append((row["own_seconds"], row["host"]))
    means = {rank: statistics.fmean(seconds for seconds, _ in found) for rank, found in by_rank.items()}
    if len(means) < 2 or not all(mean > 0 for mean in means.values()):
        return ""
    slowest = max(means, key=means.get)
    times = means.pop(slowest) / statistics.median(means.values())
    if times < SLOW:
        return ""
    _, host = max(by_rank[slowest])  # where it was slowest: a job that was requeued may have moved
    return f"rank {slowest} on {host} takes {times:.1f}x the median of the others for its own part of a step"


def _read(
    path: Path, columns: Columns, added: dict[str, object] | None = None, **dialect: str
) -> list[dict[str, object]]:
    try:
        content = path.read_text(encoding="utf-8-sig")
        lines = csv.DictReader(io.StringIO(content, newline=""), **dialect)
        names, rows = lines.fieldnames or [], []
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"it has the column {min(twice)} twice")
        if len(names) == 1 and max(map(names[0].count, ";\t")) > 3:
            raise ValueError("its cells are not separated by commas: export it with those")
        for line in lines:
            where = f"line {lines.line_num}"
            if None in line or None in line.values():
                raise ValueError(f"{where} is cut short or too long")
            version = str(line.get("schema_version"))
            if columns is OF_A_RUN and version != str(SCHEMA_VERSION):
                raise ValueError(f"its schema version {version[:30]} is not {SCHEMA_VERSION}, which is read")
            rows.append(_row((added or {}) | line, where, columns))
    except (OSError, ValueError, csv.Error) as error:
        raise RecordError(f"{path}: not read, {reason(error)}.") from None
    if not rows:
        raise RecordError(f"{path}: not read, it has no rows.")
    return rows


def _row(cells: dict[str, str], where: str, columns: Columns) -> dict[str, object]:
    missing = [name for name in columns if name not in cells]
    if missing:
        raise ValueError(f"it has no column {', '.join(missing)}")
    row = {}
    for name, read_cell in columns.items():
        try:
            row[name] = read_cell(str(cells[name]))
        except ValueError as error:
            raise ValueError(f"{where}, column {name}: {error}") from None
    if row.get("nodes", 1) > row.get("devices", row.get("ranks", math.inf)):
        raise ValueError(f"{where} has more nodes than devices")
    return row


def _check(cells: dict[str, object], where: str, columns: Columns) -> None:
    """Raise a ValueError for values that could not be read back."""
    _row({name: _to_text(value) for name, value in cells.items()}, where, columns)


def put_table(path: Path, columns: Iterable[str], rows: list[dict[str, object]], **dialect: str) -> None:
    """Write the rows to `path`, whole or not at all; raise an OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed
    with replacing(path) as file:
        writer = csv.DictWriter(file, columns, **dialect)
        writer.writeheader()
        writer.writerows({name: _to_text(row[name]) for name in columns} for row in rows)


def _to_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):  # the reader accepts nan, but not inf
        return f"{value:.6g}" if math.isfinite(value) else "nan"
    return str(value)
