"""What the logs of a job end with: what the kit and Slurm add, the errors of ranks, and a script's last line.

The job has a log, and each rank from 1 on one of its own beside it if submitit has started them; in all
others the ranks share one. Only the end of a log is read. It needs no packages.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from manygpus import log_words

# Of the end of each log, as in job_env.sh: the last line of a job that failed is there, and a job of 64
# ranks has no more than Python can read in seconds.
MOST_OF_A_LOG_BYTES = 2**22
# The line before what scripts/job_env.sh has of each log; the log's name follows.
BEGINNING_OF_A_LOG = "# in_job log "
# How submitit calls the log of a rank.
OF_A_RANK = re.compile(r"_(\d+)_log\.out$")

# srun and slurmstepd write at any place of a line: after a progress bar, for instance.
OF_SLURM = r"(?:srun|slurmstepd[^\s:]*): "
ERROR_OF_SLURM = re.compile(rf"{OF_SLURM}(?:error|fatal): ")
WITHIN_A_LINE = re.compile(rf"(?<=[^\n\r])(?<!: )(?={OF_SLURM}(?:error|fatal|launch/slurm): )")
# What follows the last line of the script: the kit's words, and Slurm's.
_LAST_WORDS = (log_words.WATCH, log_words.WHY, log_words.THEN, log_words.AGAIN, log_words.ENDED)
AFTER_THE_SCRIPT = re.compile(rf"{log_words.pattern(_LAST_WORDS)}|stopped; back to the queue|{OF_SLURM}")
# What comes before its first line.
_FIRST_WORDS = (log_words.SCRIPT, log_words.PYTHON, log_words.CODE, log_words.ENVIRONMENT)
BEFORE_THE_SCRIPT = re.compile(log_words.pattern(_FIRST_WORDS))

# What may stand before a rank's line: the number of the task (srun --label), and, once the process group
# exists, PyTorch's prefix (_distributed_excepthook in its sources).
LABEL = r"(?: *\d+: )?"
PREFIX = re.compile(rf"{LABEL}(?:\[rank(\d+)\]: ?)?")
# A progress bar may stand before the first line of a traceback.
TRACEBACK = re.compile(r"(?:\[rank(\d+)\]: )?Traceback \(most recent call last\):\s*$")
# The traceback that follows tells more than the one before.
CHAINED = re.compile(
    "During handling of the above exception|The above exception was the direct cause|-- Process .* terminated"
)
# What ends a traceback, whatever its class is called.
EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:: .*)?$")
# An error without a traceback: of a script, of argparse, of the kit.
ERROR = re.compile(
    r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?$|(?:\S+\.py: )?error(?: on rank \d+)?: .*"
)
# torchrun ends so where a rank has failed, and does not say of what.
OF_TORCHRUN = re.compile(r"torch\.distributed\.\S+\.ChildFailedError:")


class Error(NamedTuple):
    """An error that a rank has printed; the rank is None if the line does not name it."""

    rank: int | None
    text: str


def of_rank(folder: Path, job_id: str, rank: int = 0) -> Path:
    """Return the log of a rank of a job that submitit has sent from `folder`; that of rank 0 is the job's."""
    return folder / f"{job_id}_{rank}_log.out"


def paths(job_log: Path) -> set[Path]:
    """Return a job's log, which may not be there, and the logs of its ranks beside it."""
    name = OF_A_RANK.sub("", job_log.name)
    if name == job_log.name:
        return {job_log}
    return {job_log, *(path for path in job_log.parent.glob(f"{name}_*") if OF_A_RANK.search(path.name))}


def read(job_log: Path) -> dict[int, list[str]]:
    """Return the last lines of a job's log, and of the logs of its ranks beside it, by rank."""
    logs = {_rank(path.name): last_lines(path) for path in paths(job_log)}
    return dict(sorted(logs.items()))


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log, which may be long; none if it is not there."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MOST_OF_A_LOG_BYTES))
        return _lines(file.read(MOST_OF_A_LOG_BYTES))


def parse(printed: bytes) -> dict[int, list[str]]:
    """Return the lines of several logs, by rank, each after a line that names it."""
    logs: dict[int, list[str]] = {}
    lines = logs.setdefault(0, [])
    for line in _lines(printed):
        if line.startswith(BEGINNING_OF_A_LOG):
            lines = logs.setdefault(_rank(line), [])
        else:
            lines.append(line)
    return logs


def error_of(rank: int | None, logs: Mapping[int, Sequence[str]], ranks: int) -> str:
    """Return the error by which a rank has ended; "" if none is known.

    Args:
        rank: the rank's number; None for the torchrun that started the ranks.
        logs: the lines of each log.
        ranks: how many there are in all.
    """
    has_its_own = rank in logs and (len(logs) > 1 or ranks <= 1)
    errors = _errors(logs[rank] if has_its_own else logs.get(0, ()))
    if has_its_own:
        # A script that starts its ranks itself has those of all in it. The first has ended the others.
        several = len({error.rank for error in errors if error.rank is not None}) > 1
    else:
        errors_of_rank = [error for error in errors if error.rank == rank]
        # Whose the others are is not known, so it is the first that counts.
        errors = errors_of_rank or [error for error in errors if error.rank is None]
        several = rank is None or not errors_of_rank
    if not errors:
        return ""
    return errors[0].text if several else errors[-1].text


def last_error(logs: Mapping[int, Sequence[str]]) -> str:
    """Return the last error in the first log that has one, else the last that Slurm reports; "" for none."""
    for lines in logs.values():
        errors = _errors(lines)
        if errors:
            return errors[-1].text
    by_slurm = [line for lines in logs.values() for line in lines if ERROR_OF_SLURM.match(line)]
    return by_slurm[-1] if by_slurm else ""


def last_line(lines: Sequence[str], said: Sequence[str] = ()) -> str:
    """Return the last line that the script has printed; "" if it has printed none.

    Args:
        lines: the lines of its log.
        said: the lines that the kit has added at the end, besides those with its own first word.
    """
    for line in reversed(lines):
        text = line.strip()
        if BEFORE_THE_SCRIPT.match(text):
            return ""
        if text and text not in said and not AFTER_THE_SCRIPT.match(text):
            prefix = PREFIX.match(text)
            return text[prefix.end() :] if prefix[1] else text
    return ""


def is_of_the_kit(line: str) -> bool:
    """Return whether the kit or Slurm has added this line to what the script has printed."""
    return bool(BEFORE_THE_SCRIPT.match(line) or AFTER_THE_SCRIPT.match(line))


def _errors(lines: Iterable[str]) -> list[Error]:
    """Return the errors in a log, in their order."""
    errors: list[Error] = []
    # The ranks whose traceback has not ended so far.
    within: set[int | None] = set()
    is_chained = False
    for line in lines:
        begins = TRACEBACK.search(line)
        if begins:
            within.add(_number(begins[1]))
            continue
        prefix = PREFIX.match(line)
        rank, text = _number(prefix[1]), line[prefix.end() :]
        if CHAINED.match(text):
            is_chained = True
        ends_a_traceback = rank in within and EXCEPTION.match(text)
        if OF_TORCHRUN.match(text) or not (ends_a_traceback or ERROR.match(text)):
            continue
        within.discard(rank)
        if is_chained and errors and errors[-1].rank == rank:
            errors.pop()
        is_chained = False
        errors.append(Error(rank, text.rstrip()))
    return errors


def _lines(text: bytes) -> list[str]:
    """Return the lines of a log; each state of a progress bar, and each message of Slurm, is a line."""
    return WITHIN_A_LINE.sub("\n", text.decode(errors="replace")).splitlines()


def _rank(name: str) -> int:
    """Return the rank whose log has this name; 0 for the log of the job."""
    rank_in_name = OF_A_RANK.search(name)
    return int(rank_in_name[1]) if rank_in_name else 0


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
