"""The samples of a job as tables: one for each node, GPU and rank, in order of time."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from manygpus.errors import UserError
from manygpus.monitor import samples

# A day of 8 GPUs has 1.5 million rows, and a job waits for its verdict. Of a job with more rows than this
# only one second in so many is read that about this many are left.
MOST_ROWS = 25_000
BYTES_PER_ROW = 80
# For so long there may be no sample: after more, the job was requeued, and others had its GPUs.
GAP_SECONDS = 10.0


class GpuId(NamedTuple):
    """A GPU of a node, by its number in nvidia-smi."""

    node: str
    index: int


class RankId(NamedTuple):
    """A rank, and the node on which it ran."""

    node: str
    rank: int


@dataclass(frozen=True)
class SampleTables:
    """A table of samples for each node, GPU and rank.

    Its columns are those of `samples.COLUMNS`, `node`, and `seconds`: those since the sample before, NaN for
    the first and after a gap.
    """

    nodes: dict[str, pd.DataFrame]
    gpus: dict[GpuId, pd.DataFrame]
    ranks: dict[RankId, pd.DataFrame]

    @classmethod
    def split(cls, table: pd.DataFrame) -> "SampleTables":
        """Split one table of all samples."""
        groups = {
            kind: table[table.what == kind].groupby(["node", "number"], sort=False)
            for kind in (samples.NODE, samples.GPU, samples.RANK)
        }
        return cls(
            nodes={node: rows for (node, _), rows in groups[samples.NODE]},
            gpus={GpuId(node, int(index)): rows for (node, index), rows in groups[samples.GPU]},
            ranks={RankId(node, int(rank)): rows for (node, rank), rows in groups[samples.RANK]},
        )


def read_samples(folder: Path) -> pd.DataFrame:
    """Read all samples of a job into one table, in order of time.

    Raises:
        UserError: if there are none.
    """
    size_bytes = sum(file.stat().st_size for file in folder.glob("*.csv"))
    every = 1 + size_bytes // (MOST_ROWS * BYTES_PER_ROW)
    table = pd.DataFrame(samples.read(folder, every=every))
    is_node = table.what == samples.NODE
    if not is_node.any():
        # The monitor could not look at the processes.
        raise UserError(f"the samples in {folder} have no row about a node: see {folder / samples.NOTES}.")
    table.loc[is_node, "number"] = "0"
    table = table.astype({"number": int})
    return table.assign(seconds=_seconds_since_the_sample_before(table))


def mean(tables: Iterable[pd.DataFrame], column: str) -> float:
    """Return the mean of a column over the rows of several tables; NaN if there are none."""
    values = [table[column] for table in tables]
    return pd.concat(values).mean() if values else float("nan")


def _seconds_since_the_sample_before(table: pd.DataFrame) -> pd.Series:
    keys = ["what", "node", "number"]
    seconds = table.groupby(keys).time.diff()
    usual = seconds.groupby([table[key] for key in keys]).transform("median")
    longest = (3 * usual).clip(lower=GAP_SECONDS)
    return seconds.where(seconds <= longest)
