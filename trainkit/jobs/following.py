"""The state of a submitted job, and why it failed.

It is read from Slurm (`scontrol show job`, which needs no accounting) and from the outcome that the job keeps
in its folder at its end (in_job.py); for local processes, from the ranks' notes there, and from their logs
(why.py). submitit's own result files are not used (training.py), nor its answer to whether a job is done: for
that it asks `sacct`, which many clusters do not have.
"""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from trainkit import job_folder
from trainkit.errors import UserError, tell
from trainkit.jobs import slurm
from trainkit.jobs.slurm import FAILED, QUEUED
from trainkit.jobs.why import Evidence
from trainkit.record import samples

VERDICT_SECONDS = 15  # for the sampler to end by itself
NEVER_MET = "never met"  # what a verdict says of ranks that trained each by itself
PEERS_SECONDS = 2  # for the other ranks to end by themselves after one failed
OUTCOME_SECONDS = 60  # until a shared file system shows the outcome of a job that has ended
MOST_OF_A_LOG = 2**24  # bytes that are read
ASK_SECONDS = 15  # between questions to Slurm's controller, which answers everybody who waits for a job
PATIENCE_SECONDS = 300  # while Slurm does not answer: its daemon may be restarting

# The last words of a job script and of a Python program; the first pattern found counts.
LAST_WORDS = (r"error.*: .*", r"(?:\w+\.)*\w+(?:Error|Exception): .*", r"(?:srun|slurmstepd): error: .*")


class State(NamedTuple):
    """The state of a job.

    `name` is queued, running, done, failed, or unknown while Slurm does not answer. `detail` is
    the reason for waiting, the last line of progress, where the results are, or the error.
    """

    name: str
    detail: str


@dataclass
class Handle:
    """A submitted job with `tasks` processes; a `SlurmHandle` or a `LocalHandle`, which have `cancel`, too.

    `log` has the output of rank 0 and of the job script; the other ranks' logs and submitit's files
    are next to it. `folder` has the checkpoints and the ranks' notes, and `results` will have the CSV; None
    for a plain script, most of which write none.
    """

    job_id: str
    tasks: int
    log: Path
    folder: Path
    results: Path | None
    poll_seconds: ClassVar[float] = 2
    stop_command: ClassVar[str] = "scancel"

    def state(self) -> State:
        """Return the job's current state, without waiting for its end.

        Raises:
            UserError: if Slurm has not answered for `PATIENCE_SECONDS`.
        """
        return self._look()

    def how_to_follow(self) -> str:
        """Return the commands that show the job and stop it, one per line."""
        lines = [f"output   tail -n +1 -F {shlex.quote(str(self.log))}"]
        if self.tasks > 1:
            lines.append(f"ranks    ls {shlex.quote(str(self.log.parent))}/{self.job_id}_*_log.out")
        if self.results:
            lines.append(f"results  ls {shlex.quote(str(self.results))}")
        return "\n".join([*lines, f"stop     {self.stop_command} {self.job_id}"])

    def verdict(self) -> list[str]:
        """Return what the job's sampler wrote at its end (trainkit.monitor.cli), if there was one."""
        return job_folder.read(self.folder / samples.FOLDER / samples.TOLD).splitlines()

    def _progress(self) -> str:
        ours = not (self.folder / job_folder.PLAIN).exists()
        return self._log_line("epoch ") or ("no epoch finished yet" if ours else f"see {self.log}")

    def _log_line(self, beginning: str) -> str | None:
        lines = [line for line in _lines(self.log) if line.startswith(beginning)]
        return lines[-1] if lines else None

    def _last_words(self) -> str | None:
        """Return the error that the logs end with, if there is no better reason."""
        lines = self._all_lines()
        return next((line for words in LAST_WORDS for line in lines if re.match(words, line)), None)

    def _all_lines(self) -> list[str]:
        logs = sorted({self.log, *self.log.parent.glob("*_log.out")})
        return [line for log in logs for line in _lines(log)]


@dataclass
class SlurmHandle(Handle):
    """A job of Slurm.

    `facts` are what Slurm said of it at last, when its folder was as in `seen`: whether the job has begun,
    and whether it has left its outcome.
    """

    answered_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    facts: dict[str, str] = field(default_factory=dict)
    asked_at: float = -math.inf
    seen: tuple[bool, bool] | None = None

    def _look(self) -> State:
        facts = self._ask()
        state, reason = facts["JobState"], facts.get("Reason", "")
        if state == "UNKNOWN":
            if time.monotonic() - self.answered_at > PATIENCE_SECONDS:
                later = f"the job may well go on, so look again later, with squeue --jobs={self.job_id}"
                raise UserError(f"Slurm does not answer ({reason}): {later}")
            return State("unknown", reason)
        self.answered_at = time.monotonic()
        if reason == "launch_failed_requeued_held":
            remedy = f"a node could not start it: scontrol release {self.job_id} tries again, scancel ends it"
            return State("failed", remedy)
        if state in QUEUED:
            reason = "no reason yet" if reason == "None" else reason
            restarts = facts.get("Restarts", "0")
            return State("queued", reason if restarts == "0" else f"{reason}, restart {restarts}")
        outcome, plain = job_folder.read_outcome(self.folder), (self.folder / job_folder.PLAIN).exists()
        if outcome and outcome.well and self._is_judged_by(outcome, state, plain):
            state = "COMPLETED"
        if state == "COMPLETED":
            # It may be another job with its number that has ended.
            if outcome is None and (plain or not self.folder.exists()):
                self.ended_at = self.ended_at or time.monotonic()
                late = time.monotonic() - self.ended_at > OUTCOME_SECONDS
                detail = f"it has ended, but {self.folder} does not say so"
                return State("failed" if late else "running", detail)
            return State("done", self._log_line("results: ") or f"see {self.log}")
        if state in FAILED:
            reasons = outcome.why[:1] if outcome else []
            failure = "; ".join(filter(None, [*reasons, FAILED[state]])) or self._last_words()
            return State("failed", failure or f"Slurm gives the reason {reason or state}; see {self.log}")
        return State("running", self._progress())

    def _ask(self) -> dict[str, str]:
        """Return what Slurm says of the job, some seconds old at most.

        It is asked at once when the job has begun, and from when it has left its outcome until Slurm knows
        that it has ended, or gone back to the queue.
        """
        seen = (self.folder.exists(), (self.folder / job_folder.OUTCOME).exists())
        about_to_end = seen[1] and self.facts.get("JobState") not in QUEUED
        recent = time.monotonic() - self.asked_at < ASK_SECONDS
        if recent and seen == self.seen and not about_to_end:
            return self.facts
        self.facts, self.asked_at, self.seen = slurm.job_facts(self.job_id), time.monotonic(), seen
        return self.facts

    @staticmethod
    def _is_judged_by(outcome: job_folder.Outcome, state: str, plain: bool) -> bool:
        """Return whether a job in this state of Slurm is done if its outcome says so.

        That is so for a job that Slurm forgot, and for one that was preempted: if it came back and ended
        well, Slurm before 26.05 calls it PREEMPTED all the same (SchedMD's ticket 25682). A plain script that
        did not come back may only have left with 0 when asked to end.
        """
        return state == "GONE" or (state == "PREEMPTED" and (outcome.restart > 0 or not plain))

    def cancel(self) -> None:
        """Cancel the job, unless it has ended."""
        slurm.ask("scancel", self.job_id)

    def how_to_follow(self) -> str:
        return f"state    squeue --jobs={self.job_id}\n{super().how_to_follow()}"


@dataclass
class LocalHandle(Handle):
    """Processes on this machine; the job's number is that of the process that controls them.

    `ended` returns whether that process has. /proc would not show it for a child that has only just started.
    `sampler` then has some seconds for its verdict.
    """

    ended: Callable[[], bool]
    sampler: subprocess.Popen | None = None
    failed_at: float | None = None
    seen: int = 0  # the most ranks at any time
    poll_seconds: ClassVar[float] = 0.5
    stop_command: ClassVar[str] = "kill"

    def _look(self) -> State:
        if not self.ended():
            self._end_peers()
            return State("running", self._progress())
        if self.sampler:
            with suppress(subprocess.TimeoutExpired):  # it may hang in the driver, or on a disk
                self.sampler.wait(VERDICT_SECONDS)
            self.sampler.kill()
        checkpoints = job_folder.stopped(self.folder)
        if checkpoints is not None:
            given = f"--checkpoint-dir {shlex.quote(checkpoints)}"
            if (self.folder / job_folder.PLAIN).exists():
                given = f"copy {checkpoints or self.folder / 'checkpoints'} to where another start looks"
            return State("failed", f"it was stopped; to go on: {given}")
        if len(job_folder.notes(self.folder, "finished")) == self.tasks:
            return State("done", self._log_line("results: ") or f"see {self.log}")
        found = Evidence(self.folder, self._all_lines(), log=self.log).reasons()
        reasons = (*(reason.text for reason in found), self._last_words())
        silent = "" if any(self.folder.glob("rank-*")) else ": no rank left a note; does it need --plain?"
        return State("failed", reasons[0] or f"see {self.log.parent}{silent}")

    def _end_peers(self) -> None:
        """End the other ranks, as srun --kill-on-bad-exit does: they would wait for the one that failed."""
        import psutil

        with suppress(psutil.Error):
            ranks = psutil.Process(int(self.job_id)).children()
            started, failed = (job_folder.notes(self.folder, state) for state in ("started", "failed"))
            self.seen = max(self.seen, len(ranks), len(started))
            if not failed and len(ranks) >= self.seen:
                return
            self.failed_at = self.failed_at or time.monotonic()
            if time.monotonic() - self.failed_at > PEERS_SECONDS:
                for rank in ranks:
                    rank.kill()

    def cancel(self) -> None:
        """Cancel the job, unless it has ended."""
        if not self.ended():
            os.kill(int(self.job_id), signal.SIGTERM)


def follow(handle: Handle) -> int:
    """Show the job's state until it has ended, and return 0 if it went well, else 1.

    Each change is printed on a line.

    Raises:
        UserError: as `Handle.state`.
        KeyboardInterrupt: on Ctrl-C. It stops local processes; a Slurm job goes on.
    """
    shown = None
    try:
        while (state := handle.state()).name not in ("done", "failed"):
            if state != shown:
                tell(f"{state.name}: {state.detail}")
            shown = state
            time.sleep(handle.poll_seconds)
    except KeyboardInterrupt:
        if isinstance(handle, LocalHandle):
            handle.cancel()
        else:
            tell(f"\njob {handle.job_id} goes on:\n{handle.how_to_follow()}", sys.stderr)
        raise
    for line in handle.verdict():
        tell(line)
    if state.name == "failed":
        tell(f"job {handle.job_id} failed: {state.detail}", sys.stderr)
        return 1
    tell(f"done: {state.detail}")
    return 0


def _lines(log: Path) -> list[str]:
    """Return the last lines of a log, which may be long."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MOST_OF_A_LOG))
        return file.read(MOST_OF_A_LOG).decode(errors="replace").splitlines()
