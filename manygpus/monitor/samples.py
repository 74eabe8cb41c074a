"""The samples of a job: their folder, their columns, a writer that survives a kill, a reader.

`<job's folder>/monitor/` has a file per node, `<node>.csv`, with a row for each GPU, each rank and the node
itself at each moment. Beside them:

| file | what it says |
|---|---|
| `runs` | the paths of the CSVs of the job's trainings, one per line |
| `asked` | for a job script: CPUs per task, tasks per node, and MB per node (0: not asked for) |
| `notes` | what could not be sampled, a sentence per line |
| `ended` | the exit code of the job, once it has one |
| `verdict.json` | the verdict for programs, by verdict_file.py |
| `told` | the verdict as the log has it, or why there is none |

This folder is all that a training, a job and the monitor know of each other.
"""

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from manygpus import job_folder
from manygpus.errors import UserError, print_line, reason

FOLDER = job_folder.MONITOR
ASKED = "asked"
NOTES = "notes"
ENDED = "ended"
TOLD = "told"
VERDICT = "verdict.json"
# What only the last start of a job has, with the monitor's log.
OF_A_START = (ASKED, ENDED, TOLD, VERDICT, "log")

PERIOD_SECONDS = 1.0  # from one sample to the next
VERDICT_SECONDS = 15  # for the monitor to end by itself after the job, with its verdict
# The kinds of findings in the verdict that others ask for: ranks that trained each by itself, and a rank that
# did nothing, or that the others waited for.
NEVER_MET = "never_met"
STALLED_RANK = "stalled_rank"

# What a row describes.
NODE = "node"
GPU = "gpu"
RANK = "rank"
# Column -> the kinds of rows that have it. An empty cell: the value cannot be read here.
COLUMNS: dict[str, tuple[str, ...]] = {
    # In seconds since 1970.
    "time": (NODE, GPU, RANK),
    "what": (NODE, GPU, RANK),
    # Of the GPU in nvidia-smi, or the rank.
    "number": (GPU, RANK),
    # Of the GPU; of a rank the state of its process in /proc: R, S, D or T.
    "name": (GPU, RANK),
    # In use: of a rank with its loader workers, of a node by the job.
    "memory_mb": (NODE, GPU, RANK),
    # All of the GPU's; of a node what the job may use (--mem), or all.
    "memory_limit_mb": (NODE, GPU),
    # In use: of a rank by its own process, of a node by the job.
    "cores": (NODE, RANK),
    # Those that may be used, such as 0-1,4.
    "core_list": (NODE, RANK),
    # 0 to 1: the share of the time its threads could run that they waited for a core.
    "waiting": (RANK,),
    # The number of its loader workers, and the cores that these use together.
    "loaders": (RANK,),
    "loader_cores": (RANK,),
    # Those with a process on this GPU, such as 0+1; - if none, ? if only others' are seen.
    "ranks": (GPU,),
    # In % of the time: that in which at least one kernel ran.
    "utilisation": (GPU,),
    "power_w": (GPU,),
    "power_limit_w": (GPU,),
    # A counter.
    "energy_j": (GPU,),
    "clock_mhz": (GPU,),
    "clock_limit_mhz": (GPU,),
    # Why its clock is low: heat, power, other, joined by +; - if it is not.
    "throttled": (GPU,),
    "temperature_c": (GPU,),
    # Both ways, of all jobs on the node.
    "network_mb_s": (NODE,),
    # Processes with PyTorch that its script started itself and that compute, and the cores that they use.
    "others": (RANK,),
    "other_cores": (RANK,),
    # With whom it has had a TCP connection so far: rank, - (nobody), or host, on which there may be a rank.
    "met": (RANK,),
    # In /dev/shm and each other tmpfs, since the job began, where no cgroup tells whose they are.
    "shared_files_mb": (NODE,),
    # The largest one in the job's own folder.
    "checkpoint_mb": (NODE,),
}
HEADER = ",".join(COLUMNS) + "\n"
TEXT_COLUMNS = ("what", "number", "name", "core_list", "ranks", "throttled", "met")
NUMBER_COLUMNS = tuple(name for name in COLUMNS if name not in TEXT_COLUMNS)

Row = dict[str, object]


class RequestedResources(NamedTuple):
    """What a job script has asked Slurm for; 0: not asked for."""

    cpus_per_task: float
    tasks_per_node: float
    mb_per_node: float
    exclusive_helps: bool  # whether --exclusive would keep the programs of other jobs off its cores


def prepare(folder: Path, asked: RequestedResources | None) -> None:
    """Remove what an earlier start has left, and make the folder, unless this start is not sampled (None).

    Raises:
        OSError: if it cannot be written.
    """
    for name in OF_A_START:
        (folder / name).unlink(missing_ok=True)
    if asked:
        folder.mkdir(exist_ok=True)
        numbers = (*asked[:3], int(asked.exclusive_helps))
        (folder / ASKED).write_text(f"{' '.join(map(str, numbers))}\n")


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

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows with some of `COLUMNS`, synced so that they survive a kill of the job or the node."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        for row in rows:
            writer.writerow({name: _to_text(value) for name, value in row.items()})
        self._put(text.getvalue())

    def _put(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
        os.fsync(self._file.fileno())


def read(folder: Path, every: int = 1) -> list[Row]:
    """Read the samples of all nodes, ordered by time, with a column `node`; an empty cell is NaN or "".

    With `every`, only the samples of one second in so many are read. A file that is damaged is left out, with
    a warning, as those of the other nodes are still good.

    Raises:
        UserError: if there are none, or a file cannot be read.
    """
    rows: list[Row] = []
    for path in sorted(folder.glob("*.csv")):
        try:
            rows += _read_node(path, every)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({reason(error)}): give the folder of a different job."
            ) from None
        except (ValueError, csv.Error) as error:
            print_line(f"warning: {path} is left out ({error})", sys.stderr)
    if not rows:
        raise UserError(f"there are no samples in {folder}: give a sampled job (SITE_MONITOR is not off).")
    return sorted(rows, key=lambda row: row["time"])


def _read_node(path: Path, every: int) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (lines.fieldnames or ())]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
        for row in lines:
            # The monitor writes this line just now, or was killed when it did.
            is_half_written = None in row or None in row.values()
            if is_half_written or (every > 1 and float(row["time"]) % every >= 1):
                continue
            numbers = {name: float(row[name]) if row[name] else math.nan for name in NUMBER_COLUMNS}
            yield row | numbers | {"node": path.stem}


def read_asked(folder: Path) -> RequestedResources | None:
    """Return what the job script has asked Slurm for; None if no job script says it."""
    try:
        cpus_per_task, tasks_per_node, mb_per_node, exclusive_helps = job_folder.read(folder / ASKED).split()
        return RequestedResources(
            cpus_per_task=float(cpus_per_task),
            tasks_per_node=float(tasks_per_node),
            mb_per_node=float(mb_per_node),
            exclusive_helps=exclusive_helps == "1",
        )
    except ValueError:
        return None


def read_findings(folder: Path) -> list[dict[str, object]]:
    """Return the findings of the verdict, the worst first, as verdict_file.py describes them.

    There are none if there is no verdict.
    """
    try:
        return json.loads((folder / VERDICT).read_text(encoding="utf-8"))["findings"]
    except OSError:
        return []


def hang(folder: Path) -> str:
    """Return the sentence of the verdict on ranks that did nothing until the end; "" if there is none."""
    for finding in read_findings(folder):
        if finding["kind"] == STALLED_RANK and finding["evidence"].get("until_the_end"):
            return str(finding["sentence"])
    return ""


def runs(folder: Path) -> list[Path]:
    """List the CSVs of the trainings that ran in this job, in their order; none if it had none with a record.

    A recording that was put together by hand has them in its folder `training`.
    """
    try:
        lines = (folder / job_folder.RUNS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return sorted((folder / "training").glob("*.csv"))
    return [folder / line for line in dict.fromkeys(lines) if line]


def _to_text(value: object) -> str:
    is_nan = isinstance(value, float) and math.isnan(value)
    if value is None or is_nan:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)
