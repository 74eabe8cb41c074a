"""The means of some columns of a trace, over its training behind the warm-up; of words the most frequent one.

Try: python look.py a gpu utilisation power_w power_limit_w
There is nothing to change here.
"""

import statistics
from datetime import datetime
from pathlib import Path

from trainkit import errors, records, samples
from trainkit.command_line import Parser


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("trace", choices=["a", "b", "c"])
    parser.add_argument("what", choices=[samples.GPU, samples.RANK, samples.NODE])
    parser.add_argument("column", choices=samples.COLUMNS, nargs="+")
    opts = parser.parse_args()
    print(f"{'':8}", *(f"{column:>15}" for column in opts.column))
    for number, rows in of_the_training(Path(__file__).parent / opts.trace, opts.what).items():
        told = (mean([row[column] for row in rows]) for column in opts.column)
        print(f"{opts.what:4} {number:3}", *(f"{value:>15}" for value in told))


def of_the_training(trace: Path, what: str) -> dict[str, list[dict[str, object]]]:
    """The samples of each GPU or rank, by its number."""
    folder, found = trace / samples.FOLDER, {}
    epochs = [row for path in samples.runs(folder) for row in records.read(path) if not row["warmup"]]
    times = [_trained(row) for row in epochs]
    for row in samples.read(folder):
        # A sample tells of the second before it.
        if row["what"] == what and any(
            began <= row["time"] - 1 < row["time"] <= ended for began, ended in times
        ):
            found.setdefault(str(row["number"]), []).append(row)
    return found


def _trained(row: dict[str, object]) -> tuple[float, float]:
    recorded = datetime.fromisoformat(row["recorded_at"].replace("Z", "+00:00")).timestamp()
    ended = recorded - row["eval_seconds"]
    return ended - row["train_seconds"], ended


def mean(values: list[object]) -> str:
    return statistics.mode(values) if isinstance(values[0], str) else f"{statistics.fmean(values):.2f}"


if __name__ == "__main__":
    errors.run(main)
