"""Pack a folder's runs into one CSV next to it, FOLDER.csv, which is accepted wherever a folder is.

Try: python tools/pack_runs.py results/comparisons/NAME/ddp-1gpu-batch256-train20000-r1/runs
"""

import json
from pathlib import Path

import pandas as pd

from trainkit.compare.packed import AS_TEXT, AS_WRITTEN, OF_RUNS, TABLES, VERDICT
from trainkit.runtime.command_line import Parser
from trainkit.runtime.errors import UserError, run


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="with the CSVs of runs")
    for folder in parser.parse_args().folders:
        pack(folder)


def pack(folder: Path) -> None:
    """Pack the runs of `folder`, whose names are those of their files, into files next to it."""
    if not [*folder.glob("*.csv")]:
        raise UserError(f"{folder} has no runs: give a folder with the CSVs of some.")
    for suffix, cells in TABLES.items():
        files = sorted(folder.glob(f"*{suffix}"))
        tables = {file.name.removesuffix(suffix): pd.read_csv(file, **cells, **AS_TEXT) for file in files}
        if tables:
            table = pd.concat(tables, names=["run_id"])
            table = table if suffix == ".csv" else table.reset_index("run_id")
            table.to_csv(folder.with_name(folder.name + suffix), **cells, **AS_WRITTEN)
    files = sorted(folder.glob(f"*{VERDICT}"))
    if files:
        of_runs = {file.name.removesuffix(VERDICT): json.loads(file.read_text()) for file in files}
        text = json.dumps({OF_RUNS: of_runs}, indent=1)
        folder.with_name(folder.name + VERDICT).write_text(text)


if __name__ == "__main__":
    run(main)
