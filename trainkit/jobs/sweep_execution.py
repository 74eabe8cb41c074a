"""Carry out a sweep: start its runs, follow them, and report on them.

slurm/sweep.py and `make compare` do so; each says what is reported of the runs at the end.
"""

import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.errors import print_line, print_table
from trainkit.jobs import slurm, submission, sweep_table
from trainkit.jobs.sweep import Sweep
from trainkit.jobs.sweep_plan import PlannedRun
from trainkit.jobs.sweep_queue import Queue

# Epochs of a run: one to warm up, two to measure.
EPOCHS = 3
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
        UserError: if the first job is refused, or Slurm does not answer.
    """
    print_plan(sweep, planned, run_seconds)
    print_line(f"results  {sweep.folder}\nresume   {command_to_resume(sweep.folder)}\n")
    failed = finish(sweep, planned, max_jobs, sweep.folder)
    try:
        exit_code = _report(sweep, report)
    finally:
        # They are named even if the report fails.
        if failed:
            print_line(f"failed: {', '.join(failed)}. The same command runs them again.", sys.stderr)
    return 1 if failed else exit_code


def finish(sweep: Sweep, planned: list[PlannedRun], max_jobs: int, resume_in: Path) -> list[str]:
    """Run what is not finished, print each change, and return the names of the runs that failed.

    After Ctrl-C, this program's command line with --out `resume_in` resumes it.

    Raises:
        UserError: if a job is refused while none is active, or Slurm does not answer.
    """
    queue = Queue(sweep, planned, max_jobs=1 if sweep.why_here else max_jobs)
    try:
        while queue.waiting or queue.active:
            queue.submit()
            queue.update()
            if queue.active:
                time.sleep(min(handle.poll_seconds for handle in queue.active.values()))
    except KeyboardInterrupt:
        queue.stop()
        print_line(f"\nto resume: {command_to_resume(resume_in)}", sys.stderr)
        raise
    return queue.failed


def command_to_resume(folder: Path) -> str:
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


def _report(sweep: Sweep, report: Report) -> int:
    """Report on the finished runs; return the exit code."""
    csvs = sweep.finished()
    if sweep.plain:
        print_line("")
        print_table(sweep_table.write(sweep.folder))
        print_line(f"table    {sweep.folder / sweep_table.TABLE}")
        csvs = [csv for recorded in sweep.runs("*") for csv in recorded.csvs]
    if csvs:
        print_line("")
        times_by_the_doctor = sweep.site.results_dir / "all_reduce"
        if times_by_the_doctor.is_dir():
            csvs.append(times_by_the_doctor)
        return report(csvs, sweep.folder)
    if sweep.plain and sweep.finished():
        print_line("\nno run has written a record to compare: YOUR_TRAINING.md shows how a script writes one")
    return 0
