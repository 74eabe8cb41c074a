"""A job's own folder: its checkpoints, its samples, and the notes that its ranks leave in it.

| name | meaning |
|---|---|
| `rank-N.started` | rank N runs, on the node that the file names |
| `rank-N.finished`, `.failed`, `.lost` | replaces it: how it ended, and the error (lost: its peers left) |
| `first-failed` | a link to the note of the rank that failed first |
| `stopped` | a signal stopped the run after it saved; the file has the folder of its checkpoints |
| `stalled` | which ranks the monitor has ended, as they did nothing (monitor/idle_ranks.py) |
| `slow-nodes` | which of its nodes are sick, in the words of the log (jobs/inside/slow_nodes.py) |
| `avoided-nodes` | those without which it has gone back to the queue, in all its starts |
| `resumed-from` | the path of the checkpoint that this start resumed from |
| `newest-checkpoint` | the path of the last one that it has saved |
| `script.json` | the script that the job runs, its arguments, and the commit of its code (`Script`) |
| `outcome.json` | how the job's last start has ended (`Outcome`), by jobs/inside/outcome_rules.py |
| `earlier-outcome.json` | how the start before has ended: scripts/job_env.sh renames its outcome |
| `ended-for-good` | the job has ended well, and does nothing more if Slurm starts it again |
| `checkpoints`, `monitor` | the files of checkpoint/checkpointer.py; the samples (monitor/samples.py) |
| `plain` | the job's script does not use the kit (jobs/inside/run_plain.py); it may write `stopped` itself |

`prepare` makes it ready for each start of the job. srun often reports an exit code other than the failed
rank's, and a log mixes the ranks' lines. From the notes jobs/inside/failure_reason.py finds which rank it
was; a rank that is still "started" after the end was killed.
"""

import json
import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from manygpus.frozen_code import FrozenCode
from manygpus.launchers import node, rank_of

VARIABLE = "MANYGPUS_JOB_DIR"  # the environment variable with the path of this process's job
RESTARTS_IN_JOB = "MANYGPUS_RESTARTS_IN_JOB"  # the job's number, and its `restarts_in_job`, such as 17:1
PLAIN = "plain"
CHECKPOINTS = "checkpoints"
MONITOR = "monitor"
RUNS = "runs"  # in `monitor`: the paths of the CSVs of the job's trainings, one per line
OUTCOME = "outcome.json"
EARLIER_OUTCOME = "earlier-outcome.json"
SCRIPT = "script.json"
ENDED_FOR_GOOD = "ended-for-good"
FIRST_FAILED = "first-failed"
STOPPED = "stopped"
RESUMED_FROM = "resumed-from"
NEWEST_CHECKPOINT = "newest-checkpoint"
STALLED = "stalled"
SLOW_NODES = "slow-nodes"
AVOIDED_NODES = "avoided-nodes"
OF_A_START = (FIRST_FAILED, STOPPED, RESUMED_FROM, NEWEST_CHECKPOINT, STALLED)  # like the ranks' notes
STATES = ("started", "finished", "failed", "lost")  # of a rank
NOTE = re.compile(rf"rank-(\d+)\.({'|'.join(STATES)})")


def prepare(folder: Path, plain: bool) -> None:
    """Make a job's folder ready for a start: without the notes of earlier ones.

    Args:
        folder: the job's folder.
        plain: whether its script does not use the kit.

    Raises:
        OSError: if it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank_notes = [path for path in folder.glob("rank-*") if NOTE.fullmatch(path.name)]
    for path in (*rank_notes, *(folder / name for name in OF_A_START)):
        path.unlink(missing_ok=True)
    if not restarts_in_job():
        # In the same nodes they are not measured again.
        (folder / SLOW_NODES).unlink(missing_ok=True)
    if plain:
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        (folder / PLAIN).touch()


def set_aside(folder: Path) -> None:
    """Rename the folder of an older job that has had the same number, if there is one.

    So it is after each new start of a practice cluster. The checkpoints of that job are not the new one's.

    Raises:
        OSError: if it cannot be renamed.
    """
    if folder.exists():
        changed = datetime.fromtimestamp(folder.stat().st_mtime)
        folder.rename(folder.with_name(f"{folder.name}-{changed:%Y%m%d-%H%M%S}"))


def restarts_from_queue() -> int:
    """Return how often this job has come back from the queue; 0 if it has not, and outside of a job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def restarts_in_job() -> int:
    """Return how often this job has started again in its nodes since it came from the queue."""
    job_id, _, count = os.environ.get(RESTARTS_IN_JOB, "").partition(":")
    # A job inherits the variables of the one that has sent it.
    return int(count) if count and job_id == os.environ.get("SLURM_JOB_ID") else 0


def restarts() -> int:
    """Return how often this job has started before, at least; 0 at its first start, and outside of a job."""
    return restarts_from_queue() + restarts_in_job()


def here() -> Path | None:
    """Return the folder of this process's job; None outside of a job."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else None


def note(state: str, text: str = "") -> None:
    """In a job, leave a note that this rank has started, finished, failed or lost its peers.

    It replaces the rank's earlier note. A full disk is ignored: the error itself matters more than its note.
    """
    folder = here()
    if folder is None or rank_of() is None:
        return
    path = folder / f"rank-{rank_of()}.{state}"
    if state == "started":
        text = node()
    else:
        with suppress(OSError):  # there was none; renaming also works on a full disk
            path.with_suffix(".started").rename(path)
    if state == "failed":
        with suppress(OSError):  # a link can be made only once, whatever the nodes' clocks say
            (folder / FIRST_FAILED).symlink_to(path.name)
    with suppress(OSError):
        path.write_text(f"{text}\n" if text else "", encoding="utf-8", errors="replace")


def notes(folder: Path, *states: str) -> dict[int, Path]:
    """Return the notes of the ranks that are in one of `states`, by rank."""
    notes_by_rank: dict[int, Path] = {}
    for path in folder.glob("rank-*"):
        name = NOTE.fullmatch(path.name)
        if name and name[2] in states:
            notes_by_rank[int(name[1])] = path
    return dict(sorted(notes_by_rank.items()))


def read(note: Path) -> str:
    """Return what a note says; "" if it is not there."""
    try:
        return note.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def died_of(number: int) -> str:
    """Return in words what a signal did to a rank that it has ended."""
    if number == signal.SIGKILL:
        return "was killed (by hand, or because memory ran out)"
    if number == signal.SIGABRT:
        return "aborted"
    with suppress(ValueError):  # real-time signals have no names
        return f"died of signal {signal.Signals(number).name}"
    return f"died of signal {number}"


def note_stop(checkpoints: Path) -> None:
    """In a job, leave a note that the run has saved in `checkpoints` and stopped after a signal.

    Raises:
        OSError: if it cannot be written.
    """
    folder = here()
    if folder:
        (folder / STOPPED).write_text(f"{checkpoints.absolute()}\n", encoding="utf-8")


def stopped(folder: Path) -> str | None:
    """Return where this job's run saved before a signal stopped it; None if none was stopped."""
    path = folder / STOPPED
    return read(path) if path.exists() else None


def note_checkpoint(path: Path, resumed: bool = False) -> None:
    """In a job, leave a note that this start has saved a checkpoint, or has `resumed` from it."""
    folder = here()
    if folder:
        name = RESUMED_FROM if resumed else NEWEST_CHECKPOINT
        with suppress(OSError):  # a full disk
            (folder / name).write_text(f"{path}\n", encoding="utf-8")


def note_slow_nodes(folder: Path, lines: Iterable[str]) -> None:
    """Leave a note that some of the job's nodes are slow, with the lines of the log that say so."""
    with suppress(OSError):  # a full disk
        (folder / SLOW_NODES).write_text("\n".join(lines) + "\n", encoding="utf-8")


def slow_nodes(folder: Path) -> list[str]:
    """Return the lines of the log that say which nodes are slow; none also if they were not measured."""
    return read(folder / SLOW_NODES).splitlines()


def has_avoided(folder: Path, nodes: Iterable[str]) -> bool:
    """Return whether the job has gone back to the queue without one of these nodes before.

    Its shell notes them when Slurm has taken it (`avoid_nodes` in jobs/scripts/job_env.sh).
    """
    return not {*read(folder / AVOIDED_NODES).split()}.isdisjoint(nodes)


def note_run(path: Path) -> None:
    """In a sampled job, note that its training writes the CSV `path`."""
    folder = here()
    if folder and (folder / MONITOR).is_dir():
        with suppress(OSError), (folder / MONITOR / RUNS).open("a", encoding="utf-8") as file:
            file.write(f"{path.resolve()}\n")


def first_failed(folder: Path) -> str:
    """Return the name of the note of the rank that failed first; "" if there is none."""
    link = folder / FIRST_FAILED
    return link.readlink().name if link.is_symlink() else ""  # some file systems have no links


def note_end_for_good(folder: Path) -> None:
    """Leave a note that the job has ended well, and does nothing more if Slurm starts it again."""
    with suppress(OSError):  # a full disk
        (folder / ENDED_FOR_GOOD).touch()


def has_ended_for_good(folder: Path) -> bool:
    """Return whether the job has ended well, and does nothing more."""
    return (folder / ENDED_FOR_GOOD).exists()


@dataclass(frozen=True)
class Script:
    """What a job runs.

    Attributes:
        path: the script's path, absolute.
        arguments: the arguments that its user has given.
        commit: the commit of the git repository that the script is in, with "-dirty" if that has changes; ""
            if it is in none.
        repository: the top folder of that repository; "" if it is in none.
        module: its name, if it is started as a module (`python -m`).
        python: the Python that runs it; "" for that of the job.
        array_element: what Slurm calls the job if it is one of an array, such as 17_2; else "".
        run_name: the name of its run in a sweep; "" if it is of none.
        job_name: the job's name in Slurm; "" without Slurm.
        log: the path of the job's log; "" if it is not known.
        when_requeued: the words of --when-requeued (jobs/user_program.py); None if its user has given none.
        frozen_in: the folder with the copy that the job runs (frozen_code.py); "" if it runs `path` itself.
    """

    path: str
    arguments: list[str]
    commit: str = ""
    repository: str = ""
    module: str = ""
    python: str = ""
    array_element: str = ""
    run_name: str = ""
    job_name: str = ""
    log: str = ""
    when_requeued: list[str] | None = None
    frozen_in: str = ""

    def with_code(self, code: FrozenCode) -> "Script":
        """Return it as its user knows it, for a job that runs a copy of it."""
        return replace(
            self,
            path=str(code.original(Path(self.path))),
            arguments=[code.as_typed(word) for word in self.arguments],
            commit=code.commit,
            repository=str(code.checkout),
            frozen_in=str(code.folder),
        )

    @property
    def label(self) -> str:
        """Return the name of its file with that of its folder, or the name of its module."""
        return self.module or str(Path(*Path(self.path).parts[-2:]))

    def number_in_slurm(self, job_id: str) -> str:
        """Return what Slurm calls the job with this number: one of an array by its place there, as 17_2."""
        return self.array_element or job_id


def is_numbered(job: str, number: str) -> bool:
    """Return whether what Slurm calls a job, such as 17_2, is this number, or that of its array, 17."""
    return number in (job, job.partition("_")[0])


def keep_script(folder: Path, script: Script) -> None:
    """Write `script.json`.

    Raises:
        OSError: if it cannot be written.
    """
    _write_json(folder / SCRIPT, asdict(script))


def read_script(folder: Path) -> Script | None:
    """Return what the job runs; None if it is not known."""
    try:
        return Script(**json.loads((folder / SCRIPT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class Outcome:
    """How a start of a job has ended.

    Attributes:
        restart: the number of the start; 0 for the first.
        exit_code: the exit code of the job script.
        why: why it failed, the first reason first; empty if it did not, or if it was ended from outside.
        failed_rank: the rank that failed first, if it is known.
        saved: the path where it saved before a signal stopped it, if one did.
        requeued: whether it has gone back to the queue.
        seconds: how long it ran; as it is kept, with all starts before.
        said: the last lines of its log.
        starts_again: whether the job starts again in its nodes, without the queue.
        restarts_in_job: how often it does, with all starts before, as it is kept.
    """

    restart: int
    exit_code: int
    why: list[str]
    failed_rank: int | None
    saved: str | None
    requeued: bool
    seconds: int
    said: list[str]
    starts_again: bool = False
    restarts_in_job: int = 0

    @property
    def well(self) -> bool:
        """Return whether it ended without an error, and has nothing left to do."""
        return self.exit_code == 0 and self.saved is None


def keep_outcome(folder: Path, outcome: Outcome) -> None:
    """Write `outcome.json`, in a job that could not even begin also its folder.

    Raises:
        OSError: if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = earlier_outcome(folder)
    sums = {
        "seconds": (earlier.seconds if earlier else 0) + outcome.seconds,
        "restarts_in_job": (earlier.restarts_in_job if earlier else 0) + outcome.starts_again,
    }
    _write_json(folder / OUTCOME, asdict(outcome) | sums)


def read_outcome(folder: Path) -> Outcome | None:
    """Return how the job's last start has ended; None while it runs, and if it was killed before its end."""
    return _read_outcome(folder / OUTCOME)


def earlier_outcome(folder: Path) -> Outcome | None:
    """Return how the start before this one has ended; None if there was none, or they were all killed."""
    # A start that does nothing more, as the job has ended well, has not been prepared.
    return _read_outcome(folder / OUTCOME) or _read_outcome(folder / EARLIER_OUTCOME)


def _read_outcome(path: Path) -> Outcome | None:
    try:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_json(path: Path, document: dict[str, object]) -> None:
    """Write a file that is never read half written."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(document, indent=1), encoding="utf-8")
    new.replace(path)
