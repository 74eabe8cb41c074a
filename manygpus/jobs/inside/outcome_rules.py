"""How a job ends, decided from what Slurm says of it, the notes of its ranks, its exit code and its log.

It is asked at the end of the job script (`finish` in scripts/job_env.sh). It needs no packages.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from manygpus import job_folder, log_words
from manygpus.job_folder import Outcome
from manygpus.jobs import slurm
from manygpus.jobs.inside import failure_reason
from manygpus.jobs.inside.failure_reason import Evidence, Reason
from manygpus.jobs.inside.resume_point import ResumePoint
from manygpus.monitor import samples

SOON_SECONDS = 300  # a job that fails in its first five minutes might do so again and again
# What a start needs to be worth it: to begin, and to save before the time limit.
WORTH_A_START_SECONDS = 180


@dataclass(frozen=True)
class SlurmFacts:
    """What Slurm says of a job that is about to end.

    Attributes:
        at_time_limit: whether it has reached its time limit.
        preempted: whether it was told to leave for a job of higher priority, in this start.
        restarts: how often it has come back from the queue; None if that is unknown.
        seconds_left: until its time limit; None if it has none, or that is unknown.
        nodes: how many it has, without those that have failed; None if that is unknown.
    """

    at_time_limit: bool = False
    preempted: bool = False
    restarts: int | None = None
    seconds_left: int | None = None
    nodes: int | None = None

    @classmethod
    def parse(cls, shown: str) -> "SlurmFacts":
        """Return the facts in an answer of `scontrol --oneliner show job`; "" if it gave none."""
        fields = slurm.fields(shown)
        restarts = fields.get("Restarts", "")
        limit, ran = (slurm.seconds(fields.get(name, "")) for name in ("TimeLimit", "RunTime"))
        return cls(
            at_time_limit=fields.get("Reason") == "TimeLimit",
            preempted=fields.get("PreemptTime", "None")[:1].isdigit(),
            restarts=int(restarts) if restarts.isdecimal() else None,
            seconds_left=None if limit is None or ran is None else limit - ran,
            nodes=slurm.number_of_nodes(fields),
        )


@dataclass(frozen=True)
class JobEnd:
    """What the job script itself knows at its end.

    Attributes:
        code: its exit code so far.
        from_outside: whether it was sent SIGTERM or SIGHUP. scancel and the time limit send it to the job
            script; preemption sends it to the ranks only.
        seconds: the seconds since its start.
        restart: the number of the start; 0 for the first.
        refusal: why Slurm has refused to put the job back into the queue; "" if it did not refuse; None if
            it was not asked.
        most_restarts: how often a job that has saved may go back, on this site.
        begun: whether it has come so far that its ranks could start. Else the notes in its folder are of an
            earlier start.
        failure: the error by which the job script itself has ended; "" for any other end.
        resumes_unsaved: whether its script resumes without a note that it has saved (--when-requeued).
        would_start_anew: whether nothing is there that the words of --when-requeued name, or it has none.
        restarts_in_job: how often it has started again in its nodes since it came from the queue.
        most_restarts_in_job: how often it may, on this site.
        resume_point: what it would resume from; None if nothing is known.
        nodes: how many its ranks need.
    """

    code: int
    from_outside: bool = False
    seconds: int = 0
    restart: int = 0
    refusal: str | None = None
    most_restarts: int = 50
    begun: bool = True
    failure: str = ""
    resumes_unsaved: bool = False
    would_start_anew: bool = False
    restarts_in_job: int = 0
    most_restarts_in_job: int = 0
    resume_point: ResumePoint | None = None
    nodes: int = 1

    @property
    def requeued(self) -> bool:
        """Return whether the job has gone back to the queue."""
        return self.refusal == ""

    @property
    def was_the_last(self) -> bool:
        """Return whether the job has come back as often as it may on this site."""
        return self.restart >= self.most_restarts


def may_go_back(slurm_facts: SlurmFacts, folder: Path, job_end: JobEnd) -> bool:
    """Return whether a job with this folder may go back to the queue."""
    return not job_end.was_the_last and _has_reason_to_go_back(slurm_facts, folder, job_end)


def _has_reason_to_go_back(slurm_facts: SlurmFacts, folder: Path, job_end: JobEnd) -> bool:
    """Return whether a job that can resume was stopped, rather than ended by its user or by a fault.

    Where a rank fails, srun ends the others, and these may save. That is no reason to come back soon after
    the start, since such a job would do so without end. A script that resumes without a note that it has
    saved comes back only where Slurm has ended it: any other end may be a fault of its own. If it would start
    anew, it would reach its time limit again.
    """
    has_saved = job_folder.stopped(folder) is not None
    if not has_saved and not (job_end.resumes_unsaved and job_end.code):
        return False
    if slurm_facts.at_time_limit:
        return has_saved or not job_end.would_start_anew
    if job_end.from_outside:
        return False
    if not has_saved:
        return slurm_facts.preempted
    return job_end.code == 0 or job_end.seconds >= SOON_SECONDS or slurm_facts.preempted


def may_start_again(slurm_facts: SlurmFacts, job_end: JobEnd, reason: Reason) -> bool:
    """Return whether a job that has failed is to start again at once, in the nodes that it has.

    Only a failure that another try may do without is a reason for that, and only if the job does not fail so
    again and again at the same step: it has trained for long, or saved since it began; once it has started
    again, only if it has saved since.

    Args:
        slurm_facts: what Slurm says of it.
        job_end: what the job script knows of its end.
        reason: the first reason of its failure.
    """
    point = job_end.resume_point
    if not reason.may_pass or point is None or job_end.restarts_in_job >= job_end.most_restarts_in_job:
        return False
    if job_end.from_outside or job_end.requeued or slurm_facts.at_time_limit or slurm_facts.preempted:
        return False
    if slurm_facts.nodes is not None and slurm_facts.nodes < job_end.nodes:
        return False
    if slurm_facts.seconds_left is not None and slurm_facts.seconds_left < WORTH_A_START_SECONDS:
        return False
    return point.is_new or (job_end.restarts_in_job == 0 and job_end.seconds >= SOON_SECONDS)


class Decision(NamedTuple):
    """What the rules say of a start.

    Attributes:
        exit_code: its exit code.
        reasons: why it failed.
        log_lines: the last lines of its log.
        starts_again: whether the job starts again in its nodes.
    """

    exit_code: int
    reasons: list[Reason]
    log_lines: list[str]
    starts_again: bool = False


def end(slurm_facts: SlurmFacts, folder: Path, job_end: JobEnd, evidence: Evidence) -> Outcome:
    """Return how this start of a job has ended, and what its log is to say of it.

    Args:
        slurm_facts: what Slurm says of the job.
        folder: the job's folder.
        job_end: what the job script knows of its end.
        evidence: what the ranks have left, and what their launcher has printed.
    """
    if job_end.code == 0 and evidence.node_failed:  # Slurm itself puts the job back into the queue
        job_end = replace(job_end, code=1, from_outside=True)
    saved = job_folder.stopped(folder)
    if saved == "":
        saved = str(folder / job_folder.CHECKPOINTS)
    decision = _decide(slurm_facts, folder, job_end, evidence, saved)
    first = decision.reasons[0] if decision.reasons else Reason("")
    return Outcome(
        restart=job_end.restart,
        # srun reports the highest, which is 143 where it had to end others.
        exit_code=first.exit_code or decision.exit_code,
        why=[reason.text for reason in decision.reasons],
        failed_rank=first.rank,
        saved=saved,
        requeued=job_end.requeued,
        seconds=job_end.seconds,
        said=decision.log_lines,
        starts_again=decision.starts_again,
    )


def _decide(
    slurm_facts: SlurmFacts, folder: Path, job_end: JobEnd, evidence: Evidence, saved: str | None
) -> Decision:
    again = _how_to_resume(folder, saved)
    preempted = _was_only_preempted(slurm_facts, folder)
    if job_end.failure:  # its log has it already
        log_lines = [f"correct it, and {again}"] if saved else []
        return Decision(job_end.code or 1, [Reason(job_end.failure)], log_lines)

    if job_end.refusal:
        by_hand = _how_to_resume(folder, saved, refused=True)
        refused = Reason(f"this job is not requeued ({job_end.refusal}): {by_hand}")
        return Decision(job_end.code or 1, [refused], [f"error: {refused.text}"])

    stays_as_the_last = (
        job_end.refusal is None
        and job_end.was_the_last
        and _has_reason_to_go_back(slurm_facts, folder, job_end)
    )
    code = job_end.code
    if stays_as_the_last:
        code = code or 1  # its training has not come to its end

    if stays_as_the_last and not preempted:
        returns = f"it has come back {job_end.restart} times, which is the limit here (SITE_MOST_RESTARTS)"
        stays = Reason(f"{returns}: {again}")
        failed = evidence.reasons() if job_end.code and not job_end.from_outside else []
        if failed:
            return Decision(code, failed, [*failure_reason.sentences(failed), stays.text])
        return Decision(code, [stays], failure_reason.sentences([stays]))

    if job_end.from_outside and not job_end.requeued:
        hang = _hang(folder) if slurm_facts.at_time_limit else ""
        reasons = [Reason(hang)] if hang else []
        log_lines = failure_reason.sentences(reasons) or [
            "ended from outside: by scancel, scontrol requeue, preemption, the time limit or a failed node"
        ]
        if job_end.resumes_unsaved and job_end.would_start_anew and slurm_facts.at_time_limit:
            log_lines.append(
                "it does not come back: it has nothing to resume from (--when-requeued), and would reach its "
                "time limit again"
            )
        elif saved or _has_checkpoints(folder):
            log_lines.append(f"if it does not come back by itself, {again}")
        return Decision(code, reasons, log_lines)

    if code and preempted and not job_end.requeued:
        # Newer Slurm (seen: 24.11, 26.05) brings it back, whatever its exit code; 22.05 does not.
        left = "a job of higher priority took its place (preemption)"
        reason = Reason(f"{left}: if squeue shows that it does not come back, {again}")
        return Decision(code, [reason], failure_reason.sentences([reason]))

    if code == 0:
        return Decision(0, [], [])

    ended_by_slurm = job_end.requeued and (slurm_facts.at_time_limit or preempted)  # its ranks died of that
    reasons = evidence.reasons() if job_end.begun and not ended_by_slurm else []
    log_lines = failure_reason.sentences(reasons)
    starts_again = (
        bool(reasons) and not evidence.memory_ran_out and may_start_again(slurm_facts, job_end, reasons[0])
    )
    if starts_again:
        log_lines.append(_how_it_starts_again(job_end))
    else:
        log_lines += _after_a_failure(folder, job_end, saved)
    return Decision(code, reasons, log_lines, starts_again)


def _how_it_starts_again(job_end: JobEnd) -> str:
    count = f"{job_end.restarts_in_job + 1} of {job_end.most_restarts_in_job}"
    text = f"it starts again in its nodes, {job_end.resume_point.text} (SITE_RESTARTS_IN_JOB: {count})"
    return log_words.line(log_words.AGAIN, text)


def _after_a_failure(folder: Path, job_end: JobEnd, saved: str | None) -> list[str]:
    """Return how to resume from the checkpoints of a job that has failed, if there are any."""
    again = _how_to_resume(folder, saved)
    if job_end.requeued:
        return []
    if saved:
        return [f"it failed soon after its start, so it does not come back: correct it, and {again}"]
    if _has_checkpoints(folder):
        return [f"it has checkpoints: to resume from them, {again}"]
    return []


def reason(folder: Path, outcome: Outcome | None, state_in_slurm: str) -> str:
    """Return why a job has failed: by its outcome, by its monitor, or by its state in Slurm; "" if unknown.

    A job script whose ranks outlive SIGTERM is killed at the time limit, before it can leave an outcome.
    """
    by_slurm = slurm.FAILED.get(state_in_slurm, "")
    if outcome and outcome.why:
        if state_in_slurm == slurm.OUT_OF_MEMORY:  # a rank that was killed can only guess
            return f"{outcome.why[0]}; {by_slurm}"
        return outcome.why[0]
    if state_in_slurm == slurm.TIMEOUT:
        return _hang(folder) or by_slurm
    return by_slurm


def _hang(folder: Path) -> str:
    """Return why more time would not have helped a job at its limit; "" if its monitor saw no hang.

    Seen: a script that took LOCAL_RANK for its rank waited until the limit, and was told to ask for more.
    """
    sentence = samples.hang(folder / samples.FOLDER)
    return f"it hung until its time limit: {sentence}" if sentence else ""


def has_nothing_left_to_do(slurm_facts: SlurmFacts, folder: Path, job_end: JobEnd) -> bool:
    """Return whether a job that ended well is to do nothing more, should Slurm start it again.

    Slurm does so where it was preempted and ended by itself in its grace time (from 24.05 on), or had come
    back before (seen: 24.11; SchedMD's ticket 25682). The training would be made twice. A plain script that
    is told to leave may do so with 0, and then has to come back.
    """
    if not (folder / job_folder.PLAIN).exists():
        return True
    return job_end.restart > 0 and not slurm_facts.preempted


def _how_to_resume(folder: Path, saved: str | None, refused: bool = False) -> str:
    """Return how to resume by hand; `refused` if Slurm does not start this job again."""
    own_checkpoints = str(folder / job_folder.CHECKPOINTS)
    if saved is None and _has_checkpoints(folder):
        saved = own_checkpoints
    if saved is None:
        return "submit again"
    if not (folder / job_folder.PLAIN).exists():
        return f"submit again with --checkpoint-dir {saved}"
    if saved != own_checkpoints:  # a new job finds it, too
        return f"submit again (saved: {saved})"
    if not _has_checkpoints(folder):  # it saves elsewhere
        return "submit again"
    by_a_new_job = f"submit a script that loads from {saved} (Checkpointer: folder=...)"
    if refused:
        return by_a_new_job
    script = job_folder.read_script(folder)
    number = script.number_in_slurm(folder.name) if script else folder.name
    # Slurm forgets a job after MinJobAge, by default five minutes.
    return f"run scontrol requeue {number} within minutes, which resumes it in its folder, or {by_a_new_job}"


def _has_checkpoints(folder: Path) -> bool:
    """Return whether there is anything but a lock in the job's folder of checkpoints."""
    return any(not path.name.startswith(".") for path in (folder / job_folder.CHECKPOINTS).glob("*"))


def _was_only_preempted(slurm_facts: SlurmFacts, folder: Path) -> bool:
    """Return whether preemption is why it failed: no rank had a reason of its own."""
    return slurm_facts.preempted and not job_folder.first_failed(folder)
