"""DDP from a notebook or a REPL: `trainkit.launch(train, workers=2)` calls train in fresh processes."""

import codecs
import ctypes
import linecache
import math
import os
import pickle
import select
import shutil
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

from trainkit.runtime import errors, job_folder, place
from trainkit.runtime.errors import UserError, first_line

Result = TypeVar("Result")
PATIENCE_SECONDS = 5  # for ranks to end by themselves
NO_RESULT = "train's result cannot be sent back ({}): return numbers, or a state_dict() instead of the model."


class RankError(UserError):
    """A rank has failed; the text says which one was the first, and why, with its traceback."""


def launch(train: Callable[..., Result], *arguments: object, workers: int = 2) -> Result:
    """Call `train(*arguments)` in `workers` fresh processes, and return rank 0's result.

    Each process is a rank as with torchrun: `process_group.join` finds the others, and takes one GPU each.
    What they print appears here at once. They leave nothing behind, so call this as often as you like, even
    if CUDA is in use. `train` may be defined in a cell: it is sent by value, with the globals that it names.
    Its result comes back by pickle: numbers are best, or tensors on the CPU. Ctrl-C ends all ranks, and so
    does the end of this process.

    Raises:
        RankError: if `train` fails in a rank, or the rank is killed; the others are ended.
        UserError: if `workers` is not a number of processes, or `train` or its result cannot be sent.
    """
    if not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers is {workers!r}: give a whole number from 1 on; with GPUs, one for each.")
    with tempfile.TemporaryDirectory(prefix="trainkit-") as name:
        folder, ranks = Path(name), []
        _send(train, arguments, folder)
        share = max(len(os.sched_getaffinity(0)) // workers, 1)
        env = {"OMP_NUM_THREADS": str(share)} | os.environ | {
            "WORLD_SIZE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(place.free_port()),
            "PYTHONIOENCODING": "utf-8",
            job_folder.VARIABLE: name,  # where `errors.run` leaves its notes
        }  # fmt: skip
        output, theirs = os.pipe()
        printing = threading.Thread(target=_show, args=[output], daemon=True)
        # Separate sessions: Ctrl-C reaches only this process, which then ends the ranks in order.
        how = {"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs, "start_new_session": True}
        try:
            printing.start()
            for rank in map(str, range(workers)):
                command = [sys.executable, "-m", "trainkit.runtime.launching", name]
                ranks.append(subprocess.Popen(command, env=env | {"RANK": rank, "LOCAL_RANK": rank}, **how))
            _wait(ranks, folder)
            failed = _failed(ranks, folder)
        except KeyboardInterrupt:
            _signal(ranks, signal.SIGTERM)  # a Run saves its checkpoint now
            _wait(ranks, folder, PATIENCE_SECONDS)
            raise
        finally:
            _signal(ranks, signal.SIGKILL)
            for process in ranks:
                process.wait()
            os.close(theirs)
            printing.join(PATIENCE_SECONDS)  # until the other end of the pipe is closed
        if failed:
            lost = job_folder.notes(folder, "lost")
            silent = next((rank for rank in failed if rank not in lost), failed[0])
            why = (
                f"rank {silent} ended with exit code {ranks[silent].returncode} before train returned: see "
                "what it printed (-9: it was killed, perhaps for lack of memory)."
            )
            if first := job_folder.first_failed(folder):
                trace = job_folder.read(first.with_suffix(".traceback"))
                why = f"{job_folder.read(first).removeprefix('error on ')}\n{trace}".rstrip()
            raise RankError(why)
        if not (folder / "result").exists():  # a Run stopped by a signal says how to continue
            raise RankError(job_folder.read(job_folder.notes(folder, "finished")[0]))
        try:
            return pickle.loads((folder / "result").read_bytes())
        except Exception as error:  # a DDP model has no group here
            raise UserError(NO_RESULT.format(first_line(error))) from None


def _send(train: Callable, arguments: tuple, folder: Path) -> None:
    # Sources that are in no file, as a cell's: for tracebacks, and for compilers of functions.
    sources = {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}
    try:
        call = pickle.dumps((sys.path, sources, cloudpickle.dumps((train, arguments))))
    except Exception as error:  # of any kind: each object refuses pickling in its own way
        raise UserError(
            f"train, or something that it uses, cannot be sent to other processes ({first_line(error)}): "
            "open files, connections and locks inside of train."
        ) from None
    (folder / "call").write_bytes(call)


def _show(output: int) -> None:
    """Print what the ranks print until the last of them has ended."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    while written := os.read(output, 1 << 16):
        text = decoder.decode(written).encode(encoding, "replace").decode(encoding)
        print(text, end="", flush=True)
    os.close(output)


def _wait(ranks: list[subprocess.Popen], folder: Path, seconds: float = math.inf) -> None:
    """Wait until the ranks have ended, or for `seconds`, fewer once one has failed."""
    until = time.monotonic() + seconds
    while any(process.poll() is None for process in ranks) and time.monotonic() < until:
        if _failed(ranks, folder):
            until = min(until, time.monotonic() + PATIENCE_SECONDS)
        time.sleep(0.05)


def _signal(ranks: list[subprocess.Popen], number: signal.Signals) -> None:
    """Send the signal to the ranks and to the processes they started, which may outlive them."""
    for process in ranks:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _failed(ranks: list[subprocess.Popen], folder: Path) -> list[int]:
    """List the ranks that ended without a note that they finished, whatever their exit codes."""
    ended = [rank for rank, process in enumerate(ranks) if process.poll() is not None]
    return [rank for rank in ended if rank not in job_folder.notes(folder, "finished")]


def _rank(folder: Path) -> None:
    """Call train in this process, which is one of the ranks."""
    ctypes.CDLL(None).prctl(
        1, signal.SIGCONT
    )  # one that is stopped is woken by the caller's end, and ends, too
    threading.Thread(target=_end_with_the_caller, args=[folder], daemon=True).start()
    # Whole lines, as all ranks write into one pipe: PYTHONUNBUFFERED would send line ends separately.
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


def _end_with_the_caller(folder: Path) -> None:
    """Wait until the reader of this rank's output is gone, then end it, its processes and `folder`."""
    watch = select.poll()
    watch.register(1, 0)  # a closed reader is always reported, see poll(2)
    watch.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    folder = Path(sys.argv.pop())  # options.parse must not see it
    errors.run(lambda: _rank(folder))
