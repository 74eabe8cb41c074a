"""Carry out a sweep: send its runs, watch them, and report on them.

slurm/sweep.py and `make compare` do so; each says what is reported of the runs at the end.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from manygpus.errors import UserError, print_line, print_table
from manygpus.files import check_writable, replacing
from manygpus.jobs import job_log, local_job, slurm
from manygpus.jobs.submit import executor, job_script, submission
from manygpus.jobs.sweeps import pack, progress_table
from manygpus.jobs.sweeps.places import run_in_places
from manygpus.jobs.sweeps.plan import PlannedRun
from manygpus.jobs.sweeps.recorded_runs import recorded_runs
from manygpus.jobs.sweeps.sweep import Sweep
from manygpus.jobs.watch import job_status
from manygpus.jobs.watch.job_status import Handle, SlurmHandle, State
from manygpus.monitor import samples
from manygpus.record import records

# Epochs of a run: one to warm up, two to measure.
EPOCHS = 3
# A shared file system may show a new file this late on another machine.
CSV_SECONDS = 60
# Compares the runs of these CSVs, writes to this folder, and returns the exit code. Among the CSVs may be the
# folder of what the doctor has measured.
Report = Callable[[list[Path], Path], int]


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
        UserError: if no job is accepted, or Slurm does not answer.
    """
    print_plan(sweep, planned, max_jobs, run_seconds)
    print_line(f"results  {sweep.folder}\nresume   {sweep.command_to_resume}\n")
    failed = finish(sweep, planned, max_jobs)
    try:
        exit_code = _report(sweep, planned, report)
    finally:
        # They are named even if the report fails.
        if failed:
            print_line(f"failed: {', '.join(failed)}. The same command runs them again.", sys.stderr)
    return 1 if failed else exit_code


def finish(sweep: Sweep, planned: list[PlannedRun], max_jobs: int) -> list[str]:
    """Run what is not finished, print how each ends, and return the names of the runs that failed.

    Raises:
        UserError: if no job is accepted, or Slurm does not answer.
    """
    unfinished = [run for run in planned if not sweep.has_finished(run)]
    watch = Watch(sweep, ended=len(planned) - len(unfinished), total=len(planned))
    try:
        if sweep.why_here:
            _finish_here(sweep, unfinished, watch)
        else:
            _finish_in_slurm(sweep, unfinished, max_jobs, watch)
    except KeyboardInterrupt:
        print_line(f"\nto resume: {sweep.command_to_resume}", sys.stderr)
        raise
    return watch.failed


def _finish_here(sweep: Sweep, runs: Sequence[PlannedRun], watch: "Watch") -> None:
    """Run each as processes of this machine, in the first place that is free.

    Raises:
        UserError: if one cannot be started. The others are then ended.
    """
    start = partial(_start_here, sweep)
    run_in_places(runs, sweep.places, sweep.gpus_here, start=start, next_ends=watch.next_ends)


def _start_here(sweep: Sweep, run: PlannedRun) -> Handle:
    """Start a run as processes of this machine.

    Raises:
        UserError: if it cannot be started, or its processes of an earlier call, which was killed, still run.
    """
    run_folder = sweep.folder / run.name
    earlier = (run_folder / job_script.JOB).resolve()
    number = local_job.submitted(earlier).job_id
    if number and not local_job.has_ended(number, earlier):
        raise UserError(f"{run.name} of an earlier call still runs: wait for its end, or kill {number}.")
    sweep.prepare(run)
    request = sweep.request(run)
    # Before its processes: they may outlive this one.
    (run_folder / job_script.JOB).symlink_to(request.folder)
    handle = executor.submitter(run.stage)(request)
    (run_folder / job_script.LOG).symlink_to(handle.log)
    return handle


def _finish_in_slurm(sweep: Sweep, runs: Sequence[PlannedRun], max_jobs: int, watch: "Watch") -> None:
    """Send the runs, and wait for their end; what Slurm refuses is sent when the others have ended.

    Raises:
        UserError: if it refuses the first ones, or does not answer.
    """
    left = [*runs]
    while left:
        try:
            handles = _send(sweep, left, max_jobs)
        except UserError as error:
            if len(left) == len(runs):
                raise
            print_line(f"error: {error}", sys.stderr)
            for run in left:
                watch.tell_end(run, "failed: it was not sent", succeeded=False)
            return
        watch.until_ended(handles)
        left = [run for run in left if run not in handles]


def _send(sweep: Sweep, runs: Sequence[PlannedRun], max_jobs: int) -> dict[PlannedRun, Handle]:
    """Send the runs that are not in Slurm's queue, and return the jobs of all that it has then.

    Arrays run side by side as far as `max_jobs` allows; those behind them wait for their end. A site may
    limit a user's jobs, too (MaxSubmitJobs): what it refuses is left out.

    Raises:
        UserError: if Slurm refuses the first array, and no job is in the queue.
    """
    numbers = sweep.number(runs)
    in_queue = slurm.tasks_sent_from(sweep.folder)
    handles = {}
    for number, array in in_queue.items():
        handles |= _handles(sweep, runs, numbers, array, number)
    after = sorted(set(in_queue.values()))
    side_by_side: list[str] = []
    running = 0
    for jobs in jobs_of(sweep, [run for run in runs if run not in handles], max_jobs):
        at_a_time = min(len(jobs), max_jobs)
        if side_by_side and running + at_a_time > max_jobs:
            after, side_by_side, running = side_by_side, [], 0
        tasks = [numbers[job[0]] for job in jobs]
        alike = [run for job in jobs for run in job]
        try:
            array = _send_array(sweep, jobs, tasks, at_a_time, after)
        except UserError as error:
            if not handles:
                raise
            print_line(f"{alike[0].name} waits for the end of the jobs that were sent: {error}")
            break
        for task in tasks:
            handles |= _handles(sweep, alike, numbers, array, task)
        side_by_side.append(array)
        running += at_a_time
        others = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        in_jobs = f", in {len(jobs)} job(s)" if sweep.per_job > 1 else ""
        print_line(f"array {array}: {alike[0].name}{others}{in_jobs}")
    return handles


def jobs_of(sweep: Sweep, runs: Sequence[PlannedRun], max_jobs: int) -> list[list[list[PlannedRun]]]:
    """Return the runs of each job, in groups that ask Slurm for the same: all jobs of an array do."""
    groups: dict[tuple, list[PlannedRun]] = {}
    for run in runs:
        groups.setdefault((run.stage.name, run.shape), []).append(run)
    if sweep.per_job == 1:
        return [[[run] for run in alike] for alike in groups.values()]
    return [pack.shares(alike, sweep.per_job, max_jobs) for alike in groups.values()]


def _send_array(
    sweep: Sweep, jobs: Sequence[list[PlannedRun]], tasks: Sequence[int], at_a_time: int, after: Sequence[str]
) -> str:
    """Send jobs of one shape, and return the number of their array.

    Args:
        jobs: the runs of each job.
        tasks: the number of the first run of each.
        at_a_time: how many of them may run at a time.
        after: the numbers of arrays that have to end before.

    Raises:
        UserError: if Slurm refuses it, or would never start it.
    """
    first = jobs[0][0]
    request = replace(sweep.request(first), resources=sweep.job_shape(jobs))
    submission.check_limits(request)
    for run in (run for job in jobs for run in job):
        sweep.prepare(run)
    sweep.write_packs(tasks, jobs)
    check_writable(sweep.folder / job_script.LOGS, "the logs", "free the space, or give a different --out.")
    nodes = f"-{first.shape.nodes}nodes" if first.shape.nodes > 1 else ""
    script = sweep.folder / f"{first.stage.label}-{first.shape.gpus}gpu{nodes}.sh"
    if sweep.per_job > 1:
        program = sweep.code.path_in_copy(pack.PROGRAM) if sweep.code else pack.PROGRAM
        text = job_script.of_packs(request, program, sweep.folder, tasks, at_a_time, after)
    else:
        text = job_script.of_tasks(request, sweep.folder, tasks, at_a_time, after)
    with replacing(script) as file:
        file.write(f"{text}\n")
    array = submission.send_script(script)
    submission.check_start(_job_of(sweep, first, array, tasks[0]))
    return array


def _handles(
    sweep: Sweep, runs: Sequence[PlannedRun], numbers: Mapping[PlannedRun, int], array: str, task: int
) -> dict[PlannedRun, SlurmHandle]:
    """Return those of the runs that a task of an array does, and for each what tells its state."""
    names = sweep.names_in_pack(task)
    if not names:
        return {run: _job_of(sweep, run, array, task) for run in runs if numbers[run] == task}
    job_id = f"{array}_{task}"
    job = SlurmHandle(
        job_id=job_id,
        tasks=1,
        log=job_log.of_rank(sweep.folder / job_script.LOGS, job_id),
        folder=sweep.pack_file(task).with_name(f"{task}{job_script.OF_PACK}"),
        results=None,
    )
    return {run: _in_pack(sweep, run, job) for run in runs if run.name in names}


def _job_of(sweep: Sweep, run: PlannedRun, array: str, task: int) -> SlurmHandle:
    """Return the job of a run, a task of an array."""
    job_id = f"{array}_{task}"
    run_folder = sweep.folder / run.name
    return SlurmHandle(
        job_id=job_id,
        tasks=run.shape.tasks,
        log=job_log.of_rank(sweep.folder / job_script.LOGS, job_id),
        folder=run_folder / job_script.JOB,
        results=None if sweep.plain else run_folder / "runs",
    )


def _in_pack(sweep: Sweep, run: PlannedRun, job: SlurmHandle) -> pack.RunInPack:
    """Return a run in a job that it shares with others."""
    run_folder = sweep.folder / run.name
    return pack.RunInPack(
        job_id=job.job_id,
        tasks=run.shape.tasks,
        log=run_folder / job_script.LOG,
        folder=run_folder / job_script.JOB,
        results=None if sweep.plain else run_folder / "runs",
        job=job,
    )


class Watch:
    """Prints how the jobs of a sweep are doing until they have ended.

    Attributes:
        ended: how many of the `total` runs have ended.
        failed: the names of those that failed.
        printed: lines about jobs that go on, which are printed once.
    """

    def __init__(self, sweep: Sweep, ended: int, total: int) -> None:
        self.sweep = sweep
        self.ended = ended
        self.total = total
        self.failed: list[str] = []
        self.printed: set[str] = set()

    def until_ended(self, handles: dict[PlannedRun, Handle]) -> None:
        """Wait until all of these jobs of Slurm have ended, and print what changes.

        Raises:
            UserError: if Slurm does not answer.
            KeyboardInterrupt: on Ctrl-C. The jobs continue.
        """
        active = dict(handles)
        try:
            while active:
                for run in self.next_ends(active):
                    del active[run]
        except KeyboardInterrupt:
            jobs = [*dict.fromkeys(handle.job_id for handle in active.values())]
            arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in jobs)
            print_line(f"\n{len(jobs)} job(s) continue; to stop them: scancel {' '.join(arrays)}", sys.stderr)
            raise

    def next_ends(self, active: Mapping[PlannedRun, Handle]) -> list[PlannedRun]:
        """Wait until one or more of these jobs have ended, print what changes, and return those runs.

        Raises:
            UserError: if Slurm does not answer.
        """
        while True:
            states = job_status.states([*active.values()])
            ended = []
            for (run, handle), state in zip(active.items(), states, strict=True):
                if state.is_final:
                    ended.append(run)
                    self._take_end(run, handle, state)
                else:
                    self._tell(run, state)
            if ended:
                return ended
            time.sleep(min(handle.poll_seconds for handle in active.values()))

    def _tell(self, run: PlannedRun, state: State) -> None:
        # Many runs wait for the same reason.
        who = "" if state.name == "queued" else f"{run.name} "
        line = f"{who}{state.name}: {state.detail}"
        if line not in self.printed:
            self.printed.add(line)
            print_line(line)

    def _take_end(self, run: PlannedRun, handle: Handle, state: State) -> None:
        if state.name == "failed":
            self.tell_end(run, f"failed: {state.detail} (log: {handle.log})", succeeded=False)
        elif self.sweep.plain:
            self.tell_end(run, f"finished{_doubt(handle)}")
        else:
            self._take_records(run, handle)

    def _take_records(self, run: PlannedRun, handle: Handle) -> None:
        csvs = self.sweep.finished_csvs(run.name)
        until = time.monotonic() + CSV_SECONDS
        while not csvs and time.monotonic() < until:
            time.sleep(1)
            csvs = self.sweep.finished_csvs(run.name)
        if not csvs:
            why = f"failed: it left no CSV with all epochs (log: {handle.log})"
            self.tell_end(run, why, succeeded=False)
            return
        rows = records.read(csvs[-1])
        unit, per_sample = records.speed_unit(rows, records.read_metrics(csvs[-1]))
        self.tell_end(run, f"finished: {rows[-1]['images_per_s'] * per_sample:,.0f} {unit}/s")

    def tell_end(self, run: PlannedRun, sentence: str, succeeded: bool = True) -> None:
        """Count a run that has ended, and print how."""
        self.ended += 1
        if not succeeded:
            self.failed.append(run.name)
        print_line(f"[{self.ended}/{self.total}] {run.name} {sentence}")


def _doubt(handle: Handle) -> str:
    """Return what the verdict says of a plain script whose ranks never met, after a semicolon; else ""."""
    for finding in samples.read_findings(handle.folder / samples.FOLDER):
        if finding["kind"] == samples.NEVER_MET:
            return f"; {finding['sentence']}"
    return ""


def print_plan(
    sweep: Sweep, planned: list[PlannedRun], max_jobs: int, run_seconds: float | None = None
) -> None:
    """Print how many runs are planned, and how long they take."""
    unfinished = [run for run in planned if not sweep.has_finished(run)]
    plan = f"{len(planned)} runs, {len(planned) - len(unfinished)} of them finished"
    if run_seconds:
        minutes = math.ceil(len(unfinished) * run_seconds / 60)
        plan += f"; the others take at least about {minutes} minute(s)"
    elif not sweep.why_here:
        arrays = jobs_of(sweep, unfinished, max_jobs)
        gpu_hours = sum(len(jobs) * sweep.job_shape(jobs).gpus for jobs in arrays) * sweep.minutes / 60
        each = f"each of {sum(map(len, arrays))} job(s)" if sweep.per_job > 1 else "each"
        plan += (
            f"; the others take {gpu_hours:.1f} GPU-hours if {each} needs its whole time limit of "
            f"{sweep.minutes} minutes"
        )
    print_line(plan)
    held_by_this_shell = "" if sweep.why_here else slurm.job_of_this_shell()
    if held_by_this_shell:
        print_line(f"note: {held_by_this_shell}")


def _report(sweep: Sweep, planned: Sequence[PlannedRun], report: Report) -> int:
    """Report on the finished runs; return the exit code."""
    csvs = sweep.finished_csvs()
    if sweep.plain or sweep.metric:
        print_line("")
        table = progress_table.write(sweep.folder, sweep.metric)
        print_table(table)
        order = f", {sweep.metric.order}" if sweep.metric else ""
        print_line(f"table    {sweep.folder / progress_table.TABLE}{order}")
        if sweep.metric and not any(row[table[0].index(progress_table.METRIC)] for row in table[1:]):
            print_line(
                f"note: no run has a number for --metric {sweep.metric.text}, neither in its record nor in "
                "its log: correct it, and give the command again, which runs nothing twice"
            )
    if sweep.plain:
        csvs = [csv for recorded in recorded_runs(sweep.folder) for csv in recorded.csvs]
    if csvs:
        print_line("")
        times_by_the_doctor = sweep.site.results_dir / "all_reduce"
        if times_by_the_doctor.is_dir():
            csvs.append(times_by_the_doctor)
        return report(csvs, sweep.folder)
    if sweep.plain and any(map(sweep.has_finished, planned)):
        print_line(
            "\nno run has written a record to compare: 03_multigpu_ddp/CHECKPOINTER.md shows how a script "
            "writes one"
        )
    return 0
