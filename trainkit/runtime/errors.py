"""One clear sentence instead of a traceback for every mistake that a user can correct."""

import errno
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TextIO

from trainkit.runtime.job_folder import note
from trainkit.runtime.place import rank_of

# Slurm sends USR2 before the time limit, as the job scripts ask it to, and SIGTERM before it ends a job.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
REPOSITORY = Path(__file__).resolve().parents[2]
FRONT_DOORS = {REPOSITORY / name for name in ("results", "slurm", "tools")}
# PyTorch's errors of communication between ranks.
DISTRIBUTED = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


class UserError(Exception):
    """A mistake that the user can correct; its text says what is wrong and what to do."""

    def __str__(self) -> str:
        """Return the text without control sequences: it may quote a file, or another program."""
        return _printable_lines(super().__str__())


class PeerError(UserError):
    """Another rank made the mistake, and reports it."""


class Stopped(Exception):  # noqa: N818  not an error: the run did what it was asked to
    """The run has saved its state and ends before its last epoch; the text says how to continue."""


def run(main: Callable[[], int | None]) -> None:
    """Call `main` and leave the process, with its return value as the exit code.

    A `UserError` prints its sentence on stderr and exits with 1, `Stopped` exits with 0, Ctrl-C with
    130. In a job each rank also leaves a note on how it ended (runtime/job_folder.py).
    """
    note("started")
    for top in Path(sys.argv[0]).resolve().parents:
        ours = top / "trainkit" / "runtime" / "errors.py"
        if os.path.exists(ours) and not ours.samefile(__file__):  # noqa: PTH110  it may be another's folder
            fail(f"it would run the code of {REPOSITORY}: cd {shlex.quote(str(top))}, export PYTHONPATH=$PWD")
    if rank_of() is not None:  # NCCL aborts a rank that has waited too long
        with suppress(ValueError):  # a hard limit of 0
            # 1 byte: too small for a file, and Linux then starts no program that collects dumps either.
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    with suppress(AttributeError):  # it may be closed, or an object of the script
        sys.stdout.reconfigure(errors="replace")  # the terminal may support ASCII only
    words = ""
    try:
        code = main()
    except Stopped as stop:
        code, words = 0, str(stop)
    except UserError as error:
        fail(str(error), "lost" if isinstance(error, PeerError) else "failed")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once, without a word
        sys.exit(130)
    except SystemExit as left:
        note("failed", f"error{_which_rank()}: left before the end, with exit code {left.code}")
        raise
    except Exception as error:
        if sentence := _in_a_sentence(error):
            fail(sentence)
        # A rank that stops takes its peers down in whatever they were waiting for. Only the first
        # to stop knows why, so the others refer to it instead of adding a traceback each.
        if lost_peers(error):
            fail(
                f"lost the other ranks ({first_line(error)}). If one of them reported an error above, "
                "that is the reason.",
                "lost",
            )
        note("failed", f"error{_which_rank()}: {type(error).__name__}: {first_line(error)}")
        raise
    note("finished", words)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a signal now would turn success into failure
    tell()  # flush while an output error can still be ignored
    sys.exit(code)


def lost_peers(error: Exception) -> bool:
    """Return whether this is PyTorch's error of a rank that another one has left."""
    # gloo also raises the second, after its timeout, if the backward pass was waiting.
    by_torch = type(error).__name__ in DISTRIBUTED or re.search("gloo|pair closure", str(error))
    return isinstance(error, RuntimeError) and bool(by_torch)


def hear_stop(handler: Callable[..., None]) -> None:
    """Call `handler` when a signal says: save and stop. Forked processes can be ended as ever."""
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def quiet_without_run() -> None:
    """Hide the traceback of Ctrl-C and UserErrors, before `run` (during `import torch`) or without it."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = str(error) if issubclass(kind, UserError) else _limited(error)
        if text:
            text = f"error{_which_rank()}: {text}"
            note("failed", text)
            print(text, file=sys.stderr)
        elif not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def tell(text: str | None = None, stream: TextIO | None = None) -> None:
    """Print, and go on even if that fails: `| head` has ended, or the log's disk is full."""
    stream = stream or sys.stdout
    try:
        if text is not None:
            # In one write, as Python does not buffer in jobs, and other ranks may write to the same pipe.
            print(f"{_printable_lines(text)}\n", end="", file=stream)
        if stream:
            stream.flush()
    except OSError:
        with suppress(AttributeError, OSError):  # an object of the script
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(text: str, state: str = "failed") -> NoReturn:
    """End the process with this error, from any thread of a rank, whatever the others are stuck in."""
    text = _printable_lines(f"error{_which_rank()}: {text}")
    note(state, text)
    tell()
    if rank_of() is None and threading.current_thread() is threading.main_thread():
        sys.exit(text)
    # The rank's group is still open, and at Python's own end one of its threads could abort the process.
    tell(text, sys.stderr)
    os._exit(1)


def first_line(error: Exception) -> str:
    """Return the line of its text that gives the cause: NCCL's, else the first; C++ frames may follow."""
    text = str(error).strip()
    by_nccl = re.search(r"Last error:\s*(?!Exception raised)(\S.*)", text)
    by_nccl = by_nccl or re.search(r"^(nccl\w+: .*)", text, re.MULTILINE)
    # Of a network that is loaded, the second line has the cause.
    return by_nccl[1].rstrip(" .") if by_nccl else text.replace(":\n\t", ": ", 1).partition("\n")[0]


def reason(error: Exception) -> str:
    """Return why something could not be saved; PyTorch's error hides the one of the operating system."""
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    return getattr(cause, "strerror", None) or first_line(cause)


def printable(text: str) -> str:
    """Remove control sequences from text of logs, file names and other programs."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.expandtabs().split("\n")))


def _which_rank() -> str:
    """Return " on rank N" on all ranks but 0. Each reports its own error, as rank 0 may already be killed."""
    return f" on rank {rank_of()}" if rank_of() else ""


def _limited(error: BaseException) -> str | None:
    if isinstance(error, MemoryError) or re.search("failed to map segment|an't allocate memory", str(error)):
        return "this process may not have more memory: raise `ulimit -v`, or ask Slurm for more with --mem."
    too_many = isinstance(error, BlockingIOError) or "can't start new thread" in str(error)
    return "no more processes may be started: raise `ulimit -u` (docker: --pids-limit)." if too_many else None


def _is_of_the_kit(error: Exception) -> bool:
    """Return whether the kit used the file: an error of a user's own code keeps its traceback."""
    libraries = (str(Path(os.__file__).parent), "<")  # Python's own, and frozen ones
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(Path(__file__).parents[1]):
            return True
        if not frame.filename.startswith(libraries) and "site-packages" not in frame.filename:
            return Path(frame.filename).resolve().parent in FRONT_DOORS
    return False


def _in_a_sentence(error: Exception) -> str | None:
    """Explain a path, full memory, or a network that was used in part; None for other errors."""
    if isinstance(error, OSError) and error.strerror and _is_of_the_kit(error):
        if error.errno == errno.EMFILE:
            return "no more files may be open: raise `ulimit -n`."
        if error.filename:
            return f"{error.filename} cannot be read or written ({error.strerror}): give another, or mend it."
        if "temporary directory" in error.strerror:
            return f"{error.strerror}: free the space there, or set TMPDIR to a folder of yours."
        if isinstance(error, FileNotFoundError):  # of os.getcwd
            return "the folder that this was started in has been removed: cd to another."
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE):  # an open file
            return f"a file is cut off ({error.strerror}): free the space (or `ulimit -f`), or mend the disk."
    if isinstance(error, shutil.Error) and _is_of_the_kit(error):  # (from, to, why) of each file
        _, path, why = error.args[0][0]
        return f"{path} cannot be written ({why.partition(': ')[0]}): free the space, or mend it."
    if lacks := _limited(error):
        return lacks
    text = str(error) if isinstance(error, RuntimeError) else ""
    # The frames of a loader process are in the text.
    trace = "".join([*map(str, traceback.extract_tb(error.__traceback__)), str(error)])
    pillows = isinstance(error, (OSError, SyntaxError)) or type(error).__name__ == "DecompressionBombError"
    if pillows and not getattr(error, "errno", None) and re.search("/PIL/|/torchvision/", trace):
        last = str(error).strip().rpartition("\n")[2]
        return f"one of the images is damaged ({last}): replace it, or leave it out."
    if re.search(r"No working C\+\+ compiler found|Failed to find C\S* compiler", text):
        return "torch.compile needs a C++ compiler: load one (module load gcc), or leave out --compile."
    if "out of memory" in text or "ALLOC_FAILED" in text:
        return (
            "the memory of this process's GPU is full: lower --batch-size, and check with nvidia-smi whether "
            "another process uses that GPU."
        )
    if full := re.search(r"Too many open files|File too large|unable to .*shared memory\(shm\).*", text):
        return (
            f"loader processes hand over batches through /dev/shm and open files ({full[0].strip()}): "
            "lower --num-workers, raise `ulimit -n` or -f, or give a container more (docker --shm-size=1g)."
        )
    if "appears not to match sizes" in text:
        return "the ranks have networks of different sizes: start all of them with the same options."
    if unused := re.search(r"Parameter.* which did not receive grad for rank \d+: .*", text):
        return (
            "the last step left out some of the network, and DistributedDataParallel waits for its gradients "
            f"({unused[0].strip()}; TORCH_DISTRIBUTED_DEBUG=INFO names them): use all of it in every step, "
            "or see 03_multigpu_ddp/beyond/unused.py."
        )
    return None
