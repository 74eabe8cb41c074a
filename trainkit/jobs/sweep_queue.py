"""The runs of a sweep that are not finished: those that wait for a job, and those that have one."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from trainkit.errors import UserError, print_line
from trainkit.jobs import array, following, sweep_table
from trainkit.jobs.following import Handle, LocalHandle, State
from trainkit.jobs.submission import RefusedError
from trainkit.jobs.sweep import Sweep
from trainkit.jobs.sweep_plan import PlannedRun
from trainkit.monitor import samples
from trainkit.record import records

# A shared file system may show a new file this late on another machine.
CSV_SECONDS = 60


@dataclass
class Queue:
    """The runs of a sweep that are not finished, and their jobs; it prints each change.

    All jobs of an array of Slurm ask for the same nodes and GPUs. So runs that do, one after the other, are
    sent as an array.

    Attributes:
        max_jobs: how many may run at a time.
        waiting: those that have no job so far.
        active: those that have, and their jobs.
        failed: the names of those that failed.
        active_when_refused: how many were active when another was refused: the site may limit a user's jobs,
            too. None if none was refused since the last job.
        max_array_size: the most jobs of an array, where a longer one was refused.
        printed_states: the last one that was printed of each active run.
        printed_of_arrays: what was printed of arrays that wait.
    """

    sweep: Sweep
    planned: list[PlannedRun]
    max_jobs: int
    waiting: list[PlannedRun] = field(default_factory=list)
    active: dict[PlannedRun, Handle] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    active_when_refused: int | None = None
    max_array_size: int | None = None
    printed_states: dict[PlannedRun, State] = field(default_factory=dict)
    printed_of_arrays: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        unfinished = [run for run in self.planned if not self.sweep.finished(run.name)]
        self._attach_earlier_jobs(unfinished)
        self.waiting = [run for run in unfinished if run not in self.active]

    def _attach_earlier_jobs(self, runs: Sequence[PlannedRun]) -> None:
        """Take up the jobs of an earlier call that have not ended."""
        jobs = {}
        for run in runs:
            job = self.sweep.attach(run)
            if job:
                jobs[run] = job
        states = following.states([*jobs.values()])
        for (run, job), state in zip(jobs.items(), states, strict=True):
            # A plain script may have ended well since then, and its row is to be kept.
            has_to_be_kept = state.name == "done" and self.sweep.plain
            if not state.is_final or has_to_be_kept:
                self.active[run] = job

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
                handles = self.sweep.submit(runs, self.max_jobs)
            except UserError as error:
                self._take_refusal(runs, error)
            else:
                self._take_jobs(runs, handles)

    def _next_of_one_shape(self) -> list[PlannedRun]:
        """Return the first run that waits, and those behind it that ask Slurm for the same."""
        first = self.waiting[0]
        if self.sweep.why_here:
            return [first]

        def is_alike(run: PlannedRun) -> bool:
            return (run.stage, run.shape) == (first.stage, first.shape)

        alike = list(takewhile(is_alike, self.waiting))
        return alike[: self.max_array_size]

    def _has_room_for(self, count: int) -> bool:
        """Return whether so many runs may be sent together, of which at most `max_jobs` run at a time."""
        if self.active_when_refused is not None and len(self.active) >= self.active_when_refused:
            return False
        jobs_of_arrays = Counter(array.array_id(handle.job_id) for handle in self.active.values())
        running = sum(min(jobs, self.max_jobs) for jobs in jobs_of_arrays.values())
        return running + min(count, self.max_jobs) <= self.max_jobs

    def _take_refusal(self, runs: Sequence[PlannedRun], error: UserError) -> None:
        """Try a shorter array next, or wait for the end of another job.

        Raises:
            UserError: `error`, if neither would help.
        """
        if len(runs) > 1 and isinstance(error, RefusedError):
            # A site may take fewer jobs of a user, or shorter arrays (MaxSubmitJobs, MaxArraySize).
            self.max_array_size = len(runs) // 2
            return
        if not self.active:
            raise error
        self.active_when_refused = len(self.active)
        print_line(f"{runs[0].name} waits for the end of another job: {error}")

    def _take_jobs(self, runs: Sequence[PlannedRun], handles: Sequence[Handle]) -> None:
        del self.waiting[: len(runs)]
        self.active |= zip(runs, handles, strict=True)
        self.active_when_refused = None
        if len(runs) > 1:
            number = array.array_id(handles[0].job_id)
            print_line(f"array {number}: {len(runs)} runs, {runs[0].name} to {runs[-1].name}")

    def update(self) -> None:
        """Print what has changed of the active runs, and take out those that have ended."""
        jobs = list(self.active.items())
        states = following.states([handle for _, handle in jobs])
        for (run, handle), state in zip(jobs, states, strict=True):
            if state.is_final:
                self._take_out(run, handle, state)
            elif state != self.printed_states.get(run):
                self.printed_states[run] = state
                self._print_state(run, handle, state)

    def _take_out(self, run: PlannedRun, handle: Handle, state: State) -> None:
        """Take out a run that has ended, and print how."""
        del self.active[run]
        if self.sweep.plain:
            _keep_row(self.sweep, run, handle, state)
        result = _result(self.sweep, run, handle, state)
        if not result.succeeded:
            self.failed.append(run.name)
        ended = len(self.planned) - len(self.waiting) - len(self.active)
        print_line(f"[{ended}/{len(self.planned)}] {run.name} {result.sentence}")

    def _print_state(self, run: PlannedRun, handle: Handle, state: State) -> None:
        """Print the state of an active run; why the jobs of an array wait is told once."""
        number = array.array_id(handle.job_id)
        is_of_array = number != handle.job_id
        if state.name != "queued" or not is_of_array:
            print_line(f"{run.name} {state.name}: {state.detail}")
            return
        text = f"array {number} {state.name}: {state.detail}"
        if text not in self.printed_of_arrays:
            self.printed_of_arrays.add(text)
            print_line(text)

    def stop(self) -> None:
        """End the processes of this machine, and tell how to stop the jobs of Slurm, which continue."""
        in_slurm = []
        for handle in self.active.values():
            if isinstance(handle, LocalHandle):
                _end(handle)
            else:
                in_slurm.append(handle.job_id)
        if in_slurm:
            # The number of an array means all of its jobs.
            numbers = dict.fromkeys(array.array_id(job_id) for job_id in in_slurm)
            message = f"{len(in_slurm)} job(s) continue; to stop them: scancel {' '.join(numbers)}"
            print_line(f"\n{message}", sys.stderr)


def _end(handle: LocalHandle) -> None:
    """End the processes of a job on this machine, and wait for that."""
    handle.cancel()
    while handle.state().name == "running":
        time.sleep(0.1)


class _Result(NamedTuple):
    """How a run has ended, in words, and whether that was well."""

    sentence: str
    succeeded: bool


def _result(sweep: Sweep, run: PlannedRun, handle: Handle, state: State) -> _Result:
    """Return how a run has ended."""
    if state.name == "failed":
        return _Result(f"failed: {state.detail} (log: {handle.log})", succeeded=False)
    if sweep.plain:
        return _Result(f"finished{_doubt(handle)}", succeeded=True)
    csvs = sweep.finished(run.name)
    until = time.monotonic() + CSV_SECONDS
    while not csvs and time.monotonic() < until:
        time.sleep(1)
        csvs = sweep.finished(run.name)
    if not csvs:
        why = f"it left no CSV with all epochs (log: {handle.log})"
        return _Result(f"failed: {why}", succeeded=False)
    rows = records.read(csvs[-1])
    unit, per_sample = records.speed_unit(rows, records.read_metrics(csvs[-1]))
    speed = rows[-1]["images_per_s"] * per_sample
    return _Result(f"finished: {speed:,.0f} {unit}/s", succeeded=True)


def _doubt(handle: Handle) -> str:
    """Return what the verdict says of a plain script whose ranks never met, after a semicolon; else ""."""
    for finding in samples.read_findings(handle.folder / samples.FOLDER):
        if finding["kind"] == samples.NEVER_MET:
            return f"; {finding['sentence']}"
    return ""


def _keep_row(sweep: Sweep, run: PlannedRun, handle: Handle, state: State) -> None:
    """Keep the row of a plain script's run in its folder, as it may write no record."""
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
