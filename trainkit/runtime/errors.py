"""One clear sentence instead of a traceback for every mistake a user can mend."""

import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from trainkit.runtime import startup
from trainkit.runtime.job_folder import note
from trainkit.runtime.place import rank_of

# Slurm sends USR2 before the time limit, as the job scripts ask it to, and SIGTERM before it ends a job.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
# PyTorch's errors of what is between ranks.
DISTRIBUTED = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


class UserError(Exception):
    """A mistake that the user can correct; its text says what is wrong and what to do."""

    def __str__(self) -> str:
        """Return the text without what a terminal would obey: it may quote a file, or another program."""
        return "\n".join(map(printable, super().__str__().split("\n")))


class PeerError(UserError):
    """Another rank made the mistake, and tells it."""


class Stopped(Exception):  # noqa: N818  not an error: the run did what it was asked to
    """The run has saved its state and ends before its last epoch; the text says how it goes on."""


def run(main: Callable[[], int | None]) -> None:
    """Call `main` and leave the process, with its return value as the exit code.

    A `UserError` prints its sentence on stderr and exits with 1, `Stopped` exits with 0, Ctrl-C with
    130. In a job each rank also leaves a note on how it ended (runtime/job_folder.py).
    """
    startup.mark("imports")
    note("started")
    if rank_of() is not None:  # NCCL aborts a rank that has waited for too long
        with suppress(ValueError):  # a hard limit of 0
            # Of 1 byte: too small for a file, and Linux does not start a program that collects dumps either.
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    if sys.stdout:  # it may be closed
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII only
    words = ""
    try:
        code = main()
    except Stopped as stop:
        code, words = 0, str(stop)
    except UserError as error:
        fail(str(error), "lost" if isinstance(error, PeerError) else "failed")
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as left:
        note("failed", f"error{_which_rank()}: left before the end, with exit code {left.code}")
        raise
    except Exception as error:
        if told := _told_by_pytorch(error):
            fail(told)
        # A rank that stops takes its peers down in whatever they were waiting for. Only the first
        # to stop knows why, so the others point there instead of adding a traceback each.
        # The second is gloo's too, after its timeout, when the backward pass was waiting.
        by_torch = type(error).__name__ in DISTRIBUTED or re.search("gloo|pair closure", str(error))
        if isinstance(error, RuntimeError) and by_torch:
            fail(
                f"lost the other ranks ({first_line(error)}). If one of them reported an error above, "
                "that is the reason.",
                "lost",
            )
        note("failed", f"error{_which_rank()}: {type(error).__name__}: {first_line(error)}")
        raise
    note("finished", words)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # to be stopped now would make a failure of it
    tell()  # while an error of the output can still be overlooked
    sys.exit(code)


def quiet_without_run() -> None:
    """Have Ctrl-C and a UserError show no traceback, before `run` (behind `import torch`) or without it."""

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, UserError):
            print(f"error{_which_rank()}: {error}", file=sys.stderr)
        elif not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = told


def tell(text: str | None = None) -> None:
    """Print, and go on even if nobody can read it: `| head` has ended, or the disk of the log is full."""
    try:
        if text is not None:
            print(text)
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(text: str, state: str = "failed") -> NoReturn:
    """End the process with this error; a rank from any thread, and whatever the others are stuck in."""
    text = f"error{_which_rank()}: {text}"
    note(state, text)
    tell()
    if rank_of() is None and threading.current_thread() is threading.main_thread():
        sys.exit(text)
    # The rank's group is still open, and at Python's own end one of its threads could abort the process.
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def first_line(error: Exception) -> str:
    """Pick the line of its text that tells why: NCCL's own words, else the first; C++ frames may follow."""
    text = str(error).strip()
    by_nccl = re.search(r"Last error:\s*(?!Exception raised)(\S.*)", text)
    by_nccl = by_nccl or re.search(r"^(nccl\w+: .*)", text, re.MULTILINE)
    return by_nccl[1].rstrip(" .") if by_nccl else text.partition("\n")[0]


def reason(error: Exception) -> str:
    """Tell why something could not be saved; PyTorch hides the system's answer behind one of its own."""
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    return getattr(cause, "strerror", None) or first_line(cause)


def printable(text: str) -> str:
    """Strip text from logs, names of files and other programs of what a terminal would obey."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _which_rank() -> str:
    """Every rank tells its own error: a launcher may kill rank 0 before it could speak for all."""
    return f" on rank {rank_of()}" if rank_of() else ""


def _told_by_pytorch(error: Exception) -> str | None:
    """What a full GPU or /dev/shm, or a network that was used in part, means; None for other errors."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "out of memory" in text or "ALLOC_FAILED" in text:
        return (
            "the memory of this process's GPU is full: lower --batch-size, and see with nvidia-smi whether "
            "anybody else uses that GPU."
        )
    if full := re.search(r"Too many open files|unable to .*shared memory\(shm\).*", text):
        return (
            f"loader processes hand over batches through /dev/shm and open files ({full[0].strip()}): "
            "lower --num-workers, raise `ulimit -n`, or give a container more (docker run --shm-size=1g)."
        )
    if unused := re.search(r"Parameter.* which did not receive grad for rank \d+: .*", text):
        return (
            "the last step left out some of the network, and DistributedDataParallel waits for its gradients "
            f"({unused[0].strip()}; TORCH_DISTRIBUTED_DEBUG=INFO names them): use all of it in every step, "
            "or see 03_multigpu_ddp/beyond/unused.py."
        )
    return None
