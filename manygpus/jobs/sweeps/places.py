"""Runs that share a machine: each in a place of its own, and the next one where a place is free."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from manygpus.jobs import local_job
from manygpus.jobs.watch.job_status import Handle

Run = TypeVar("Run")


def run_in_places(
    runs: Sequence[Run],
    places: int,
    gpus: int,
    start: Callable[[Run], Handle],
    next_ends: Callable[[Mapping[Run, Handle]], Iterable[Run]],
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Run each as processes of this machine, in the first place that is free. At an error all are ended.

    Args:
        runs: the runs, in the order in which they begin.
        places: how many run at a time.
        gpus: the GPUs of this machine that they may use.
        start: starts a run.
        next_ends: waits until one or more of those that run have ended, and returns them.
        goes_on: returns whether others are to begin.
    """
    waiting = [*runs]
    free = [*range(places)]
    active: dict[Run, Handle] = {}
    place_of: dict[Run, int] = {}
    try:
        while active or (waiting and goes_on()):
            while waiting and free and goes_on():
                run = waiting.pop(0)
                place_of[run] = free.pop(0)
                with local_job.in_place(place_of[run], places, gpus):
                    active[run] = start(run)
            for run in next_ends(active):
                del active[run]
                free.append(place_of[run])
    except BaseException:
        for handle in active.values():
            handle.cancel()
            while handle.state().name == "running":
                time.sleep(0.1)
        raise
