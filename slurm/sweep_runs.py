"""The runs of a sweep: what each one is, where its results are, and the queue it waits in."""

import argparse
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout
from submitit import LocalJob, SlurmJob

from trainkit import jobs, options, records, submission
from trainkit.errors import UserError
from trainkit.jobs import Handle, LocalHandle, SlurmHandle, State
from trainkit.submission import Geometry, Request, Stage

CSV_SECONDS = 60  # a shared file system may show a file that late on another machine


@dataclass(frozen=True)
class Run:
    """One configuration and the number of its repeat.

    `batch_size` is the global one. `num_workers` is None for the resident loader, `train_size` is
    None for all training images.
    """

    stage: Stage
    shape: Geometry
    batch_size: int
    num_workers: int | None
    train_size: int | None
    repeat: int

    @property
    def gpus(self) -> int:
        """GPUs on all nodes together."""
        return self.shape.nodes * self.shape.gpus_per_node

    @property
    def configuration(self) -> str:
        """The run's name without the number of its repeat; no two configurations share one."""
        parts = [self.stage.name, f"{self.gpus}gpu"]
        if self.shape.nodes > 1:
            parts.append(f"{self.shape.nodes}nodes")
        parts.append(f"batch{self.batch_size}")
        if self.num_workers is not None:
            parts.append(f"workers{self.num_workers}")
        if self.train_size is not None:
            parts.append(f"train{self.train_size}")
        return "-".join(parts)

    @property
    def name(self) -> str:
        return f"{self.configuration}-r{self.repeat}"

    def arguments(self) -> list[str]:
        """What the stage has to be told."""
        arguments = ["--batch-size", str(self.batch_size)]
        if self.num_workers is not None:
            arguments += ["--loader", "workers", "--num-workers", str(self.num_workers)]
        if self.train_size is not None:
            arguments += ["--train-size", str(self.train_size)]
        return arguments


@dataclass(frozen=True)
class Survivor:
    """The process of a local run that a killed sweep has left behind: not our child any more."""

    pid: int
    folder: Path

    def poll(self) -> int | None:
        """As Popen's: None while it runs. Its exit code is not to be had; its notes tell how it ended."""
        with suppress(psutil.Error):  # the number may belong to another program by now
            return None if str(self.folder) in psutil.Process(self.pid).cmdline() else 0
        return 0


class Sweep:
    """The folder of a sweep, which is all of its state: a folder per run, with its CSV and job.json."""

    def __init__(
        self, folder: Path, own: argparse.Namespace, opts: options.Options, arguments: list[str]
    ) -> None:
        self.folder = folder
        self._own, self._opts, self._arguments = own, opts, arguments

    def claim(self) -> FileLock:
        """Make the folder this sweep's, for as long as the lock is held.

        Raises:
            UserError: if it cannot be written to, has other things in it, belongs to a sweep with other
                options, or another sweep.py is at work in it.
        """
        known = self.folder / "options.txt"
        mine = shlex.join([*self._arguments, "--cpus-per-gpu", str(self._own.cpus_per_gpu)])
        lock = FileLock(self.folder / ".lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()) and not known.exists():
                raise UserError(f"{self.folder} has other things in it: give a new or an empty --out.")
            lock.acquire(timeout=0)
            if not known.exists():
                _write(known, mine)
            elif known.read_text() != mine:
                raise UserError(
                    f"{self.folder} is of a sweep with the options {known.read_text()}, not {mine}: its rows "
                    "could not be compared with these. Give another --out."
                )
        except Timeout:
            raise UserError(
                f"another sweep.py is at work in {self.folder}: wait, or stop that one."
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be written to ({error.strerror}): give another --out."
            ) from None
        return lock

    def request(self, run: Run, precision: str) -> Request:
        """The job of `run`; every repeat has a seed of its own."""
        arguments = [*self._arguments, *run.arguments(), "--precision", precision]
        arguments += ["--seed", str(self._opts.seed + run.repeat - 1)]
        arguments += ["--results-dir", str(self.folder / run.name)]
        return Request(run.stage, run.shape, tuple(arguments), self._own.time, self._own.partition)

    def submit(self, run: Run, precision: str) -> Handle:
        """Start `run`, and note where.

        Raises:
            UserError: if it was refused.
        """
        handle = submission.submit(self.request(run, precision))
        slurm, folder = isinstance(handle, SlurmHandle), self.folder / run.name
        job = {"id": handle.job_id, "slurm": slurm, "log": str(handle.log), "folder": str(handle.folder)}
        try:
            _write(folder / "job.json", json.dumps(job, indent=2))
            (folder / "log").unlink(missing_ok=True)
            (folder / "log").symlink_to(handle.log)
        except OSError as error:
            handle.cancel()  # the next call would not know of it
            raise UserError(f"{folder} cannot be written to ({error.strerror}): free the space.") from None
        return handle

    def attach(self, run: Run) -> Handle | None:
        """The latest job of `run`, of an earlier call too, or None if there is none."""
        note = self.folder / run.name / "job.json"
        if not note.exists():
            return None
        job = json.loads(note.read_text())
        submitted, results = Path(job["log"]).parent, self.folder / run.name / "runs"
        tasks = range(run.shape.tasks)
        if job["slurm"]:
            return SlurmHandle(SlurmJob(submitted, job["id"], tasks), Path(job["folder"]), results)
        process = Survivor(int(job["id"]), submitted)
        return LocalHandle(LocalJob(submitted, job["id"], tasks, process), Path(job["folder"]), results)

    def finished(self, name: str = "*") -> list[Path]:
        """The CSVs that have all epochs, of the run called `name` or of all runs."""
        return [csv for csv, rows in self._csvs(name) if rows[-1]["epoch"] >= self._opts.epochs]

    def precision(self) -> str:
        """The one precision of all runs: the one asked for, or "auto" until a run has chosen."""
        chosen = (rows[0]["precision"] for _, rows in self._csvs("*"))
        return next(chosen, "auto") if self._opts.precision == "auto" else self._opts.precision

    def _csvs(self, name: str) -> Iterator[tuple[Path, list[dict]]]:
        for csv in sorted(self.folder.glob(f"{name}/runs/*.csv")):
            with suppress(records.RecordError):
                yield csv, records.read(csv)


class Queue:
    """The runs of a sweep on their way: `waiting` for their submission, `active`, `failed`, or finished.

    `states` tells how the active ones are doing. At most `limit` are active at a time.
    """

    def __init__(self, sweep: Sweep, runs: list[Run], limit: int) -> None:
        self._sweep, self._runs, self.limit = sweep, runs, limit
        self._refused_at = math.inf
        self.waiting: list[Run] = []
        self.active: dict[Run, Handle] = {}
        self.states: dict[Run, State] = {}
        self.failed: list[str] = []
        for run in runs:
            if sweep.finished(run.name):
                continue
            handle = sweep.attach(run)
            if handle and handle.state().name not in ("done", "failed"):
                self.active[run] = handle
            else:
                self.waiting.append(run)

    def finished(self) -> int:
        """How many runs are."""
        return len(self._runs) - len(self.waiting) - len(self.active) - len(self.failed)

    def undecided(self) -> bool:
        """Whether the precision is still to be chosen, by a run that goes alone."""
        return self._sweep.precision() == "auto"

    def submit(self) -> Iterator[str]:
        """Submit what there is room for, and tell if Slurm takes no more.

        Raises:
            UserError: if a job is refused while none is active.
        """
        precision = self._sweep.precision()
        room = min(self._refused_at, 1 if self.undecided() else self.limit)
        while self.waiting and len(self.active) < room:
            run = self.waiting[0]
            try:
                self.active[run] = self._sweep.submit(run, precision)
            except UserError as error:
                if not self.active:
                    raise
                # As where a user may have only so many jobs: there is room when one has ended.
                self._refused_at = len(self.active)
                yield f"{run.name} waits for the end of another job: {error}"
                return
            self._refused_at = math.inf
            self.waiting.pop(0)

    def look(self) -> Iterator[str]:
        """Ask how the active runs are doing; a line for each that has ended."""
        self.states = {run: handle.state() for run, handle in self.active.items()}
        for run, state in list(self.states.items()):
            if state.name not in ("done", "failed"):
                continue
            del self.states[run]
            log = self.active.pop(run).log
            ended = f"[{len(self._runs) - len(self.waiting) - len(self.active)}/{len(self._runs)}] {run.name}"
            csv = self._wait_for_csv(run) if state.name == "done" else None
            if csv:
                yield f"{ended} finished: {records.read(csv)[-1]['images_per_s']:,.0f} images/s"
            else:
                self.failed.append(run.name)
                why = state.detail if state.name == "failed" else "it has left no CSV with all epochs"
                yield f"{ended} failed: {why} (log: {log})"

    def _wait_for_csv(self, run: Run) -> Path | None:
        """Its CSV, for which a shared file system may take its time."""
        until = time.monotonic() + CSV_SECONDS
        while not (csvs := self._sweep.finished(run.name)) and time.monotonic() < until:
            time.sleep(1)
        return csvs[0] if csvs else None


class Board:
    """What the sweep shows: on a terminal a few lines kept up to date, in a log only what changes."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._height = 0  # lines on the terminal that the next ones replace
        self._shown: dict[Run, State] = {}

    def say(self, text: str) -> None:
        """Print something that stays."""
        self._erase()
        print(text, flush=True)

    def show(self, queue: Queue) -> None:
        """Print how the runs are doing."""
        news = {run: state for run, state in queue.states.items() if state != self._shown.get(run)}
        self._shown = queue.states
        if not sys.stdout.isatty():
            for run, state in news.items():
                print(f"{run.name} {state.name}: {state.detail}", flush=True)
            return
        lines = [
            f"{queue.finished()} of {self._total} finished, {len(queue.failed)} failed, "
            f"{len(queue.waiting)} to submit"
        ]
        lines += [f"  {run.name} {state.name}: {state.detail}" for run, state in queue.states.items()]
        size = shutil.get_terminal_size()
        self._erase()
        self._height = min(len(lines), size.lines - 1)
        for line in lines[: self._height]:
            print(line[: size.columns - 1], flush=True)

    def _erase(self) -> None:
        if self._height:
            print(f"\x1b[{self._height}F\x1b[J", end="")
        self._height = 0


def watch(queue: Queue, board: Board) -> None:
    """Have every run finished or failed, and show how they are doing.

    Raises:
        UserError: if the first job is refused, or Slurm does not answer.
    """
    if queue.waiting and queue.limit > 1 and queue.undecided():
        board.say(
            "the first run goes alone, and its precision holds for all (or give --precision fp32 or bf16)"
        )
    answered = time.monotonic()
    while queue.waiting or queue.active:
        for news in (*queue.submit(), *queue.look()):
            board.say(news)
        board.show(queue)
        unanswered = [state for state in queue.states.values() if state.name == "unknown"]
        if not unanswered:
            answered = time.monotonic()
        elif time.monotonic() - answered > jobs.PATIENCE_SECONDS:
            raise UserError(
                f"Slurm does not answer ({unanswered[0].detail}): the jobs may well go on, so give the same "
                "command again later."
            )
        if queue.active:
            time.sleep(jobs.POLL_SECONDS)


def leave(queue: Queue, command: str) -> None:
    """After Ctrl-C: stop a local run, say what becomes of the jobs and how to come back to them."""
    in_slurm = []
    for handle in queue.active.values():
        if isinstance(handle, SlurmHandle):
            in_slurm.append(handle.job_id)
            continue
        handle.cancel()
        while handle.state().name == "running":
            time.sleep(0.1)
    if in_slurm:
        print(f"\n{len(in_slurm)} job(s) go on; to stop them: scancel {' '.join(in_slurm)}", file=sys.stderr)
    print(f"\nto go on: {command}", file=sys.stderr)


def _write(path: Path, text: str) -> None:
    """Write the file at once or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
