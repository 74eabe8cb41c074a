"""A sweep: the planned runs of a comparison, their folder, their queue, and what is printed.

slurm/sweep.py and `make compare` are sweeps: they say what is reported of the runs at the end. This module
checks only numbers, so that hundreds of runs are checked at once; only the jobs load PyTorch.
"""

import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import product, takewhile
from pathlib import Path
from typing import NamedTuple

from trainkit.config.command_line import check_divides
from trainkit.config.options import Options
from trainkit.errors import UserError, print_line, print_table
from trainkit.files import check_writable, locked, replacing
from trainkit.jobs import array, following, slurm, submission, sweep_table, variation
from trainkit.jobs.following import Handle, LocalHandle, State
from trainkit.jobs.site import Site
from trainkit.jobs.stages import Resources, Stage, resources
from trainkit.jobs.submission import Request
from trainkit.jobs.variation import Setting
from trainkit.record import records, samples
from trainkit.record.columns import DP

# Epochs of a run: one to warm up, two to measure.
EPOCHS = 3
# A shared file system may show a new file this late on another machine.
CSV_SECONDS = 60
# What stays the same on every number of GPUs: the global batch size, that of each GPU, or each in turn.
STRONG, WEAK, BOTH = "strong", "weak", "both"
# Compares the runs of these CSVs, writes to this folder, and returns the exit code. Among the CSVs may be the
# folder of what the doctor has measured.
Report = Callable[[list[Path], Path], int]


@dataclass(frozen=True)
class PlannedRun:
    """One configuration and the number of its repeat.

    Attributes:
        batch_size: the global one; None for a plain script that is given none.
        num_workers: loader processes of each process; None for the resident loader.
        train_size: images per epoch; None for all.
        repeat: from 1 on.
        settings: what it varies besides (--vary).
    """

    stage: Stage
    shape: Resources
    batch_size: int | None
    num_workers: int | None
    train_size: int | None
    repeat: int
    settings: tuple[Setting, ...] = ()

    @property
    def name(self) -> str:
        """Return a name that no other run of the sweep has."""
        settings = [self.stage.label, f"{self.shape.gpus}gpu"]
        if self.shape.nodes > 1:
            settings.append(f"{self.shape.nodes}nodes")
        if self.batch_size is not None:
            settings.append(f"batch{self.batch_size}")
        if self.num_workers is not None:
            settings.append(f"workers{self.num_workers}")
        if self.train_size is not None:
            settings.append(f"train{self.train_size}")
        settings += [setting.label for setting in self.settings]
        settings.append(f"r{self.repeat}")
        return "-".join(settings)

    def options(self) -> list[str]:
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

    Attributes:
        scaling: strong (batch sizes are global), weak (they are per GPU) or both.
        gpus_per_node: a run on more GPUs is spread over several nodes.
        settings: the combinations of what is varied besides.
    """

    stages: tuple[Stage, ...]
    gpus: tuple[int, ...]
    batch_sizes: tuple[int | None, ...]
    num_workers: tuple[int | None, ...] = (None,)
    train_sizes: tuple[int | None, ...] = (None,)
    repeats: int = 1
    scaling: str = STRONG
    gpus_per_node: int | None = None
    settings: tuple[tuple[Setting, ...], ...] = ((),)

    def nodes(self, gpus: int) -> int:
        """Return the nodes of a run on `gpus` in all."""
        if self.gpus_per_node is None:
            return 1
        return math.ceil(gpus / self.gpus_per_node)

    def batch_factors(self, gpus: int) -> list[int]:
        """Return by which a batch size is multiplied for the global ones of runs on `gpus`."""
        return {STRONG: [1], WEAK: [gpus], BOTH: [1, gpus]}[self.scaling]


@dataclass(frozen=True)
class Sweep:
    """What all runs share, and their folder, which holds the sweep's whole state: CSV and job of each.

    All jobs of an array of Slurm ask for the same nodes and GPUs. So runs that do, one after the other, are
    sent as an array.

    Attributes:
        arguments: for every run, with names in braces (variation.py).
        opts: what they mean at this `site`.
        minutes: the time limit of a run.
        why_here: why the runs are on this machine; "" if they go to Slurm.
        gpus_here: the GPUs of this machine that they may use.
        plain: its script does not use the kit, and gets only its own arguments.
        chdir: each run starts in its own folder.

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
    chdir: bool = False

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
            UserError: if none is left, or the stage does not know what is varied.
        """
        if not self.plain:
            for settings in grid.settings:
                self._options(grid.stages[0], settings)
        # A dictionary without values: strong and weak scaling may give the same run, which is planned once.
        planned: dict[PlannedRun, None] = {}
        left_out: Counter[str] = Counter()
        combinations = product(
            range(1, grid.repeats + 1),
            sorted(grid.gpus),
            grid.stages,
            grid.batch_sizes,
            grid.num_workers,
            grid.train_sizes,
            grid.settings,
        )
        for repeat, gpus, stage, batch_size, num_workers, train_size, settings in combinations:
            for factor in grid.batch_factors(gpus):
                try:
                    run = PlannedRun(
                        stage=stage,
                        shape=resources(stage, gpus, grid.nodes(gpus), self.cpus_per_gpu),
                        batch_size=batch_size and batch_size * factor,
                        num_workers=num_workers,
                        train_size=train_size,
                        repeat=repeat,
                        settings=settings,
                    )
                    self._check(run)
                except UserError as error:
                    # After the colon is advice for a single job.
                    reason = str(error).partition(":")[0]
                    left_out[reason] += 1
                else:
                    planned[run] = None
        for name, count in Counter(run.name for run in planned).items():
            if count > 1:
                raise UserError(f"{count} runs would be called {name}: give values that differ more.")
        if not planned:
            raise UserError(f"no run is left ({'; '.join(left_out)}): change what is asked for.")
        return list(planned), left_out

    def _check(self, run: PlannedRun) -> None:
        """Raise a UserError if the run makes no sense."""
        gpus = run.shape.gpus
        available = self.gpus_here or len(os.sched_getaffinity(0))
        if self.why_here and gpus > available:
            raise UserError(f"{gpus} workers are more than the {available} found here")
        on_cpu = self.opts.no_cuda or (self.why_here and not self.gpus_here)
        if run.stage.name == DP and gpus > 1 and on_cpu:
            raise UserError("without GPUs, stage dp on several devices is the plain model on one")
        self.script_arguments(run)
        if not self.plain:
            opts = self._options(run.stage, run.settings)
            opts = replace(opts, batch_size=run.batch_size, train_size=run.train_size)
            submission.check_sizes(opts, run.stage, run.shape)

    def _options(self, stage: Stage, settings: tuple[Setting, ...]) -> Options:
        """Return what the arguments mean with these settings.

        Raises:
            UserError: if the stage refuses them.
        """
        if not settings:
            return self.opts
        return submission.read_options(stage, variation.filled(self.arguments, settings, {}), self.site)

    def script_arguments(self, run: PlannedRun) -> tuple[str, ...]:
        """Return the arguments that the script gets in `run`.

        Raises:
            UserError: if they ask for the batch of each GPU, and it does not divide among them.
        """
        named = variation.in_braces(self.arguments)
        known: dict[str, object] = {
            variation.GPUS: run.shape.gpus,
            variation.NODES: run.shape.nodes,
            variation.FOLDER: self.folder / run.name,
        }
        if run.batch_size is not None:
            known[variation.BATCH] = run.batch_size
            if variation.BATCH_PER_GPU in named:
                check_divides(run.batch_size, run.shape.gpus, "GPUs")
                known[variation.BATCH_PER_GPU] = run.batch_size // run.shape.gpus
        arguments = variation.filled(self.arguments, run.settings, known)
        if self.plain:
            return arguments
        seed = self._options(run.stage, run.settings).seed + run.repeat - 1
        own_folder = ["--results-dir", str(self.folder / run.name)]
        return (*arguments, *run.options(), "--seed", str(seed), *own_folder)

    def claim(self, script: Sequence[str] = ()) -> AbstractContextManager:
        """Claim the folder for this sweep, for as long as the lock is held; `script` names a user's own.

        Raises:
            UserError: if it cannot be written to, has other things in it, belongs to a sweep with other
                options, or another sweep is at work in it.
        """
        words = [*script, *self.arguments, "--cpus-per-gpu", str(self.cpus_per_gpu)]
        if self.chdir:
            words = ["--chdir", *words]
        options = shlex.join(words)
        check_writable(self.folder, "the sweep", "give another --out.")
        kept = self.folder / "options.txt"
        other_things = [path for path in self.folder.iterdir() if path.name != ".lock"]
        if other_things and not kept.exists():
            raise UserError(f"{self.folder} has other things in it: give a new or an empty --out.")
        in_use = f"another sweep.py is at work in {self.folder}: wait, or stop it."
        lock = locked(self.folder / ".lock", in_use)
        if not kept.exists():
            with replacing(kept) as file:
                file.write(options)
            return lock
        earlier_options = kept.read_text()
        if earlier_options != options:
            raise UserError(
                f"{self.folder} belongs to a sweep with the options {earlier_options}, not {options}: its "
                "rows could not be compared with these. Give another --out."
            )
        return lock

    def submit(self, runs: list[PlannedRun], most_at_a_time: int) -> list[Handle]:
        """Start runs of one shape, every repeat with another seed; their links `log.out` lead to the logs.

        Several are an array of Slurm, of which so many run at a time.

        Raises:
            UserError: if they were refused.
        """
        folder = submission.new_folder(self.site, runs[0].stage)
        first, *others = [self._request(run, folder) for run in runs]
        for run in runs:
            run_folder = self.folder / run.name
            check_writable(run_folder, "the run", "free the space, or give another --out.")
            # The link comes before the job, so that `attach` always finds that.
            link = run_folder / "job"
            link.unlink(missing_ok=True)
            link.symlink_to(folder)
        submit = submission.submitter(first.stage)
        handle = submit(replace(first, others=tuple(others), most_at_a_time=most_at_a_time))
        handles = [self.attach(run) for run in runs] if others else [handle]
        for run, of_run in zip(runs, handles, strict=True):
            log = self.folder / run.name / "log.out"
            log.unlink(missing_ok=True)
            log.symlink_to(of_run.log)
        return handles

    def _request(self, run: PlannedRun, folder: Path) -> Request:
        run_folder = self.folder / run.name
        site = self.site._replace(results_dir=run_folder)
        return Request(
            stage=run.stage,
            resources=run.shape,
            arguments=self.script_arguments(run),
            site=site,
            folder=folder,
            working_dir=run_folder if self.chdir else None,
            run_name=run.name,
            minutes=self.minutes,
            partition=self.partition,
            why_here=self.why_here,
            # Else those of runs with fewer workers would have more threads each.
            threads=1 if self.why_here else None,
        )

    def attach(self, run: PlannedRun) -> Handle | None:
        """Return the latest job of `run`, also of an earlier call, or None if there is none."""
        run_folder = self.folder / run.name
        try:
            job_folder = (run_folder / "job").readlink()
        except OSError:
            # There is none.
            return None
        return submission.find(job_folder, run.shape.tasks, run_folder / "runs")

    def finished(self, name: str = "*") -> list[Path]:
        """Return the CSVs of finished runs, of the run called `name` or of all runs.

        A run whose job came back to the queue has several, the last one of which is the last here. Plain
        scripts may write none: of theirs it is what `sweep_table` keeps.
        """
        finished = []
        if self.plain:
            for path in sorted(self.folder.glob(f"{name}/{sweep_table.ROW}")):
                row = sweep_table.read(path.parent)
                if row and row.state == "finished":
                    finished.append(path)
            return finished
        for recorded in self.runs(name):
            last = recorded.rows[-1]
            if last["epoch"] >= self.opts.epochs or last["ended"]:
                finished += recorded.csvs
        return finished

    def runs(self, name: str) -> Iterator["RecordedRun"]:
        """Yield what the run called `name` has recorded; `*` for all runs."""
        files: dict[str, Path] = {}
        starts: dict[str, list[records.Row]] = {}
        for csv in sorted(self.folder.glob(f"{name}/runs/*.csv")):
            with suppress(records.RecordError):
                starts |= records.by_run(records.read(csv))
                files[csv.stem] = csv
        for rows in records.join(starts).values():
            starts_in_order = dict.fromkeys(row["start"] for row in rows)
            yield RecordedRun(csvs=[files[start] for start in starts_in_order], rows=rows)


class RecordedRun(NamedTuple):
    """What a run has recorded: a CSV for each of its starts, and the rows of all of them."""

    csvs: list[Path]
    rows: list[records.Row]


def run(
    sweep: Sweep,
    planned: list[PlannedRun],
    max_jobs: int,
    report: Report,
    run_seconds: float | None = None,
) -> int:
    """Finish the runs, at most `max_jobs` at a time, and report on them; return the exit code.

    The caller has claimed the folder. `run_seconds` is about how long one run takes, if known.

    Raises:
        UserError: if the first job is refused, or Slurm does not answer.
    """
    print_plan(sweep, planned, run_seconds)
    print_line(f"results  {sweep.folder}\ngo on    {command_to_go_on(sweep.folder)}\n")
    return _report(sweep, finish(sweep, planned, max_jobs, sweep.folder), report)


def finish(sweep: Sweep, planned: list[PlannedRun], max_jobs: int, go_on_in: Path) -> list[str]:
    """Run what is not finished, print each change, and return the names of the runs that failed.

    After Ctrl-C, this program's command line with --out `go_on_in` continues.

    Raises:
        UserError: if a job is refused while none is active, or Slurm does not answer.
    """
    queue = _Queue(sweep, planned, most_jobs=1 if sweep.why_here else max_jobs)
    try:
        while queue.waiting or queue.active:
            queue.submit()
            queue.look()
            if queue.active:
                time.sleep(min(handle.poll_seconds for handle in queue.active.values()))
    except KeyboardInterrupt:
        queue.stop()
        print_line(f"\nto go on: {command_to_go_on(go_on_in)}", sys.stderr)
        raise
    return queue.failed


@dataclass
class _Queue:
    """The runs of a sweep that are not finished.

    Attributes:
        most_jobs: how many may run at a time.
        waiting: those that have no job so far.
        active: those that have, and their jobs.
        failed: the names of those that failed.
        refused_beside: how many were active when another was refused: the site may limit a user's jobs, too.
        longest: the most jobs of an array, where a longer one was refused.
        shown: what was printed of each at last.
        shown_of_arrays: what was printed of the jobs of each array that wait.
    """

    sweep: Sweep
    planned: list[PlannedRun]
    most_jobs: int
    waiting: list[PlannedRun] = field(default_factory=list)
    active: dict[PlannedRun, Handle] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    refused_beside: int | None = None
    longest: int | None = None
    shown: dict[PlannedRun, State] = field(default_factory=dict)
    shown_of_arrays: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Take up the jobs of an earlier call that have not ended."""
        unfinished = [run for run in self.planned if not self.sweep.finished(run.name)]
        jobs = {run: self.sweep.attach(run) for run in unfinished}
        earlier = {run: job for run, job in jobs.items() if job}
        for (run, job), state in zip(earlier.items(), following.states([*earlier.values()]), strict=True):
            # A plain script may have ended well since then.
            if not state.is_final or (state.name == "done" and self.sweep.plain):
                self.active[run] = job
        self.waiting = [run for run in unfinished if run not in self.active]

    def submit(self) -> None:
        """Submit runs that wait, as many as may run.

        Raises:
            UserError: if one is refused while none is active.
        """
        while self.waiting:
            runs = self._next_of_one_shape()
            if not self._has_room_for(len(runs)):
                return
            try:
                handles = self.sweep.submit(runs, self.most_jobs)
            except UserError as error:
                if len(runs) > 1 and isinstance(error, submission.RefusedError):
                    # A site may take fewer jobs of a user, or shorter arrays (MaxSubmitJobs, MaxArraySize).
                    self.longest = len(runs) // 2
                    continue
                if not self.active:
                    raise
                self.refused_beside = len(self.active)
                print_line(f"{runs[0].name} waits for the end of another job: {error}")
            else:
                del self.waiting[: len(runs)]
                self.active |= zip(runs, handles, strict=True)
                self.refused_beside = None
                if len(runs) > 1:
                    number = array.array_id(handles[0].job_id)
                    print_line(f"array {number}: {len(runs)} runs, {runs[0].name} to {runs[-1].name}")

    def _next_of_one_shape(self) -> list[PlannedRun]:
        """Return the first run that waits, and those behind it that ask Slurm for the same."""
        first = self.waiting[0]
        if self.sweep.why_here:
            return [first]

        def is_alike(run: PlannedRun) -> bool:
            return (run.stage, run.shape) == (first.stage, first.shape)

        return [*takewhile(is_alike, self.waiting)][: self.longest]

    def _has_room_for(self, count: int) -> bool:
        """Return whether so many runs may be sent together, of which at most `most_jobs` run at a time."""
        if self.refused_beside is not None and len(self.active) >= self.refused_beside:
            return False
        jobs_of_arrays = Counter(array.array_id(handle.job_id) for handle in self.active.values())
        running = sum(min(jobs, self.most_jobs) for jobs in jobs_of_arrays.values())
        return running + min(count, self.most_jobs) <= self.most_jobs

    def look(self) -> None:
        """Print what has changed of the active runs, and take out those that have ended."""
        handles = [*self.active.values()]
        for run, handle, state in zip([*self.active], handles, following.states(handles), strict=True):
            if state.is_final:
                del self.active[run]
                ending = _ending(self.sweep, run, handle, state)
                if not ending.well:
                    self.failed.append(run.name)
                number = len(self.planned) - len(self.waiting) - len(self.active)
                print_line(f"[{number}/{len(self.planned)}] {run.name} {ending.sentence}")
            elif state != self.shown.get(run):
                self.shown[run] = state
                self._print_state(run, handle, state)

    def _print_state(self, run: PlannedRun, handle: Handle, state: State) -> None:
        """Print the state of an active run; why the jobs of an array wait is told once."""
        number = array.array_id(handle.job_id)
        text = f"{run.name} {state.name}: {state.detail}"
        if state.name == "queued" and number != handle.job_id:
            text = f"array {number} {state.name}: {state.detail}"
            if text in self.shown_of_arrays:
                return
            self.shown_of_arrays.add(text)
        print_line(text)

    def stop(self) -> None:
        """End the processes of this machine, and tell how to stop the jobs of Slurm, which go on."""
        in_slurm = []
        for handle in self.active.values():
            if not isinstance(handle, LocalHandle):
                in_slurm.append(handle.job_id)
                continue
            handle.cancel()
            while handle.state().name == "running":
                time.sleep(0.1)
        if in_slurm:
            numbers = dict.fromkeys(map(array.array_id, in_slurm))
            message = f"{len(in_slurm)} job(s) go on; to stop them: scancel {' '.join(numbers)}"
            print_line(f"\n{message}", sys.stderr)


class _Ending(NamedTuple):
    """How a run has ended, in words, and whether it went well."""

    sentence: str
    well: bool


def _ending(sweep: Sweep, run: PlannedRun, handle: Handle, state: State) -> _Ending:
    """Return how a run has ended, once its CSV can be seen; that of a plain script keeps its row."""
    if sweep.plain:
        _keep_row(sweep, run, handle, state)
    if state.name == "failed":
        return _Ending(f"failed: {state.detail} (log: {handle.log})", well=False)
    if sweep.plain:
        for finding in samples.read_findings(handle.folder / samples.FOLDER):
            if finding["kind"] == samples.NEVER_MET:
                return _Ending(f"finished; {finding['sentence']}", well=True)
        return _Ending("finished", well=True)
    until = time.monotonic() + CSV_SECONDS
    csvs = sweep.finished(run.name)
    while not csvs and time.monotonic() < until:
        time.sleep(1)
        csvs = sweep.finished(run.name)
    if not csvs:
        return _Ending(f"failed: it has left no CSV with all epochs (log: {handle.log})", well=False)
    rows = records.read(csvs[-1])
    unit, per_sample = records.speed_unit(rows, records.read_metrics(csvs[-1]))
    return _Ending(f"finished: {rows[-1]['images_per_s'] * per_sample:,.0f} {unit}/s", well=True)


def _keep_row(sweep: Sweep, run: PlannedRun, handle: Handle, state: State) -> None:
    measured = sweep_table.measured(handle)
    row = sweep_table.Row(
        run=run.name,
        settings=dict(run.settings),
        gpus=run.shape.gpus,
        nodes=run.shape.nodes,
        batch=run.batch_size,
        state="failed" if state.name == "failed" else "finished",
        seconds=measured.seconds,
        exit_code=measured.exit_code,
        last_line=measured.last_line,
    )
    sweep_table.keep(sweep.folder / run.name, row)


def command_to_go_on(folder: Path) -> str:
    """Return the command line of this program, with --out."""
    command = [sys.executable, str(Path(sys.argv[0]).absolute())]
    # A plain script may have an --out, too.
    own_words, _ = submission.split(sys.argv[1:])
    if "--out" not in own_words:
        command += ["--out", str(folder)]
    return shlex.join([*command, *sys.argv[1:]])


def print_plan(sweep: Sweep, planned: list[PlannedRun], run_seconds: float | None = None) -> None:
    """Print how many runs are planned, and how long they take."""
    unfinished = [run for run in planned if not sweep.finished(run.name)]
    plan = f"{len(planned)} runs, {len(planned) - len(unfinished)} of them finished"
    if run_seconds:
        minutes = math.ceil(len(unfinished) * run_seconds / 60)
        plan += f"; the others take at least about {minutes} minute(s)"
    elif not sweep.why_here:
        gpu_hours = sum(run.shape.gpus for run in unfinished) * sweep.minutes / 60
        plan += (
            f"; the others take {gpu_hours:.1f} GPU-hours if each needs its whole time limit of "
            f"{sweep.minutes} minutes"
        )
    print_line(plan)
    held_by_this_shell = "" if sweep.why_here else slurm.job_of_this_shell()
    if held_by_this_shell:
        print_line(f"note: {held_by_this_shell}")


def _report(sweep: Sweep, failed: list[str], report: Report) -> int:
    """Report on the finished runs, and name those that failed; return the exit code."""
    exit_code = 0
    compared = sweep.finished()
    if sweep.plain:
        print_line("")
        print_table(sweep_table.write(sweep.folder))
        print_line(f"table    {sweep.folder / sweep_table.TABLE}")
        compared = [csv for recorded in sweep.runs("*") for csv in recorded.csvs]
    try:
        if compared:
            print_line("")
            times_by_the_doctor = sweep.site.results_dir / "all_reduce"
            if times_by_the_doctor.is_dir():
                compared.append(times_by_the_doctor)
            exit_code = report(compared, sweep.folder)
        elif sweep.plain and sweep.finished():
            print_line(
                "\nno run has written a record to compare: YOUR_TRAINING.md shows how a script writes one"
            )
    finally:
        # They are named even if the report fails.
        if failed:
            print_line(f"failed: {', '.join(failed)}. The same command runs them again.", sys.stderr)
    return 1 if failed else exit_code
