"""Compare runs: a table on the terminal, comparison.md, comparison.html, comparison.csv and the figures.

It reads what your runs have recorded, and trains nothing: `make compare` runs the three stages first.

Try: python results/plot_results.py results/runs
"""

from manygpus import project
from manygpus.config.command_line import Parser, above_0, at_least, given_path
from manygpus.errors import entrypoint, print_line
from manygpus.reports.advice import proposal
from manygpus.reports.advice.answer import page_of_answer
from manygpus.reports.advice.choice import Constraints
from manygpus.reports.comparison_report import report, report_each

RESULTS = project.folder() / "results"


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "paths",
        nargs="*",
        type=given_path,
        default=[RESULTS / "runs"],
        help="CSV files of runs, or folders that hold some (default: results/runs)",
    )
    parser.add_argument(
        "--out", type=given_path, default=RESULTS, help="folder to write to (default: results)"
    )
    parser.add_argument(
        "--target",
        type=above_0(100),
        metavar="PERCENT",
        help="also show how long each took to reach this test accuracy, such as 98",
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--each",
        action="store_true",
        help="compare the runs of each folder separately, in one table: yours and ours, or those of a class",
    )
    extent.add_argument(
        "--proposal",
        action="store_true",
        help="also write the scaling section of a proposal for compute time: proposal.md, .tex and .pdf",
    )
    parser.add_argument(
        "--set",
        type=at_least(1),
        metavar="N",
        help="which set of runs the --proposal is about, if their settings differ",
    )
    args = parser.parse_args()
    if args.set and not args.proposal:
        parser.error("--set is for --proposal: a comparison has all sets")
    if args.each:
        print_line(report_each(args.paths, args.out, args.target))
    else:
        answer = page_of_answer(args.paths, Constraints(target=args.target))
        print_line(report(args.paths, args.out, args.target, answer))
    if args.proposal:
        print_line("")
        proposal.report(args.paths, args.out, args.set)
