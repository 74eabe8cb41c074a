"""The record of a training: a CSV with a row per epoch, as columns.py says. Its writer and its readers.

Every start of a training, the first one and each that resumes from a checkpoint, writes a file of its own,
`<run_id>.csv`, with the epochs that it has completed itself; `resumed_from` names the start that it resumes
from, and those before that one if it had no row when it saved. `join` puts the starts together to runs.

Next to the CSV are `<run_id>.ranks.tsv`, a row per epoch and device, and, for a training with its own
metrics, `<run_id>.metrics.tsv`, a row per epoch and metric. The files are replaced as a whole after every
epoch, so a kill or a full disk never leaves half a row.

A CSV may hold the rows of many runs, as those in results/sample. This module also reads the file of a job of
the doctor, a row per size of its all-reduce.
"""

import csv
import io
import math
import re
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from manygpus import job_folder
from manygpus.errors import UserError, first_line, print_line, reason
from manygpus.files import check_writable, explained, replacing
from manygpus.process import process_start
from manygpus.record.columns import ALL_REDUCE_COLUMNS, COLUMNS, METRIC_COLUMNS, RANK_COLUMNS, Column
from manygpus.record.loggers import Logger, config_of, curves

SCHEMA_VERSION = 1
# A rank is called slow from this many times the median of the others on.
SLOW_RANK_FACTOR = 1.25
# Why a run ended: nothing ended it earlier, or the script itself did.
ALL_EPOCHS = "all epochs"
ITS_LOOP = "its loop ended"
# The unit of a speed, unless a training has another one, and how a metric is named that has a speed.
IMAGES = "images"
PER_SECOND = "_per_s"
# Characters of the stage that the name of a file may have.
MOST_STAGE_CHARACTERS = 40
# Of a training that is resumed: what has to be the same (a Recorder compares it; a Run has its checkpoints do
# so), and what stays as at its first start, whatever the script says now. For example, an optimizer has its
# constants from the checkpoint.
SAME = ("stage", "dataset", "model", "global_batch", "settings")
KEPT = ("precision", "optimizer", "lr", "schedule")

Row = dict[str, object]


class RecordError(UserError):
    """A CSV that cannot be used; the text names the file and the reason."""


class RecordWriter:
    """Writes the record of one start of a training, on one rank: the row of an epoch, then its checkpoint.

    `facts` are the columns that are the same in all rows, `rows` those that are written, and `path` is the
    CSV, which is there from the first row on.

    Args:
        folder: `<results_dir>/runs`, created if it is not there; None writes nothing, as in a dry run.
        facts: columns that the training knows at its start. For others their `Column.default` counts.
        loggers: what else gets each epoch, as loggers.py says; nothing without a folder.
        unit, per_sample: the unit in which a speed is told, and how many of it a sample has; another unit
            than images makes the speed in it a metric, as `speed_unit` reads it.

    Raises:
        UserError: if the folder cannot be written to, or a fact could not be read back: before the training,
            not after an epoch whose result would be lost.
    """

    # A second training in a process does not begin with the process.
    _trainings_of_this_process = 0

    def __init__(
        self,
        folder: Path | None,
        facts: Row,
        loggers: Iterable[Logger] = (),
        *,
        unit: str = IMAGES,
        per_sample: float = 1,
    ) -> None:
        is_first_training = RecordWriter._trainings_of_this_process == 0
        RecordWriter._trainings_of_this_process += 1
        self._began = process_start() if is_first_training else time.monotonic()
        # The seconds of the starts that this one resumes.
        self._seconds_before = 0.0
        began_at = datetime.now(timezone.utc) - timedelta(seconds=time.monotonic() - self._began)
        defaults = {name: column.default for name, column in COLUMNS.items() if column.default is not None}
        start_columns = {
            "run_id": f"{_file_word(facts['stage'])}-{began_at:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
            "started_at": f"{began_at:%Y-%m-%dT%H:%M:%SZ}",
            "schema_version": SCHEMA_VERSION,
        }
        self.facts: Row = defaults | start_columns | facts
        for name in facts:
            try:
                COLUMNS[name].read(_to_text(facts[name]))
            except ValueError as error:
                raise UserError(f"the {name} cannot be recorded ({error}): give another.") from None
        # Of the training's first start.
        self._first_run_id = self.facts["run_id"]
        self._loggers = list(loggers) if folder else []
        self._unit = unit
        self._per_sample = per_sample
        self.rows: list[Row] = []
        self._rank_rows: list[Row] = []
        self._metrics: list[Row] = []
        self._epochs_added = 0
        self.path = folder / f"{self.facts['run_id']}.csv" if folder else None
        if folder:
            fix = "free the space, fix the permissions, or give a different --results-dir."
            check_writable(folder, "results", fix)

    def add(self, row: Row, rank_rows: Iterable[Row] = (), metrics: Iterable[Row] = ()) -> Row:
        """Write the row of an epoch, those of its devices and its metrics; return the row with all columns.

        It replaces the rows of this epoch and later ones: the training has gone back to an earlier state, or
        they could not be written.

        Raises:
            UserError: if a number makes no sense, or they cannot be written; earlier epochs are kept.
        """
        epoch = row["epoch"]
        clock_columns = {
            "warmup": self._epochs_added == 0,
            "elapsed_s": self._elapsed_s(),
            "recorded_at": _now(),
        }
        row = self.facts | clock_columns | row
        metrics = list(metrics)
        if self._unit != IMAGES:
            speed = row["images_per_s"] * self._per_sample
            name = f"{self._unit}{PER_SECOND}"
            metrics.insert(0, {"epoch": epoch, "metric": name, "of": "", "value": speed})
        try:
            _check(row, COLUMNS)
            for metric in metrics:
                _check(metric, METRIC_COLUMNS)
        except ValueError as error:
            raise UserError(
                f"epoch {epoch} cannot be recorded ({error}): correct the numbers of the training. "
                "The earlier epochs are recorded."
            ) from None
        self.rows = [*_before(epoch, self.rows), row]
        self._rank_rows = [*_before(epoch, self._rank_rows), *rank_rows]
        self._metrics = [*_before(epoch, self._metrics), *metrics]
        if self.path:
            self._write()
            if not self._epochs_added:
                job_folder.note_run(self.path)
        if not self._epochs_added:
            config = config_of(self.facts)
            self._call_loggers(lambda logger: logger.start(self._first_run_id, config, epoch))
        self._call_loggers(lambda logger: logger.log(epoch, curves(row, metrics)))
        self._epochs_added += 1
        return row

    def _call_loggers(self, call: Callable[[Logger], None]) -> None:
        """Call each logger; the training goes on without one that fails, as the record has all of it."""
        for logger in [*self._loggers]:
            try:
                call(logger)
            except Exception as error:  # each package has errors of its own
                self._loggers.remove(logger)
                print_line(
                    f"warning: {type(logger).__name__} gets no more epochs ({type(error).__name__}: "
                    f"{first_line(error)}); the training goes on, and {self.path} has all of them",
                    sys.stderr,
                )

    def finish(self, ended: str = ALL_EPOCHS) -> None:
        """Write why the run has ended into its last row: after its last checkpoint, so that it stays so.

        Raises:
            UserError: if that cannot be written; the epochs are.
        """
        if self.path and self.rows:
            self.rows[-1] = self.rows[-1] | {"ended": ended}
            self._write()
            self._call_loggers(lambda logger: logger.finish())

    @property
    def of_the_last_epoch(self) -> list[Row]:
        """Return the rows of the devices in the last epoch."""
        return [row for row in self._rank_rows if row["epoch"] == self.rows[-1]["epoch"]]

    def _write(self) -> None:
        fix = "free the space or give a different --results-dir. The earlier epochs are recorded."
        with explained(f"{self.path} cannot be written", fix):
            put_table(self.path, COLUMNS, self.rows)
            if self._rank_rows:
                put_table(beside(self.path, "ranks"), RANK_COLUMNS, self._rank_rows, delimiter="\t")
            if self._metrics:
                put_table(beside(self.path, "metrics"), METRIC_COLUMNS, self._metrics, delimiter="\t")

    def state_dict(self) -> dict[str, object]:
        """Return what a start that resumes from here has to know: numbers and texts, for a checkpoint."""
        run_id = self.facts["run_id"]
        resumed_from = run_id
        if not self.rows:
            # A start that has no row yet has no file. If it never gets one, the next resumes from the starts
            # before it.
            resumed_from = f"{run_id} {self.facts['resumed_from']}".strip()
        return {
            "run_id": run_id,
            "first_run_id": self._first_run_id,
            "resumed_from": resumed_from,
            "elapsed_s": self._elapsed_s(),
            "facts": {name: self.facts[name] for name in (*SAME, *KEPT)},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Resume from the start that has saved `state`: name its record, and count on from its seconds."""
        if state["run_id"] == self.facts["run_id"]:
            # This start goes back to what it has saved itself.
            return
        self.facts |= {name: state["facts"][name] for name in KEPT}
        self.facts["resumed_from"] = state["resumed_from"]
        self._first_run_id = state["first_run_id"]
        self._seconds_before = state["elapsed_s"]

    def _elapsed_s(self) -> float:
        """Return the seconds that the run's processes took so far, without the time between them."""
        return self._seconds_before + time.monotonic() - self._began


def _file_word(stage: str) -> str:
    """Return the part of a file's name that says the stage; `own` if a name leaves nothing."""
    word = re.sub(r"[^\w.-]+", "-", stage).lstrip("-.")
    return word[:MOST_STAGE_CHARACTERS] or "own"


def _now() -> str:
    """Return the time in UTC, to milliseconds."""
    microseconds = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S.%f}"
    return f"{microseconds[:-3]}Z"


def _before(epoch: int, rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["epoch"] < epoch]


def beside(path: Path, kind: str = "ranks") -> Path:
    """Return the file with the rows of the ranks, or with the "metrics", of a run's CSV."""
    return path.with_name(f"{path.stem}.{kind}.tsv")


def verdict_file(path: Path) -> Path:
    """Return the file with the verdict on the job of a run, for the run's CSV."""
    return path.with_name(f"{path.stem}.monitor.json")


def put_table(path: Path, columns: Iterable[str], rows: list[Row], **dialect: str) -> None:
    """Write the rows to `path`, whole or not at all; raise an OSError if it cannot be written."""
    # The folder may have been removed since the training began.
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        writer = csv.DictWriter(file, columns, **dialect)
        writer.writeheader()
        writer.writerows({name: _to_text(row[name]) for name in columns} for row in rows)


def _to_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        # The reader accepts nan, but not inf.
        return f"{value:.6g}" if math.isfinite(value) else "nan"
    return str(value)


def _check(row: Row, columns: dict[str, Column]) -> None:
    """Raise a ValueError for a value that could not be read back."""
    _read_row({name: _to_text(value) for name, value in row.items()}, columns)


# --- reading ----------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    """Read the rows of a CSV of one or more starts, each cell as its column says.

    Raises:
        RecordError: if the file cannot be read, is empty or damaged, has another schema, or has a cell that
            no run writes.
    """
    return _read(path, COLUMNS)


def read_ranks(path: Path) -> list[Row]:
    """Read the rows of the ranks next to a run's CSV, each cell as `RANK_COLUMNS` says.

    Raises:
        RecordError: as `read`.
    """
    return _read(beside(path), RANK_COLUMNS, delimiter="\t")


def read_metrics(path: Path) -> list[Row]:
    """Read the rows of the metrics next to a run's CSV, each cell as `METRIC_COLUMNS` says; [] without any.

    Raises:
        RecordError: as `read`.
    """
    file = beside(path, "metrics")
    return _read(file, METRIC_COLUMNS, delimiter="\t") if file.exists() else []


def speed_unit(rows: Iterable[Row], metrics: Iterable[Row]) -> tuple[str, float]:
    """Return the unit of a start's speeds, and how many of it a sample has.

    Args:
        rows: the rows of the start.
        metrics: the metrics of the start, as `read_metrics` returns them.
    """
    images_per_s = {row["epoch"]: row["images_per_s"] for row in rows}
    for metric in metrics:
        # A metric of the script's own is always of something.
        is_speed = metric["of"] == "" and metric["metric"].endswith(PER_SECOND)
        if is_speed and metric["epoch"] in images_per_s:
            per_sample = metric["value"] / images_per_s[metric["epoch"]]
            return metric["metric"].removesuffix(PER_SECOND), per_sample
    return IMAGES, 1


def read_all_reduce(path: Path) -> list[Row]:
    """Read the rows that the doctor wrote, each cell as `ALL_REDUCE_COLUMNS` says.

    Raises:
        RecordError: as `read`.
    """
    return _read(path, ALL_REDUCE_COLUMNS, delimiter="\t")


def _read(path: Path, columns: dict[str, Column], **dialect: str) -> list[Row]:
    rows = []
    try:
        content = path.read_text(encoding="utf-8-sig")
        lines = csv.DictReader(io.StringIO(content, newline=""), **dialect)
        for cells in lines:
            line = f"line {lines.line_num}"
            if None in cells or None in cells.values():
                raise ValueError(f"{line} is cut short or too long")
            version = cells.get("schema_version", str(SCHEMA_VERSION))
            if version != str(SCHEMA_VERSION):
                raise ValueError(f"its schema version {version[:30]} is not {SCHEMA_VERSION}, which is read")
            try:
                rows.append(_read_row(cells, columns))
            except KeyError as error:
                raise ValueError(f"it has no column {error.args[0]}") from None
            except ValueError as error:
                raise ValueError(f"{line}, {error}") from None
    except (OSError, ValueError, csv.Error) as error:
        raise RecordError(f"{path}: not read, {reason(error)}.") from None
    if not rows:
        raise RecordError(f"{path}: not read, it has no rows.")
    return rows


def _read_row(cells: dict[str, str], columns: dict[str, Column]) -> Row:
    """Read each cell; a column that the file does not have takes its default, as a file may be older than it.

    Raises:
        ValueError: for a cell that its column cannot have.
        KeyError: for a column that is missing and has no default.
    """
    row = {}
    for name, column in columns.items():
        if name in cells:
            try:
                row[name] = column.read(cells[name])
            except ValueError as error:
                raise ValueError(f"column {name}: {error}") from None
        elif column.default is not None:
            row[name] = column.default
        else:
            raise KeyError(name)
    return row


def by_run(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group the rows of a file by their `run_id`, in the order of their epochs."""
    rows_of: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["epoch"]):
        rows_of.setdefault(row["run_id"], []).append(row)
    return rows_of


def read_runs(paths: Iterable[Path]) -> dict[str, list[Row]]:
    """Read CSVs, and return the rows of each run by the `run_id` of its last start, as `join` does.

    Raises:
        RecordError: as `read`.
    """
    starts: dict[str, list[Row]] = {}
    for path in paths:
        starts |= by_run(read(path))
    return join(starts)


def join(starts: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Put the starts of trainings together to runs: the rows of each, by the `run_id` of its last start.

    A run is a start, and of the starts that it resumes from the epochs before its own first one. So an epoch
    that was made again counts once, as the later start made it.

    Other starts are left out, as a later one has taken their place:
    - If a start was stopped or killed, the later one resumes from it, or from a start before it.
    - If it came to its end, the later one continues after its last epoch, as with more --epochs.

    So if a start came to its end, and another resumes from one of its earlier checkpoints, these are two
    runs, which share their first epochs.

    Args:
        starts: the rows of each start, by `run_id`, in the order of their epochs.

    Returns:
        The same rows with the run's `run_id`, and their own in `start`. Of epochs that two runs share, those
        of the second run are a `warmup`, so that no speed counts twice.
    """
    runs: dict[str, list[Row]] = {}
    earlier_starts = {run_id: _earlier_starts(run_id, starts) for run_id in starts}
    # In a speed an epoch counts once, also if two runs have it: a warm-up counts in none.
    counted: set[tuple[str, int]] = set()
    for run_id in starts:
        if _is_superseded(run_id, starts, earlier_starts):
            continue
        run = []
        for row in _rows_of_run(run_id, starts, earlier_starts[run_id]):
            start, epoch = row["run_id"], row["epoch"]
            row = row | {"run_id": run_id, "start": start}
            if (start, epoch) in counted:
                row["warmup"] = True
            counted.add((start, epoch))
            run.append(row)
        runs[run_id] = run
    return runs


def _rows_of_run(run_id: str, starts: dict[str, list[Row]], earlier_starts: list[str]) -> list[Row]:
    """Return the rows of a start, after those of the starts that it resumed from."""
    rows = starts[run_id]
    for name in earlier_starts:
        if name in starts:
            first_epoch = rows[0]["epoch"]
            # A run that has ended, and was resumed after all, has not ended there.
            earlier_rows = [row | {"ended": ""} for row in _before(first_epoch, starts[name])]
            rows = earlier_rows + rows
    return rows


def _earlier_starts(run_id: str, starts: dict[str, list[Row]]) -> list[str]:
    """List the starts that this one resumed from, the latest first; the records of some may be missing."""
    earlier: list[str] = []
    recorded: str | None = run_id
    while recorded:
        names = starts[recorded][0]["resumed_from"].split()
        # Those before the first one with a record had no row when they saved.
        recorded = next((name for name in names if name in starts), None)
        earlier += names[: names.index(recorded) + 1] if recorded else names
    return earlier


def _is_superseded(run_id: str, starts: dict[str, list[Row]], earlier_starts: dict[str, list[str]]) -> bool:
    """Return whether another start takes the place of this one, as `join` says.

    `earlier_starts`: of each start those that it resumed from, the latest first.
    """
    last_row = starts[run_id][-1]
    run_and_earlier_starts = {run_id, *earlier_starts[run_id]}
    # A start is never superseded by one that it resumed from, whatever the clocks of their nodes say.
    for other in starts.keys() - run_and_earlier_starts:
        first_row = starts[other][0]
        if last_row["ended"]:
            recorded = [name for name in earlier_starts[other] if name in starts]
            follows_this_one = recorded[:1] == [run_id]
            takes_its_place = follows_this_one and first_row["epoch"] > last_row["epoch"]
        else:
            same_training = not run_and_earlier_starts.isdisjoint(earlier_starts[other])
            takes_its_place = same_training and first_row["recorded_at"] > last_row["recorded_at"]
        if takes_its_place:
            return True
    return False


def ends_with(rows: list[Row]) -> Row:
    """Return the row of a run with the weights that it ends with: of its best epoch, or else the last."""
    best_epoch = rows[-1]["best_epoch"]  # 0 without a validation
    for row in rows:
        if row["epoch"] == best_epoch:
            return row
    return rows[-1]


def slow_rank(rows_of_ranks: Iterable[Row]) -> str:
    """Return a clause that names a rank that holds up the others, by its mean seconds over all epochs.

    "" if none reaches `SLOW_RANK_FACTOR`, if there is only one rank, or if the seconds of one are unknown.
    """
    rows_of: dict[int, list[Row]] = {}
    for row in rows_of_ranks:
        rows_of.setdefault(row["rank"], []).append(row)
    means = {rank: statistics.fmean(row["own_seconds"] for row in rows) for rank, rows in rows_of.items()}
    # A mean of nan is not above 0.
    if len(means) < 2 or not all(mean > 0 for mean in means.values()):
        return ""
    slowest = max(means, key=means.get)
    others = [mean for rank, mean in means.items() if rank != slowest]
    factor = means[slowest] / statistics.median(others)
    if factor < SLOW_RANK_FACTOR:
        return ""
    # A job that was requeued may have moved: the host is the one where the rank was slowest.
    host = max(rows_of[slowest], key=lambda row: (row["own_seconds"], row["host"]))["host"]
    return f"rank {slowest} on {host} takes {factor:.1f}x the median of the others for its own part of a step"
