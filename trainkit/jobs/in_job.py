"""What a job script asks at its end: why the job failed, its exit code, whether it goes back to the queue.

slurm/job_env.sh, with the job's log as the input, runs

    python -m trainkit.jobs.in_job back --code=1 ...   which prints yes or no: whether it may go back
    python -m trainkit.jobs.in_job end --code=1 ...    which prints the exit code, then the job's last lines

and `end` also keeps the outcome in the job's folder (`job_folder.Outcome`). It needs no packages.
"""

import argparse
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from trainkit import job_folder
from trainkit.errors import tell
from trainkit.job_folder import Outcome
from trainkit.jobs import slurm, why
from trainkit.jobs.why import Evidence, Reason

BEGINNING = b"job     "  # the first line that each start of a job writes to its log
SOON_SECONDS = 300  # a job that fails in its first five minutes might do so again and again


@dataclass(frozen=True)
class SlurmFacts:
    """What Slurm says of a job that is about to end.

    Attributes:
        at_time_limit: whether it has reached its time limit.
        preempted: whether it was told to leave for a job of higher priority, in this start.
    """

    at_time_limit: bool = False
    preempted: bool = False

    @classmethod
    def parse(cls, shown: str) -> "SlurmFacts":
        """Return the facts in an answer of `scontrol --oneliner show job`; "" if it gave none."""
        fields = slurm.fields(shown)
        return cls(
            at_time_limit=fields.get("Reason") == "TimeLimit",
            preempted=fields.get("PreemptTime", "None")[:1].isdigit(),
        )


@dataclass(frozen=True)
class Ending:
    """What the job script itself knows at its end.

    Attributes:
        code: its exit code so far.
        from_outside: whether it was sent SIGTERM or SIGHUP. scancel and the time limit send it to the job
            script; preemption sends it to the ranks only.
        seconds: since its start.
        restart: which start it is; 0 for the first.
        refusal: why Slurm has refused to put the job back into the queue; "" if it did not refuse; None if
            it was not asked.
        most_restarts: how often a job that has saved may go back, on this site.
    """

    code: int
    from_outside: bool = False
    seconds: int = 0
    restart: int = 0
    refusal: str | None = None
    most_restarts: int = 50

    @property
    def requeued(self) -> bool:
        """Return whether the job has gone back to the queue."""
        return self.refusal == ""

    @property
    def was_the_last(self) -> bool:
        """Return whether the job has come back as often as it may on this site."""
        return self.restart >= self.most_restarts


def may_go_back(facts: SlurmFacts, ending: Ending) -> bool:
    """Return whether a job that has saved may go back to the queue."""
    return not ending.was_the_last and _has_reason_to_go_back(facts, ending)


def _has_reason_to_go_back(facts: SlurmFacts, ending: Ending) -> bool:
    """Return whether a job that has saved was stopped, rather than ended by its user or by a fault.

    Where a rank fails, srun ends the others, and these may save. That is no reason to come back soon after
    the start, since such a job would do so without end.
    """
    if facts.at_time_limit:
        return True
    if ending.from_outside:
        return False
    return ending.code == 0 or ending.seconds >= SOON_SECONDS or facts.preempted


def end(facts: SlurmFacts, folder: Path, ending: Ending, evidence: Evidence) -> Outcome:
    """Return how this start of a job has ended, and what its log is to say of it.

    Args:
        facts: by Slurm.
        folder: the job's own.
        ending: by the job script.
        evidence: by the ranks and by what their launcher has printed.
    """
    if ending.code == 0 and evidence.node_failed:  # Slurm itself puts the job back into the queue
        ending = replace(ending, code=1, from_outside=True)
    code = ending.code
    saved = job_folder.stopped(folder)
    if saved == "":
        saved = str(folder / job_folder.CHECKPOINTS)
    again = _how_to_go_on(folder, saved)
    preempted = _was_only_preempted(facts, folder)
    too_often = (
        saved is not None
        and ending.refusal is None
        and ending.was_the_last
        and _has_reason_to_go_back(facts, ending)
    )
    if too_often:
        code = code or 1  # its training has not come to its end

    reasons: list[Reason] = []
    said: list[str] = []
    if ending.refusal:
        code = code or 1
        reasons = [Reason(f"this job is not requeued ({ending.refusal}): {again}")]
        said = [f"error: {reasons[0].text}"]
    elif too_often and not preempted:
        returns = f"it has come back {ending.restart} times, the most here (SITE_MOST_RESTARTS)"
        stays = Reason(f"{returns}: {again}")
        failed = evidence.reasons() if ending.code and not ending.from_outside else []
        reasons = failed or [stays]
        said = why.sentences(reasons)
        if failed:
            said.append(stays.text)
    elif ending.from_outside and not ending.requeued:
        said = ["ended from outside: scancel, scontrol requeue, preemption, the time limit or a failed node"]
        if saved:
            said.append(f"if it does not come back by itself, {again}")
    elif code and not ending.requeued and preempted:
        # Newer Slurm (seen: 24.11, 26.05) brings it back, whatever its exit code; 22.05 does not.
        left = "a job of higher priority took its place (preemption)"
        reasons = [Reason(f"{left}: if squeue shows that it does not come back, {again}")]
        said = why.sentences(reasons)
    elif code:
        reasons = evidence.reasons()
        said = why.sentences(reasons)
        if saved and not ending.requeued:
            said.append(f"it failed soon after its start, so it does not come back: correct it, and {again}")

    first = reasons[0] if reasons else Reason("")
    return Outcome(
        restart=ending.restart,
        # srun reports the highest, which is 143 where it had to end others.
        exit_code=first.exit_code or code,
        why=[reason.text for reason in reasons],
        failed_rank=first.rank,
        saved=saved,
        requeued=ending.requeued,
        seconds=ending.seconds,
        ended_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        said=said,
    )


def has_nothing_left_to_do(facts: SlurmFacts, folder: Path, ending: Ending) -> bool:
    """Return whether a job that ended well is to do nothing more, should Slurm start it again.

    Slurm does so where it was preempted and ended by itself in its grace time (from 24.05 on), or had come
    back before (seen: 24.11; SchedMD's ticket 25682). The training would be made twice. A plain script that
    is told to leave may do so with 0, and then has to come back.
    """
    if not (folder / job_folder.PLAIN).exists():
        return True
    return ending.restart > 0 and not facts.preempted


def _how_to_go_on(folder: Path, saved: str | None) -> str:
    if saved is None:
        return "submit again"
    if (folder / job_folder.PLAIN).exists():
        return f"submit again (saved: {saved})"
    return f"submit again with --checkpoint-dir {saved}"


def _was_only_preempted(facts: SlurmFacts, folder: Path) -> bool:
    """Return whether preemption is why it failed: no rank had a reason of its own."""
    return facts.preempted and not job_folder.first_failed(folder)


def of_this_start(log: Iterable[bytes]) -> list[str]:
    """Return the lines of a log that tell how its last start has ended; it may hold earlier ones."""
    lines: list[str] = []
    for line in log:
        if line.startswith(BEGINNING):
            lines.clear()
        text = line.decode(errors="replace").rstrip("\n")
        if why.CLUES.search(text):  # a log may have millions of others
            lines.append(text)
    return lines


def main() -> None:
    """Answer what slurm/job_env.sh asks."""
    options = _parse()
    facts = SlurmFacts.parse(options.facts)
    ending = Ending(
        code=options.code,
        from_outside=options.from_outside,
        seconds=options.seconds,
        restart=options.restart,
        refusal=options.refusal,
        most_restarts=options.most_restarts,
    )
    if options.question == "back":
        tell("yes" if may_go_back(facts, ending) else "no")
        return
    evidence = Evidence(
        options.folder,
        of_this_start(sys.stdin.buffer),
        launcher=options.launcher,
        log=options.log,
        first_start=ending.restart == 0,
    )
    outcome = end(facts, options.folder, ending, evidence)
    if outcome.well and has_nothing_left_to_do(facts, options.folder, ending):
        job_folder.note_end_for_good(options.folder)
    with suppress(OSError):  # a full disk
        job_folder.keep_outcome(options.folder, outcome)
    tell("\n".join([f"code    {outcome.exit_code}", *outcome.said]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("question", choices=("back", "end"))
    add("--facts", required=True, help="what Slurm says of the job, or nothing")
    add("--folder", type=Path, required=True, help="the job's own")
    add("--log", type=Path, required=True, help="the job's")
    add("--launcher", choices=("srun", "torchrun"), required=True)
    add("--code", type=int, required=True, help="the job script's exit code")
    add("--seconds", type=int, required=True, help="since its start")
    add("--restart", type=int, required=True, help="which start this is, from 0 on")
    add("--most-restarts", type=int, required=True, help="SITE_MOST_RESTARTS")
    add("--from-outside", action="store_true", help="it was sent SIGTERM or SIGHUP")
    add("--refusal", help="why Slurm has refused to put it back into the queue; empty if it did not refuse")
    return parser.parse_args()


if __name__ == "__main__":
    main()
