"""Why a job failed: which rank died first, where, and of what. It needs no packages.

It reads the notes of the ranks (runtime/job_folder.py), and the output of srun, torchrun and NCCL:
slurm/job_env.sh runs `python -m trainkit.jobs.why srun < log`.
"""

import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from trainkit.jobs.slurm import numbers
from trainkit.runtime import job_folder
from trainkit.runtime.errors import tell

# srun reports its tasks: the ranks, or torchruns, which report their ranks, the first to die last.
OF_SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
OF_TORCHRUN = re.compile(r"  host +: (\S+).*\n  rank +: (\d{1,9}).*\n  exitcode +: (\S+)")
ROOT_CAUSE = re.compile(r"^Root Cause.*?(?:^===|\Z)", re.MULTILINE | re.DOTALL)
# NCCL aborts the ranks that have waited for --timeout. The one they waited for prints nothing.
TIMEOUT = re.compile(r"\[Rank (\d{1,9})\] Watchdog caught collective operation timeout")
LEFT = re.compile(r"srun: error: First task exited (\d+)s ago")  # by --wait of the job scripts
ABORTED = re.compile(r"Rank (\d{1,9})\] Process group watchdog .* exception: (.*)")
CLUES = re.compile(r"srun: error: |  (host|rank|exitcode) +: |Root Cause|===|Rank \d+\] (Watch|Process )")
MOST, LONGEST = 9, 2000  # reasons that are printed, and characters of one


class Evidence:
    """What is known about a job that has failed.

    Args:
        folder: the job's own.
        printed: the lines of its logs.
        launcher: what started the ranks: srun, torchrun, or "" on this machine without Slurm.
    """

    def __init__(self, folder: Path, printed: Iterable[str], launcher: str = "") -> None:
        self._folder, self._launcher = folder, launcher
        self._lines = list(filter(CLUES.search, printed))  # a log may have millions of others
        self._left = next(filter(None, map(LEFT.search, self._lines)), None)
        silent = job_folder.notes(folder, "started")
        self._nodes = {rank: job_folder.read(note) for rank, note in silent.items()}
        self._waited = sorted({int(rank) for line in self._lines for rank in TIMEOUT.findall(line)})

    def reasons(self) -> list[str]:
        """Return why the job failed, the first reason first; nothing if it is unknown."""
        reasons = (self._noted_by_a_rank(), *self._deaths(), self._gave_up())
        found = list(dict.fromkeys(filter(None, reasons)))
        if self._nodes and not found:
            why = "for want of memory: --mem" if self._launcher else "at its time limit, for want of memory"
            return [f"{self._names(self._nodes)} ended silently: killed (by hand, or {why})?"]
        if self._launcher and not found and job_folder.notes(self._folder, "lost"):
            return ["the ranks lost contact: the network failed, or a rank hung for longer than --timeout"]
        return found

    def _noted_by_a_rank(self) -> str:
        """Return the note of the rank that failed first; "" on a full disk, where there is none."""
        failed = job_folder.notes(self._folder, "failed").values()  # some file systems have no links
        notes = (self._folder / "first-failed", *failed)
        lines = (line for note in notes for line in job_folder.read(note).splitlines())
        return next(filter(None, lines), "")[:LONGEST]

    def _deaths(self) -> Iterator[str | None]:
        """Yield the deaths that no rank could report itself, in order; torchrun prints the first one last."""
        ended = job_folder.notes(self._folder, "finished", "failed", "lost")
        printed = "\n".join(self._lines)
        for node, rank, how in OF_TORCHRUN.findall("\n".join([*ROOT_CAUSE.findall(printed), printed])):
            if int(rank) not in ended:
                yield self._died(int(rank), node, how)
        for node, tasks, how in OF_SRUN.findall(printed):
            for task in numbers(tasks):
                if self._launcher != "torchrun" and task not in ended:
                    yield self._died(task, node, how)
                elif self._launcher == "torchrun" and not how.startswith(("Exited", "Terminated")):
                    yield f"torchrun {task} on {node} {_in_words(how)}"

    def _died(self, rank: int, node: str, how: str) -> str | None:
        """Return a clause on a rank's death; `how` is srun's word, or torchrun's exit code."""
        if rank in self._waited:
            return self._gave_up()
        words = _in_words(how)
        if how.startswith("Killed") and self._left:
            words = f"was ended by srun, {self._left[1]} s after another rank left: let all leave together"
        if (self._folder / job_folder.PLAIN).exists():  # its ranks leave no notes
            words = words.replace(" silently,", "")
        if words == "aborted":
            aborted = (found.groups() for found in map(ABORTED.search, self._lines) if found)
            words += next((f" ({cause})" for of, cause in aborted if int(of) == rank), "")
        return words and f"rank {rank} on {self._nodes.get(rank) or node} {words}"

    def _gave_up(self) -> str | None:
        if not self._waited:
            return None
        missing = self._names(rank for rank in self._nodes if rank not in self._waited)
        missing = f"{missing}, which hung or was lost" if missing else "each other"
        return f"NCCL gave up after --timeout: rank {','.join(map(str, self._waited))} waited for {missing}"

    def _names(self, ranks: Iterable[int]) -> str:
        if self._launcher:
            return ", ".join(f"rank {rank} on {self._nodes[rank]}" for rank in ranks)
        numbers = ", ".join(map(str, ranks))
        return numbers and f"rank {numbers}"


def _in_words(how: str) -> str:
    """Explain srun's word, or torchrun's exit code; "" if another death was the cause."""
    if how.startswith("Terminated") or how == "-15":
        return ""
    if how.startswith("Killed") or how == "-9":
        return "was killed (by hand, or for want of memory: --mem)"
    if how.startswith("Out Of Memory"):
        return "was killed for want of memory: ask for more --mem"
    if how.startswith("Aborted") or how == "-6":
        return "aborted"
    if how.startswith("-"):
        with suppress(ValueError):  # real-time signals have no names
            return f"died of signal {signal.Signals(-int(how)).name}"
        return f"died of signal {how[1:]}"
    if how.startswith("Exited") or how.isdigit():
        return f"ended silently, with exit code {how.split()[-1]}"
    return f"died: {how}"


def main() -> None:
    """Print the reasons as the last words of a job's log."""
    if len(sys.argv) < 2 or not job_folder.here():
        sys.exit(f"error: slurm/job_env.sh asks this in a job, whose folder is {job_folder.VARIABLE}.")
    printed = (line.decode(errors="replace").rstrip("\n") for line in sys.stdin.buffer)
    reasons = Evidence(job_folder.here(), printed, launcher=sys.argv[1]).reasons()[:MOST]
    for number, reason in enumerate(reasons):
        # Without the guess in brackets: srun killed every rank that did not end by itself after the first.
        tell(f"then    {reason.partition(' (')[0]}" if number else f"why     {reason}")


if __name__ == "__main__":
    main()
