"""Why a job failed: which rank died first, where, and of what. It needs no packages.

It reads the notes of the ranks (job_folder.py), and the output of srun, torchrun and NCCL.
"""

import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainkit import job_folder
from trainkit.ranges import parse_ranges

# srun reports its tasks: the ranks, or torchruns, which report their ranks, the first to die last.
OF_SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
OF_TORCHRUN = re.compile(r"  host +: (\S+).*\n  rank +: (\d+).*\n  exitcode +: (\S+)")
EXITED = re.compile(r"(?:Exited with exit code )?(\d+)")  # in the words of either
ROOT_CAUSE = re.compile(r"^Root Cause.*?(?:^===|\Z)", re.MULTILINE | re.DOTALL)
# NCCL aborts the ranks that have waited for --timeout. The one they waited for prints nothing.
TIMEOUT = re.compile(r"\[Rank (\d+)\] Watchdog caught collective operation timeout")
LEFT = re.compile(r"srun: error: First task exited (\d+)s ago")  # by --wait of the job scripts
ABORTED = re.compile(r"Rank (\d+)\] Process group watchdog .* exception: (.*)")
NODE_FAILED = "srun: error: Node failure on "
NO_STEP = re.compile(r"srun: error: (Unable to create step.*)")
NO_COMMAND = re.compile(r"srun: error: \S+: tasks? [\d,-]+: Exited with exit code 12[67]")  # by bash, or env
CLUES = re.compile(r"srun: error: |  (host|rank|exitcode) +: |Root Cause|===|Rank \d+\] (Watch|Process )")
MOST_REASONS = 9  # that are printed
OWN_LOG = "_0_log.out"  # how the name of submitit's log of rank 0 ends
# How an exception's traceback ends, and an error in a sentence.
LAST_WORDS = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?$|error(?: on rank \d+)?: .*")
MOST_OF_A_LOG = 2**20  # bytes of its end in which a rank's last words are looked for


class Reason(NamedTuple):
    """Why a job failed: a clause on one rank, and that rank's exit code; 0 if these are not known."""

    text: str
    rank: int | None = None
    exit_code: int = 0


class Evidence:
    """What is known about a job that has failed.

    Args:
        folder: the job's own.
        printed: the lines of its logs.
        launcher: what started the ranks: srun, torchrun, or "" on this machine without Slurm.
        log: the log of rank 0. If it is one of submitit's, each rank has its own beside it.
        first_start: its logs have nothing of an earlier start.
    """

    def __init__(
        self,
        folder: Path,
        printed: Iterable[str],
        launcher: str = "",
        log: Path | None = None,
        first_start: bool = True,
    ) -> None:
        self._folder, self._launcher = folder, launcher
        self._log, self._first_start = log, first_start
        self._lines = list(filter(CLUES.search, printed))  # a log may have millions of others
        self._left = next(filter(None, map(LEFT.search, self._lines)), None)
        silent = job_folder.notes(folder, "started")
        self._nodes = {rank: job_folder.read(note) for rank, note in silent.items()}
        self._waited = sorted({int(rank) for line in self._lines for rank in TIMEOUT.findall(line)})

    @property
    def node_failed(self) -> bool:
        """Return whether srun says that a node has failed; its exit code may be 0 then."""
        return any(line.startswith(NODE_FAILED) for line in self._lines)

    def reasons(self) -> list[Reason]:
        """Return why the job failed, the first reason first; nothing if it is unknown."""
        if self._launcher and not job_folder.notes(self._folder, *job_folder.STATES):
            never_started = self._never_started()
            if never_started:
                return [never_started]
        reasons = (self._noted_by_a_rank(), *self._deaths(), self._gave_up())
        found = list(dict.fromkeys(filter(None, reasons)))
        if self._nodes and not found:
            why = "for want of memory: --mem" if self._launcher else "at its time limit, for want of memory"
            return [Reason(f"{self._names(self._nodes)} ended silently: killed (by hand, or {why})?")]
        if self._launcher and not found and job_folder.notes(self._folder, "lost"):
            why = "the network failed, or a rank hung for longer than --timeout"
            return [Reason(f"the ranks lost contact: {why}")]
        return list(map(self._with_its_output, found))

    def _never_started(self) -> Reason | None:
        """Return why srun could not start the ranks' Python, if it says so."""
        for line in self._lines:
            refused = NO_STEP.match(line)
            if refused:
                asks = "in the #SBATCH lines, by sbatch or in slurm/site.sh"
                return Reason(
                    f"srun starts nothing in this job ({refused[1]}): correct what it asks for, {asks}"
                )
            if NO_COMMAND.match(line):
                remedy = "correct activate_environment, SITE_CONTAINER or SITE_SRUN_ARGS in slurm/site.sh"
                return Reason(f"no rank could start, as a command was not found: {remedy}")
        return None

    def _noted_by_a_rank(self) -> Reason | None:
        """Return the note of the rank that failed first; None on a full disk, where there is none."""
        first_name = job_folder.first_failed(self._folder)
        failed = job_folder.notes(self._folder, "failed").items()
        for rank, note in sorted(failed, key=lambda noted: noted[1].name != first_name):
            if lines := list(filter(None, job_folder.read(note).splitlines())):
                # It may not have come to its exit: PyTorch's threads abort some, and srun ends others.
                exited = EXITED.fullmatch(self._ends().get(rank, ""))
                return Reason(lines[0], rank, int(exited[1]) if exited else 1)
        return None

    def _ends(self) -> dict[int, str]:
        """Return how the ranks ended: srun's word, or torchrun's exit code."""
        printed = "\n".join(self._lines)
        if self._launcher == "torchrun":
            return {int(rank): how for _, rank, how in OF_TORCHRUN.findall(printed)}
        return {task: how for _, tasks, how in OF_SRUN.findall(printed) for task in parse_ranges(tasks)}

    def _deaths(self) -> Iterator[Reason | None]:
        """Yield the deaths that no rank could report itself, in order; torchrun prints the first one last."""
        ended = job_folder.notes(self._folder, "finished", "failed", "lost")
        printed = "\n".join(self._lines)
        for node, rank, how in OF_TORCHRUN.findall("\n".join([*ROOT_CAUSE.findall(printed), printed])):
            if int(rank) not in ended:
                yield self._died(int(rank), node, how)
        for node, tasks, how in OF_SRUN.findall(printed):
            for task in parse_ranges(tasks):
                if self._launcher != "torchrun" and task not in ended:
                    yield self._died(task, node, how)
                elif self._launcher == "torchrun" and not how.startswith(("Exited", "Terminated")):
                    yield Reason(f"torchrun {task} on {node} {_in_words(how)}", None, _exit_code(how))

    def _died(self, rank: int, node: str, how: str) -> Reason | None:
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
        if not words:
            return None
        return Reason(f"rank {rank} on {self._nodes.get(rank) or node} {words}", rank, _exit_code(how))

    def _gave_up(self) -> Reason | None:
        if not self._waited:
            return None
        missing = self._names(rank for rank in self._nodes if rank not in self._waited)
        missing = f"{missing}, which hung or was lost" if missing else "each other"
        waited = ",".join(map(str, self._waited))
        reason = f"NCCL gave up after --timeout: rank {waited} waited for {missing}"
        return Reason(reason, self._waited[0], _exit_code(self._ends().get(self._waited[0], "")))

    def _with_its_output(self, reason: Reason) -> Reason:
        """Add the error that a script has printed which leaves no note of it, and name the log it is in."""
        if self._log is None or reason.rank is None or not self._log.name.endswith(OWN_LOG):
            return reason
        log = self._log.with_name(f"{self._log.name.removesuffix(OWN_LOG)}_{reason.rank}_log.out")
        text = reason.text
        without_its_error = re.search(r"exit code \d+$", text) and (self._folder / job_folder.PLAIN).exists()
        if without_its_error and self._first_start and (words := _last_words(log)):
            text += f": {words}"
        if reason.rank and log.is_file():  # that of rank 0 is the job's
            text += f" (in {log.name})"
        return reason._replace(text=text)

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
    if how.startswith("Aborted"):
        return "aborted"
    if how.startswith("-"):
        return job_folder.died_of(-int(how))
    if how.startswith("Exited") or how.isdigit():
        return f"ended silently, with exit code {how.split()[-1]}"
    return f"died: {how}"


def _exit_code(how: str) -> int:
    """Return the exit code, as a shell has it, by srun's word or torchrun's exit code; 0 if it is unknown."""
    by_signal = re.fullmatch(r"-(\d+)", how)
    if by_signal:
        return 128 + int(by_signal[1])
    exited = EXITED.fullmatch(how)
    if exited:
        return int(exited[1])
    by_name = {signal.strsignal(number): number for number in signal.valid_signals()}
    number = signal.SIGKILL if how.startswith("Out Of Memory") else by_name.get(how.partition(" (core")[0])
    return 128 + number if number else 0


def _last_words(log: Path) -> str:
    """Return the error that a log ends with; "" if there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MOST_OF_A_LOG))
        lines = file.read(MOST_OF_A_LOG).decode(errors="replace").splitlines()
    return next(filter(LAST_WORDS.match, reversed(lines)), "")


def sentences(reasons: list[Reason]) -> list[str]:
    """Return why a job failed as the last words of its log."""
    lines = []
    for number, reason in enumerate(reasons[:MOST_REASONS]):
        # Without the guess in brackets: srun killed every rank that did not end by itself after the first.
        lines.append(f"then    {reason.text.partition(' (')[0]}" if number else f"why     {reason.text}")
    return lines
