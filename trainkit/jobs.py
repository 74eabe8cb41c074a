"""How a submitted job is doing, and why it failed.

That is read from Slurm (`scontrol show job`, which needs no accounting), from the notes that the
ranks leave in the job's folder (`trainkit.errors.note`) and from their logs. submitit's own result
files are not used: a job that went back to the queue may leave one from before, the error of one
rank hides behind the silence of another, and without `sacct` submitit never learns that a job failed.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import submitit

from trainkit.errors import UserError

POLL_SECONDS = 2
PATIENCE_SECONDS = 300  # with a Slurm that does not answer: its daemon may just be restarted

# States of a job, from the man page of squeue, and of ours: GONE. Every other state is a running job's.
QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
FAILED = {
    "FAILED": "",  # for this one the ranks' notes and logs tell why
    "TIMEOUT": "it reached its time limit: give more --time",
    "CANCELLED": "it was cancelled",
    "OUT_OF_MEMORY": "it needed more memory than it had asked for: export SBATCH_MEM_PER_NODE, e.g. as 16G",
    "NODE_FAIL": "a node of it failed: submit it again",
    "BOOT_FAIL": "a node of it did not boot: submit it again",
    "PREEMPTED": "a job of higher priority took its place: submit it again",
    "DEADLINE": "it could not end before its deadline",
    "GONE": "Slurm does not know this job (it forgets a job some minutes after its end)",
}
# Reasons for which a job would wait for ever, unless an administrator changes the cluster.
NEVER = ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit")
# The last words of a job script and of a Python program; the first pattern that is found counts.
LAST_WORDS = (r"error.*: .*", r"(?:\w+\.)*\w+(?:Error|Exception): .*", r"(?:srun|slurmstepd): error: .*")


class State(NamedTuple):
    """How a job is doing.

    `name` is queued, running, done, failed, or unknown while Slurm does not answer. `detail` is
    the reason for waiting, the last line of progress, where the results are, or the error.
    """

    name: str
    detail: str


class Handle:
    """A submitted job; `SlurmHandle` or `LocalHandle`.

    `log` has the output of rank 0 and of the job script; the other ranks' are beside it. `folder` has
    the checkpoints and the ranks' notes, and `results` will have the CSV.
    """

    def __init__(self, job: submitit.Job, folder: Path, results: Path) -> None:
        self._job = job
        self.job_id, self.log, self.folder, self.results = job.job_id, job.paths.stdout, folder, results

    def state(self) -> State:
        """Ask how the job is doing, without waiting for it."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End the job, if it has not ended."""
        raise NotImplementedError

    def how_to_follow(self) -> str:
        """The commands that show the job and stop it, one per line."""
        output, results = shlex.quote(str(self.log)), shlex.quote(str(self.results))
        return f"output   tail -n +1 -F {output}\nresults  ls {results}"

    def _progress(self) -> str:
        return self._log_line("epoch ") or "no epoch finished yet"

    def _results(self) -> str:
        return self._log_line("results: ") or f"see {self.log}"

    def _log_line(self, beginning: str) -> str | None:
        lines = [line for line in _lines(self.log) if line.startswith(beginning)]
        return lines[-1] if lines else None

    def _all_ranks_finished(self) -> bool:
        return len(self._notes("finished")) == self._job.num_tasks and not self._stopped()

    def _stopped(self) -> bool:
        return (self.folder / "stopped").exists()

    def _told_by_a_rank(self) -> str | None:
        """The words of the rank that failed first."""
        notes = self._notes("failed")
        return notes[0].read_text().strip() if notes else None

    def _notes(self, state: str) -> list[Path]:
        """The ranks' notes, oldest first, without those of an older job that had the same number."""
        submission = self._job.paths.submitted_pickle
        submitted = submission.stat().st_mtime if submission.exists() else 0
        notes = sorted((note.stat().st_mtime, note) for note in self.folder.glob(f"rank-*.{state}"))
        return [note for written, note in notes if written >= submitted]

    def _guessed(self) -> str | None:
        """Why it failed, by its logs, when no rank could tell."""
        # srun ends the peers of a rank that died; those are "Terminated".
        death = r"srun: error: \S+: tasks? ([\d,-]+): (?!Terminated|Exited)(.*)"
        for line in _lines(self.log):
            if found := re.match(death, line):
                return f"rank {found[1]} ended without a word: {found[2]} (by hand, or for want of memory?)"
        silent = sorted(note.stem.removeprefix("rank-") for note in self._notes("started"))
        if silent:
            return f"rank {', '.join(silent)} ended without a word: killed (by hand, or for want of memory?)"
        logs = [line for log in sorted(self.log.parent.glob("*_log.out")) for line in _lines(log)]
        for pattern in LAST_WORDS:
            for line in logs:
                if re.match(pattern, line):
                    return line
        return None


class SlurmHandle(Handle):
    """A job of Slurm."""

    def state(self) -> State:
        facts = _facts(self.job_id)
        state, reason = facts["JobState"], facts.get("Reason", "")
        if state == "UNKNOWN":
            return State("unknown", reason)
        if reason == "launch_failed_requeued_held":
            told = f"a node could not start it: scontrol release {self.job_id} tries again, scancel ends it"
            return State("failed", told)
        if state in QUEUED:
            reason = "no reason yet" if reason == "None" else reason
            restarts = int(facts.get("Restarts", 0))
            return State("queued", f"{reason}, restart {restarts}" if restarts else reason)
        if state == "COMPLETED" or (state == "GONE" and self._all_ranks_finished()):
            return State("done", self._results())
        if state in FAILED:
            failure = self._told_by_a_rank() or FAILED[state] or self._guessed()
            return State("failed", failure or f"{reason}; see {self.log}")
        return State("running", self._progress())

    def cancel(self) -> None:
        _ask("scancel", self.job_id)

    def how_to_follow(self) -> str:
        state, stop = f"state    squeue --jobs={self.job_id}", f"stop     scancel {self.job_id}"
        return f"{state}\n{super().how_to_follow()}\n{stop}"


class LocalHandle(Handle):
    """Processes of this machine; the job's number is that of the process that controls them."""

    def state(self) -> State:
        failure = self._told_by_a_rank()
        if not self._job.done():
            if failure:
                self.cancel()  # as srun --kill-on-bad-exit: its peers would wait for the rank that failed
            return State("running", self._progress())
        if self._all_ranks_finished():
            return State("done", self._results())
        if self._stopped():
            checkpoints = (self.folder / "stopped").read_text().strip()
            return State("failed", f"it was stopped; to go on: --checkpoint-dir {checkpoints}")
        return State("failed", failure or self._guessed() or f"see {self.log}")

    def cancel(self) -> None:
        if not self._job.done():
            os.kill(int(self.job_id), signal.SIGTERM)

    def how_to_follow(self) -> str:
        return f"{super().how_to_follow()}\nstop     kill {self.job_id}"


def follow(handle: Handle) -> int:
    """Show how the job is doing until it has ended; returns 0 if it went well, else 1.

    On a terminal one line is kept up to date; elsewhere every change is a line of its own.

    Raises:
        UserError: if Slurm does not answer for `PATIENCE_SECONDS`.
        KeyboardInterrupt: for Ctrl-C. It stops local processes; a job of Slurm goes on.
    """
    shown, answered = None, time.monotonic()
    try:
        while (state := handle.state()).name not in ("done", "failed"):
            if state.name != "unknown":
                answered = time.monotonic()
            elif time.monotonic() - answered > PATIENCE_SECONDS:
                raise UserError(
                    f"Slurm does not answer ({state.detail}): the job may well go on, so look again later, "
                    f"with squeue --jobs={handle.job_id}"
                )
            if state != shown:
                _show(state, ended=False)
                shown = state
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        if isinstance(handle, LocalHandle):
            handle.cancel()
        else:
            print(f"\njob {handle.job_id} goes on:\n{handle.how_to_follow()}", file=sys.stderr)
        raise
    if state.name == "done":
        _show(state, ended=True)
        return 0
    if sys.stdout.isatty():
        print()
    print(f"job {handle.job_id} failed: {state.detail}", file=sys.stderr)
    return 1


def _show(state: State, ended: bool) -> None:
    text = f"{state.name}: {state.detail}"
    if not sys.stdout.isatty():
        print(text, flush=True)
    elif ended:
        print(f"\r\x1b[K{text}")
    else:  # a line that wraps could not be taken back
        print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def _facts(job_id: str) -> dict[str, str]:
    """What Slurm knows of a job. JobState is UNKNOWN if Slurm does not answer, GONE if it forgot the job."""
    shown = _ask("scontrol", "show", "job", "--oneliner", job_id)
    if shown.returncode == 0:
        return dict(re.findall(r"(\w+)=(\S*)", shown.stdout))
    if "Invalid job id" not in shown.stderr:
        return {"JobState": "UNKNOWN", "Reason": shown.stderr.strip().rpartition("\n")[2]}
    # Accounting remembers longer, where there is any.
    ended = _ask("sacct", f"--jobs={job_id}", "--allocations", "--noheader", "--format=State%20")
    return {"JobState": (ended.stdout.split() or ["GONE"])[0]}


def _ask(*command: str) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines() if log.exists() else []
