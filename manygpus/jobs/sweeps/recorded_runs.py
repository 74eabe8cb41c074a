"""What the runs of a sweep have recorded, in their folders."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from manygpus import frozen_code
from manygpus.record import records


class RecordedRun(NamedTuple):
    """What a run has recorded: a CSV for each of its starts, and the rows of all of them."""

    csvs: list[Path]
    rows: list[records.Row]


def recorded_runs(sweep: Path, name: str = "*") -> Iterator[RecordedRun]:
    """Yield what the run called `name`, or each run, has recorded in the folder of a sweep."""
    files: dict[str, Path] = {}
    starts: dict[str, list[records.Row]] = {}
    for csv in sorted(sweep.glob(f"{name}/runs/*.csv")):
        if frozen_code.is_copy(csv.parents[1]):
            continue
        with suppress(records.RecordError):
            starts |= records.by_run(records.read(csv))
            files[csv.stem] = csv
    for rows in records.join(starts).values():
        starts_in_order = dict.fromkeys(row["start"] for row in rows)
        yield RecordedRun(csvs=[files[start] for start in starts_in_order], rows=rows)
