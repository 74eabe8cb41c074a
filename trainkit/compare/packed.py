"""Pack the files of many runs into few: `runs.csv` instead of the folder `runs`, and likewise the others.

In `runs.csv` the rows of all runs stand under one header. `runs.ranks.tsv` and `runs.metrics.tsv` have the
column `run_id` before the others, and `runs.monitor.json` has the verdicts by it. comparison.load reads both.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

import pandas as pd

from trainkit.runtime.errors import UserError
from trainkit.runtime.files import read_text, replacing
from trainkit.schema import records

TABLES = {".csv": {"sep": ","}, ".ranks.tsv": {"sep": "\t"}, ".metrics.tsv": {"sep": "\t"}}  # by suffix
AS_TEXT = {"dtype": str, "keep_default_na": False}
VERDICT = ".monitor.json"
OF_RUNS = "runs"  # their key in that file


def pack(folder: Path) -> None:
    """Pack the runs of `folder` into files next to it, with its name.

    Raises:
        UserError: if it has no runs, a file that cannot be read or is not named as its run, or runs with
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
    for suffix, cells in TABLES.items():
        there = [file.with_suffix(suffix) for file in files if file.with_suffix(suffix).exists()]
        of_runs = {file.name.removesuffix(suffix): pd.read_csv(file, **cells, **AS_TEXT) for file in there}
        if len({tuple(table) for table in of_runs.values()}) > 1:
            raise UserError(f"the {suffix} files in {folder} have unequal columns: pack the runs apart.")
        if of_runs:
            of_all = pd.concat(of_runs, names=["run_id"])
            of_all = of_all if "run_id" in of_all else of_all.reset_index("run_id")
            _write(folder.with_name(folder.name + suffix), of_all, cells)
    if any(verdicts.values()):
        known = {run_id: verdict for run_id, verdict in verdicts.items() if verdict}
        with replacing(folder.with_name(folder.name + VERDICT)) as lines:
            json.dump({OF_RUNS: known}, lines, indent=1)


def unpack(packed: Path, folder: Path, run_ids: Collection[str] = ()) -> None:
    """Write the files of these runs, or of all, to `folder` as the runs wrote them."""
    for suffix, cells in TABLES.items():
        file = packed.with_name(packed.stem + suffix)
        if file.exists():
            for run_id, rows in pd.read_csv(file, **cells, **AS_TEXT).groupby("run_id"):
                if run_id in (run_ids or [run_id]):
                    own = rows if suffix == ".csv" else rows.drop(columns="run_id")
                    _write(folder / f"{run_id}{suffix}", own, cells)
    verdicts = _verdict(packed.with_name(packed.stem + VERDICT)) or {OF_RUNS: {}}
    for run_id, verdict in verdicts[OF_RUNS].items():
        if run_id in (run_ids or [run_id]):
            (folder / f"{run_id}{VERDICT}").write_text(json.dumps(verdict, indent=1))


def _verdict(file: Path) -> dict[str, object] | None:
    if not os.path.lexists(file):
        return None
    try:
        return dict(json.loads(read_text(file)))
    except (OSError, ValueError, TypeError, RecursionError):
        raise UserError(f"{file}: not packed, it is damaged.") from None


def _write(file: Path, table: pd.DataFrame, cells: dict[str, str]) -> None:
    with replacing(file) as lines:
        table.to_csv(lines, index=False, lineterminator="\r\n", **cells)
