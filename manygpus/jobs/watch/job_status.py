"""The state of a submitted job, and why it failed.

It is read from Slurm (`squeue`, which needs no accounting) and from the outcome that the job keeps in its
folder at its end (inside/in_job.py); for local processes, from the ranks' notes there, and from their logs
(inside/failure_reason.py). submitit's own result files are not used (inside/job_task.py), nor its answer to
whether a job is done: for that it asks `sacct`, which many clusters do not have.
"""

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from manygpus import job_folder
from manygpus.errors import UserError, print_line
from manygpus.job_folder import Outcome
from manygpus.jobs import job_log, slurm
from manygpus.jobs.inside import outcome_rules
from manygpus.jobs.inside.failure_reason import Evidence
from manygpus.jobs.site import shared_folders_fix
from manygpus.jobs.slurm import COMPLETED, FAILED, GONE, PREEMPTED, QUEUED, UNKNOWN, JobStatus
from manygpus.monitor import samples

# The other ranks have so long to end by themselves after one has failed.
PEERS_SECONDS = 2
# A shared file system may show the outcome of a job that has ended so much later.
OUTCOME_SECONDS = 60
# Between questions to Slurm's controller, which answers everybody who waits for a job.
ASK_SECONDS = 15
# Slurm may not answer for so long: its daemon may be restarting.
UNANSWERED_SECONDS = 300
# A job that Slurm would never start (slurm.NEVER) is given up after so long. An administrator may be at work.
NEVER_STARTS_SECONDS = 600

# What is said of a job without a log: its node has not seen the folder, or has one of its own by that name.
NO_LOG = "it has left no log in {folder}, so its nodes do not see that folder"


class State(NamedTuple):
    """The state of a job.

    Attributes:
        name: queued, running, done, failed, or unknown while Slurm does not answer.
        detail: what the user is shown: why it waits, the last line of progress, where the results are, or the
            error.
        reason: why it is queued, in Slurm's own word.
    """

    name: str
    detail: str
    reason: str = ""

    @property
    def is_final(self) -> bool:
        """Return whether the job has come to its end."""
        return self.name in ("done", "failed")


@dataclass
class GrowingLog:
    """The last line about an epoch in a log that grows. Each byte of it is read once."""

    log: Path
    last_epoch: str | None = None
    read_bytes: int = 0
    unfinished_line: bytes = b""

    def update(self) -> str | None:
        """Read what is new in the log, and return the last line about an epoch; None if there is none."""
        if not self.log.is_file():
            return self.last_epoch
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            if size < self.read_bytes:
                # Somebody has emptied it.
                self.read_bytes = 0
            start = max(self.read_bytes, size - job_log.MOST_OF_A_LOG_BYTES)
            if start != self.read_bytes or start == 0:
                self.unfinished_line = b""
            file.seek(start)
            new = file.read(size - start)
        self.read_bytes = start + len(new)
        *lines, self.unfinished_line = (self.unfinished_line + new).split(b"\n")
        for line in reversed(lines):
            if line.startswith(b"epoch "):
                self.last_epoch = line.decode(errors="replace")
                break
        return self.last_epoch


@dataclass
class Handle:
    """A submitted job: a `SlurmHandle` or a `LocalHandle`, which have `judge` and `cancel`, too.

    Attributes:
        job_id: its number.
        tasks: how many processes it has.
        log: the output of rank 0 and of the job script. The other ranks' logs and submitit's files are next
            to it.
        folder: the job's folder (manygpus.job_folder).
        results: the path that its CSV will have; None for a plain script, most of which write none.
    """

    job_id: str
    tasks: int
    log: Path
    folder: Path
    results: Path | None
    poll_seconds: ClassVar[float] = 2
    stop_command: ClassVar[str] = "scancel"

    def __post_init__(self) -> None:
        self._growing_log = GrowingLog(self.log)

    def state(self) -> State:
        """Return the job's current state, without waiting for its end.

        Raises:
            UserError: as `states`.
        """
        return states([self])[0]

    def how_to_follow(self) -> str:
        """Return the commands that show the job and stop it, one per line."""
        lines = [f"output   tail -n +1 -F {shlex.quote(str(self.log))}"]
        if self.tasks > 1:
            lines.append(f"ranks    ls {shlex.quote(str(self.log.parent))}/{self.job_id}_*_log.out")
        if self.results:
            lines.append(f"results  ls {shlex.quote(str(self.results))}")
        lines.append(f"stop     {self.stop_command} {self.job_id}")
        return "\n".join(lines)

    def verdict(self) -> list[str]:
        """Return which nodes are slow, and what the job's monitor wrote at its end (slurm/monitor.py)."""
        told = job_folder.read(self.folder / samples.FOLDER / samples.TOLD)
        return [*job_folder.slow_nodes(self.folder), *told.splitlines()]

    @property
    def _is_plain(self) -> bool:
        """Return whether its script does not use the kit."""
        return (self.folder / job_folder.PLAIN).exists()

    def _running(self) -> State:
        progress = self._growing_log.update()
        if progress is None:
            progress = f"see {self.log}" if self._is_plain else "no epoch finished yet"
        return State("running", progress)

    def _done(self) -> State:
        where = [line for line in job_log.last_lines(self.log) if line.startswith("results: ")]
        return State("done", where[-1] if where else f"see {self.log}")


@dataclass
class SlurmHandle(Handle):
    """A job of Slurm, and what Slurm has said of it at last.

    Attributes:
        status: what Slurm has said.
        asked_at: when Slurm was asked, by the monotonic clock, in seconds; so are the other times.
        answered_at: when Slurm answered.
        seen: what was in the job's folder when Slurm was asked.
        ended_at: when Slurm called the job ended, if the job has not left its outcome.
        never_starts_since: since when Slurm has given a reason for which the job would wait forever.
    """

    status: JobStatus = JobStatus(UNKNOWN)
    asked_at: float = -math.inf
    answered_at: float = field(default_factory=time.monotonic)
    seen: "_Seen | None" = None
    ended_at: float | None = None
    never_starts_since: float | None = None

    @property
    def answer_is_old(self) -> bool:
        """Return whether it is time to ask Slurm again."""
        return time.monotonic() - self.asked_at >= ASK_SECONDS

    @property
    def has_news(self) -> bool:
        """Return whether Slurm is to be asked at once.

        That is so when the job has begun, and from when it has left its outcome until Slurm knows that it has
        ended, or gone back to the queue.
        """
        seen = self.look_into_folder()
        about_to_end = seen.outcome and self.status.state not in QUEUED
        return seen != self.seen or about_to_end

    def look_into_folder(self) -> "_Seen":
        """Return what is in the job's folder."""
        return _Seen(
            folder=self.folder.exists(),
            outcome=(self.folder / job_folder.OUTCOME).exists(),
        )

    def take_answer(self, status: JobStatus, seen: "_Seen") -> None:
        """Keep what Slurm has just said of the job, and what was in its folder before."""
        self.status = status
        self.asked_at = time.monotonic()
        self.seen = seen
        if status.state != UNKNOWN:
            self.answered_at = self.asked_at

    def judge(self) -> State:
        """Return the job's state, by Slurm's last answer and the job's folder.

        Raises:
            UserError: if Slurm has not answered for `UNANSWERED_SECONDS`.
        """
        status = self.status
        if status.state == UNKNOWN:
            return self._unanswered()
        outcome = job_folder.read_outcome(self.folder)
        if outcome and outcome.well and self._is_judged_by(outcome):
            return self._done()
        if status.state in QUEUED:
            return self._queued()
        if status.state == COMPLETED:
            return self._completed(outcome)
        if status.state in FAILED:
            return self._failed(outcome)
        return self._running()

    @property
    def left_no_log(self) -> bool:
        """Return whether no log of the job, which has ended, is seen on this machine."""
        return not any(log.exists() for log in job_log.paths(self.log))

    def cancel(self) -> None:
        """Cancel the job, unless it has ended."""
        slurm.ask("scancel", self.job_id)

    def how_to_follow(self) -> str:
        return f"state    squeue --jobs={self.job_id}\n{super().how_to_follow()}"

    def reason(self, seconds: float) -> str:
        """Return why it waits; if Slurm gives no reason so far, it is asked again for so many seconds."""
        until = time.monotonic() + seconds
        state = self.state()
        while state.reason == slurm.NO_REASON and time.monotonic() < until:
            time.sleep(1)
            self.asked_at = -math.inf
            state = self.state()
        return state.reason

    def _unanswered(self) -> State:
        message = self.status.reason
        if time.monotonic() - self.answered_at > UNANSWERED_SECONDS:
            raise UserError(
                f"Slurm does not answer ({message}): the job may still be running, so look again later, with "
                f"squeue --jobs={self.job_id}"
            )
        return State("unknown", message)

    def _queued(self) -> State:
        reason = self.status.reason
        if reason == slurm.LAUNCH_FAILED:
            remedy = f"scontrol release {self.job_id} tries again, scancel ends it"
            return State("failed", f"a node could not start it: {remedy}", reason)
        if slurm.never_starts(reason):
            return self._never_starts()
        self.never_starts_since = None
        detail = "no reason yet" if reason == slurm.NO_REASON else reason
        if self.status.restarts:
            detail += f", restart {self.status.restarts}"
            outcome = job_folder.read_outcome(self.folder)
            detail += f" ({outcome.why[0]})" if outcome and outcome.why else ""
        return State("queued", detail, reason)

    def _never_starts(self) -> State:
        reason = self.status.reason
        remedy = slurm.advice(reason)
        now = time.monotonic()
        if self.never_starts_since is None:
            self.never_starts_since = now
        if now - self.never_starts_since < NEVER_STARTS_SECONDS:
            return State("queued", f"{reason}, so it would never start: {remedy}", reason)
        return State(
            "failed",
            f"Slurm would never start it ({reason}): {remedy}; scancel {self.job_id} removes it",
            reason,
        )

    def _is_judged_by(self, outcome: Outcome) -> bool:
        """Return whether a job that has ended well by its outcome is done, though Slurm says something else.

        - Slurm forgot it.
        - It was preempted: if it came back and ended well, Slurm before 26.05 calls it PREEMPTED all the same
          (SchedMD's ticket 25682).
        - It ended well while it was asked to leave, and Slurm (seen: 24.11) puts it back into the queue all
          the same. It does nothing more when it starts again (scripts/job_env.sh).

        A plain script that did not come back may only have left with 0 when asked to end.
        """
        state = self.status.state
        if state == GONE:
            return True
        if state == PREEMPTED:
            return outcome.restart > 0 or not self._is_plain
        return state in QUEUED and outcome.restart < self.status.restarts and not self._is_plain

    def _completed(self, outcome: Outcome | None) -> State:
        # Without an outcome it may be another job with its number that has ended.
        if outcome is None and (self._is_plain or not self.folder.exists()):
            if self.ended_at is None:
                self.ended_at = time.monotonic()
            late = time.monotonic() - self.ended_at > OUTCOME_SECONDS
            detail = f"it has ended, but {self.folder} has no note of its end"
            if self.left_no_log:
                detail = self._no_log
            return State("failed" if late else "running", detail)
        return self._done()

    @property
    def _no_log(self) -> str:
        return f"{NO_LOG.format(folder=self.log.parent)}: {shared_folders_fix()}"

    def _failed(self, outcome: Outcome | None) -> State:
        state = self.status.state
        detail = outcome_rules.reason(self.folder, outcome, state) or job_log.last_error(
            job_log.read(self.log)
        )
        if not detail and self.left_no_log:
            detail = self._no_log
        elif not detail:
            detail = f"Slurm gives the reason {self.status.reason or state}; see {self.log}"
        return State("failed", detail)


class _Seen(NamedTuple):
    """Whether a job has a folder, which means that it has begun, and whether its outcome is there."""

    folder: bool
    outcome: bool


@dataclass
class LocalHandle(Handle):
    """Processes on this machine; the job's number is that of the process that controls them.

    Attributes:
        has_ended: returns whether that process has ended. /proc would not show it for a child that has only
            just started.
        monitor: the job's monitor, which then has some seconds for its verdict.
        failed_at: the time by which a rank had failed, by the monotonic clock, in seconds.
        most_ranks: the most ranks that there were at any time.
    """

    has_ended: Callable[[], bool]
    monitor: subprocess.Popen | None = None
    failed_at: float | None = None
    most_ranks: int = 0
    poll_seconds: ClassVar[float] = 0.5
    stop_command: ClassVar[str] = "kill"

    def judge(self) -> State:
        """Return the job's state."""
        if not self.has_ended():
            self._end_peers()
            return self._running()
        if self.monitor:
            # It may hang in the driver, or on a disk.
            with suppress(subprocess.TimeoutExpired):
                self.monitor.wait(samples.VERDICT_SECONDS)
            self.monitor.kill()
        checkpoints = job_folder.stopped(self.folder)
        if checkpoints is not None:
            return State("failed", f"it was stopped: to resume it, {self._how_to_resume(checkpoints)}")
        if len(job_folder.notes(self.folder, "finished")) == self.tasks:
            return self._done()
        return State("failed", self._why())

    def cancel(self) -> None:
        """Cancel the job, unless it has ended."""
        if not self.has_ended():
            os.kill(int(self.job_id), signal.SIGTERM)

    def _end_peers(self) -> None:
        """End the other ranks, as srun --kill-on-bad-exit does: they would wait for the one that failed."""
        import psutil

        # The ranks may just have ended.
        with suppress(psutil.Error):
            ranks = psutil.Process(int(self.job_id)).children()
            started = job_folder.notes(self.folder, "started")
            failed = job_folder.notes(self.folder, "failed")
            self.most_ranks = max(self.most_ranks, len(ranks), len(started))
            if not failed and len(ranks) >= self.most_ranks:
                return
            if self.failed_at is None:
                self.failed_at = time.monotonic()
            if time.monotonic() - self.failed_at > PEERS_SECONDS:
                for rank in ranks:
                    # Of those that it has started, only some would end with it.
                    for process in (*rank.children(recursive=True), rank):
                        process.kill()

    def _how_to_resume(self, checkpoints: str) -> str:
        if self._is_plain:
            saved = checkpoints or self.folder / job_folder.CHECKPOINTS
            return f"copy {saved} to where its next start looks"
        return f"submit again with --checkpoint-dir {shlex.quote(checkpoints)}"

    def _why(self) -> str:
        """Return why it failed."""
        logs = job_log.read(self.log)
        reasons = Evidence(self.folder, logs, log=self.log).reasons()
        if reasons:
            return reasons[0].text
        last_words = job_log.last_error(logs)
        if last_words:
            return last_words
        if any(self.folder.glob("rank-*")):
            return f"see {self.log.parent}"
        return f"see {self.log.parent}: no rank left a note; does it need --plain?"


def states(handles: Sequence[Handle]) -> list[State]:
    """Return the current state of each job. Slurm's controller is asked at most once, for all of them.

    It is asked for all jobs when one of its answers is `ASK_SECONDS` old, and in between only for those that
    have just begun or ended.

    Raises:
        UserError: if Slurm has not answered for `UNANSWERED_SECONDS`.
    """
    asked_for = [handle for handle in handles if isinstance(handle, SlurmHandle)]
    if not any(handle.answer_is_old for handle in asked_for):
        asked_for = [handle for handle in asked_for if handle.has_news]
    if asked_for:
        # First the folders: what a job does there after Slurm's answer is news the next time.
        seen_before = [handle.look_into_folder() for handle in asked_for]
        status = slurm.job_status([handle.job_id for handle in asked_for])
        for handle, seen in zip(asked_for, seen_before, strict=True):
            handle.take_answer(status[handle.job_id], seen)
    return [handle.judge() for handle in handles]


def follow(handle: Handle) -> int:
    """Show the job's state until it has ended, and return 0 if it went well, else 1.

    Each change is printed on a line.

    Raises:
        UserError: as `states`.
        KeyboardInterrupt: on Ctrl-C. It stops local processes; a Slurm job continues.
    """
    shown = None
    try:
        state = handle.state()
        while not state.is_final:
            if state != shown:
                print_line(f"{state.name}: {state.detail}")
            shown = state
            time.sleep(handle.poll_seconds)
            state = handle.state()
    except KeyboardInterrupt:
        if isinstance(handle, LocalHandle):
            handle.cancel()
        else:
            print_line(f"\njob {handle.job_id} continues:\n{handle.how_to_follow()}", sys.stderr)
        raise
    for line in handle.verdict():
        print_line(line)
    if state.name == "failed":
        print_line(f"job {handle.job_id} failed: {state.detail}", sys.stderr)
        return 1
    print_line(f"done: {state.detail}")
    return 0
