"""The means of some columns of a trace, over its training behind the warm-up; of words the most frequent one.

Try: python look.py a gpu utilisation power_w
     python look.py a rank cores own_seconds
     python look.py a epoch images_per_s train_seconds
There is nothing to change here.
"""

import statistics
from datetime import datetime
from pathlib import Path

from trainkit.config.command_line import Parser
from trainkit.errors import entrypoint
from trainkit.record import records, samples

EPOCH = "epoch"
COLUMNS = [*samples.COLUMNS, *records.RANK_COLUMNS, *records.COLUMNS]


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("trace", choices=["a", "b", "c"])
    parser.add_argument("what", choices=[samples.GPU, samples.RANK, samples.NODE, EPOCH])
    parser.add_argument("column", nargs="+")
    opts = parser.parse_args()
    unknown = set(opts.column) - set(COLUMNS)
    if unknown:
        parser.error(f"there is no column {unknown.pop()}")
    trace = Path(__file__).parent / opts.trace / samples.FOLDER
    columns = {column: values(trace, opts.what, column) for column in opts.column}
    print(f"{'':8}", *(f"{column:>15}" for column in opts.column))
    for number in {number: None for by_number in columns.values() for number in by_number}:
        means = [mean(by_number.get(number, [])) for by_number in columns.values()]
        print(f"{opts.what:5} {number:2}", *(f"{cell:>15}" for cell in means))


def values(folder: Path, what: str, column: str) -> dict[str, list[object]]:
    """Return a column by the number of the GPU or rank, of samples of the training, or of its record."""
    (path,) = samples.runs(folder)
    epochs = [row for row in records.read(path) if not row["warmup"]]
    if what == EPOCH:
        return {"": [row[column] for row in epochs if column in row]}
    if column in samples.COLUMNS:
        times = [_trained(row) for row in epochs]
        rows = [row for row in samples.read(folder) if row["what"] == what and _is_within(row["time"], times)]
        key = "number"
    else:
        counted = {row["epoch"] for row in epochs}
        rows = [row for row in records.read_ranks(path) if row["epoch"] in counted and what == samples.RANK]
        key = "rank"
    by_number: dict[str, list[object]] = {}
    for row in rows:
        if column in row:
            by_number.setdefault(str(row[key]), []).append(row[column])
    return by_number


def _trained(row: dict[str, object]) -> tuple[float, float]:
    recorded = datetime.fromisoformat(row["recorded_at"].replace("Z", "+00:00")).timestamp()
    ended = recorded - row["eval_seconds"]
    return ended - row["train_seconds"], ended


def _is_within(time: float, spans: list[tuple[float, float]]) -> bool:
    """Extend a period by the second before it, which its first sample covers."""
    return any(began <= time - samples.PERIOD_SECONDS and time <= ended for began, ended in spans)


def mean(cells: list[object]) -> str:
    """Return the mean of numbers, and of words the most frequent one."""
    if not cells:
        return "-"
    if isinstance(cells[0], str):
        return statistics.mode(cells)
    return f"{statistics.fmean(cells):.2f}"


if __name__ == "__main__":
    main()
