"""The CSV that every run writes: its columns, a writer that survives a kill, a reader that checks.

One file per run, one row per epoch. The file is replaced as a whole after every epoch, so that a
reader, a kill or a full disk never meets half a row.
"""

import csv
from pathlib import Path

from trainkit.errors import UserError
from trainkit.files import check_writable, replacing

SCHEMA_VERSION = 1

# Column -> type. results/README.md tells what each one means and its unit.
COLUMNS: dict[str, type] = {
    "run_id": str,
    "stage": str,
    "launcher": str,
    "epoch": int,
    "warmup": bool,
    "dataset": str,
    "model": str,
    "loader": str,
    "recipe": str,
    "world_size": int,
    "nodes": int,
    "devices": int,
    "device_name": str,
    "workers_per_loader": int,
    "threads_per_worker": int,
    "global_batch": int,
    "batch_per_device": int,
    "accumulate": int,
    "precision": str,
    "compiled": bool,
    "steps": int,
    "images": int,
    "train_seconds": float,
    "images_per_s": float,
    "test_images": int,
    "eval_seconds": float,
    "train_loss": float,
    "test_loss": float,
    "test_accuracy": float,
    "learning_rate": float,
    "peak_memory_mb": float,
    "elapsed_s": float,
    "seed": int,
    "job_id": str,
    "node_list": str,
    "torch_version": str,
    "cuda_version": str,
    "git_commit": str,
    "started_at": str,
    "schema_version": int,
}
# Columns that files of earlier programs lack, and what held for those.
ADDED = {"model": "Net", "test_images": 10_000}


class RecordError(UserError):
    """A CSV that cannot be used; the text names the file and the reason."""


class Recorder:
    """Writes `<results_dir>/runs/<run_id>.csv`.

    `rows` are the rows so far.

    Args:
        results_dir: created if it is not there.
        facts: the columns that are the same in every row of the run.

    Raises:
        UserError: if the directory cannot be written to. It is asked for here, before the
            training starts, and not after an epoch whose result would be lost.
    """

    def __init__(self, results_dir: Path, facts: dict[str, object]) -> None:
        self.path = results_dir / "runs" / f"{facts['run_id']}.csv"
        self._facts = facts | {"schema_version": SCHEMA_VERSION}
        self.rows: list[dict[str, object]] = []
        fix = "free the space, mend the permissions, or give another --results-dir."
        check_writable(self.path.parent, "results", fix)

    def add(self, **row: object) -> None:
        """Append the row of one epoch and put the whole file in place.

        Raises:
            UserError: if the file cannot be written; the rows written before stay.
        """
        self.rows.append(self._facts | row)
        self._write()

    def go_on(self, facts: dict[str, object], rows: list[dict[str, object]]) -> None:
        """Continue the file of an earlier process of the run, which had written `rows`.

        `facts`, `run_id` among them, stay as they were there.

        Raises:
            UserError: if the file cannot be written.
        """
        self.path = self.path.with_name(f"{facts['run_id']}.csv")
        self._facts |= facts
        self.rows = [ADDED | row for row in rows]
        if rows:
            self._write()

    def _write(self) -> None:
        try:
            with replacing(self.path) as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows({name: _to_text(row[name]) for name in COLUMNS} for row in self.rows)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}): free the space or give another "
                f"--results-dir. The epochs recorded before are kept."
            ) from None


def read(path: Path) -> list[dict[str, object]]:
    """The rows of one run's CSV, each column as its type in `COLUMNS`.

    Raises:
        RecordError: if the file cannot be read, is empty or damaged, or has another schema.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise RecordError(f"{path}: not read, {reason}.") from None
    if not rows:
        raise RecordError(f"{path}: not read, it has no rows.")
    if "schema_version" not in header:
        raise RecordError(f"{path}: not read, it has no schema_version column: not a record of a run.")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise RecordError(f"{path}: not read, line {number} is cut short or too long.")
        version = row["schema_version"]
        if version != str(SCHEMA_VERSION):
            age = "newer" if version.isdecimal() and int(version) > SCHEMA_VERSION else "older or unknown"
            raise RecordError(
                f"{path}: not read, its schema version {version or '(none)'} is {age} "
                f"(this program reads version {SCHEMA_VERSION})."
            )
    rows = [ADDED | row for row in rows]
    missing = [name for name in COLUMNS if name not in header and name not in ADDED]
    if missing:
        raise RecordError(f"{path}: not read, it has no column {', '.join(missing)}.")
    try:
        return [{name: _from_text(row[name], kind) for name, kind in COLUMNS.items()} for row in rows]
    except ValueError as error:
        raise RecordError(f"{path}: not read, {error}.") from None


def _to_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _from_text(text: str, kind: type) -> object:
    if kind is bool:
        return bool(int(text))
    return kind(text)
