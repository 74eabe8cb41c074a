"""Pack a folder's runs into one CSV next to it, FOLDER.csv, which is accepted wherever a folder is.

Try: python tools/pack_runs.py results/comparisons/NAME/ddp-1gpu-batch256-train20000-r1/runs
"""

import json
import os
from pathlib import Path

import pandas as pd

from trainkit.compare.packed import AS_TEXT, AS_WRITTEN, OF_RUNS, TABLES, VERDICT
from trainkit.runtime.command_line import Parser
from trainkit.runtime.errors import UserError, run
from trainkit.runtime.files import read_text, replacing
from trainkit.schema import records

READERS = {".csv": records.read, ".ranks.tsv": records.read_ranks, ".metrics.tsv": records.read_metrics}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="with the CSVs of runs")
    for folder in parser.parse_args().folders:
        try:
            pack(Path(os.path.abspath(folder)))  # noqa: PTH100  `..` has a name, too
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{folder} cannot be packed ({error}): correct it, or give another.") from None


def pack(folder: Path) -> None:
    """Pack the runs of `folder`, whose names are those of their files, into files next to it.

    Raises:
        UserError: if there are none, one cannot be read, or a file has the name of one to be written.
        OSError, ValueError, RecursionError: if a verdict cannot be read, or a file not be written.
    """
    runs, texts = sorted(folder.glob("*.csv")), {}
    if not (folder.name and runs):
        raise UserError(f"{folder} has no runs: give a folder with the CSVs of some.")
    for suffix in (*TABLES, VERDICT):
        if os.path.lexists(packed := folder.with_name(folder.name + suffix)):
            raise UserError(f"{packed} is there already: move it away.")
    for suffix, cells in TABLES.items():
        files = [path for path in runs if suffix == ".csv" or path.with_suffix(suffix).exists()]
        for path in files:
            READERS[suffix](path)
        if files:
            tables = [pd.read_csv(path.with_suffix(suffix), **cells, **AS_TEXT) for path in files]
            table = pd.concat(tables, keys=[path.stem for path in files], names=["run_id"])
            table = table if suffix == ".csv" else table.reset_index("run_id")
            texts[suffix] = table.to_csv(**cells, **AS_WRITTEN)
    files = {path.stem: records.verdict_file(path) for path in runs}
    of_runs = {name: json.loads(read_text(file)) for name, file in files.items() if file.exists()}
    if of_runs:
        texts[VERDICT] = json.dumps({OF_RUNS: of_runs}, indent=1)
    for suffix, text in texts.items():
        with replacing(folder.with_name(folder.name + suffix)) as file:
            file.write(text)


if __name__ == "__main__":
    run(main)
