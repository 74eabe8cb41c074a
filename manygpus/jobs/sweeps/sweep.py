"""A sweep: what its runs share, and its folder, from which it resumes after a break.

Each run is a line in the sweep's `commands.txt`: its name, and the words that name its script. The runs that
ask Slurm for the same nodes and GPUs are one array, whose task N does line N (submit/job_script.py). Each run
has a folder, with its CSV and links to its job's folder and log. Whether a run has finished is told by its
CSV, or for a plain script by its job's outcome. The same command again sends what has not finished and is not
in Slurm's queue.

Without Slurm the runs are processes of this machine, one or more at a time. execution.py does both. This
module checks only numbers, so that hundreds of runs are checked at once; only the jobs load PyTorch.
"""

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from manygpus import project
from manygpus.config.command_line import check_divides
from manygpus.config.options import Options
from manygpus.errors import UserError
from manygpus.files import check_writable, explained, locked, replacing
from manygpus.jobs.site import Site
from manygpus.jobs.stages import Resources, Stage
from manygpus.jobs.submit import job_script, submission
from manygpus.jobs.submit.freezing import PlannedCopy
from manygpus.jobs.submit.request import Request, new_folder, read_options
from manygpus.jobs.sweeps import pack, progress_table, varied_options
from manygpus.jobs.sweeps.metric import Metric
from manygpus.jobs.sweeps.pack import Pack
from manygpus.jobs.sweeps.plan import Grid, PlannedRun, SweepPlan
from manygpus.jobs.sweeps.recorded_runs import recorded_runs
from manygpus.jobs.sweeps.varied_options import Settings
from manygpus.record.columns import DP


@dataclass(frozen=True)
class Sweep:
    """What all runs share, and their folder, which holds the sweep's whole state: CSV and job of each.

    Attributes:
        arguments: the arguments of every run, with names in braces (varied_options.py).
        opts: the options as they count at this `site`.
        minutes: the time limit of a run.
        why_here: why the runs are on this machine; "" if they go to Slurm.
        command_to_resume: the command line that resumes it after Ctrl-C.
        gpus_here: the GPUs of this machine that they may use.
        places: how many runs this machine has at a time.
        per_job: how many runs share a job of Slurm at a time.
        gpus_per_job: the GPUs of such a job; None for those of all these runs together.
        plain: its script does not use the kit, and gets only its own arguments.
        passed_on: options of sbatch and their values, for all runs.
        chdir: each run starts in its own folder.
        metric: by which its table of runs is sorted.
        code: the frozen code that all runs run; None for the files as they are when each starts.

    Raises:
        UserError: for options that the runs cannot share.
    """

    folder: Path
    arguments: tuple[str, ...]
    opts: Options
    site: Site
    minutes: int
    why_here: str
    command_to_resume: str
    gpus_here: int = 0
    places: int = 1
    per_job: int = 1
    gpus_per_job: int | None = None
    cpus_per_gpu: int = 2
    partition: str | None = None
    passed_on: Mapping[str, str] = field(default_factory=dict)
    plain: bool = False
    chdir: bool = False
    metric: Metric | None = None
    code: PlannedCopy | None = None

    def __post_init__(self) -> None:
        if self.opts.checkpoint_dir or self.opts.resume != "never":
            raise UserError("--checkpoint-dir and --resume are for single jobs: leave them out.")
        if self.opts.batch_size_per_gpu:
            raise UserError("--batch-size-per-gpu is set by --scaling weak and --batch-size: give those two.")

    def planned(self, grid: Grid) -> SweepPlan:
        """Return the runs that make sense, and the reasons against the others.

        Raises:
            UserError: if no run is left, two would have one name, or the stage does not know what is varied.
        """
        if not self.plain:
            for settings in grid.settings:
                self._options(grid.stages[0], settings)
        # A dictionary without values: strong and weak scaling may give the same run, which is planned once.
        runs: dict[PlannedRun, None] = {}
        left_out: Counter[str] = Counter()
        for combination in grid.combinations():
            try:
                run = combination.run(self.cpus_per_gpu)
                self._check(run)
            except UserError as error:
                # After the colon is advice for a single job.
                reason = str(error).partition(":")[0]
                left_out[reason] += 1
            else:
                runs[run] = None
        for name, count in Counter(run.name for run in runs).items():
            if count > 1:
                raise UserError(f"{count} runs would be called {name}: give values that differ more.")
        if not runs:
            raise UserError(f"no run is left ({'; '.join(left_out)}): change what you ask for.")
        return SweepPlan(list(runs), left_out)

    def _check(self, run: PlannedRun) -> None:
        """Raise a UserError if the run makes no sense."""
        gpus = run.shape.gpus
        available = self.gpus_here or len(os.sched_getaffinity(0))
        # Runs share GPUs, but no cores.
        places = 1 if self.gpus_here else self.places
        if self.why_here and gpus * places > available:
            at_a_time = f" for each of {places} runs at a time" if places > 1 else ""
            raise UserError(f"{gpus} workers{at_a_time} are more than the {available} found here")
        on_cpu = self.opts.no_cuda or (self.why_here and not self.gpus_here)
        if run.stage.name == DP and gpus > 1 and on_cpu:
            raise UserError("without GPUs, stage dp on several devices is the plain model on one")
        # It refuses a batch that does not divide evenly among the GPUs.
        self.script_arguments(run)
        if not self.plain:
            opts = self._options(run.stage, run.settings)
            opts = replace(opts, batch_size=run.batch_size, train_size=run.train_size)
            submission.check_sizes(opts, run.stage, run.shape)

    def _options(self, stage: Stage, settings: Settings) -> Options:
        """Return what the arguments mean with these settings.

        Raises:
            UserError: if the stage refuses them.
        """
        if not settings:
            return self.opts
        return read_options(stage, varied_options.filled(self.arguments, settings, {}), self.site)

    def script_arguments(self, run: PlannedRun) -> tuple[str, ...]:
        """Return the arguments that the script gets in `run`.

        Raises:
            UserError: if they ask for the batch of each GPU, and it does not divide evenly among them.
        """
        arguments = varied_options.filled(self.arguments, run.settings, self._values_in_braces(run))
        if self.plain:
            return arguments
        seed = self._options(run.stage, run.settings).seed + run.repeat - 1
        own_folder = ["--results-dir", str(self.folder / run.name)]
        return (*arguments, *run.options(), "--seed", str(seed), *own_folder)

    def _values_in_braces(self, run: PlannedRun) -> dict[str, object]:
        """Return what the names of the sweep in braces stand for in `run`.

        Raises:
            UserError: as `script_arguments`.
        """
        values: dict[str, object] = {
            varied_options.GPUS: run.shape.gpus,
            varied_options.NODES: run.shape.nodes,
            varied_options.FOLDER: self.folder / run.name,
        }
        if run.batch_size is not None:
            values[varied_options.BATCH] = run.batch_size
            if varied_options.BATCH_PER_GPU in varied_options.in_braces(self.arguments):
                check_divides(run.batch_size, run.shape.gpus, "GPUs")
                values[varied_options.BATCH_PER_GPU] = run.batch_size // run.shape.gpus
        return values

    def claim(self, script: Sequence[str] = ()) -> AbstractContextManager:
        """Claim the folder for this sweep, for as long as the lock is held; `script` names a user's own.

        Raises:
            UserError: if it cannot be written to, has other things in it, belongs to a sweep with other
                options, or another sweep is at work in it.
        """
        project.hide_results(self.site.results_dir)
        check_writable(self.folder, "the sweep", "give a different --out.")
        options_file = self.folder / "options.txt"
        other_things = [path for path in self.folder.iterdir() if path.name != ".lock"]
        if other_things and not options_file.exists():
            raise UserError(f"{self.folder} contains other things: give a new or empty --out.")
        in_use = f"another sweep.py is running in {self.folder}: wait, or stop it."
        lock = locked(self.folder / ".lock", in_use)
        options = self._shared_options(script)
        if not options_file.exists():
            with replacing(options_file) as file:
                file.write(options)
            return lock
        earlier_options = options_file.read_text()
        if earlier_options != options:
            raise UserError(
                f"{self.folder} belongs to a sweep with the options {earlier_options}, not {options}: its "
                "rows could not be compared with these. Give a different --out."
            )
        return lock

    def _shared_options(self, script: Sequence[str]) -> str:
        """Return what runs must have in common to be compared, as a command line."""
        words = [*script, *self.arguments, "--cpus-per-gpu", str(self.cpus_per_gpu)]
        if self.chdir:
            words = ["--chdir", *words]
        return shlex.join(words)

    def freeze(self) -> None:
        """Make the copy of the code, if there is to be one.

        Raises:
            UserError: if it cannot be written.
        """
        if self.code:
            with explained(f"the code cannot be copied to {self.folder}", "free the space, or --no-freeze."):
                self.code.write()

    def request(self, run: PlannedRun) -> Request:
        """Return the request for the job of a run."""
        run_folder = self.folder / run.name
        request = Request(
            stage=self._stage(run),
            resources=run.shape,
            arguments=self.script_arguments(run),
            site=self.site._replace(results_dir=run_folder),
            folder=new_folder(self.site, run.stage),
            working_dir=run_folder if self.chdir else None,
            run_name=run.name,
            minutes=self.minutes,
            partition=self.partition,
            passed_on=self.passed_on,
            why_here=self.why_here,
            # Else those of runs with fewer workers would have more threads each.
            threads=1 if self.why_here else None,
        )
        return request.with_code(self.code) if self.code else request

    def places_per_job(self, jobs: Sequence[list[PlannedRun]]) -> int:
        """Return how many runs each of these jobs of an array has at a time."""
        return min(self.per_job, max(map(len, jobs)))

    def job_shape(self, jobs: Sequence[list[PlannedRun]]) -> Resources:
        """Return the shape of these jobs of an array, which are given by their runs."""
        of_run = jobs[0][0].shape
        return (
            of_run if self.per_job == 1 else pack.shape(of_run, self.places_per_job(jobs), self.gpus_per_job)
        )

    def pack_file(self, task: int) -> Path:
        """Return the file with what a task of an array does, where runs share jobs."""
        return self.folder / job_script.PACKS / str(task)

    def write_packs(self, tasks: Sequence[int], jobs: Sequence[list[PlannedRun]]) -> None:
        """Write what each task of an array does, if runs share jobs.

        Raises:
            OSError: if it cannot be written.
        """
        for task, runs in zip(tasks, jobs, strict=True):
            self.pack_file(task).unlink(missing_ok=True)
            if self.per_job > 1:
                requests = tuple(pack.within(self.request(run)) for run in runs)
                places, gpus = self.places_per_job(jobs), self.job_shape(jobs).gpus
                Pack(requests, places, gpus).write(self.pack_file(task))

    def names_in_pack(self, task: int) -> list[str]:
        """Return the names of the runs that a task of an array does; none if it does that with its number."""
        if not self.pack_file(task).exists():
            return []
        return [request.run_name for request in Pack.read(self.pack_file(task)).requests]

    def number(self, runs: Sequence[PlannedRun]) -> dict[PlannedRun, int]:
        """Write the runs into `commands.txt`, and return the number of the line of each, from 1 on.

        A run keeps its number: its job may be in the queue.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / job_script.COMMANDS
        lines = {}
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                lines[shlex.split(line)[0]] = line
        for run in runs:
            request = self.request(run)
            line = shlex.join([run.name, *request.words, *request.arguments])
            # A line of the file is one of the shell, too.
            lines[run.name] = line.replace("\n", "'$'\\n''")
        with replacing(file) as new:
            new.write("".join(f"{line}\n" for line in lines.values()))
        numbers = {name: number for number, name in enumerate(lines, start=1)}
        return {run: numbers[run.name] for run in runs}

    def _stage(self, run: PlannedRun) -> Stage:
        """Return the stage of the run, with what its program gets when it comes back (--when-requeued)."""
        program = run.stage.program
        if program is None or program.when_requeued is None:
            return run.stage
        values = {**self._values_in_braces(run), **varied_options.values(run.settings)}
        words = varied_options.filled(program.when_requeued, settings=(), known=values)
        return run.stage.with_program(replace(program, when_requeued=words))

    def prepare(self, run: PlannedRun) -> None:
        """Make the folder of a run for a new job, without the links to an earlier one.

        Raises:
            UserError: if it cannot be written to.
        """
        run_folder = self.folder / run.name
        check_writable(run_folder, "the run", "free the space, or give a different --out.")
        for name in (job_script.JOB, job_script.LOG):
            (run_folder / name).unlink(missing_ok=True)
        progress_table.describe(run_folder, run)

    def has_finished(self, run: PlannedRun) -> bool:
        """Return whether a run has ended well: by its CSV, or for a plain script by its job's outcome."""
        if self.plain:
            return progress_table.has_finished(self.folder / run.name)
        return bool(self.finished_csvs(run.name))

    def finished_csvs(self, name: str = "*") -> list[Path]:
        """Return the CSVs of finished runs, of the run called `name` or of all runs.

        A run whose job came back to the queue has several, the last one of which is the last here.
        """
        finished = []
        for recorded in recorded_runs(self.folder, name):
            last = recorded.rows[-1]
            if last["epoch"] >= self.opts.epochs or last["ended"]:
                finished += recorded.csvs
        return finished
