"""The samples of a job: their folder, their columns, a writer that survives a kill, a reader.

`<job's folder>/monitor/` has a file per node, `<node>.csv`, with a row for each GPU, each rank and the node
itself at each moment; `runs`, the paths of the CSVs of the job's trainings, one per line; `ended`, the exit
code of the job, once it has one; `told`, the verdict as the log has it, or why there is none; and, for a job
script, `asked`: CPUs per task, tasks per node, and MB per node (0: not asked for).
"""

import csv
import io
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from trainkit import job_folder
from trainkit.errors import UserError, reason, tell

FOLDER, RUNS, NOTES, ASKED, ENDED, TOLD = "monitor", "runs", "notes", "asked", "ended", "told"
PERIOD = 1.0  # s
# What a row describes.
NODE, GPU, RANK = "node", "gpu", "rank"
# Column -> the kinds of rows that have it. An empty cell: the value cannot be read here.
COLUMNS: dict[str, tuple[str, ...]] = {
    "time": (NODE, GPU, RANK),  # s, since 1970
    "what": (NODE, GPU, RANK),
    "number": (GPU, RANK),  # of the GPU in nvidia-smi, or the rank
    "name": (GPU, RANK),  # of the GPU; of a rank, R, S, D or T: the state of its process in /proc
    "memory_mb": (NODE, GPU, RANK),  # in use; of a rank with its loader workers, of a node by the job
    "memory_limit_mb": (NODE, GPU),  # all of the GPU's; of a node what the job may use (--mem), or all
    "cores": (NODE, RANK),  # in use, of a rank by its own process, of a node by the job
    "core_list": (NODE, RANK),  # that may be used, such as 0-1,4
    "waiting": (RANK,),  # 0 to 1: the share of the time its threads could run that they waited for a core
    "loaders": (RANK,),  # loader workers
    "loader_cores": (RANK,),  # that they use together
    "ranks": (GPU,),  # those with a process on this GPU, such as 0+1; - if none, ? if only others' are seen
    "utilisation": (GPU,),  # % of the time in which at least one kernel ran
    "power_w": (GPU,),
    "power_limit_w": (GPU,),
    "energy_j": (GPU,),  # a counter
    "clock_mhz": (GPU,),
    "clock_limit_mhz": (GPU,),
    "throttled": (GPU,),  # why its clock is low: heat, power, other, joined by +; - if it is not
    "temperature_c": (GPU,),
    "network_mb_s": (NODE,),  # both ways, of all jobs on the node
    "others": (RANK,),  # processes with PyTorch that its script started itself, and that compute
    "other_cores": (RANK,),  # that they use together
    # With whom it has had a TCP connection so far: rank, - (nobody), or host, on which there may be a rank.
    "met": (RANK,),
    "shared_files_mb": (NODE,),  # in /dev/shm, since the job began, where no cgroup tells whose they are
    "checkpoint_mb": (NODE,),  # the largest one in the job's own folder
}
HEADER = ",".join(COLUMNS) + "\n"
WORDS = ("what", "number", "name", "core_list", "ranks", "throttled", "met")  # the other columns are numbers


class Writer:
    """Appends to `<folder>/<node>.csv`, which may have samples of an earlier start of the job.

    Raises:
        OSError: if it cannot be written, here and in `add`.
    """

    def __init__(self, folder: Path, node: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{node}.csv").open("a", encoding="utf-8", newline="")
        is_new = self._file.tell() == 0
        # After a kill the last line may lack its end; an empty line is no row.
        self._put(HEADER if is_new else "\n")

    def add(self, rows: Iterable[dict[str, object]]) -> None:
        """Write rows with some of `COLUMNS`, synced so that they survive a kill of the job or the node."""
        text = io.StringIO(newline="")
        csv.DictWriter(text, COLUMNS, lineterminator="\n").writerows(
            {name: _to_text(value) for name, value in row.items()} for row in rows
        )
        self._put(text.getvalue())

    def _put(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
        os.fsync(self._file.fileno())


def read(folder: Path, every: int = 1) -> list[dict[str, object]]:
    """Read the samples of all nodes, ordered by time, with a column `node`; an empty cell is NaN or "".

    With `every`, only the samples of one second in so many are read. A file that is damaged is left out, with
    a warning, as those of the other nodes are still good.

    Raises:
        UserError: if there are none, or a file cannot be read.
    """
    rows = []
    for path in sorted(folder.glob("*.csv")):
        try:
            rows += _read_node(path, every)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({reason(error)}): give another job's folder.") from None
        except (ValueError, csv.Error) as error:
            tell(f"warning: {path} is left out ({error})", sys.stderr)
    if not rows:
        raise UserError(f"there are no samples in {folder}: give a sampled job (SITE_MONITOR is not off).")
    return sorted(rows, key=lambda row: row["time"])


def _read_node(path: Path, every: int) -> Iterator[dict[str, object]]:
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (lines.fieldnames or ())]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
        for row in lines:
            # The sampler writes this line just now, or was killed when it did.
            half_written = None in row or None in row.values()
            if half_written or (every > 1 and float(row["time"]) % every >= 1):
                continue
            numbers = {
                name: float(row[name]) if row[name] else math.nan for name in COLUMNS if name not in WORDS
            }
            yield row | numbers | {"node": path.stem}


def runs(folder: Path) -> list[Path]:
    """List the CSVs of the trainings that ran in this job, in their order; none if it had none with a record.

    A recording that was put together by hand has them in its folder `training`.
    """
    try:
        lines = (folder / RUNS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return sorted((folder / "training").glob("*.csv"))
    return [folder / line for line in dict.fromkeys(filter(None, lines))]


def note_run(path: Path) -> None:
    """In a sampled job, note that its training writes the CSV `path`."""
    job = job_folder.here()
    if job and (job / FOLDER).is_dir():
        with suppress(OSError), (job / FOLDER / RUNS).open("a", encoding="utf-8") as file:
            file.write(f"{path.resolve()}\n")


def _to_text(value: object) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
