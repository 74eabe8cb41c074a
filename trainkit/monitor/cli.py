"""Watch what a job does with its GPUs, cores and memory, while it runs and afterwards.

    python slurm/monitor.py --verdict JOB      what it wasted, the worst first, and what could be faster
    python slurm/monitor.py --plot JOB         the same as a picture, along its time
    python slurm/monitor.py --attach JOB       sample a running job of Slurm that does not sample itself
    python slurm/monitor.py -- COMMAND ...     run a command, on this machine, and sample it

JOB is the number of a job, or its folder. Jobs sample themselves, unless SITE_MONITOR is off.
"""

import argparse
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.jobs import local, slurm
from trainkit.jobs.site import read_site
from trainkit.jobs.stages import REPOSITORY
from trainkit.runtime import job_folder
from trainkit.runtime.command_line import Parser, at_least
from trainkit.runtime.errors import UserError, first_line, tell
from trainkit.runtime.files import check_writable
from trainkit.schema import samples

if TYPE_CHECKING:
    from trainkit.monitor.waste import Verdict

VERDICT_SECONDS = 15  # that it may take after Ctrl-C
END_SECONDS = 0.25  # between checks whether a local job has ended
# Signals that may be sent to this program, and are meant for the command that it runs.
HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FIX = "set SITE_SCRATCH_DIR in slurm/site.sh to a folder of yours."


def main(own_job: str | None) -> int:
    """Do what the command line of slurm/monitor.py says; return the exit code.

    Args:
        own_job: the folder of the job that it was started in, if it is one of ours.

    Raises:
        UserError: for every mistake that the user can correct.
    """
    own, command = _parse()
    if command:
        return _run(command)
    if own.sample:
        _sample(own.sample, own.until, own_job)
    elif own.attach:
        _attach(own.attach)
    elif own.plot is not None:
        from trainkit.monitor import timeline

        folder = _find_samples(own.plot)
        tell(str(timeline.draw(folder, own.out or folder / "timeline.png")))
    else:
        from trainkit.monitor import waste

        judged = waste.judge(_find_samples(own.verdict))
        lines = judged.lines(f"job {own.verdict}" if own.verdict.isdigit() else own.verdict)
        tell(json.dumps(judged.facts(), indent=2) if own.json else "\n".join(lines))
    return 0


def _parse() -> tuple[argparse.Namespace, list[str]]:
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[end + 1 :]
    parser = Parser(description=__doc__, usage="monitor.py [OPTION JOB | -- COMMAND ...]")
    what = parser.add_mutually_exclusive_group(required=not command)
    what.add_argument("--verdict", metavar="JOB", help="say what it wasted")
    what.add_argument("--plot", metavar="JOB", help="draw it")
    what.add_argument("--attach", metavar="JOB", type=at_least(1), help="sample it, from a login node")
    what.add_argument("--sample", metavar="FOLDER", type=Path, help="what jobs call")
    parser.add_argument("--json", action="store_true", help="of --verdict: as JSON")
    parser.add_argument("--out", metavar="FILE.png", type=Path, help="of --plot: where to")
    parser.add_argument("--until", metavar="PID", type=at_least(1), help=argparse.SUPPRESS)
    return parser.parse_args(arguments[:end]), command


def _find_samples(job: str) -> Path:
    """Return the folder of a job's samples, by the number or the folder of the job.

    Raises:
        UserError: if there is none.
    """
    folder, jobs_dir = Path(job), read_site().jobs_dir
    if job.isdigit() and not folder.is_dir():
        # Otherwise submit.py started it without Slurm. Process numbers are reused.
        here = [path.parent for path in jobs_dir.glob(f"submitit/*/{job}_submitted.pkl")]
        found = [path for path in [jobs_dir / job] if path.is_dir()] or sorted(here, key=os.path.getmtime)
        if not found:
            raise UserError(
                f"there is no job {job} in {jobs_dir}, where each has a folder. A queued job has none yet."
            )
        folder = found[-1]
    if not folder.is_dir():
        raise UserError(f"there is no folder {job}: give a job's number or folder.")
    if (folder / samples.FOLDER).is_dir():
        folder /= samples.FOLDER
    elif not any(folder.glob("*.csv")):
        raise UserError(
            f"job {job} was not sampled (SITE_MONITOR=off?): while it runs in Slurm, "
            "`python slurm/monitor.py --attach <number>` does it."
        )
    return folder


def _run(command: list[str]) -> int:
    """Run the command as a separate job, and sample it; return its exit code.

    Raises:
        UserError: if there is no such command, or the samples cannot be written.
    """
    from trainkit.monitor import collector

    job = read_site().jobs_dir / local.new_name("monitored")
    folder, mine = job / samples.FOLDER, {job_folder.VARIABLE: str(job)}
    check_writable(folder, "samples", FIX)
    try:
        child = subprocess.Popen(command, env=os.environ | mine)
    except OSError as error:
        shutil.rmtree(job)
        raise UserError(f"{command[0]} cannot be run ({error.strerror}): correct the command.") from None
    for number in (signal.SIGINT, signal.SIGQUIT):  # the terminal also sends them to the command
        signal.signal(number, signal.SIG_IGN)
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: child.send_signal(number))

    def ended(seconds: float | None) -> bool:
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        return child.returncode is not None

    try:
        collector.sample(folder, mine, ended)
    finally:  # whatever becomes of the samples
        ended(None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _keep_and_tell(folder, "the command", job)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _sample(folder: Path, until: int | None, own_job: str | None) -> None:
    """Sample this node until the input, or the process `until`, ends; one node prints the verdict."""
    from trainkit.monitor import collector

    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if until:

        def ended(seconds: float) -> bool:
            moment = time.monotonic() + seconds
            while not (gone := local.has_ended(str(until), folder.parent)) and time.monotonic() <= moment:
                time.sleep(END_SECONDS)
            return gone

        collector.sample(folder, {job_folder.VARIABLE: str(folder.parent)}, ended)
    else:
        if "SLURM_JOB_ID" not in os.environ:
            raise UserError("--sample is for jobs of Slurm: on this machine, give a command after --.")
        # As if the input had ended. A job script blocks the signal, as there is more to come (job_env.sh).
        signal.signal(signal.SIGTERM, lambda *_: os.dup2(os.open(os.devnull, os.O_RDONLY), 0))
        mine = {name: os.environ[name] for name in ("SLURM_JOB_ID", "SLURMD_NODENAME")}
        if own_job:  # another practice cluster may have a job with that number
            mine[job_folder.VARIABLE] = own_job

        def at_end(seconds: float) -> bool:
            return bool(select.select([0], [], [], seconds)[0]) and not os.read(0, 65536)

        collector.sample(folder, mine, at_end)
    number = until or os.environ["SLURM_JOB_ID"]
    if until or own_job and os.environ["SLURM_PROCID"] == "0":  # else `_attach` prints it
        _keep_and_tell(folder, f"job {number}", number)


def _attach(job: int) -> None:
    """Sample a running job of Slurm, from a login node, until it ends or Ctrl-C.

    Raises:
        UserError: if it does not run, samples itself, or may not be sampled.
    """
    if why := slurm.why_not_here():
        raise UserError(f"no Slurm here ({why}): --attach is for its jobs, on a login node.")
    facts = slurm.job_facts(str(job))
    if facts["JobState"] != "RUNNING":
        state = ", ".join(filter(None, (facts["JobState"], facts.get("Reason", ""))))
        raise UserError(f"job {job} does not run ({state}): attach while it does; see `squeue --me`.")
    steps = slurm.ask("squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%j").stdout.split()
    if "monitor" in steps:
        raise UserError(f"job {job} is being sampled already: python slurm/monitor.py --verdict {job}")
    nodes = facts.get("NumNodes", "1")
    folder = read_site().jobs_dir / str(job) / samples.FOLDER
    check_writable(folder, "samples", FIX)
    script = 'source "$1"; activate; sample "$2" "$3" --jobid="$4"'
    words = [str(REPOSITORY / "slurm" / "site_env.sh"), nodes, str(folder), str(job)]
    with (folder / "log").open("w") as log:
        step = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            stdin=subprocess.PIPE,  # which closes with this program, however that ends
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=local.outside_of_jobs(),
            start_new_session=True,  # Ctrl-C is only for this program
        )
    tell(f"sampling job {job} on {nodes} node(s) into {folder}; Ctrl-C ends that, not the job")
    try:
        step.wait()
    except KeyboardInterrupt:
        step.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            step.wait(VERDICT_SECONDS)
        step.terminate()
    if not any(folder.glob("*.csv")):
        last = job_folder.read(folder / "log").rpartition("\n")[2]
        raise UserError(f"job {job} could not be sampled: {last or 'the step failed'}")
    _keep_and_tell(folder, f"job {job}", job)


def in_log(verdict: "Verdict", name: str, job: object) -> list[str]:
    """Format the verdict for the log of a job; `job` is its number or folder."""
    lines = verdict.lines(name)
    lines[-1] += f"; its picture: python slurm/monitor.py --plot {shlex.quote(str(job))}"
    return [f"watch   {line}" for line in lines]


def _keep_and_tell(folder: Path, name: str, job: object) -> None:
    """Save the verdict on a job, and print it, or why there is none."""
    from trainkit.monitor import waste

    try:
        judged = waste.judge(folder)
        with suppress(OSError):  # a full disk
            waste.keep(folder, judged)
        lines = in_log(judged, name, job)
    except UserError as error:
        lines = [f"watch   not sampled: {error}"]
    except Exception as error:  # our fault must not become the job's
        lines = [f"watch   no verdict: {type(error).__name__}: {first_line(error)}"]
    tell("\n".join(lines))
