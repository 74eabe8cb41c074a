"""Watch a job from its start to its end, and print the verdict on it.

It knows a job by its folder, and samples a command of its own, a job on this machine, or one of Slurm.
slurm/monitor.py is its command line.
"""

import math
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manygpus import job_folder, log_words, project
from manygpus.errors import UserError, first_line, print_line
from manygpus.files import check_writable
from manygpus.monitor import collector, samples

# Between checks whether a job on this machine has ended.
POLL_SECONDS = 0.25
# From SIGTERM on, for the job to end by itself. By default Slurm kills it after 30 s (KillWait).
PATIENCE_SECONDS = 8
# From a verdict after SIGTERM on: a job that goes on for longer has another one at its end.
NEXT_VERDICT_SECONDS = 60
# Signals that may be sent to this program, and are meant for the command that it runs.
SIGNALS_FOR_THE_COMMAND = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Signals that a terminal sends both to this program and to the command.
SIGNALS_OF_A_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
# Slurm sends USR2 before the time limit; USR1 with the `--signal=USR1@90` that Lightning's pages give.
SIGNALS_FOR_THE_RANKS = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# What an environment has in a step of Slurm on a node.
OF_A_STEP = {"SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_PROCID"}


def run_command(command: list[str], job: Path) -> int:
    """Run a command as a job whose folder is `job`, sample it, and print the verdict; return its exit code.

    Raises:
        UserError: if the folder cannot be written to, or the command cannot be run.
    """
    folder = job / samples.FOLDER
    variables = {job_folder.VARIABLE: str(job)}
    check_writable(folder, "samples", f"set SITE_SCRATCH_DIR in {project.site_name()} to a folder of yours.")
    # Not ignored, as the command would inherit that. Its user may press Ctrl-C as soon as it prints a line.
    for number in SIGNALS_OF_A_TERMINAL:
        signal.signal(number, lambda *_: None)
    try:
        process = subprocess.Popen(command, env=os.environ | variables)
    except OSError as error:
        shutil.rmtree(job)
        raise UserError(f"{command[0]} cannot be run ({error.strerror}): correct the command.") from None
    for number in SIGNALS_FOR_THE_COMMAND:
        signal.signal(number, lambda number, _: process.send_signal(number))

    def has_ended(seconds: float | None) -> bool:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode is not None

    monitor = threading.Thread(target=collector.sample, args=(folder, variables, has_ended), daemon=True)
    monitor.start()
    has_ended(None)
    # A reading may hang in the driver.
    monitor.join(samples.VERDICT_SECONDS)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_code = process.returncode
    if exit_code < 0:
        exit_code = 128 - exit_code
    _note_end(folder, exit_code)
    _keep_and_print_verdict(folder, str(job))
    return exit_code


def sample_job_here(folder: Path, name: str, has_ended: Callable[[], bool]) -> None:
    """Sample a job on this machine, called `name`, until it has ended, and print the verdict.

    Args:
        folder: the folder for the samples, in that of the job.
        has_ended: a function that says whether the job has ended.
    """
    _leave_signals_to_the_ranks()
    job = folder.parent

    def ends_within(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not has_ended():
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True

    collector.sample(folder, {job_folder.VARIABLE: str(job)}, ends_within)
    ended_badly = bool(job_folder.notes(job, "started", "failed", "lost"))
    _note_end(folder, exit_code=int(ended_badly))
    print_line("")  # a script that was killed may have left a progress bar without a line end
    _keep_and_print_verdict(folder, name)


def sample_slurm_job(folder: Path, job: str | None, most_idle_seconds: float = 0) -> None:
    """Sample this node until the job script closes the input; the first of its nodes prints the verdict.

    A rank that outlives SIGTERM is killed by Slurm, and so is the job script, before it can print its last
    lines. So the verdict is printed some seconds after the signal, if the job has not ended by then.

    Args:
        folder: the folder for the samples.
        job: the folder of the job; None outside of one.
        most_idle_seconds: a rank that has done nothing for so long is ended; 0: none is.

    Raises:
        UserError: outside of a job of Slurm.
    """
    _leave_signals_to_the_ranks()
    if not job or not os.environ.keys() >= OF_A_STEP:
        raise UserError("--sample is for jobs of Slurm: on this machine, give a command after --.")
    name = f"job {os.environ['SLURM_JOB_ID']}"
    prints_verdict = os.environ["SLURM_PROCID"] == "0"
    asked_to_end: list[float] = []
    printed_at = -math.inf
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.append(time.monotonic()))
    # The job script has blocked it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    variables = {variable: os.environ[variable] for variable in ("SLURM_JOB_ID", "SLURMD_NODENAME")}
    # Another practice cluster may have a job with that number.
    variables[job_folder.VARIABLE] = job

    def input_ends_within(seconds: float) -> bool:
        nonlocal printed_at
        if prints_verdict and asked_to_end and time.monotonic() - asked_to_end[0] >= PATIENCE_SECONDS:
            asked_to_end.clear()
            _keep_and_print_verdict(folder, name, outlived_sigterm=True)
            printed_at = time.monotonic()
        readable, _, _ = select.select([0], [], [], seconds)
        return bool(readable) and not os.read(0, 65536)

    collector.sample(folder, variables, input_ends_within, most_idle_seconds=most_idle_seconds)
    if prints_verdict and time.monotonic() - printed_at > NEXT_VERDICT_SECONDS:
        _keep_and_print_verdict(folder, name)


def _leave_signals_to_the_ranks() -> None:
    for number in SIGNALS_FOR_THE_RANKS:
        signal.signal(number, signal.SIG_IGN)


def _note_end(folder: Path, exit_code: int) -> None:
    """Note the exit code of the job, or 1 for any other than 0, as scripts/job_env.sh does."""
    # The disk may be full.
    with suppress(OSError):
        (folder / samples.ENDED).write_text(f"{exit_code}\n")


def _keep_and_print_verdict(folder: Path, name: str, outlived_sigterm: bool = False) -> None:
    """Save the verdict on the job called `name`, and print it, or why there is none.

    If the job has outlived SIGTERM, it begins with the ranks that still run.
    """
    lines = _verdict_lines(folder, name, outlived_sigterm)
    text = "\n".join(log_words.line(log_words.WATCH, line) for line in lines)
    with suppress(OSError):
        (folder / samples.TOLD).write_text(text, encoding="utf-8")
    print_line(text)


def _verdict_lines(folder: Path, name: str, outlived_sigterm: bool) -> list[str]:
    # Only now, as they load pandas: a monitor shares the memory of the job.
    from manygpus.monitor import verdict_file, wording
    from manygpus.monitor.verdict import judge

    try:
        verdict = judge(folder)
        # The disk may be full.
        with suppress(OSError):
            verdict_file.keep(folder, verdict)
        lines = wording.verdict_lines(verdict, name)
        last_ranks = wording.last_ranks_words(verdict)
    except UserError as error:
        return [f"not sampled: {error}"]
    except Exception as error:  # our fault must not become the job's
        return [f"no verdict: {type(error).__name__}: {first_line(error)}"]
    if outlived_sigterm and last_ranks:
        still_ran = f"{last_ranks} still ran: a process that ignores the signal, or hangs, is killed soon"
        lines.insert(0, f"{PATIENCE_SECONDS} s after SIGTERM {still_ran}")
    return lines
