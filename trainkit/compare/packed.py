"""The files of many runs, packed into few by tools/pack_runs.py: `runs.csv` instead of the folder `runs`.

In `runs.csv` the rows of all runs stand under one header. `runs.ranks.tsv` and `runs.metrics.tsv` have the
column `run_id` before the others, and `runs.monitor.json` has the verdicts by it. comparison.load reads both.
"""

import json
from collections.abc import Collection
from pathlib import Path

import pandas as pd

TABLES = {".csv": {"sep": ","}, ".ranks.tsv": {"sep": "\t"}, ".metrics.tsv": {"sep": "\t"}}  # by suffix
VERDICT = ".monitor.json"
OF_RUNS = "runs"  # their key in that file


def unpack(packed: Path, folder: Path, run_ids: Collection[str] = ()) -> None:
    """Write the files of these runs, or of all, to `folder` as the runs wrote them."""
    for suffix, cells in TABLES.items():
        file = packed.with_suffix(suffix)
        if file.exists():
            table = pd.read_csv(file, **cells, dtype=str, keep_default_na=False)
            for run_id, rows in table.groupby("run_id"):
                if run_id in (run_ids or [run_id]):
                    own = rows if suffix == ".csv" else rows.drop(columns="run_id")
                    own.to_csv(folder / f"{run_id}{suffix}", **cells, index=False, lineterminator="\r\n")
    verdicts = packed.with_suffix(VERDICT)
    if verdicts.exists():
        for run_id, verdict in json.loads(verdicts.read_text())[OF_RUNS].items():
            if run_id in (run_ids or [run_id]):
                (folder / f"{run_id}{VERDICT}").write_text(json.dumps(verdict, indent=1))
