"""DDP from a notebook or a REPL: `trainkit.launch(train, workers=2)` calls train in fresh processes."""

import codecs
import linecache
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import cloudpickle  # comes with submitit

from trainkit import errors, network
from trainkit.errors import UserError, first_line

Result = TypeVar("Result")
PATIENCE_SECONDS = 5  # for ranks to end by themselves
NO_RESULT = "train's result cannot be sent back ({}): return numbers, or a state_dict() instead of the model."


class RankError(UserError):
    """A rank has failed; the text says which one was the first, and why, with its traceback."""


def launch(train: Callable[..., Result], *arguments: object, workers: int = 2) -> Result:
    """Call `train(*arguments)` in so many fresh processes, and return what it returns in rank 0.

    Each process is a rank as with torchrun: `trainkit.world.join` finds the others, and takes one GPU each.
    What they print appears here at once. Nothing of them stays, so call this as often as you like, also where
    CUDA is in use. `train` may be defined in a cell: it is sent by value, with the globals that it names. Its
    result comes back by pickle: best numbers, or tensors on the CPU. Ctrl-C ends all ranks, and so does the
    end of this process.

    Raises:
        RankError: if `train` fails in a rank, or the rank is killed; the others are ended.
        UserError: if there is nothing to call, or `train` or its result cannot be sent.
    """
    if not callable(train):
        raise UserError(f"launch cannot call {train!r}: give it the function itself, without its ().")
    if not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers is {workers!r}: give a whole number from 1 on; with GPUs, one for each.")
    call = _packed(train, arguments)
    output, theirs = os.pipe()
    # However we leave this block, it closes the pipe; that ends even a rank that is not in `processes` yet.
    with tempfile.TemporaryDirectory(prefix="trainkit-") as name, os.fdopen(output), os.fdopen(theirs):
        folder, processes = Path(name), []
        (folder / "call").write_bytes(call)
        share = max(len(os.sched_getaffinity(0)) // workers, 1)
        env = {"OMP_NUM_THREADS": str(share)} | os.environ | {
            "WORLD_SIZE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(network.free_port()),
            "PYTHONIOENCODING": "utf-8",
            "TRAINKIT_JOB_DIR": name,  # where `errors.run` leaves its notes
        }  # fmt: skip
        command = [sys.executable, "-m", "trainkit.launching", name]
        # Sessions of their own: Ctrl-C is for this process alone, which then ends them in an orderly way.
        how = {"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs, "start_new_session": True}
        try:
            for rank in map(str, range(workers)):
                own = {"RANK": rank, "LOCAL_RANK": rank}
                processes.append(subprocess.Popen(command, env=env | own, **how))
            _follow(processes, output, folder)
            why = _why(processes, folder)
        except KeyboardInterrupt:
            _signal(processes, signal.SIGTERM)  # a Run saves its checkpoint now
            _follow(processes, output, folder, PATIENCE_SECONDS)
            raise
        finally:
            _signal(processes, signal.SIGKILL)
            for process in processes:
                process.wait()
        if why:
            raise RankError(why)
        try:
            return pickle.loads((folder / "result").read_bytes())
        except Exception as error:  # a DDP model has no group here
            raise UserError(NO_RESULT.format(first_line(error))) from None


def _packed(train: Callable, arguments: tuple) -> bytes:
    # Sources that are in no file, as a cell's: for tracebacks, and for who compiles functions.
    sources = {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}
    try:
        return pickle.dumps((sys.path, sources, cloudpickle.dumps((train, arguments))))
    except Exception as error:  # of any kind: every object has its own way to refuse
        raise UserError(
            f"train, or something that it uses, cannot be sent to other processes ({first_line(error)}): "
            "open files, connections and locks inside of train."
        ) from None


def _follow(processes: list[subprocess.Popen], output: int, folder: Path, seconds: float = math.inf) -> None:
    """Print what the ranks print until they have ended, or for `seconds`, fewer once one has failed."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended = all(process.poll() is not None for process in processes)
        if _failed(processes, folder):
            until = min(until, time.monotonic() + PATIENCE_SECONDS)
        if select.select([output], [], [], 0.1)[0]:
            print(decoder.decode(os.read(output, 1 << 16)), end="", flush=True)
        elif ended:
            return


def _signal(processes: list[subprocess.Popen], number: signal.Signals) -> None:
    """Send it to the ranks and to what they have started, which may outlive them."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _failed(processes: list[subprocess.Popen], folder: Path) -> list[int]:
    """The ranks that have ended without the note that they finished, whatever their exit codes."""
    ended = [rank for rank, process in enumerate(processes) if process.poll() is not None]
    return [rank for rank in ended if not (folder / f"rank-{rank}.finished").exists()]


def _why(processes: list[subprocess.Popen], folder: Path) -> str:
    """What the first rank to fail tells, or what is known of one that could not; empty if train returned."""
    failed, first = _failed(processes, folder), folder / "first-failed"
    if not failed:
        return (folder / "rank-0.finished").read_text()  # how a Run goes on that a signal has stopped
    silent = [rank for rank in failed if not list(folder.glob(f"rank-{rank}.[fl]*"))]
    if silent and not first.exists():
        code = processes[silent[0]].returncode
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        reason = "by hand, or for want of memory?" if code == -signal.SIGKILL else "see what it printed."
        return f"rank {silent[0]} ended with {how} before train returned: {reason}"
    note = first.resolve() if first.exists() else min(folder.glob("rank-*.lost"))
    trace = note.with_suffix(".traceback")
    return note.read_text().removeprefix("error on ") + (trace.read_text() if trace.exists() else "")


def _rank(folder: Path) -> None:
    """Call train in this process, which is one of the ranks."""
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    # Whole lines, as those of all ranks go into one pipe: PYTHONUNBUFFERED would send their ends apart.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        sys.path[:], sources, call = pickle.loads((folder / "call").read_bytes())
        linecache.cache.update(sources)
        train, arguments = pickle.loads(call)
        result = train(*arguments)
    except Exception as error:
        if not isinstance(error, (UserError, errors.Stopped)):
            lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
            (folder / f"rank-{os.environ['RANK']}.traceback").write_text("".join(lines))
            sys.excepthook = lambda *_: None  # the caller shows it
        raise
    if os.environ["RANK"] == "0":
        try:
            (folder / "result").write_bytes(cloudpickle.dumps(result))
        except Exception as error:
            raise UserError(NO_RESULT.format(first_line(error))) from None


def _end_with_the_caller() -> None:
    """Wait until nobody can read what this rank prints, then end it and the processes that it started."""
    watch = select.poll()
    watch.register(1, 0)  # of a pipe whose reader is gone it tells without being asked, see poll(2)
    watch.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    folder = Path(sys.argv.pop())  # options.parse is not to see it
    errors.run(lambda: _rank(folder))
