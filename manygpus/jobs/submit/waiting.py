"""How long a job would wait: Slurm's estimate of its start, and how long earlier jobs of the user waited.

Slurm plans the starts of jobs from the time limits of those before them, so its estimate is of this moment.
"""

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from manygpus.jobs import local_job, slurm
from manygpus.jobs.site import Site
from manygpus.jobs.slurm import Trial, Wait, time_in_words
from manygpus.jobs.stages import Resources
from manygpus.jobs.submit import partition_limits
from manygpus.jobs.submit.request import NOT_FOR_SUBMITIT
from manygpus.jobs.submit.slurm_options import of_variables, trial_options

# Waits of so many days count: the load of a cluster changes over the year.
DAYS = 14
CAUTION = (
    "such an estimate changes with the queue: the start comes earlier if jobs end before their time limits, "
    "and later if jobs of higher priority are submitted"
)


def planned(
    site: Site, shape: Resources, minutes: int, partitions: Sequence[Mapping[str, str]] | None = None
) -> Trial:
    """Ask Slurm once when it would start a job of this shape, as `submit.py` would request it.

    Args:
        minutes: its time limit.
        partitions: those of `partition_limits.read_partitions`, where several shapes are asked for.
    """
    asked = trial_options(site, shape, minutes)
    variables = {name: value for name, value in site.sbatch.items() if name not in NOT_FOR_SUBMITIT}
    beyond = partition_limits.excess(of_variables(variables) | asked, partitions)
    if beyond:
        return Trial(refusal=f"{beyond.reason}: {beyond.limit}")
    options = [f"--{option}={value}" for option, value in asked.items()]
    return slurm.test_only(options, local_job.without_sbatch_variables() | variables)


def of_size(waits: Sequence[Wait], shape: Resources) -> list[float]:
    """Return the waits, in seconds, of the jobs that had as many GPUs on as many nodes."""
    return [wait.seconds for wait in waits if (wait.nodes, wait.gpus) == (shape.nodes, shape.gpus)]


def is_now(moment: datetime) -> bool:
    """Return whether a start is so soon that nothing is before it."""
    return moment < datetime.now() + timedelta(minutes=1)


def from_now(moment: datetime) -> str:
    """Return a start as "now", or as "2026-11-29 01:44 (in 24 min)"."""
    if is_now(moment):
        return "now"
    ahead = time_in_words((moment - datetime.now()).total_seconds())
    return f"{moment:%Y-%m-%d %H:%M} (in {ahead})"


def typical(seconds: Sequence[float]) -> str:
    """Return how long jobs have waited, as "3 min (the median of 7 jobs), at most 2.5 h"."""
    median, longest = time_in_words(statistics.median(seconds)), time_in_words(max(seconds))
    return f"{median} (the median of {len(seconds)} job(s)), at most {longest}"
