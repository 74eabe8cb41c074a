"""The samples of a job: their folder, their columns, a writer that survives a kill, a reader.

`<job's folder>/monitor/` has a file per node, `<node>.csv`, with a row for each GPU, each rank and the node
itself at each moment; `runs`, the paths of the CSVs of the job's trainings, one per line; `ended`, the exit
code of the job, once it has one; and, for a job script, `asked`: CPUs per task, tasks per node, and MB per
node (0: not asked for).
"""

import csv
import errno
import io
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trainkit.runtime import job_folder
from trainkit.runtime.errors import UserError, reason
from trainkit.runtime.files import check_regular, read_text
from trainkit.schema.columns import MOST

FOLDER, RUNS, NOTES, ASKED, ENDED = "monitor", "runs", "notes", "asked", "ended"
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
NO_FSYNC = (errno.EINVAL, errno.EROFS, errno.ENOTSUP)  # of a pipe, or a file system without it
HEADER = ",".join(COLUMNS) + "\n"
WORDS = ("what", "number", "name", "core_list", "ranks", "throttled", "met")  # the other columns are numbers


class Writer:
    """Appends to `<folder>/<node>.csv`, which may have samples of an earlier start of the job.

    Raises:
        OSError: if it cannot be written, here and in `add`.
    """

    def __init__(self, folder: Path, node: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{node}.csv").open("a+b", buffering=0)
        header = HEADER.encode()
        self._file.seek(0)
        there = self._file.read(len(header))
        if len(there) < len(header) and header.startswith(there):  # new, or cut short by a full disk
            self._file.truncate(0)
            self._put(header)
        else:  # after a kill the last line may lack its end; an empty line is no row
            self._put(b"\n")

    def add(self, rows: Iterable[dict[str, object]]) -> None:
        """Write rows with some of `COLUMNS`, synced so that they survive a kill of the job or the node."""
        text = io.StringIO(newline="")
        csv.DictWriter(text, COLUMNS, lineterminator="\n").writerows(
            {name: _to_text(value) for name, value in row.items()} for row in rows
        )
        self._put(text.getvalue().encode())

    def _put(self, text: bytes) -> None:
        while text:  # a nearly full disk takes a part, and refuses the rest
            text = text[self._file.write(text) :]
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno not in NO_FSYNC:
                raise


def read(folder: Path, every: int = 1) -> list[dict[str, object]]:
    """Read the samples of all nodes, ordered by time, with a column `node`; an empty cell is NaN or "".

    With `every`, only the samples of one second in so many are read. What a kill or a full disk has cut short
    is left out: a line, or a file that ends within its header.

    Raises:
        UserError: if there are none, or a file cannot be read.
    """
    rows = []
    for path in sorted(folder.glob("*.csv")):
        try:
            check_regular(path)
            with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
                first = file.readline(10**6)  # a damaged file may be one endless line
                if first != HEADER and HEADER.startswith(first):
                    continue  # a full disk, or the end of the node: the other nodes' files are still good
                lines = csv.reader(one for one in iter(lambda: file.readline(10**6), "") if "\0" not in one)
                header = next(csv.reader([first]), [])
                if missing := [name for name in COLUMNS if name not in header]:
                    raise ValueError(f"it has no column {', '.join(missing)}")
                unknown = dict.fromkeys(COLUMNS, "")
                time = header.index("time")
                for cells in lines:
                    with suppress(ValueError, IndexError):
                        if every > 1 and float(cells[time]) % every >= 1:
                            continue
                        row = unknown | dict(zip(header, cells, strict=True)) | {"node": path.stem}
                        row |= {name: _number(row[name]) for name in COLUMNS if name not in WORDS}
                        if row["time"] >= 0:  # NaN cannot be ordered
                            rows.append(row)
        except (OSError, ValueError, csv.Error) as error:
            raise UserError(
                f"{path}: no samples of slurm/monitor.py ({reason(error)}): give the folder of a job."
            ) from None
    if not rows:
        raise UserError(f"there are no samples in {folder}: give a sampled job (SITE_MONITOR is not off).")
    return sorted(rows, key=lambda row: row["time"])


def runs(folder: Path) -> list[Path]:
    """List the CSVs of the trainings that ran in this job, in their order; none if it had none with a record.

    A recording that was put together by hand has them in its folder `training`.
    """
    try:
        lines = read_text(folder / RUNS).splitlines()
    except (OSError, ValueError):
        return sorted((folder / "training").glob("*.csv"))
    return [folder / line for line in dict.fromkeys(filter(None, lines))]


def note_run(path: Path) -> None:
    """In a sampled job, note that its training writes the CSV `path`."""
    job = job_folder.here()
    if job and (job / FOLDER).is_dir():
        with suppress(OSError), job_folder.opened(job / FOLDER / RUNS, "a") as file:
            file.write(f"{path.resolve()}\n")


def _number(cell: str) -> float:
    number = float(cell or "nan")
    return number if abs(number) <= MOST else math.nan


def _to_text(value: object) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
