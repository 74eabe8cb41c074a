"""Pack a folder's runs into one CSV next to it, FOLDER.csv, which is accepted wherever a folder is.

Try: python tools/pack_runs.py results/comparisons/NAME/ddp-1gpu-batch256-train20000-r1/runs
"""

import json
import os
from pathlib import Path

from trainkit.compare import comparison
from trainkit.compare.packed import OF_RUNS, TABLES, VERDICT
from trainkit.runtime.command_line import Parser, given_path
from trainkit.runtime.errors import UserError, reason, run
from trainkit.runtime.files import read_text, replacing
from trainkit.schema import records

MOST = 10**6  # characters of all verdicts, which comparison.py reads
READERS = {
    ".csv": (records.read, [*records.COLUMNS]),
    ".ranks.tsv": (records.read_ranks, ["run_id", *records.RANK_COLUMNS]),
    ".metrics.tsv": (records.read_metrics, ["run_id", *records.METRIC_COLUMNS]),
}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=given_path, metavar="FOLDER", help="with the CSVs of runs")
    for folder in parser.parse_args().folders:
        try:
            pack(Path(os.path.abspath(folder)))  # noqa: PTH100  `..` has a name, too
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{folder} cannot be packed ({error}): correct it, or give another.") from None


def pack(folder: Path) -> None:
    """Pack the runs of `folder`, one in each CSV, into files next to it.

    Raises:
        UserError: if there are none, one cannot be read, or a file has the name of one to be written.
        OSError, ValueError, RecursionError: if a CSV has several runs, or a run several CSVs; if a verdict
            cannot be read; if a file cannot be written.
    """
    paths, runs, verdicts = sorted(folder.glob("*.csv")), {}, {}
    if f"{folder.name}.csv" in comparison.WRITTEN:
        raise ValueError("its file would have the name of a report")
    if below := next(folder.glob("*/**/*.csv"), None):
        raise ValueError(f"it has folders with more, such as {below.parent.name}, to be packed first")
    if not (folder.name and paths):
        raise UserError(f"{folder} has no runs: give a folder with the CSVs of some.")
    for suffix in (*TABLES, VERDICT):
        if os.path.lexists(packed := folder.with_name(folder.name + suffix)):
            raise UserError(f"{packed} is there already: move it away.")
    for path in paths:
        (run_id, *others) = records.by_run(records.read(path))
        if others or run_id in runs:
            raise ValueError(f"{path.name} has several runs, or one that another file has")
        runs[run_id] = path
        if (file := records.verdict_file(path)).exists():
            verdicts[run_id] = json.loads(read_text(file))
    text = json.dumps({OF_RUNS: verdicts}, indent=1)
    if len(text) > MOST:
        raise ValueError(f"its verdicts have more than {MOST:,} characters")
    tables = {}
    for suffix, (read, _) in READERS.items():  # all of it is read before anything is written
        having = {name: path for name, path in runs.items() if path.with_suffix(suffix).exists()}
        tables[suffix] = [row | {"run_id": name} for name, path in having.items() for row in read(path)]
        size = sum(path.with_suffix(suffix).stat().st_size for path in having.values())
        if size + 40 * len(tables[suffix]) > records.LARGEST_FILE:  # with the name of the run in each row
            raise ValueError("a reader takes no file as large as its runs make: pack them in several folders")
    try:
        if verdicts:
            with replacing(folder.with_name(folder.name + VERDICT)) as file:
                file.write(text)
        for suffix, (_, columns) in reversed(READERS.items()):  # the runs last: without them nobody reads it
            if tables[suffix]:
                separator = {"delimiter": TABLES[suffix]["sep"]}
                place = folder.with_name(folder.name + suffix)
                records.put_table(place, columns, tables[suffix], **separator)
    except OSError as error:
        for suffix in (*TABLES, VERDICT):  # half a pack would seem to be one
            folder.with_name(folder.name + suffix).unlink(missing_ok=True)
        raise UserError(f"{folder} cannot be packed ({reason(error)}): free the space.") from None


if __name__ == "__main__":
    run(main)
