"""One clear sentence instead of a traceback for a mistake that a user can correct."""

import errno
import functools
import os
import re
import resource
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NoReturn, TextIO

from manygpus import frozen_code
from manygpus.job_folder import note
from manygpus.launchers import rank_of
from manygpus.signals import STOP_SIGNALS

REPOSITORY = Path(__file__).resolve().parents[1]
# False if the package is installed alone (project.py).
IS_CHECKOUT = (REPOSITORY / "slurm" / "job_env.sh").is_file()
# PyTorch's errors of communication between ranks.
DISTRIBUTED = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
# The extras of pyproject.toml that the commands of the package alone need. The others are for the course.
OF_COMMANDS = ("train", "reports")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_MEMORY = "this process cannot get more memory: ask Slurm for more with --mem, or raise `ulimit -v`."


class UserError(Exception):
    """A mistake that the user can correct; its text says what is wrong and what to do."""


class PeerError(UserError):
    """Another rank made the mistake, and reports it."""


class Stopped(Exception):  # noqa: N818  not an error: the run did what it was asked to
    """The run has saved its state and ends before its last epoch; the text says how to continue."""


# Errors of PyTorch that have a known remedy: a pattern of their text -> what to say; see `explain`.
_SENTENCES: dict[str, str] = {}


def explain(pattern: str, sentence: str) -> None:
    """Have `entrypoint` end with a sentence, in place of a traceback, for a RuntimeError of PyTorch's.

    It is called by the module whose subject the error is.

    Args:
        pattern: a regular expression, looked for in the error's text.
        sentence: what to say, with {found} for what the pattern has found.
    """
    _SENTENCES[pattern] = sentence


def entrypoint(main: Callable[..., int | None]) -> Callable[..., None]:
    """Make `main` the function by which a program begins and ends, as PyTorch Elastic's @record does.

        @entrypoint
        def main() -> None: ...

        if __name__ == "__main__":
            main()

    The function that it returns comes back after success, and after `Stopped`; if `main` returns a number
    other than 0, it exits with it. A `UserError` prints its sentence on stderr and exits with 1, as do the
    errors of `explain`; Ctrl-C exits with 130. Any other error keeps its traceback. In a job each rank also
    leaves a note on how it ended (job_folder.py).
    """

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> None:
        code = _run(functools.partial(main, *args, **kwargs))
        if code:
            sys.exit(code)

    return run


def _run(main: Callable[[], int | None]) -> int | None:
    """Call `main` and return its value; leave the process after a failure, as `entrypoint` says."""
    note("started")
    _refuse_another_checkout()
    if rank_of() is not None:
        _dump_no_core()
    with suppress(AttributeError):  # a script may have put an object of its own in the place of sys.stdout
        sys.stdout.reconfigure(errors="replace")  # the terminal may support ASCII only
    last_words = ""
    try:
        code = main()
    except Stopped as stop:
        code = 0
        last_words = str(stop)
    except PeerError as error:
        fail(str(error), "lost")
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once, without a word
        sys.exit(130)
    except SystemExit as left:
        note("failed", f"error{_on_which_rank()}: left before the end, with exit code {left.code}")
        raise
    except Exception as error:
        if sentence := _explanation(error):
            fail(sentence)
        # A rank that stops takes its peers down in whatever they were waiting for. Only the first
        # to stop knows why, so the others refer to it instead of adding a traceback each.
        if lost_peers(error):
            fail(
                f"lost the other ranks ({first_line(error)}). If one of them reported an error above, "
                "that is the reason.",
                "lost",
            )
        note("failed", f"error{_on_which_rank()}: {type(error).__name__}: {first_line(error)}")
        raise
    note("finished", last_words)
    if rank_of() is not None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a signal now would turn a rank's success into failure
    print_line()  # flush while an output error can still be ignored
    return code


def _refuse_another_checkout() -> None:
    """End if the script is in one checkout and this package in another.

    In the environment of the first checkout its `manygpus` is installed (INSTRUCTORS.md has a class share
    one). Edits of the second checkout's would change nothing, without a word.
    """
    code = frozen_code.of(REPOSITORY)
    for folder in Path(sys.argv[0]).resolve().parents:
        beside_the_script = folder / "manygpus" / "errors.py"
        if not beside_the_script.exists():
            continue
        # The name of `manygpus monitor` is no path. In a job it is as if it lay in the current folder, which
        # is in the checkout, and the job runs a frozen copy of that.
        is_of_its_job = code and code.checkout == folder
        if not is_of_its_job and not beside_the_script.samefile(__file__):
            remedy = f"cd {shlex.quote(str(folder))} && export PYTHONPATH=$PWD"
            fail(f"this script would run the code of {REPOSITORY}: {remedy}")
        # A frozen copy of a checkout may lie in that checkout.
        break


def _dump_no_core() -> None:
    """Leave no core file of a rank that NCCL aborts because it has waited too long for another one."""
    with suppress(ValueError):  # there is a hard limit of 0
        # 1 byte: too small for a file, and Linux then starts no program that collects dumps either.
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


def lost_peers(error: Exception) -> bool:
    """Return whether this is PyTorch's error of a rank that another one has left."""
    # gloo also raises the second, after its timeout, if the backward pass was waiting.
    by_torch = type(error).__name__ in DISTRIBUTED or re.search("gloo|pair closure", str(error))
    return isinstance(error, RuntimeError) and bool(by_torch)


def print_line(text: str | None = None, stream: TextIO | None = None) -> None:
    """Print, and go on even if that fails: `| head` has ended, or the log's disk is full."""
    stream = stream or sys.stdout
    try:
        if text is not None:
            # In one write, as Python does not buffer in jobs, and other ranks may write to the same pipe.
            stream.write(f"{text}\n")
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of text in columns, the titles first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
        print_line("  ".join(cells).rstrip())


def fail(text: str, state: str = "failed") -> NoReturn:
    """End the process with this error, from any thread of a rank, whatever the others are stuck in."""
    text = f"error{_on_which_rank()}: {text}"
    note(state, text)
    print_line()
    if rank_of() is None and threading.current_thread() is threading.main_thread():
        sys.exit(text)
    # The rank's group is still open, and at Python's own end one of its threads could abort the process.
    print_line(text, sys.stderr)
    os._exit(1)


def diverged(clause: str) -> UserError:
    """Return the error of a diverged training; `clause` says how it shows, such as "the loss is nan"."""
    return UserError(
        f"{clause}: lower --lr, in a new run (a checkpoint keeps the --lr that it was made with), or look "
        "for such numbers in the data. The earlier epochs are recorded."
    )


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


def _on_which_rank() -> str:
    """Return " on rank N", or "" without a launcher. Every rank reports: rank 0 may be killed already."""
    return f" on rank {rank_of()}" if rank_of() else ""


def _explanation(error: Exception) -> str | None:
    """Return what to say of a known error of PyTorch or of the system; None for other errors."""
    if isinstance(error, RuntimeError):
        for pattern, sentence in _SENTENCES.items():
            match = re.search(pattern, str(error))
            if match:
                return sentence.format(found=match[0].strip())
    if isinstance(error, ImportError) and rank_of() is None:
        return missing_package(error) or None
    if isinstance(error, OSError) and error.errno in NO_SPACE and rank_of() is None:
        # On the login node a full quota is what HPC users meet most often. A check before cannot foresee
        # it: the first files may fit. In a rank the traceback tells which file it was.
        path = error.filename2 or error.filename
        file = f" to write {path}" if path else ""
        return f"there is no space{file} ({error.strerror}): free some, or ask for a larger quota."
    return NO_MEMORY if _lacks_memory(error) else None


def missing_package(error: ImportError) -> str:
    """Return which of the optional packages a command lacks, and how to get them; "" for other errors."""
    name = (error.name or "").partition(".")[0]
    for extra, packages in _extras().items():
        if name.replace("PIL", "pillow") in packages:
            install = f"{sys.executable} -m pip install {' '.join(packages)}"
            return f"this needs {name}, of the extra manygpus[{extra}]: {install}"
    return ""


def _extras() -> dict[str, list[str]]:
    """Return the packages of the extras of commands, by extra; none in a checkout."""
    extras: dict[str, list[str]] = {}
    if IS_CHECKOUT:
        return extras
    with suppress(metadata.PackageNotFoundError):  # another Python runs the package (run_alone.py)
        for requirement in metadata.requires("manygpus") or []:
            optional = re.match(r"([\w.-]+).*; *extra *== *\W(\w+)", requirement)
            if optional and optional[2] in OF_COMMANDS:
                extras.setdefault(optional[2], []).append(optional[1])
    return extras


def _lacks_memory(error: BaseException) -> bool:
    """Return whether the process has reached its limit of memory (not the GPU's).

    `import torch` already may: github.com/pytorch/pytorch/issues/16558.
    """
    texts = "failed to map segment|can't allocate memory|Cannot allocate memory"
    return isinstance(error, MemoryError) or re.search(texts, str(error)) is not None
