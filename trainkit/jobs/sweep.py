"""A sweep: the runs of a comparison, its cells; their folder, the queue they wait in, and what is shown.

slurm/sweep.py and `make compare` are sweeps. Only numbers are looked at here, so that hundreds of
cells are checked at once; PyTorch and pandas belong to the jobs, and to the comparison at the end.
"""

import io
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from filelock import FileLock, Timeout

from trainkit import records
from trainkit.errors import UserError, printable
from trainkit.files import check_writable, replacing
from trainkit.jobs import submission
from trainkit.jobs.following import Handle, LocalHandle, State
from trainkit.jobs.site import Site
from trainkit.jobs.stages import REPOSITORY, Geometry, Stage, geometry
from trainkit.jobs.submission import Request
from trainkit.options import Options

PLOT_RESULTS = REPOSITORY / "results" / "plot_results.py"
HOW_MANY_GPUS = REPOSITORY / "results" / "how_many_gpus.py"
MOST_CELLS = 10_000
EPOCHS = 3  # one to warm up, two to measure
CSV_SECONDS = 60  # a shared file system may show a file that late on another machine


@dataclass(frozen=True)
class Cell:
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
    def configuration(self) -> str:
        """The cell's name without the number of its repeat; no two configurations share one."""
        parts = [self.stage.label, f"{self.shape.gpus}gpu"]
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
class Lists:
    """Of what a sweep tries every combination; `Cell` explains them.

    `scaling` is strong (batch sizes are global), weak (they are of each GPU) or both. Above
    `gpus_per_node` GPUs a run is spread over several nodes.
    """

    stages: tuple[Stage, ...]
    gpus: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    num_workers: tuple[int | None, ...] = (None,)
    train_sizes: tuple[int | None, ...] = (None,)
    repeats: int = 1
    scaling: str = "strong"
    gpus_per_node: int | None = None


@dataclass(frozen=True)
class Sweep:
    """What all cells share, and their folder, which is all of the sweep's state: CSV and job of each.

    `arguments` go to every run, and `opts` is what they mean at this `site`. `here` is for runs on this
    machine, also where there is a Slurm, and `gpus_here` the GPUs it may use. `minutes` is the time limit
    of a run.

    Raises:
        UserError: for options that the runs cannot share.
    """

    folder: Path
    arguments: tuple[str, ...]
    opts: Options
    site: Site
    minutes: int
    here: bool
    gpus_here: int = 0
    cpus_per_gpu: int = 2
    partition: str | None = None

    def __post_init__(self) -> None:
        if self.opts.checkpoint_dir or self.opts.resume != "never":
            raise UserError("--checkpoint-dir and --resume are every job's own matter: leave them out.")
        if self.opts.batch_size_per_gpu:
            raise UserError(
                "--batch-size-per-gpu is what --scaling weak makes of --batch-size here: give those two."
            )

    @property
    def on_cpu(self) -> bool:
        """Whether CPU cores stand in for GPUs."""
        return self.opts.no_cuda or (self.here and not self.gpus_here)

    def cells(self, lists: Lists) -> tuple[list[Cell], Counter[str]]:
        """The cells that make sense, and the reasons for those that do not, with their numbers.

        Repeats come one after the other, so that a busy hour of the cluster does not hit a single
        configuration, and those on one GPU, with which the others are compared, come first.

        Raises:
            UserError: if none is left.
        """
        cells, left_out = {}, Counter()
        repeats = range(1, lists.repeats + 1)
        axes = repeats, sorted(lists.gpus), lists.stages, lists.batch_sizes, lists.num_workers
        combinations = math.prod(map(len, (*axes, lists.train_sizes)))
        if combinations > MOST_CELLS:
            raise UserError(
                f"{combinations:,} runs are more than the {MOST_CELLS:,} of a sweep: shorten the lists."
            )
        for repeat, gpus, stage, batch, num_workers, train_size in product(*axes, lists.train_sizes):
            nodes = math.ceil(gpus / lists.gpus_per_node) if lists.gpus_per_node else 1
            for factor in {"strong": [1], "weak": [gpus], "both": [1, gpus]}[lists.scaling]:
                try:
                    shape = geometry(stage, gpus, nodes, self.cpus_per_gpu)
                    cell = Cell(stage, shape, batch * factor, num_workers, train_size, repeat)
                    self._check(cell)
                except UserError as error:
                    left_out[str(error).partition(":")[0]] += 1  # behind it is what a single job could do
                else:
                    cells[cell] = None  # once, also where strong and weak scaling or two equal words meet
        if not cells:
            raise UserError(f"no run is left ({'; '.join(left_out)}): change what is asked for.")
        return list(cells), left_out

    def _check(self, cell: Cell) -> None:
        """Raise a UserError if the cell makes no sense."""
        gpus, most = cell.shape.gpus, self.gpus_here or len(os.sched_getaffinity(0))
        if self.here and gpus > most:
            raise UserError(f"{gpus} workers are more than the {most} found here")
        if cell.stage.name == "dp" and gpus > 1 and self.on_cpu:
            raise UserError("without GPUs, stage dp on several devices is the plain model on one")
        sizes = {"batch_size": cell.batch_size, "train_size": cell.train_size}
        submission.check_sizes(replace(self.opts, **sizes), cell.stage, cell.shape)

    def claim(self, script: Path | None = None) -> FileLock:
        """Make the folder this sweep's, for as long as the lock is held; `script` is a user's own.

        Raises:
            UserError: if it cannot be written to, has other things in it, belongs to a sweep with other
                options, or another sweep is at work in it.
        """
        known = self.folder / "options.txt"
        own = ["--script", str(script)] if script else []
        mine = shlex.join([*own, *self.arguments, "--cpus-per-gpu", str(self.cpus_per_gpu)])
        check_writable(self.folder, "the sweep", "give another --out.")
        others = {path.name for path in self.folder.iterdir()} - {".lock", "options.txt.tmp"}
        if others and not known.exists():
            raise UserError(f"{self.folder} has other things in it: give a new or an empty --out.")
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            raise UserError(
                f"another sweep.py is at work in {self.folder}: wait, or stop that one."
            ) from None
        if not known.exists():
            with replacing(known) as file:
                file.write(mine)
        elif (was := _text(known)) != mine:
            raise UserError(
                f"{self.folder} is of a sweep with the options {printable(was[:1000])}, not {mine}: "
                "its rows could not be compared with these. Give another --out."
            )
        return lock

    def submit(self, cell: Cell, precision: str) -> Handle:
        """Start the run of `cell`, every repeat with a seed of its own; its link `job` leads to the logs.

        Raises:
            UserError: if it was refused.
        """
        place = self.folder / cell.name
        arguments = [*self.arguments, *cell.arguments(), "--precision", precision]
        arguments += ["--seed", str(self.opts.seed + cell.repeat - 1), "--results-dir", str(place)]
        threads = 1 if self.here else None  # or runs with fewer workers would have more threads each
        request = Request(
            cell.stage, cell.shape, tuple(arguments), self.minutes, self.partition, self.here, threads
        )
        folder = submission.new_folder(request, self.site)
        link = place / "job"
        try:
            place.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(folder)  # before the job is there, which `attach` then finds in any case
        except OSError as error:
            raise UserError(f"{place} cannot be written to ({error.strerror}): free the space.") from None
        try:
            return submission.submit(replace(request, folder=folder), self.site)
        except UserError:
            link.unlink(missing_ok=True)
            raise

    def attach(self, cell: Cell) -> Handle | None:
        """The latest job of `cell`, of an earlier call too, or None if there is none.

        Raises:
            UserError: if Slurm does not answer.
        """
        place = self.folder / cell.name
        try:
            folder = (place / "job").readlink()
        except OSError:  # there is none, or junk
            return None
        if folder.parent.name != "submitit":
            return None
        return submission.find(folder, cell.shape.tasks, place / "runs")

    def finished(self, name: str = "*") -> list[Path]:
        """The CSVs of runs that went to their end, of the cell called `name` or of all cells."""
        last = ((csv, rows[-1]) for csv, rows in self._csvs(name))
        return [csv for csv, row in last if row["epoch"] >= self.opts.epochs or row["ended"]]

    def device_hours(self) -> float:
        """What all runs have taken, also those that failed after an epoch."""
        last = (rows[-1] for _, rows in self._csvs("*"))
        return sum(row["devices"] * row["elapsed_s"] for row in last) / 3600

    def precision(self) -> str:
        """The one precision of all runs: the one asked for, or "auto" until a run has chosen."""
        chosen = (rows[0]["precision"] for _, rows in self._csvs("*"))
        return next(chosen, "auto") if self.opts.precision == "auto" else self.opts.precision

    def _csvs(self, name: str) -> Iterator[tuple[Path, list[dict]]]:
        for csv in sorted(self.folder.glob(f"{name}/runs/*.csv")):
            with suppress(records.RecordError):
                yield csv, records.read(csv)


def _text(path: Path) -> str:
    """What is in a small file; nothing if it is none, such as a pipe, in which nobody may ever write."""
    try:
        with path.open(errors="replace") if path.is_file() else io.StringIO() as file:
            return file.read(100_000)
    except OSError:
        return ""


def run(
    sweep: Sweep,
    cells: list[Cell],
    max_jobs: int,
    run_seconds: float | None = None,
    question: tuple[str, ...] | None = None,
) -> int:
    """Finish the cells, at most `max_jobs` at a time, and compare; returns the exit code.

    The folder is claimed before. `run_seconds` is about how long one run takes, if that is known, and
    `question` the options of results/how_many_gpus.py, if that is to answer.

    Raises:
        UserError: if the first job is refused, or Slurm does not answer.
    """
    begin(sweep, cells, run_seconds)
    return compare(sweep, finish(sweep, cells, max_jobs, sweep.folder), question)


def begin(sweep: Sweep, cells: list[Cell], run_seconds: float | None = None) -> None:
    """Print what is asked for, and how to come back to it."""
    tell(sweep, cells, run_seconds)
    print(f"results  {sweep.folder}\ngo on    {command_to_go_on(sweep.folder)}\n", flush=True)


def finish(sweep: Sweep, cells: list[Cell], max_jobs: int, go_on_in: Path) -> list[str]:
    """Run what is not finished, and return the names of those that failed.

    The command line of this program, with --out `go_on_in`, goes on after Ctrl-C.

    Raises:
        UserError: if the first job is refused, or Slurm does not answer.
    """
    queue = Queue(sweep, cells, 1 if sweep.here else max_jobs)
    try:
        _watch(queue)
    except KeyboardInterrupt:
        _leave(queue, command_to_go_on(go_on_in))
        raise
    return queue.failed


def command_to_go_on(folder: Path) -> str:
    """The command line of this program, with --out."""
    command = [sys.executable, str(Path(sys.argv[0]).absolute()), *sys.argv[1:]]
    return shlex.join(command if "--out" in command else [*command, "--out", str(folder)])


def tell(sweep: Sweep, cells: list[Cell], run_seconds: float | None = None) -> None:
    """Print how much is asked for."""
    todo = [cell for cell in cells if not sweep.finished(cell.name)]
    told = f"{len(cells)} runs, {len(cells) - len(todo)} of them finished"
    if run_seconds:
        told += f"; the others take at least about {math.ceil(len(todo) * run_seconds / 60)} minute(s)"
        if not sweep.here:
            told += ", and their time in the queue"
    elif not sweep.here:
        hours = sum(cell.shape.gpus for cell in todo) * sweep.minutes / 60
        told += (
            f"; the others take {hours:.1f} GPU-hours if each needs its whole time limit of "
            f"{sweep.minutes} minutes"
        )
    print(told)


def compare(sweep: Sweep, failed: list[str], question: tuple[str, ...] | None = None) -> int:
    """Compare what has finished, and answer the question if there is one; returns the sweep's exit code."""
    csvs = sweep.finished()
    code = 0
    if csvs:
        print(flush=True)
        command = [sys.executable, PLOT_RESULTS, *csvs, *_all_reduce(sweep), "--out", sweep.folder]
        if question and "--target" in question:
            command += ["--target", question[question.index("--target") + 1]]
        code = subprocess.run(command).returncode
    if csvs and question is not None:
        done = _how_many_gpus(sweep, csvs, "--out", sweep.folder, *question)
        print(f"\n{done.stdout or _why_not(done)}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}. The same command runs them again.", file=sys.stderr)
    return 1 if failed else code


def answer(sweep: Sweep, question: tuple[str, ...]) -> dict:
    """What results/how_many_gpus.py --json says of the finished runs, `question` being its other options.

    Where it refuses, there are no `options` and `probes`, and the `sentence` tells why.
    """
    told, csvs = "nothing has run", sweep.finished()
    if csvs:
        done = _how_many_gpus(sweep, csvs, "--json", *question)
        if done.stdout:
            return json.loads(done.stdout)
        told = _why_not(done)
    return {"best": None, "sure": 0.0, "options": [], "probes": [], "sentence": told}


def _how_many_gpus(sweep: Sweep, csvs: list[Path], *options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, HOW_MANY_GPUS, *csvs, *_all_reduce(sweep), *options]
    return subprocess.run(command, capture_output=True, text=True)


def _all_reduce(sweep: Sweep) -> list[Path]:
    """The folder of what the doctor has measured, if there is one."""
    return [folder for folder in [sweep.site.results_dir / "all_reduce"] if folder.is_dir()]


def _why_not(done: subprocess.CompletedProcess[str]) -> str:
    """Its sentence, or the last line of what went wrong with the program itself."""
    return done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")


class Queue:
    """The cells of a sweep on their way: `waiting` for their submission, `active`, `failed`, or finished.

    `states` tells how the active ones are doing. At most `limit` are active at a time.
    """

    def __init__(self, sweep: Sweep, cells: list[Cell], limit: int) -> None:
        self._sweep, self._cells, self.limit = sweep, cells, limit
        self._refused_at = math.inf
        self.waiting: list[Cell] = []
        self.active: dict[Cell, Handle] = {}
        self.states: dict[Cell, State] = {}
        self.failed: list[str] = []
        for cell in cells:
            if sweep.finished(cell.name):
                continue
            handle = sweep.attach(cell)
            if handle and handle.state().name not in ("done", "failed"):
                self.active[cell] = handle
            else:
                self.waiting.append(cell)

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
            cell = self.waiting[0]
            try:
                self.active[cell] = self._sweep.submit(cell, precision)
            except UserError as error:
                if not self.active:
                    raise
                # As where a user may have only so many jobs: there is room when one has ended.
                self._refused_at = len(self.active)
                yield f"{cell.name} waits for the end of another job: {error}"
                return
            self._refused_at = math.inf
            self.waiting.pop(0)

    def look(self) -> Iterator[str]:
        """Ask how the active runs are doing; a line for each that has ended."""
        self.states = {cell: handle.state() for cell, handle in self.active.items()}
        for cell, state in list(self.states.items()):
            if state.name not in ("done", "failed"):
                continue
            del self.states[cell]
            log = self.active.pop(cell).log
            number = len(self._cells) - len(self.waiting) - len(self.active)
            ended = f"[{number}/{len(self._cells)}] {cell.name}"
            csv = self._wait_for_csv(cell) if state.name == "done" else None
            if csv:
                yield f"{ended} finished: {records.read(csv)[-1]['images_per_s']:,.0f} images/s"
            else:
                self.failed.append(cell.name)
                why = state.detail if state.name == "failed" else "it has left no CSV with all epochs"
                yield f"{ended} failed: {why} (log: {log})"

    def _wait_for_csv(self, cell: Cell) -> Path | None:
        """Its CSV, for which a shared file system may take its time."""
        until = time.monotonic() + CSV_SECONDS
        while not (csvs := self._sweep.finished(cell.name)) and time.monotonic() < until:
            time.sleep(1)
        return csvs[0] if csvs else None


def _watch(queue: Queue) -> None:
    """Have every cell finished or failed, and print what changes."""
    if queue.waiting and queue.limit > 1 and queue.undecided():
        print("the first run goes alone, and its precision holds for all (or give --precision)", flush=True)
    shown: dict[Cell, State] = {}
    while queue.waiting or queue.active:
        for news in (*queue.submit(), *queue.look()):
            print(news, flush=True)
        for cell, state in queue.states.items():
            if state != shown.get(cell):
                print(f"{cell.name} {state.name}: {state.detail}", flush=True)
        shown = queue.states
        if queue.active:
            time.sleep(min(handle.poll_seconds for handle in queue.active.values()))


def _leave(queue: Queue, command: str) -> None:
    """After Ctrl-C: stop a local run, say what becomes of the jobs and how to come back to them."""
    in_slurm = []
    for handle in queue.active.values():
        if not isinstance(handle, LocalHandle):
            in_slurm.append(handle.job_id)
            continue
        handle.cancel()
        while handle.state().name == "running":
            time.sleep(0.1)
    if in_slurm:
        print(f"\n{len(in_slurm)} job(s) go on; to stop them: scancel {' '.join(in_slurm)}", file=sys.stderr)
    print(f"\nto go on: {command}", file=sys.stderr)
