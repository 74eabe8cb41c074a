"""Watch what a job does with its GPUs, cores and memory, while it runs and afterwards.

    python slurm/monitor.py --verdict JOB      what it wasted, the worst first, and what could be faster
    python slurm/monitor.py -- COMMAND ...     run a command, on this machine, and sample it

JOB is the number of a job, or its folder. Jobs sample themselves, unless SITE_MONITOR is off.
"""

import argparse
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from trainkit import job_folder
from trainkit.config.command_line import Parser, at_least, given, given_path
from trainkit.errors import UserError, first_line, tell
from trainkit.files import check_writable, explained
from trainkit.jobs import local, why
from trainkit.jobs.site import read_site
from trainkit.record import samples

END_SECONDS = 0.25  # between checks whether a local job has ended
# From SIGTERM on, for the job to end by itself. By default Slurm kills it after 30 s (KillWait).
PATIENCE_SECONDS = 8
AGAIN_SECONDS = 60  # from a verdict after SIGTERM: a job that goes on for longer has another at its end
# Signals that may be sent to this program, and are meant for the command that it runs.
HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
    else:
        from trainkit.monitor import waste

        with explained(f"job {own.verdict} cannot be read", "ask its owner for the right to."):
            judged = waste.judge(_find_samples(own.verdict))
        lines = judged.lines(f"job {own.verdict}" if own.verdict.isdigit() else own.verdict)
        tell("\n".join(lines))
    return 0


def _parse() -> tuple[argparse.Namespace, list[str]]:
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[end + 1 :]
    parser = Parser(description=__doc__, usage="monitor.py [OPTION JOB | -- COMMAND ...]")
    what = parser.add_mutually_exclusive_group(required=not command)
    what.add_argument("--verdict", metavar="JOB", type=given, help="say what it wasted")
    what.add_argument("--sample", metavar="FOLDER", type=given_path, help="what jobs call")
    parser.add_argument("--until", metavar="PID", type=at_least(1), help=argparse.SUPPRESS)
    return parser.parse_args(arguments[:end]), command


def _find_samples(job: str) -> Path:
    """Return the folder of a job's samples, by the number or the folder of the job."""
    folder, jobs_dir = Path(job), read_site().jobs_dir
    if job.isdigit() and not folder.is_dir():
        # Otherwise submit.py started it without Slurm. Process numbers are reused.
        here = [path.parent for path in jobs_dir.glob(f"submitit/*/{job}_submitted.pkl")]
        found = [path for path in [jobs_dir / job] if path.is_dir()] or sorted(here, key=os.path.getmtime)
        if not found:
            raise UserError(f"there is no job {job} in {jobs_dir}: a queued job has no folder yet.")
        folder = found[-1]
    if not folder.is_dir():
        raise UserError(f"there is no folder {job}: give a job's number or folder.")
    if (folder / samples.FOLDER).is_dir():
        folder /= samples.FOLDER
    elif not any(folder.glob("*.csv")):
        raise UserError(
            f"job {job} was not sampled (SITE_MONITOR=off?): while it runs in Slurm, "
            "`srun --jobid=<number> --overlap nvidia-smi` shows its GPUs."
        )
    return folder


def _run(command: list[str]) -> int:
    """Run the command as a separate job, and sample it; return its exit code."""
    from trainkit.monitor import collector

    job = read_site().jobs_dir / local.new_name("monitored")
    folder, mine = job / samples.FOLDER, {job_folder.VARIABLE: str(job)}
    check_writable(folder, "samples", "set SITE_SCRATCH_DIR in slurm/site.sh to a folder of yours.")
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

    watch = threading.Thread(target=collector.sample, args=(folder, mine, ended), daemon=True)
    watch.start()
    ended(None)
    watch.join(samples.VERDICT_SECONDS)  # a reading may hang in the driver
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    _note_end(folder, code)
    _keep_and_tell(folder, str(job))
    return code


def _sample(folder: Path, until: int | None, own_job: str | None) -> None:
    """Sample this node until the input, or the process `until`, ends; one node prints the verdict."""
    # Slurm sends USR2 before the time limit; USR1 with the `--signal=USR1@90` that Lightning's pages give.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if until:
        _sample_local_job(folder, until)
    elif own_job and {"SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_PROCID"} <= os.environ.keys():
        _sample_job_of_slurm(folder, own_job)
    else:
        raise UserError("--sample is for jobs of Slurm: on this machine, give a command after --.")


def _sample_local_job(folder: Path, until: int) -> None:
    from trainkit.monitor import collector

    def ended(seconds: float) -> bool:
        moment = time.monotonic() + seconds
        while not (gone := local.has_ended(str(until), folder.parent)) and time.monotonic() <= moment:
            time.sleep(END_SECONDS)
        return gone

    collector.sample(folder, {job_folder.VARIABLE: str(folder.parent)}, ended)
    _note_end(folder, int(bool(job_folder.notes(folder.parent, "started", "failed", "lost"))))
    _keep_and_tell(folder, f"job {until}")
    _tell_why(folder.parent, str(until))


def _sample_job_of_slurm(folder: Path, own_job: str) -> None:
    """Sample until the job script closes the input, and print the verdict, by the first of its nodes.

    A rank that outlives SIGTERM is killed by Slurm, and so is the job script, before it can print its last
    lines. So the verdict is printed some seconds after the signal, if the job has not ended by then.
    """
    from trainkit.monitor import collector

    name, tells = f"job {os.environ['SLURM_JOB_ID']}", os.environ["SLURM_PROCID"] == "0"
    asked_to_end: list[float] = []
    told_at = -math.inf
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.append(time.monotonic()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the job script has blocked it
    mine = {variable: os.environ[variable] for variable in ("SLURM_JOB_ID", "SLURMD_NODENAME")}
    mine[job_folder.VARIABLE] = own_job  # another practice cluster may have a job with that number

    def at_end(seconds: float) -> bool:
        nonlocal told_at
        if tells and asked_to_end and time.monotonic() - asked_to_end[0] >= PATIENCE_SECONDS:
            asked_to_end.clear()
            _keep_and_tell(folder, name, outlived=True)
            told_at = time.monotonic()
        return bool(select.select([0], [], [], seconds)[0]) and not os.read(0, 65536)

    collector.sample(folder, mine, at_end)
    if tells and time.monotonic() - told_at > AGAIN_SECONDS:
        _keep_and_tell(folder, name)


def _tell_why(job: Path, job_id: str) -> None:
    """Print why a job on this machine failed, as slurm/job_env.sh does at the end of a job of Slurm."""
    failed = job_folder.notes(job, "started", "failed", "lost") and job_folder.stopped(job) is None
    if failed:
        reasons = why.Evidence(job, (), log=job / f"{job_id}_0_log.out").reasons()
        for sentence in why.sentences(reasons):
            tell(sentence)


def _note_end(folder: Path, code: int) -> None:
    """Note the exit code of the job, or 1 for any other than 0, as slurm/job_env.sh does."""
    with suppress(OSError):  # a full disk
        (folder / samples.ENDED).write_text(f"{code}\n")


def _keep_and_tell(folder: Path, name: str, outlived: bool = False) -> None:
    """Save the verdict on the job called `name`, and print it, or why there is none.

    If the job has `outlived` SIGTERM, it begins with the ranks that still run.
    """
    from trainkit.monitor import waste

    try:
        judged = waste.judge(folder)
        with suppress(OSError):  # a full disk
            waste.keep(folder, judged)
        lines = [f"watch   {line}" for line in judged.lines(name)]
        if outlived and judged.still_there:
            words = f"{judged.still_there} still ran: what ignores the signal, or hangs, is killed soon"
            lines.insert(0, f"watch   {PATIENCE_SECONDS} s after SIGTERM {words}")
    except UserError as error:
        lines = [f"watch   not sampled: {error}"]
    except Exception as error:  # our fault must not become the job's
        lines = [f"watch   no verdict: {type(error).__name__}: {first_line(error)}"]
    with suppress(OSError):
        (folder / samples.TOLD).write_text("\n".join(lines), encoding="utf-8")
    tell("\n".join(lines))
