"""Run a learner's function in several ranks that communicate through gloo, on this machine's CPU."""

import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # DDP imports it, and once here is faster than in every rank.
import torch.distributed as dist
from torch.distributed import init_process_group  # a check puts `meet` in its place in `dist`

from manygpus.process import end_with
from manygpus.workshop.work import Wrong

TIMEOUT = 15  # seconds that the ranks wait for each other
FOREVER_SECONDS = 1e6  # until the process is killed
IN_VAIN = "The ranks wait for each other in vain"
_kept: list[dist.ProcessGroup | None] = []


class Outcome(NamedTuple):
    """What a rank sends: the result of its function, or a sentence on how it failed."""

    succeeded: bool
    result: object


def in_ranks(function: Callable[[int, int], object], size: int = 2, group: bool = True) -> list[object]:
    """Call `function(rank, size)` in `size` new processes that form a process group; return their results.

    The results have to be picklable; convert tensors to lists. Without `group` the function forms the group
    itself.

    Raises:
        Wrong: if it fails in a rank, or the ranks wait for each other in vain.
    """
    # Forked, as the function need not be importable then.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store" if group else None
        pipes: list[Connection] = []
        processes = []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(function, rank, size, store, sender), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _results(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def meet(*arguments: object, **settings: object) -> None:
    """Be `init_process_group` for a learner's script in a rank, with a shorter timeout.

    The group is kept until the process ends. Else the last user of it, such as DistributedDataParallel when
    the script's `main` returns, may wait for the group's threads, which may wait for Python's lock
    (`destroy_distributed` has more; seen with gloo and PyTorch 2.4 and 2.5).
    """
    init_process_group(*arguments, **settings | {"timeout": timedelta(seconds=TIMEOUT)})
    _kept.append(dist.group.WORLD)


def _results(pipes: list[Connection]) -> list[object]:
    """Return what each rank sends, in the order of the ranks."""
    results: dict[Connection, object] = {}
    while len(results) < len(pipes):
        failures = []
        for pipe in wait([pipe for pipe in pipes if pipe not in results]):
            try:
                outcome: Outcome = pipe.recv()
            except EOFError:
                raise Wrong(f"Rank {pipes.index(pipe)} ended without a message.") from None
            results[pipe] = outcome.result
            if not outcome.succeeded:
                failures.append(str(outcome.result))
        if failures:
            # Report the rank that failed rather than one that waited for it.
            raise Wrong(min(failures, key=lambda failure: failure.startswith(IN_VAIN)))
    return [results[pipe] for pipe in pipes]


def _rank(function: Callable, rank: int, size: int, store: Path | None, sender: Connection) -> None:
    end_with(multiprocessing.parent_process().pid)
    # The machine's own name may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    try:
        if store:
            init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=TIMEOUT),
            )
        sender.send(Outcome(succeeded=True, result=function(rank, size)))
    except Wrong as wrong:
        sender.send(Outcome(succeeded=False, result=str(wrong)))
    except Exception as error:
        sender.send(Outcome(succeeded=False, result=error_in_words(rank, error)))
    # Others may still be about to meet this one.
    time.sleep(FOREVER_SECONDS)


def error_in_words(rank: int, error: Exception) -> str:
    """Say where a rank failed: in the learner's program, if that was running."""
    frames = traceback.extract_tb(error.__traceback__)
    learner_frames = [frame for frame in frames if Path(frame.filename).parent.name == "mine"]
    if learner_frames:
        line = f"in line {learner_frames[-1].lineno} of {Path(learner_frames[-1].filename).name}"
    else:
        line = f"in line {frames[-1].lineno}"
    if re.search("[Tt]imed? ?out|[Cc]onnection (closed|reset)|[Bb]roken pipe", str(error)):
        return f"{IN_VAIN}: rank {rank} waits {line}. Do all ranks make the same calls, in the same order?"
    return f"Rank {rank} stops with {type(error).__name__} {line}: {error}"
