"""The files of many runs as few: `runs.csv` in place of the folder `runs`, and what is beside them likewise.

In `runs.csv` the rows of all runs stand under one header. `runs.ranks.tsv` and `runs.metrics.tsv` have the
column `run_id` before the others, and `runs.monitor.json` has the verdicts by it. comparison.load reads both.
"""

import csv
import json
from collections.abc import Collection
from pathlib import Path

from trainkit.runtime.errors import UserError
from trainkit.runtime.files import replacing
from trainkit.schema import records

TABLES = {".csv": ",", ".ranks.tsv": "\t", ".metrics.tsv": "\t"}  # suffix: what is between two cells
VERDICT = ".monitor.json"
OF_RUNS = "runs"  # what has them in that file

Row = dict[str, str]


def pack(folder: Path) -> None:
    """Put the runs of `folder` into files beside it, which are called as it is.

    Raises:
        UserError: if it has no runs, a file that cannot be read or is not called as its run, or runs with
            unequal columns.
    """
    files = sorted(folder.glob("*.csv"))
    if not files:
        raise UserError(f"{folder} has no runs: give a folder with the CSVs of some.")
    for file in files:
        if {*records.by_run(records.read(file))} != {file.stem}:
            raise UserError(f"{file}: not packed, its name is not that of its run.")
        if records.beside(file).exists():
            records.read_ranks(file)
        if records.beside(file, "metrics").exists():
            records.read_metrics(file)
    verdicts = {file.stem: _verdict(file.with_suffix(VERDICT)) for file in files}
    for suffix, delimiter in TABLES.items():
        of_runs = {file.stem: _rows(file.with_suffix(suffix), delimiter) for file in files}
        rows = [{"run_id": run_id} | row for run_id, rows in of_runs.items() for row in rows]
        if any(row.keys() != rows[0].keys() for row in rows):
            raise UserError(f"the {suffix} files in {folder} have unequal columns: pack the runs apart.")
        _write(folder.with_name(folder.name + suffix), rows, delimiter)
    if any(verdicts.values()):
        known = {run_id: verdict for run_id, verdict in verdicts.items() if verdict}
        folder.with_name(folder.name + VERDICT).write_text(json.dumps({OF_RUNS: known}, indent=1))


def unpack(packed: Path, folder: Path, run_ids: Collection[str] = ()) -> None:
    """Put the files of these runs, or of all, into `folder` as the runs have written them."""
    for suffix, delimiter in TABLES.items():
        for run_id, rows in records.by_run(_rows(packed.with_name(packed.stem + suffix), delimiter)).items():
            if run_id in (run_ids or [run_id]):
                own = rows if suffix == ".csv" else [dict(list(row.items())[1:]) for row in rows]
                _write(folder / f"{run_id}{suffix}", own, delimiter)
    verdicts = _verdict(packed.with_name(packed.stem + VERDICT)) or {OF_RUNS: {}}
    for run_id, verdict in verdicts[OF_RUNS].items():
        if run_id in (run_ids or [run_id]):
            (folder / f"{run_id}{VERDICT}").write_text(json.dumps(verdict, indent=1))


def _rows(file: Path, delimiter: str) -> list[Row]:
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines, delimiter=delimiter))


def _verdict(file: Path) -> dict[str, object] | None:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{file}: not packed, it is damaged.") from None


def _write(file: Path, rows: list[Row], delimiter: str) -> None:
    if rows:
        with replacing(file) as lines:
            writer = csv.DictWriter(lines, rows[0], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
