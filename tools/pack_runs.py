"""Pack a folder's runs into one CSV next to it, FOLDER.csv, which is accepted wherever a folder is.

Try: python tools/pack_runs.py results/comparisons/NAME/ddp-1gpu-batch256-train20000-r1/runs
"""

from pathlib import Path

from trainkit.compare.packed import pack
from trainkit.runtime.command_line import Parser
from trainkit.runtime.errors import run


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="with the CSVs of runs")
    for folder in parser.parse_args().folders:
        pack(folder)


if __name__ == "__main__":
    run(main)
