"""Watch what a job does with its GPUs, cores and memory, while it runs and afterwards.

    python slurm/monitor.py --verdict JOB      what it wasted, the worst first, and what could be faster
    python slurm/monitor.py -- COMMAND ...     run a command, on this machine, and sample it

JOB is the number of a job (17, or 17_2 of an array), or its folder. Jobs sample themselves, unless
SITE_MONITOR is off.
"""

import argparse
import os
import re
import sys
from functools import partial
from pathlib import Path

from manygpus import job_folder, json_document
from manygpus.config.command_line import Parser, add_json, at_least, given, given_path
from manygpus.errors import UserError, entrypoint, print_line
from manygpus.files import explained
from manygpus.jobs import job_log, local_job
from manygpus.jobs.inside import failure_reason
from manygpus.jobs.site import read_site
from manygpus.monitor import samples, watch


def main() -> None:
    """Begin and end the program."""
    # Without the variable it leaves no notes of a rank in the job's folder.
    own_job = os.environ.pop(job_folder.VARIABLE, None)
    _do_what_is_asked(own_job)


@entrypoint
def _do_what_is_asked(own_job: str | None) -> int:
    """Do what the command line says; return the exit code.

    Args:
        own_job: the folder of the job that it was started in, if it is one of ours.
    """
    options, command = _parse()
    if command:
        return watch.run_command(command, read_site().jobs_dir / local_job.new_name("monitored"))
    if options.verdict:
        _print_verdict(options.verdict, options.json)
    elif options.until:
        _sample_job_here(options.sample, str(options.until))
    else:
        watch.sample_slurm_job(options.sample, own_job, options.most_idle_seconds)
    return 0


def _parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the command after "--"."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[end + 1 :]
    parser = Parser(description=__doc__, usage="%(prog)s [OPTION JOB | -- COMMAND ...]")
    modes = parser.add_mutually_exclusive_group(required=not command)
    modes.add_argument("--verdict", metavar="JOB", type=given, help="print what this job wasted")
    modes.add_argument("--sample", metavar="FOLDER", type=given_path, help="sample this node; jobs call it")
    parser.add_argument("--until", metavar="PID", type=at_least(1), help=argparse.SUPPRESS)
    parser.add_argument(
        "--most-idle-seconds", metavar="N", type=at_least(0), default=0, help=argparse.SUPPRESS
    )
    add_json(parser, "the verdict")
    options = parser.parse_args(arguments[:end])
    if options.json and not options.verdict:
        parser.error("--json goes with --verdict")
    return options, command


def _print_verdict(job: str, as_json: bool) -> None:
    # Only here, as they load pandas: a monitor shares the memory of the job.
    from manygpus.monitor import verdict_file, wording
    from manygpus.monitor.verdict import judge

    runs = _runs_in(job) or {job if Path(job).is_dir() else f"job {job}": job}
    if as_json and len(runs) > 1:
        folders = ", ".join(runs.values())
        raise UserError(f"job {job} has several runs: give the folder of one of them ({folders}).")
    for name, run in runs.items():
        try:
            with explained(f"job {run} cannot be read", "ask its owner for permission to read it."):
                verdict = judge(_find_samples(run))
        except UserError as error:
            if len(runs) == 1:
                raise
            print_line(f"{name}: {error}")  # the other runs of the job have theirs
            continue
        if as_json:
            json_document.print_document(verdict_file.as_json(verdict))
            return
        print_line("\n".join(wording.verdict_lines(verdict, name)))


def _find_samples(job: str) -> Path:
    """Return the folder of a job's samples, by the number or the folder of the job."""
    folder = _find_job(job)
    if (folder / samples.FOLDER).is_dir():
        return folder / samples.FOLDER
    if not any(folder.glob("*.csv")):
        raise UserError(
            f"job {job} was not sampled (SITE_MONITOR=off?): while it runs in Slurm, "
            "`srun --jobid=<number> --overlap nvidia-smi` shows its GPUs."
        )
    return folder


def _find_job(job: str) -> Path:
    """Return the folder of a job, by its number or that folder itself."""
    jobs_dir = read_site().jobs_dir
    if Path(job).is_dir():
        return Path(job)
    if not re.fullmatch(r"\d+(_\d+)?", job):
        raise UserError(f"there is no folder {job}: give a job's number or folder.")
    if (jobs_dir / job).is_dir():
        return jobs_dir / job
    # Otherwise submit.py started it without Slurm. Process numbers are reused.
    submitted = [path.parent for path in jobs_dir.glob(f"submitit/*/{job}_submitted.pkl")]
    return _latest(submitted, job, jobs_dir)


def _runs_in(job: str) -> dict[str, str]:
    """Return the folders of the runs that share a job of an array, or of the job itself, by their names.

    The number of an array stands for all its jobs; it is also that of the last one, whose folder has it. A
    job that is shared is not sampled itself, but each of its runs is.
    """
    jobs_dir = read_site().jobs_dir
    runs = {script.run_name: str(folder) for folder, script in _of_array(job, jobs_dir, "submitit/*")}
    if runs:
        return runs
    jobs = _of_array(job, jobs_dir, "[0-9]*")
    return {f"job {script.array_element}": str(folder) for folder, script in jobs}


def _of_array(job: str, jobs_dir: Path, folders: str) -> list[tuple[Path, job_folder.Script]]:
    """Return the folders, among those of a pattern, of one job of an array or of all, the latest last."""
    found = []
    for path in jobs_dir.glob(f"{folders}/{job_folder.SCRIPT}"):
        script = job_folder.read_script(path.parent)
        if script and job_folder.is_numbered(script.array_element, job):
            found.append((path.parent, script))
    return sorted(found, key=lambda of_run: of_run[0].stat().st_mtime)


def _latest(folders: list[Path], job: str, jobs_dir: Path) -> Path:
    """Return the folder that has changed last.

    Raises:
        UserError: if there is none.
    """
    if not folders:
        raise UserError(f"there is no job {job} in {jobs_dir}: a queued job has no folder yet.")
    return max(folders, key=os.path.getmtime)


def _sample_job_here(folder: Path, job_id: str) -> None:
    """Sample a job that submit.py has started on this machine; at its end print why it failed, if it did."""
    job = folder.parent
    watch.sample_job_here(folder, f"job {job_id}", partial(local_job.has_ended, job_id, job))
    has_failed = job_folder.notes(job, "started", "failed", "lost") and job_folder.stopped(job) is None
    if has_failed:
        log = job_log.of_rank(job, job_id)
        reasons = failure_reason.Evidence(job, job_log.read(log), log=log).reasons()
        for sentence in failure_reason.sentences(reasons):
            print_line(sentence)
