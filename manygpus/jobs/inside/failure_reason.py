"""Why a job failed: which rank died first, where, and of what. It needs no packages.

It reads the notes of the ranks (job_folder.py), and the output of srun, torchrun and NCCL.
"""

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from manygpus import job_folder, log_words, project
from manygpus.errors import DISTRIBUTED
from manygpus.jobs import job_log
from manygpus.ranges import parse_ranges

# srun reports its tasks: the ranks, or torchruns, which report their ranks, the first to die last.
OF_SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
OF_TORCHRUN = re.compile(r"(?:  time +: (\S+).*\n)?  host +: (\S+).*\n  rank +: (\d+).*\n  exitcode +: (\S+)")
EXITED = re.compile(r"(?:Exited with exit code )?(\d+)")  # in the words of either
ROOT_CAUSE = re.compile(r"^Root Cause.*?(?:^===|\Z)", re.MULTILINE | re.DOTALL)
# NCCL aborts the ranks that have waited for --timeout. The one they waited for prints nothing.
TIMEOUT = re.compile(r"\[Rank (\d+)\] Watchdog caught collective operation timeout")
# With gloo, a rank that has waited for --timeout notes that. The one that it waited for is killed, or finds
# when it goes on that the others have left (seen: Connection closed by peer).
TIMED_OUT = re.compile(r"Timed out waiting \d+ms|timeout caused pair closure")
LEFT = re.compile(r"srun: error: First task exited (\d+)s ago")  # by --wait of the job scripts
ABORTED = re.compile(r"Rank (\d+)\] Process group watchdog .* exception: (.*)")
# What C++ prints of an exception that nobody catches, such as gloo's of all-reduces of different sizes.
UNCAUGHT = re.compile(r"^\s*what\(\):\s+(.+)")
NODE_FAILED = re.compile(r"srun: error: Node failure on (\S+)")
# What srun says where it starts nothing: of the step, or of an option or a variable (seen: SLURM_NO_KILL=1,
# SLURM_ACCTG_FREQ=often). A line on a task, or on the end of a step that has begun, is none of these.
NO_STEP = re.compile(
    r"srun: (?:error|fatal): (?!\S+: tasks? |Node failure|First task|Timed out|.*launch/slurm)(.+)"
)
NO_COMMAND = re.compile(r"srun: error: \S+: tasks? [\d,-]+: Exited with exit code 12[67]")  # by bash, or env
# How Python ends that is not the one in which the packages were installed.
NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
CLUES = re.compile(
    r"srun: (error|fatal): |  (time|host|rank|exitcode) +: |Root Cause|===|Rank \d+\] (Watch|Process )"
    r"|ModuleNotFoundError"
)
MOST_REASONS = 9  # that are printed
FIRST_OF_SIGNALS = 128  # the exit code of a process that signal N has ended is 128 + N, in a shell
OWN_LOG = "_0_log.out"  # how the name of submitit's log of rank 0 ends
# How a rank ends that another one has left, in the words of gloo and of PyTorch's store.
LOST_A_PEER = re.compile(rf": (RuntimeError: .*gloo|(torch\.distributed\.)?({'|'.join(DISTRIBUTED)}): )")


# Errors of a GPU, of the network, and of a file server, in the words of CUDA, NCCL and Linux. GPUs and their
# memory caused nearly half of the interruptions of Llama 3's training (arxiv.org/abs/2407.21783, table 5).
OF_HARDWARE = re.compile(
    "uncorrectable ECC error|uncorrectable NVLink error|hardware stack error|unspecified launch failure"
    "|Input/output error|Stale file handle|ncclRemoteError|ncclSystemError"
)
# What srun and slurmstepd say where the memory that a job has asked for ran out.
OUT_OF_MEMORY = re.compile(rf"{job_log.OF_SLURM}.*(?:oom.kill|Out Of Memory)", re.IGNORECASE)


class Reason(NamedTuple):
    """Why a job failed.

    Attributes:
        text: a clause on one rank.
        rank: that rank; None if it is not known.
        exit_code: its exit code; 0 if it is not known.
        may_pass: whether another try may do without it: a signal has ended the rank, it hung or lost the
            others, or its hardware failed. An error of the script would return.
    """

    text: str
    rank: int | None = None
    exit_code: int = 0
    may_pass: bool = False


class Evidence:
    """What is known about a job that has failed.

    Args:
        folder: the job's folder.
        logs: the last lines of its logs, from this start, by rank: those of job_log.py.
        launcher: what started the ranks: srun, torchrun, or "" on this machine without Slurm.
        log: the log of rank 0. If it is one of submitit's, each rank has its own beside it.
    """

    def __init__(
        self,
        folder: Path,
        logs: Mapping[int, Sequence[str]],
        launcher: str = "",
        log: Path | None = None,
    ) -> None:
        self._folder = folder
        self._launcher = launcher
        self._logs = logs
        self._log = log
        # A log may have many other lines.
        self._lines = [line for lines in logs.values() for line in lines if CLUES.search(line)]
        left = (LEFT.search(line) for line in self._lines)
        self._left = next(filter(None, left), None)
        silent = job_folder.notes(folder, "started")
        self._nodes = {rank: job_folder.read(note) for rank, note in silent.items()}
        lost = job_folder.notes(folder, "lost")
        self._timed_out = [rank for rank, note in lost.items() if TIMED_OUT.search(job_folder.read(note))]
        self._waited = sorted({int(rank) for line in self._lines for rank in TIMEOUT.findall(line)})

    @property
    def _is_plain(self) -> bool:
        """Return whether the job is of a plain script, whose ranks leave no notes."""
        return (self._folder / job_folder.PLAIN).exists()

    @property
    def memory_ran_out(self) -> bool:
        """Return whether Slurm says that it has killed a process for its memory."""
        return any(OUT_OF_MEMORY.search(line) for lines in self._logs.values() for line in lines)

    @property
    def node_failed(self) -> bool:
        """Return whether srun says that a node has failed; its exit code may be 0 then."""
        return any(map(NODE_FAILED.match, self._lines))

    def reasons(self) -> list[Reason]:
        """Return why the job failed, the first reason first; nothing if it is unknown."""
        if self._launcher and not job_folder.notes(self._folder, *job_folder.STATES):
            never_started = self._never_started()
            if never_started:
                return [never_started]
        reasons = (
            *self._failed_nodes(),
            self._stalled(),
            self._noted_by_a_rank(),
            self._timed_out_on_gloo(),
            *self._deaths(),
            self._gave_up(),
        )
        known = list(dict.fromkeys(reason for reason in reasons if reason))
        if not known:
            known = list(dict.fromkeys(self._exited_torchruns()))
        if known:
            with_output = [self._with_its_output(reason) for reason in known]
            # Two ranks may end within a moment. The one that says that it lost another was not the first.
            return sorted(with_output, key=lambda reason: LOST_A_PEER.search(reason.text) is not None)
        if self._nodes:
            guess = "by hand, at its time limit, or because memory ran out"
            if self._launcher:
                guess = "by hand, or because memory ran out: --mem"
            return [Reason(f"{self._names(self._nodes)} ended silently: killed ({guess})?", may_pass=True)]
        if self._launcher and job_folder.notes(self._folder, "lost"):
            why = "the network failed, or a rank hung for longer than --timeout"
            return [Reason(f"the ranks lost contact: {why}", may_pass=True)]
        return []

    def _failed_nodes(self) -> list[Reason]:
        """Return the nodes that a job has lost; Slurm ends the other jobs, or puts them into the queue."""
        failed = filter(None, map(NODE_FAILED.match, self._lines))
        return [Reason(f"node {line[1]} failed", may_pass=True) for line in failed]

    def _stalled(self) -> Reason | None:
        """Return which ranks the monitor has ended; their deaths come after it."""
        note = job_folder.read(self._folder / job_folder.STALLED)
        return Reason(note, may_pass=True) if note else None

    def _never_started(self) -> Reason | None:
        """Return why the ranks' program could not start, if srun or Python says so."""
        for line in self._lines:
            refused = NO_STEP.match(line)
            if refused:
                asks = (
                    "in the #SBATCH lines, by sbatch, by a SLURM_ variable of your shell or in "
                    f"{project.site_name()}"
                )
                return Reason(
                    f"srun starts nothing in this job ({refused[1]}): correct what the job asks for {asks}"
                )
            if NO_COMMAND.match(line):
                settings = "activate_environment, SITE_CONTAINER or SITE_SRUN_ARGS"
                remedy = f"correct {settings} in {project.site_name()}"
                return Reason(f"no rank could start, as a command was not found: {remedy}")
        for line in reversed(self._lines):
            lacking = NO_MODULE.search(line)
            if lacking:
                remedy = f"correct activate_environment in {project.site_name()}, or install it"
                if self._is_plain:
                    remedy = (
                        f"leave activate_environment in {project.site_name()} to the kit, and give yours "
                        "with --python"
                    )
                return Reason(f"the job's Python has no {lacking[1]}: {remedy}", exit_code=1)
        return None

    def _noted_by_a_rank(self) -> Reason | None:
        """Return the note of the rank that failed first; None on a full disk, where there is none."""
        failed = job_folder.notes(self._folder, "failed")
        first_name = job_folder.first_failed(self._folder)
        first_to_last = sorted(failed, key=lambda rank: failed[rank].name != first_name)
        for rank in first_to_last:
            lines = [line for line in job_folder.read(failed[rank]).splitlines() if line]
            if lines:
                # It may not have come to its exit: PyTorch's threads abort some, and srun ends others.
                exited = EXITED.fullmatch(self._exit_status(rank))
                return Reason(lines[0], rank, int(exited[1]) if exited else 1)
        return None

    def _ends(self) -> dict[int, tuple[str, str]]:
        """Return the nodes of the ranks that ended, and how: srun's word, or torchrun's exit code."""
        printed = "\n".join(self._lines)
        if self._launcher == "torchrun":
            return {int(rank): (node, status) for _, node, rank, status in OF_TORCHRUN.findall(printed)}
        ended = OF_SRUN.findall(printed)
        return {task: (node, status) for node, tasks, status in ended for task in parse_ranges(tasks)}

    def _exit_status(self, rank: int) -> str:
        """Return srun's word, or torchrun's exit code; "" if they tell nothing of the rank."""
        return self._ends().get(rank, ("", ""))[1]

    def _deaths(self) -> Iterator[Reason | None]:
        """Yield the deaths that no rank could report itself, in order.

        The torchrun of each node prints last which of its ranks was the first to die.
        """
        ended = job_folder.notes(self._folder, "finished", "failed", "lost")
        printed = "\n".join(self._lines)
        root_causes = OF_TORCHRUN.findall("\n".join(ROOT_CAUSE.findall(printed)))
        root_causes.sort(key=lambda cause: cause[0])
        for _, node, rank, status in (*root_causes, *OF_TORCHRUN.findall(printed)):
            if int(rank) not in ended:
                yield self._died(int(rank), node, status)
        for node, tasks, status in OF_SRUN.findall(printed):
            if self._launcher == "torchrun":
                if status.startswith("Exited"):  # a rank of it has failed, and srun then ends the others
                    return
                yield from self._died_torchruns(node, tasks, status)
                continue
            for task in parse_ranges(tasks):
                if task not in ended:
                    yield self._died(task, node, status)

    def _died_torchruns(self, node: str, tasks: str, status: str) -> Iterator[Reason]:
        if status.startswith("Terminated"):
            return
        for task in parse_ranges(tasks):
            code = _exit_code(status)
            text = f"torchrun {task} on {node} {_in_words(status)}"
            yield Reason(text, exit_code=code, may_pass=_is_by_signal(code))

    def _exited_torchruns(self) -> Iterator[Reason]:
        """Yield how torchruns ended that tell of no rank: they did not meet, for instance."""
        if self._launcher == "torchrun":
            for node, tasks, status in OF_SRUN.findall("\n".join(self._lines)):
                yield from self._died_torchruns(node, tasks, status)

    def _died(self, rank: int, node: str, status: str) -> Reason | None:
        """Return a clause on a rank's death; `status` is srun's word, or torchrun's exit code."""
        if rank in self._waited:
            return self._gave_up()
        words = _in_words(status)
        if status.startswith("Killed") and self._left:
            words = (
                f"was ended by srun, {self._left[1]} s after another rank left: have all ranks end together"
            )
        if self._is_plain:
            words = words.replace(" silently,", "")
        if words == "aborted":
            words += self._cause_of_abort(rank)
        if not words:
            return None
        code = _exit_code(status)
        text = f"rank {rank} on {self._nodes.get(rank) or node} {words}"
        return Reason(text, rank, code, may_pass=_is_by_signal(code))

    def _cause_of_abort(self, rank: int) -> str:
        """Return in brackets what NCCL, or else the C++ of a library, says why; "" if it says nothing."""
        for line in self._lines:
            aborted = ABORTED.search(line)
            if aborted and int(aborted[1]) == rank:
                return f" ({aborted[2]})"
        # It names no rank, and the log of rank 0 may be that of all, but mostly all met the same error.
        own_log = self._logs.get(rank) or self._logs.get(0, [])
        uncaught = next(filter(None, map(UNCAUGHT.match, own_log)), None)
        return f" ({uncaught[1].strip()})" if uncaught else ""

    def _gave_up(self) -> Reason | None:
        if not self._waited:
            return None
        return self._waiting("NCCL", self._waited, [rank for rank in self._nodes if rank not in self._waited])

    def _timed_out_on_gloo(self) -> Reason | None:
        """Return which ranks have waited, and for whom; None if all have, as on a network that failed."""
        ranks = job_folder.notes(self._folder, "started", "lost")
        missing = [rank for rank in ranks if rank not in self._timed_out]
        return self._waiting("gloo", self._timed_out, missing) if self._timed_out and missing else None

    def _waiting(self, library: str, waited: Sequence[int], missing: Sequence[int]) -> Reason:
        names = self._names(missing)
        awaited = f"{names}, which hung or was lost" if names else "each other"
        reason = f"{library} gave up after --timeout: rank {','.join(map(str, waited))} waited for {awaited}"
        return Reason(reason, waited[0], _exit_code(self._exit_status(waited[0])), may_pass=True)

    def _with_its_output(self, reason: Reason) -> Reason:
        """Add the error that was printed, if no note has it, and name the rank's log if it has its own."""
        text = reason.text
        if re.search(r"exit code \d+$", text):
            ranks = len(job_folder.notes(self._folder, *job_folder.STATES))
            error = job_log.error_of(reason.rank, self._logs, ranks)
            if error:
                remedy = _remedy(error, ranks) if self._is_plain else ""
                text = f"{text.replace(' silently,', '')}: {error}{remedy}"
        if self._log and self._log.name.endswith(OWN_LOG) and reason.rank in self._logs and reason.rank:
            # That of rank 0 is the job's.
            text += f" (in {self._log.name.removesuffix(OWN_LOG)}_{reason.rank}_log.out)"
        return reason._replace(text=text, may_pass=reason.may_pass or bool(OF_HARDWARE.search(text)))

    def _names(self, ranks: Iterable[int]) -> str:
        if self._launcher:
            nodes = {rank: node for rank, (node, _) in self._ends().items()} | self._nodes
            return ", ".join(f"rank {rank} on {nodes.get(rank, 'a node')}" for rank in ranks)
        names = ", ".join(map(str, ranks))
        return f"rank {names}" if names else ""


def _remedy(error: str, ranks: int) -> str:
    """Return what to do about an error of a script that does not use the kit; "" if that is not known."""
    # Each of two tasks ran a script that starts the ranks of a node itself (slurm/REFERENCE.md).
    if "EADDRINUSE" in error and ranks > 1:
        return ": if the script starts its ranks itself, submit it with --one-process-per-node"
    # gloo wants the name of an interface: github.com/aws-samples/aws-do-eks/pull/51.
    if "Unable to find address for" in error:
        return f": correct SITE_NETWORK_INTERFACE in {project.site_name()}, or GLOO_SOCKET_IFNAME"
    return ""


def _in_words(status: str) -> str:
    """Explain srun's word, or torchrun's exit code; "" if another death was the cause."""
    if status.startswith("Terminated") or status == "-15":
        return ""
    if status.startswith("Killed") or status == "-9":
        return "was killed (by hand, or because memory ran out: --mem)"
    if status.startswith("Out Of Memory"):
        return "was killed because memory ran out: ask for more --mem"
    if status.startswith("Aborted"):
        return "aborted"
    if status.startswith("-"):
        return job_folder.died_of(-int(status))
    if status.startswith("Exited") or status.isdigit():
        return f"ended silently, with exit code {status.split()[-1]}"
    return f"died: {status}"


def _exit_code(status: str) -> int:
    """Return the exit code, as a shell has it, by srun's word or torchrun's exit code; 0 if it is unknown."""
    by_signal = re.fullmatch(r"-(\d+)", status)
    if by_signal:
        return FIRST_OF_SIGNALS + int(by_signal[1])
    exited = EXITED.fullmatch(status)
    if exited:
        return int(exited[1])
    if status.startswith("Out Of Memory"):
        return FIRST_OF_SIGNALS + signal.SIGKILL
    by_name = {signal.strsignal(number): number for number in signal.valid_signals()}
    number = by_name.get(status.partition(" (core")[0])
    return FIRST_OF_SIGNALS + number if number else 0


def _is_by_signal(exit_code: int) -> bool:
    """Return whether an exit code, as a shell has it, says that a signal has ended the process."""
    return exit_code > FIRST_OF_SIGNALS


def sentences(reasons: list[Reason]) -> list[str]:
    """Return why a job failed as the last words of its log."""
    if not reasons:
        return []
    first, *others = reasons[:MOST_REASONS]
    later = [log_words.line(log_words.THEN, _in_short(reason.text)) for reason in others]
    return [log_words.line(log_words.WHY, first.text), *later]


def _in_short(text: str) -> str:
    """Return the reason of a later death without what it guesses in brackets, or says of the peer it lost.

    srun kills every rank that does not end by itself after the first.
    """
    lost = LOST_A_PEER.search(text)
    return text[: lost.start() if lost else None].partition(" (")[0]
