"""How the runs of a sweep have ended, as a table: a plain script may write no record that tells it.

What a run is stands in its own folder, and how it has ended in the folder of its job, so that a sweep that
resumes has the runs of earlier calls.
"""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manygpus import frozen_code, job_folder
from manygpus.files import replacing
from manygpus.jobs import job_log
from manygpus.jobs.submit.job_script import JOB, LOG
from manygpus.jobs.sweeps import varied_options
from manygpus.jobs.sweeps.metric import Metric
from manygpus.jobs.sweeps.plan import PlannedRun

# In the folder of a run; in that of the sweep.
RUN, TABLE = "run.json", "sweep.csv"
# Columns of the table: what a run asks for, and the number by which runs are compared.
SHAPE, METRIC = ("gpus", "nodes", "batch"), "metric"
# The states of a run that was sent.
FINISHED, FAILED = "finished", "failed"
# Of the last line of a log, in characters: the whole is in the CSV.
MOST_OF_A_LINE = 60


@dataclass(frozen=True)
class Ended:
    """How the job of a run has ended.

    Attributes:
        seconds: how long it took; None if that is not known.
        exit_code: its exit code; None if that is not known, as of a job that was killed with its node.
        last_line: the last one that the script itself has printed, on rank 0 or on the rank that failed.
    """

    seconds: float | None
    exit_code: int | None
    last_line: str


@dataclass(frozen=True)
class RunRow:
    """A row of the table: what a run is, and how it has ended.

    Attributes:
        settings: what it varies besides GPUs and batch size.
        batch: the global batch size; None if it is given none.
        metric: the number by which runs are compared; None if it has none.
        has_finished: whether it ended without an error, and has nothing left to do.
        log: the path of its job's log.
    """

    run: str
    settings: dict[str, str]
    gpus: int
    nodes: int
    batch: int | None
    metric: float | None
    has_finished: bool
    end: Ended
    log: Path

    def as_json(self) -> dict[str, object]:
        """Return the row as schemas/sweep.json describes it."""
        return {
            "run": self.run,
            "settings": self.settings,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "global_batch": self.batch,
            "state": FINISHED if self.has_finished else FAILED,
            METRIC: self.metric,
            "seconds": self.end.seconds,
            "exit_code": self.end.exit_code,
            "last_line": self.end.last_line,
            "log": self.log,
        }


def describe(folder: Path, run: PlannedRun) -> None:
    """Write into the folder of a run what it is.

    Its `settings` are what it varies besides GPUs and batch size; `batch` is None if it is given none.
    """
    description = {
        "run": run.name,
        "settings": varied_options.values(run.settings),
        "gpus": run.shape.gpus,
        "nodes": run.shape.nodes,
        "batch": run.batch_size,
        "tasks": run.shape.tasks,
    }
    with replacing(folder / RUN) as file:
        json.dump(description, file, indent=1)


def has_finished(folder: Path) -> bool:
    """Return whether the job of the run in `folder` ended without an error, and has nothing left to do."""
    job = folder / JOB
    outcome = job_folder.read_outcome(job)
    if outcome:
        return outcome.well
    return exit_code_here(folder) == 0 and job_folder.stopped(job) is None


def _ended(folder: Path) -> Ended:
    """Return how the job of the run in `folder` has ended."""
    outcome = job_folder.read_outcome(folder / JOB)
    if outcome:
        line = job_log.last_line(_log(folder, outcome.failed_rank or 0), said=outcome.said)
        return Ended(outcome.seconds, outcome.exit_code, line)
    # A job on this machine, or one without its outcome.
    rank = next(iter(job_folder.notes(folder / JOB, "failed")), 0)
    line = job_log.last_line(_log(folder, rank))
    return Ended(seconds_here(folder / JOB), exit_code_here(folder), line)


def _log(folder: Path, rank: int) -> list[str]:
    log = (folder / LOG).resolve()
    name = job_log.OF_A_RANK.sub("", log.name)
    return job_log.last_lines(job_log.of_rank(log.parent, name, rank))


def seconds_here(job: Path) -> float | None:
    """Return how long a job on this machine took, by the times of its notes."""
    notes = job_folder.notes(job, "finished", "failed", "lost")
    ended_at = [note.stat().st_mtime for note in notes.values()]
    if not ended_at:
        return None
    return round(max(ended_at) - (job / job_folder.SCRIPT).stat().st_mtime, 1)


def exit_code_here(folder: Path) -> int | None:
    """Return the exit code of a job on this machine: that of the rank that failed first."""
    job = folder / JOB
    finished = job_folder.notes(job, "finished")
    if finished and len(finished) == _read(folder)["tasks"]:
        return 0
    note = job / (job_folder.first_failed(job) or "none")
    # jobs/inside/run_plain.py writes it.
    code = re.search(r"exit code (\d+)", job_folder.read(note))
    return int(code[1]) if code else None


def _read(folder: Path) -> dict:
    return json.loads((folder / RUN).read_text(encoding="utf-8"))


def rows(sweep: Path, metric: Metric | None = None) -> list[RunRow]:
    """Return a row for each run that was sent, from few GPUs to many.

    With a metric, the best run comes first, and those that failed come last, whatever they had reached.
    """
    folders = [path.parent for path in sweep.glob(f"*/{RUN}") if not frozen_code.is_copy(path.parent)]
    runs = [_row(sweep, folder, metric) for folder in folders]
    runs.sort(key=lambda row: (row.gpus, row.batch or 0, row.run))
    if metric:
        runs.sort(key=lambda row: (not row.has_finished, metric.sort_key(row.metric)))
    return runs


def _row(sweep: Path, folder: Path, metric: Metric | None) -> RunRow:
    run = _read(folder)
    log = (folder / LOG).resolve()
    return RunRow(
        run=run["run"],
        settings=run["settings"],
        gpus=run["gpus"],
        nodes=run["nodes"],
        batch=run["batch"],
        metric=metric.of_run(sweep, run["run"], log) if metric else None,
        has_finished=has_finished(folder),
        end=_ended(folder),
        log=log,
    )


def write(sweep: Path, metric: Metric | None = None) -> list[tuple[str, ...]]:
    """Write `rows` to the CSV of a sweep; return them as text, the titles first."""
    runs = rows(sweep, metric)
    names = list(dict.fromkeys(name for row in runs for name in row.settings))
    of_metric = (METRIC,) if metric else ()
    titles = ("run", *names, *SHAPE, *of_metric, "state", "seconds", "exit_code", "last_line")
    table = [_cells(row, names, has_metric=metric is not None) for row in runs]
    with replacing(sweep / TABLE) as file:
        csv.writer(file, lineterminator="\n").writerows([titles, *table])
    shown = [titles]
    for cells in table:
        line = cells[-1]
        if len(line) > MOST_OF_A_LINE:
            line = f"{line[: MOST_OF_A_LINE - 3]}..."
        shown.append((*cells[:-1], line))
    return shown


def _cells(row: RunRow, names: Sequence[str], has_metric: bool) -> tuple[str, ...]:
    varied = [row.settings.get(name) for name in names]
    numbers = [row.gpus, row.nodes, row.batch]
    if has_metric:
        numbers.append(row.metric)
    state = FINISHED if row.has_finished else FAILED
    cells = (row.run, *varied, *numbers, state, row.end.seconds, row.end.exit_code)
    return (*("" if cell is None else str(cell) for cell in cells), row.end.last_line)
