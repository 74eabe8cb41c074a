"""The jobs of this checkout: what each one runs, its state, how long it ran, and what is to be said of it.

It reads the jobs' folders, and asks Slurm once for the user's queue, and once for the jobs that have not
ended well by their folders.
"""

import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manygpus import job_folder, launchers, log_words, project
from manygpus.errors import REPOSITORY
from manygpus.frozen_code import FrozenCode
from manygpus.job_folder import Outcome, Script
from manygpus.jobs import job_log, local_job, slurm
from manygpus.jobs.inside import outcome_rules
from manygpus.jobs.inside.failure_reason import Evidence
from manygpus.jobs.site import Site
from manygpus.jobs.slurm import JobStatus, time_in_words
from manygpus.monitor import samples

# The longest script with its arguments that a row shows, in characters, and how many of them are its last:
# several jobs often differ in their last arguments only.
MOST_OF_A_SCRIPT = 60
LAST_OF_A_SCRIPT = 25
TITLES = ("job", "name", "script", "state", "time", "restarts", "verdict, or why")
UNKNOWN = "-"


@dataclass(frozen=True)
class JobRow:
    """A job of the list.

    Attributes:
        number: the job's number, as squeue and scancel take it; on this machine without Slurm, that of the
            process that controls its ranks.
        name: the job's name in Slurm.
        script: what it runs; None if it has not kept that, or has not begun.
        state: queued, running, done, stopped (it has saved, and does not come back by itself), failed, or
            unknown, while Slurm does not answer.
        seconds: how long it ran, over all its starts; None if that is not known.
        restarts: how often it has started before, from the queue or again in its nodes.
        note: why it waits, has failed or has started again in its nodes, else which of its nodes are slow,
            or the first finding of the verdict.
        sent_from: of a job that has not begun, the folder in which it was sent, and its job script.
        log: the path of its log; "" if that is not known.
        frozen_in: the folder with the copy of the code that it runs; "" if it runs no copy.
        outcome: how its last start has ended; None if it has left none, as on this machine without Slurm.
        findings: what its verdict has found, the worst first, as monitor/verdict_file.py keeps it.
    """

    number: str
    name: str
    script: Script | None
    state: str
    seconds: float | None = None
    restarts: int = 0
    note: str = ""
    sent_from: tuple[str, ...] = ()
    log: str = ""
    frozen_in: str = ""
    outcome: Outcome | None = None
    findings: Sequence[dict[str, object]] = ()

    def matches(self, word: str) -> bool:
        """Return whether this is the job with that number, or has the word in its name or in what it runs.

        The number of an array stands for all jobs of it.
        """
        texts = [self.name, self.shown_script, *self.sent_from]
        if self.script:
            texts.append(shlex.join([self.script.path, *self.script.arguments]))
        return self.is_numbered(word) or any(word in text for text in texts)

    def is_numbered(self, number: str) -> bool:
        """Return whether the job has this number, or is of the array with it."""
        return job_folder.is_numbered(self.number, number)

    @property
    def shown_script(self) -> str:
        """Return the script with the name of its folder, and the arguments that fit into a row.

        In a sweep it is the name of its run, as the arguments of its runs may begin alike.
        """
        return _script_words(self.script) if self.script else UNKNOWN

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of `TITLES`."""
        duration = UNKNOWN if self.seconds is None else time_in_words(self.seconds)
        name = self.name or UNKNOWN
        return (self.number, name, self.shown_script, self.state, duration, str(self.restarts), self.note)

    def as_json(self) -> dict[str, object]:
        """Return what is known of the job, as schemas/jobs.json describes it; None for what is not."""
        script = self.script
        outcome = self.outcome
        return {
            "job": self.number,
            "name": self.name or None,
            "state": self.state,
            "note": self.note or None,
            "script": script.path if script else None,
            "module": script.module or None if script else None,
            "arguments": script.arguments if script else None,
            "sweep_run": script.run_name or None if script else None,
            "commit": script.commit or None if script else None,
            "seconds": self.seconds,
            "restarts": self.restarts,
            "exit_code": outcome.exit_code if outcome else None,
            "failed_rank": outcome.failed_rank if outcome else None,
            "saved_in": outcome.saved if outcome else None,
            "findings": [
                {name: finding[name] for name in ("kind", "lost_share", "sentence")}
                for finding in self.findings
            ],
            "log": self.log or None,
            "frozen_in": self.frozen_in or None,
        }


def jobs(site: Site) -> list[JobRow]:
    """Return the jobs of this checkout: those with a folder by the time they began, then those that wait."""
    by_slurm = {path.name: path for path in site.jobs_dir.glob("[0-9]*") if path.name.isdecimal()}
    outcomes = {number: job_folder.read_outcome(folder) for number, folder in by_slurm.items()}
    to_ask = [number for number, outcome in outcomes.items() if not (outcome and outcome.well)]
    status: dict[str, JobStatus] = {}
    if to_ask and not slurm.why_not_here():
        status = slurm.job_status(to_ask)
    rows = {
        folder: of_folder(number, folder, outcomes[number], status.get(number))
        for number, folder in by_slurm.items()
    }
    for folder in (site.jobs_dir / "submitit").glob("*"):
        submitted = local_job.submitted(folder)
        if submitted.job_id and not submitted.by_slurm:
            rows[folder] = _of_this_machine(submitted.job_id, folder, status)
    begun = [rows[folder] for folder in sorted(rows, key=_began_at)]
    waiting = _queue(site.jobs_dir, begun=by_slurm)
    return begun + waiting


def of_folder(number: str, folder: Path, outcome: Outcome | None, status: JobStatus | None) -> JobRow:
    """Return the row of a job of Slurm that has begun.

    Args:
        number: the job's number, by which its folder is called.
        folder: the job's folder.
        outcome: how its last start has ended; None if it has left no outcome.
        status: what Slurm says of it; None if it was not asked.
    """
    state_in_slurm = status.state if status else slurm.GONE
    is_over = state_in_slurm in (slurm.COMPLETED, slurm.UNKNOWN, *slurm.FAILED)
    last_outcome = outcome or job_folder.earlier_outcome(folder)
    restarts = max(status.restarts if status else 0, outcome.restart if outcome else 0)
    restarts += last_outcome.restarts_in_job if last_outcome else 0
    seconds = outcome.seconds if outcome else None
    findings = samples.read_findings(folder / samples.FOLDER)
    if not is_over and state_in_slurm in slurm.QUEUED:
        state, note = "queued", status.reason
        note += f" ({outcome.why[0]})" if outcome and outcome.why else ""
    elif not is_over:
        state, note = "running", _slow_nodes(folder)
        seconds = time.time() - _began_at(folder)
        if last_outcome:
            seconds += last_outcome.seconds
            note = f"again after: {last_outcome.why[0]}" if last_outcome.starts_again else note
    elif outcome and outcome.well:
        state, note = "done", _verdict(folder, findings)
    elif outcome is None and state_in_slurm == slurm.UNKNOWN:
        state, note = "unknown", status.reason
    elif outcome and outcome.saved is not None and not outcome.why:
        state, note = "stopped", f"its checkpoints are in {outcome.saved}"
    else:
        state, note = "failed", _why(folder, outcome, state_in_slurm)
    script = job_folder.read_script(folder)
    return JobRow(
        number=script.number_in_slurm(number) if script else number,
        name=script.job_name if script else "",
        script=script,
        state=state,
        seconds=seconds,
        restarts=restarts,
        note=note,
        log=script.log if script else "",
        frozen_in=script.frozen_in if script else "",
        outcome=outcome,
        findings=findings,
    )


def _of_this_machine(number: str, folder: Path, status: Mapping[str, JobStatus]) -> JobRow:
    """Return the row of a job that runs, or ran, without Slurm: on this machine, or on the node of a job.

    Args:
        number: that of the process that controls its ranks.
        folder: the job's folder.
        status: what Slurm says of jobs, by their numbers.
    """
    script = job_folder.read_script(folder)
    log = job_log.of_rank(folder, number)
    if script and script.array_element:
        row = _of_shared_job(number, folder, status.get(script.array_element))
        return replace(row, log=str(log))
    began = _began_at(folder)
    # Notes of ranks that have not come to an end.
    nodes = {job_folder.read(note) for note in job_folder.notes(folder, "started").values()}
    failed = job_folder.notes(folder, "failed")
    ended = job_folder.notes(folder, "failed", "finished", "lost")
    findings = samples.read_findings(folder / samples.FOLDER)
    if not local_job.has_ended(number, folder):
        state, note, until = "running", "", time.time()
    elif nodes - {launchers.node()}:
        # A sweep whose runs are processes within a job (slurm/SWEEP.md): another machine has their numbers.
        state, note, until = "unknown", f"its processes are, or were, on {', '.join(sorted(nodes))}", None
    else:
        times = [note.stat().st_mtime for note in ended.values()]
        until = max(times, default=None)
        state, note = "done", _verdict(folder, findings)
        if (folder / job_folder.STOPPED).exists():
            state, note = "stopped", f"its checkpoints are in {job_folder.stopped(folder)}"
        elif failed or not ended:
            state = "failed"
            reasons = Evidence(folder, job_log.read(log)).reasons()
            note = reasons[0].text if reasons else ""
    return JobRow(
        number=number,
        name=script.job_name if script else "",
        script=script,
        state=state,
        seconds=None if until is None else until - began,
        note=note,
        log=str(log),
        frozen_in=script.frozen_in if script else "",
        findings=findings,
    )


def _of_shared_job(number: str, folder: Path, status: JobStatus | None) -> JobRow:
    """Return the row of a run of a sweep that shares a job of Slurm with others (sweeps/pack.py).

    Args:
        number: that of the process that controls its ranks.
        folder: the run's own.
        status: what Slurm says of the job.
    """
    outcome = job_folder.read_outcome(folder)
    if outcome and not outcome.requeued:
        return of_folder(number, folder, outcome, None)
    if outcome and status and status.state not in (slurm.COMPLETED, slurm.UNKNOWN, *slurm.FAILED):
        status = JobStatus(slurm.QUEUED[0], "it resumes when its job has come back")
    return of_folder(number, folder, outcome, status)


def _why(folder: Path, outcome: Outcome | None, state_in_slurm: str) -> str:
    """Return why a job has failed: by its outcome, else by Slurm, else its exit code."""
    reason = outcome_rules.reason(folder, outcome, "" if state_in_slurm == slurm.GONE else state_in_slurm)
    if reason:
        return reason
    return f"exit code {outcome.exit_code}" if outcome else "it ended before it could say why"


def _slow_nodes(folder: Path) -> str:
    """Return which nodes of a job are slow; "" if none is, or they were not measured."""
    clauses = (log_words.text_of(log_words.CHECK, line) for line in job_folder.slow_nodes(folder))
    return "; ".join(clauses)


def _verdict(folder: Path, findings: Sequence[dict[str, object]]) -> str:
    """Return which nodes of a job are slow, else the first of these findings of its verdict; "" without."""
    if slow := _slow_nodes(folder):
        return slow
    if findings:
        return str(findings[0]["sentence"])
    verdict_lines = job_folder.read(folder / samples.FOLDER / samples.TOLD)
    return log_words.text_of(log_words.WATCH, verdict_lines.partition("\n")[0])


def _script_words(script: Script) -> str:
    """Return the name of its run in a sweep, else that of a script with the arguments that fit into a row."""
    if script.run_name:
        return script.run_name
    words = " ".join(map(log_words.printable, (script.label, *script.arguments)))
    if len(words) <= MOST_OF_A_SCRIPT:
        return words
    return f"{words[: MOST_OF_A_SCRIPT - LAST_OF_A_SCRIPT - 3]}...{words[-LAST_OF_A_SCRIPT:]}"


def _began_at(folder: Path) -> float:
    """Return when the job's last start began, in seconds since 1970, as far as that is known."""
    kept = folder / job_folder.SCRIPT
    return (kept if kept.exists() else folder).stat().st_mtime


def _queue(jobs_dir: Path, begun: Collection[str]) -> list[JobRow]:
    """Return the jobs of this user that wait or begin just now, and were sent from this checkout.

    Args:
        jobs_dir: the folder in which each job that has begun has its own.
        begun: the numbers of the jobs that have begun.
    """
    waiting = []
    for line in slurm.queue("%A|%i|%T|%r|%Z|%o|%j"):
        # The waiting jobs of an array are one line, such as 17_[2-5]; others have numbers of their own.
        number, shown_as, state, reason, folder, script, name = line.split("|", maxsplit=6)
        if number in begun:
            continue
        here = project.folder()
        is_of_checkout = _is_within(folder, (here,)) or _is_within(script, (here, jobs_dir))
        # A sweep may have its script, and its user, elsewhere.
        if is_of_checkout or _is_of_a_sweep(Path(script)):
            code = FrozenCode.read(Path(script).parent)
            is_queued = state in slurm.QUEUED
            row = JobRow(
                shown_as,
                name,
                None,
                "queued" if is_queued else "running",
                note=reason if is_queued else "",
                sent_from=(folder, script),
                frozen_in=str(code.folder) if code else "",
            )
            waiting.append(row)
    return waiting


def _is_of_a_sweep(script: Path) -> bool:
    """Return whether a job script is one of a sweep of this checkout."""
    text = job_folder.read(script)
    if not project.IS_CHECKOUT:
        return f"MANYGPUS_PROJECT={shlex.quote(str(project.folder()))}\n" in text
    # What it sources is in the package, or slurm/job_env.sh.
    sources = re.search(rf"{re.escape(str(REPOSITORY))}/\S*/job_env\.sh", text)
    return sources is not None or f"MANYGPUS_CHECKOUT={shlex.quote(str(REPOSITORY))}\n" in text


def _is_within(path: str, folders: Sequence[Path]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)
