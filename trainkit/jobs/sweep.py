"""A sweep: the planned runs of a comparison, their folder, their queue, and what is printed.

slurm/sweep.py and `make compare` are sweeps. This module checks only numbers, so that hundreds of
runs are checked at once; only the jobs load PyTorch, and only the comparison of their results pandas.
"""

import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from trainkit.advice.constraints import Constraints
from trainkit.config.options import Options
from trainkit.errors import UserError, tell
from trainkit.files import check_writable, locked, replacing
from trainkit.jobs import slurm, submission
from trainkit.jobs.following import NEVER_MET, Handle, LocalHandle, State
from trainkit.jobs.site import Site
from trainkit.jobs.stages import Resources, Stage, resources
from trainkit.jobs.submission import Request
from trainkit.record import records
from trainkit.record.columns import DP

EPOCHS = 3  # one to warm up, two to measure
FINISHED = "finished"  # in the folder of a run whose plain script ended well
ENDED = ("done", "failed")
CSV_SECONDS = 60  # a shared file system may show a new file this late on another machine


@dataclass(frozen=True)
class PlannedRun:
    """One configuration and the number of its repeat.

    `batch_size` is the global one. `num_workers` is None for the resident loader, `train_size` is
    None for all training images.
    """

    stage: Stage
    shape: Resources
    batch_size: int
    num_workers: int | None
    train_size: int | None
    repeat: int

    @property
    def name(self) -> str:
        """Return a name that no other run of the sweep has."""
        parts = [self.stage.label, f"{self.shape.gpus}gpu"]
        if self.shape.nodes > 1:
            parts.append(f"{self.shape.nodes}nodes")
        if not self.stage.plain:
            parts.append(f"batch{self.batch_size}")
        if self.num_workers is not None:
            parts.append(f"workers{self.num_workers}")
        if self.train_size is not None:
            parts.append(f"train{self.train_size}")
        return "-".join([*parts, f"r{self.repeat}"])

    def arguments(self) -> list[str]:
        """Return the options for the stage."""
        arguments = ["--batch-size", str(self.batch_size)]
        if self.num_workers is not None:
            arguments += ["--loader", "workers", "--num-workers", str(self.num_workers)]
        if self.train_size is not None:
            arguments += ["--train-size", str(self.train_size)]
        return arguments


@dataclass(frozen=True)
class Grid:
    """The lists of which a sweep tries every combination; `PlannedRun` explains them.

    `scaling` is strong (batch sizes are global), weak (they are per GPU) or both. Above
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
    """What all runs share, and their folder, which holds the sweep's whole state: CSV and job of each.

    `arguments` go to every run, and `opts` is what they mean at this `site`. `why_here` is why the runs are
    on this machine, "" if they go to Slurm, and `gpus_here` the GPUs it may use. `minutes` is the time limit
    of a run. The script of a `plain` sweep does not use the kit: its runs differ only in their GPUs.

    Its jobs are not an array of Slurm, though submitit could send one: all jobs of an array ask for the same
    nodes and GPUs, and those of a sweep differ in just that.

    Raises:
        UserError: for options that the runs cannot share.
    """

    folder: Path
    arguments: tuple[str, ...]
    opts: Options
    site: Site
    minutes: int
    why_here: str
    gpus_here: int = 0
    cpus_per_gpu: int = 2
    partition: str | None = None
    plain: bool = False

    def __post_init__(self) -> None:
        if self.opts.checkpoint_dir or self.opts.resume != "never":
            raise UserError("--checkpoint-dir and --resume are for single jobs: leave them out.")
        if self.opts.batch_size_per_gpu:
            raise UserError("--batch-size-per-gpu is set by --scaling weak and --batch-size: give those two.")

    def planned(self, grid: Grid) -> tuple[list[PlannedRun], Counter[str]]:
        """Return the runs that make sense, and the reasons against the others, with how many each concerns.

        All runs of a repeat come before the next repeat, so that a busy hour of the cluster does not hit a
        single configuration, and those on one GPU, the baselines, come first.

        Raises:
            UserError: if none is left.
        """
        planned, left_out = {}, Counter()
        repeats = range(1, grid.repeats + 1)
        axes = repeats, sorted(grid.gpus), grid.stages, grid.batch_sizes, grid.num_workers
        for repeat, gpus, stage, batch, num_workers, train_size in product(*axes, grid.train_sizes):
            nodes = math.ceil(gpus / grid.gpus_per_node) if grid.gpus_per_node else 1
            for factor in {"strong": [1], "weak": [gpus], "both": [1, gpus]}[grid.scaling]:
                try:
                    shape = resources(stage, gpus, nodes, self.cpus_per_gpu)
                    run = PlannedRun(stage, shape, batch * factor, num_workers, train_size, repeat)
                    self._check(run)
                except UserError as error:
                    left_out[str(error).partition(":")[0]] += 1  # after the colon is advice for a single job
                else:
                    planned[run] = None  # once, even if strong and weak scaling give the same run
        if not planned:
            raise UserError(f"no run is left ({'; '.join(left_out)}): change what is asked for.")
        return list(planned), left_out

    def _check(self, run: PlannedRun) -> None:
        """Raise a UserError if the run makes no sense."""
        gpus, most = run.shape.gpus, self.gpus_here or len(os.sched_getaffinity(0))
        if self.why_here and gpus > most:
            raise UserError(f"{gpus} workers are more than the {most} found here")
        on_cpu = self.opts.no_cuda or (self.why_here and not self.gpus_here)
        if run.stage.name == DP and gpus > 1 and on_cpu:
            raise UserError("without GPUs, stage dp on several devices is the plain model on one")
        sizes = {"batch_size": run.batch_size, "train_size": run.train_size}
        if not self.plain:
            submission.check_sizes(replace(self.opts, **sizes), run.stage, run.shape)

    def claim(self, script: Path | None = None) -> AbstractContextManager:
        """Claim the folder for this sweep, for as long as the lock is held; `script` is a user's own.

        Raises:
            UserError: if it cannot be written to, has other things in it, belongs to a sweep with other
                options, or another sweep is at work in it.
        """
        known = self.folder / "options.txt"
        own = ["--script", str(script)] if script else []
        mine = shlex.join([*own, *self.arguments, "--cpus-per-gpu", str(self.cpus_per_gpu)])
        check_writable(self.folder, "the sweep", "give another --out.")
        others = [path for path in self.folder.iterdir() if path.name != ".lock"]
        if others and not known.exists():
            raise UserError(f"{self.folder} has other things in it: give a new or an empty --out.")
        held = f"another sweep.py is at work in {self.folder}: wait, or stop it."
        lock = locked(self.folder / ".lock", held)
        if not known.exists():
            with replacing(known) as file:
                file.write(mine)
        elif (was := known.read_text()) != mine:
            raise UserError(
                f"{self.folder} belongs to a sweep with the options {was}, not {mine}: its rows could not be "
                "compared with these. Give another --out."
            )
        return lock

    def submit(self, run: PlannedRun, precision: str) -> Handle:
        """Start `run`, every repeat with another seed; its link `job` leads to the logs.

        Raises:
            UserError: if it was refused.
        """
        place = self.folder / run.name
        arguments, site = [*self.arguments], self.site._replace(results_dir=place)
        if not self.plain:
            arguments += [*run.arguments(), "--precision", precision]
            arguments += ["--seed", str(self.opts.seed + run.repeat - 1), "--results-dir", str(place)]
        folder = submission.new_folder(site, run.stage)
        request = Request(
            stage=run.stage,
            resources=run.shape,
            arguments=tuple(arguments),
            site=site,
            folder=folder,
            minutes=self.minutes,
            partition=self.partition,
            why_here=self.why_here,
            threads=1 if self.why_here else None,  # or runs with fewer workers would have more threads each
        )
        check_writable(place, "the run", "free the space, or give another --out.")
        (place / "job").unlink(missing_ok=True)
        (place / "job").symlink_to(folder)  # before the job, so that `attach` always finds it
        submit = submission.submitter(run.stage)
        return submit(request)

    def attach(self, run: PlannedRun) -> Handle | None:
        """Return the latest job of `run`, also of an earlier call, or None if there is none."""
        place = self.folder / run.name
        try:
            folder = (place / "job").readlink()
        except OSError:  # there is none
            return None
        return submission.find(folder, run.shape.tasks, place / "runs")

    def finished(self, name: str = "*") -> list[Path]:
        """Return the CSVs of finished runs, of the run called `name` or of all runs.

        A run whose job came back to the queue has several, the last one of which is the last here. Plain
        scripts may write none: theirs is an empty file.
        """
        if self.plain:
            return sorted(self.folder.glob(f"{name}/{FINISHED}"))
        return [
            csv
            for csvs, rows in self.runs(name)
            if rows[-1]["epoch"] >= self.opts.epochs or rows[-1]["ended"]
            for csv in csvs
        ]

    def precision(self) -> str:
        """Return the precision of all runs: the one requested, or "auto" until a run has chosen."""
        if self.plain:
            return ""
        chosen = (rows[0]["precision"] for _, rows in self.runs("*"))
        return next(chosen, "auto") if self.opts.precision == "auto" else self.opts.precision

    def runs(self, name: str) -> Iterator[tuple[list[Path], list[records.Row]]]:
        """Yield the run called `name`, `*` for all, each with the CSVs of its starts and with its rows."""
        files: dict[str, Path] = {}
        starts: dict[str, list[records.Row]] = {}
        for csv in sorted(self.folder.glob(f"{name}/runs/*.csv")):
            with suppress(records.RecordError):
                starts |= records.by_run(records.read(csv))
                files[csv.stem] = csv
        for rows in records.join(starts).values():
            yield [files[start] for start in dict.fromkeys(row["start"] for row in rows)], rows


def run(
    sweep: Sweep,
    planned: list[PlannedRun],
    max_jobs: int,
    run_seconds: float | None = None,
    constraints: Constraints | None = None,
) -> int:
    """Finish the runs, at most `max_jobs` at a time, and compare them; return the exit code.

    The caller has claimed the folder. `run_seconds` is about how long one run takes, if known; with
    `constraints` it ends with how many GPUs to ask for.

    Raises:
        UserError: if the first job is refused, or Slurm does not answer.
    """
    print_plan(sweep, planned, run_seconds)
    tell(f"results  {sweep.folder}\ngo on    {command_to_go_on(sweep.folder)}\n")
    return _compare(sweep, finish(sweep, planned, max_jobs, sweep.folder), constraints)


def finish(sweep: Sweep, planned: list[PlannedRun], max_jobs: int, go_on_in: Path) -> list[str]:
    """Run what is not finished, print each change, and return the names of the runs that failed.

    After Ctrl-C, this program's command line with --out `go_on_in` continues.

    Raises:
        UserError: if a job is refused while none is active, or Slurm does not answer.
    """
    todo = [run for run in planned if not sweep.finished(run.name)]
    over = {"failed"} if sweep.plain else ENDED  # a plain one may have ended well meanwhile
    active = {run: job for run in todo if (job := sweep.attach(run)) and job.state().name not in over}
    waiting = [run for run in todo if run not in active]
    most = room = 1 if sweep.why_here else max_jobs
    shown: dict[PlannedRun, State] = {}
    failed: list[str] = []
    if waiting and most > 1 and sweep.precision() == "auto":
        tell("the first run goes alone, and sets the precision of all (or give --precision)")
    try:
        while waiting or active:
            precision = sweep.precision()
            while waiting and len(active) < min(room, 1 if precision == "auto" else most):
                try:
                    active[waiting[0]] = sweep.submit(waiting[0], precision)
                    waiting.pop(0)
                    room = most
                except UserError as error:
                    room = len(active)  # perhaps the site limits a user's jobs: wait until one has ended
                    if not active:
                        raise
                    tell(f"{waiting[0].name} waits for the end of another job: {error}")
            for run, handle in list(active.items()):
                state = handle.state()
                if state.name in ENDED:
                    del active[run]
                    ending, well = _ending(sweep, run, handle, state)
                    failed += [] if well else [run.name]
                    number = len(planned) - len(waiting) - len(active)
                    tell(f"[{number}/{len(planned)}] {run.name} {ending}")
                elif state != shown.get(run):
                    shown[run] = state
                    tell(f"{run.name} {state.name}: {state.detail}")
            if active:
                time.sleep(min(handle.poll_seconds for handle in active.values()))
    except KeyboardInterrupt:
        local = [handle for handle in active.values() if isinstance(handle, LocalHandle)]
        for handle in local:
            handle.cancel()
            while handle.state().name == "running":
                time.sleep(0.1)
        if in_slurm := [handle.job_id for handle in active.values() if handle not in local]:
            message = f"{len(in_slurm)} job(s) go on; to stop them: scancel {' '.join(in_slurm)}"
            tell(f"\n{message}", sys.stderr)
        tell(f"\nto go on: {command_to_go_on(go_on_in)}", sys.stderr)
        raise
    return failed


def _ending(sweep: Sweep, run: PlannedRun, handle: Handle, state: State) -> tuple[str, bool]:
    """Return how a run has ended, in words, and whether it went well."""
    if sweep.plain and state.name == "done":
        (sweep.folder / run.name / FINISHED).touch()
        alone = next((line.removeprefix("watch   ") for line in handle.verdict() if NEVER_MET in line), "")
        return f"finished; {alone}" if alone else "finished", True
    until = time.monotonic() + (CSV_SECONDS if state.name == "done" else 0)
    while not (csvs := sweep.finished(run.name)) and time.monotonic() < until:
        time.sleep(1)
    if csvs and state.name == "done":
        return f"finished: {records.read(csvs[-1])[-1]['images_per_s']:,.0f} images/s", True
    why = state.detail if state.name == "failed" else "it has left no CSV with all epochs"
    return f"failed: {why} (log: {handle.log})", False


def command_to_go_on(folder: Path) -> str:
    """Return the command line of this program, with --out."""
    own, _ = submission.split(sys.argv[1:])  # a plain script may have an --out, too
    out = [] if "--out" in own else ["--out", str(folder)]
    return shlex.join([sys.executable, str(Path(sys.argv[0]).absolute()), *out, *sys.argv[1:]])


def print_plan(sweep: Sweep, planned: list[PlannedRun], run_seconds: float | None = None) -> None:
    """Print how many runs are planned, and how long they take."""
    todo = [run for run in planned if not sweep.finished(run.name)]
    plan = f"{len(planned)} runs, {len(planned) - len(todo)} of them finished"
    if run_seconds:
        plan += f"; the others take at least about {math.ceil(len(todo) * run_seconds / 60)} minute(s)"
    elif not sweep.why_here:
        hours = sum(run.shape.gpus for run in todo) * sweep.minutes / 60
        plan += (
            f"; the others take {hours:.1f} GPU-hours if each needs its whole time limit of "
            f"{sweep.minutes} minutes"
        )
    tell(plan)
    held = "" if sweep.why_here else slurm.job_of_this_shell()
    if held:
        tell(f"note: {held}")


def _compare(sweep: Sweep, failed: list[str], constraints: Constraints | None) -> int:
    """Compare the finished runs, answer with `constraints` how many GPUs to ask for; return the exit code."""
    code, csvs, all_reduce = 0, sweep.finished(), sweep.site.results_dir / "all_reduce"
    if sweep.plain:
        csvs = [csv for csvs, _ in sweep.runs("*") for csv in csvs]
    try:
        if csvs:
            from trainkit.advice.report import compare_and_answer  # loads pandas, which is needed here only

            tell("")
            measured = [all_reduce] if all_reduce.is_dir() else []  # by the doctor
            code = compare_and_answer([*csvs, *measured], sweep.folder, constraints)
        elif sweep.plain and sweep.finished():
            tell("\nno run has written a record to compare: YOUR_TRAINING.md shows how a script writes one")
    finally:  # even if the comparison fails
        if failed:
            tell(f"failed: {', '.join(failed)}. The same command runs them again.", sys.stderr)
    return 1 if failed else code
