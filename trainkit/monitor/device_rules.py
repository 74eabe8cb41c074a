"""Rules of the verdict on what GPUs and memories show. Each finds one kind of issue, or None.

The utilisation of a GPU decides nothing by itself: it is 100 % while a kernel does nothing but wait.
"""

import math
from collections.abc import Iterable

import pandas as pd

from trainkit.monitor.issues import (
    WHAT_MAKES_RANKS_WAIT,
    FullGpuMemory,
    FullHostMemory,
    Grade,
    IdleGpus,
    Issue,
    LaunchBound,
    Location,
    PowerReading,
    ThrottledGpus,
    ThrottlingCause,
    UnusedGpus,
)
from trainkit.monitor.sample_tables import GpuId
from trainkit.monitor.sampled_job import SampledJob
from trainkit.record.columns import DP

# A GPU's load is its power, 0 when idle and 1 at its limit. Kernels that fill it take 0.4 to 1; short ones
# with gaps between them, or NCCL's that wait for another rank, below 0.25, at up to 100 % utilisation. An
# H100 that our network fills takes 0.6; at 0.35 it had no kernel for a third of the time, which a captured
# step saved.
IDLE_LOAD = 0.05
LOW_LOAD = 0.3
HALF_LOAD = 0.5
# With low power the utilisation shows the reason.
IDLE_UTILISATION_PERCENT = 5
BUSY_UTILISATION_PERCENT = 80
# With so much of the time without a kernel, at less than half of the power, it could be faster.
GAP_TIME_SHARE = 0.2
# In a well-cooled server heat never slows a GPU down.
HOT_TIME_SHARE = 0.05
# At the limit of its power a GPU has 0.65 to 0.9 of its highest clock, and wastes nothing. Below is a cap.
CAPPED_CLOCK_SHARE = 0.6
CAPPED_TIME_SHARE = 0.2
# A GPU's memory is there to be filled; on a host the kernel kills as soon as --mem is reached.
FULL_GPU_MEMORY_SHARE = 0.95
FULL_HOST_MEMORY_SHARE = 0.9


def find_unused_gpus(job: SampledJob) -> Issue | None:
    """Find GPUs that no rank uses."""
    gpus = job.judged.gpus
    unused = [gpu for gpu in gpus if job.is_unused(gpu)]
    if not unused:
        return None
    return Issue(
        UnusedGpus(gpus=len(unused), used_gpus=len(gpus) - len(unused)),
        locations=unused,
        lost_share=len(unused) / len(gpus),
    )


def find_throttled_gpus(job: SampledJob) -> Issue | None:
    """Find GPUs with a low clock: whenever heat is the reason, for other reasons only if it is very low."""
    for cause in ThrottlingCause:
        least_share = HOT_TIME_SHARE if cause is ThrottlingCause.HEAT else CAPPED_TIME_SHARE
        slow_rows = {gpu: _throttled_rows(rows, cause) for gpu, rows in job.judged.gpus.items()}
        shares = {gpu: len(rows) / len(job.judged.gpus[gpu]) for gpu, rows in slow_rows.items()}
        throttled = [gpu for gpu, share in shares.items() if share >= least_share]
        if throttled:
            worst = max(throttled, key=shares.get)
            return _throttled(cause, throttled, time_share=shares[worst], rows=slow_rows[worst])
    return None


def _throttled_rows(rows: pd.DataFrame, cause: ThrottlingCause) -> pd.DataFrame:
    """Return the samples in which a GPU's clock was low for this cause."""
    rows = rows[rows.throttled.str.contains(cause.value)]
    if cause is not ThrottlingCause.HEAT:
        rows = rows[rows.clock_mhz < CAPPED_CLOCK_SHARE * rows.clock_limit_mhz]
    return rows


def _throttled(cause: ThrottlingCause, gpus: list[GpuId], time_share: float, rows: pd.DataFrame) -> Issue:
    means = rows.mean(numeric_only=True)
    lost_share = 0.0
    if means.clock_mhz <= means.clock_limit_mhz:
        lost_share = time_share * (1 - means.clock_mhz / means.clock_limit_mhz)
    evidence = ThrottledGpus(
        cause=cause,
        time_share=time_share,
        clock_mhz=means.clock_mhz,
        clock_limit_mhz=means.clock_limit_mhz,
        temperature_c=means.temperature_c,
        power_limit_w=means.power_limit_w,
    )
    return Issue(evidence, locations=gpus, lost_share=lost_share)


def find_full_gpu_memory(job: SampledJob) -> Issue | None:
    """Find GPUs whose memory was nearly full at any moment."""
    full = _full_memories(job.sampled.gpus, FULL_GPU_MEMORY_SHARE)
    if not full:
        return None
    return Issue(FullGpuMemory(max(full.values())), list(full), lost_share=0.0, grade=Grade.DANGER)


def find_full_host_memory(job: SampledJob) -> Issue | None:
    """Find nodes on which the job's memory was nearly full at any moment."""
    full = _full_memories(job.sampled.nodes, FULL_HOST_MEMORY_SHARE)
    if not full:
        return None
    return Issue(FullHostMemory(max(full.values())), list(full), lost_share=0.0, grade=Grade.DANGER)


def _full_memories(tables: dict[Location, pd.DataFrame], least_share: float) -> dict[Location, float]:
    """Return the largest share in use of each memory of which at least that much was in use."""
    shares = {location: (rows.memory_mb / rows.memory_limit_mb).max() for location, rows in tables.items()}
    return {location: share for location, share in shares.items() if least_share <= share < math.inf}


def find_idle_gpus(job: SampledJob) -> Issue | None:
    """Find GPUs that have a rank, and no work."""
    loads = _loads_of_used_gpus(job)
    idle = _idle_gpus(job, loads)
    if not idle:
        return None
    others_work = max(loads.values()) >= LOW_LOAD
    return Issue(
        IdleGpus(gpus=len(idle), others_work=len(idle) < len(loads), power=_power(job, idle)),
        locations=idle,
        lost_share=len(idle) / len(job.judged.gpus),
        explained_by=frozenset() if others_work else WHAT_MAKES_RANKS_WAIT,
    )


def find_launch_bound_gpus(job: SampledJob) -> Issue | None:
    """Find GPUs that wait for their next kernel: those at low power, or else those that could be faster."""
    loads = _loads_of_used_gpus(job)
    idle = _idle_gpus(job, loads)
    at_low_load = [gpu for gpu, load in loads.items() if load < LOW_LOAD and gpu not in idle]
    if at_low_load:
        load = _mean_load(job, at_low_load)
        return _launch_bound(job, at_low_load, lost_share=1 - load, grade=Grade.WASTE)
    with_gaps = [
        gpu
        for gpu, load in loads.items()
        if LOW_LOAD <= load < HALF_LOAD and _gap_share(job, gpu) >= GAP_TIME_SHARE
    ]
    if with_gaps:
        gap_share = _mean_gap_share(job, with_gaps)
        return _launch_bound(job, with_gaps, lost_share=gap_share, grade=Grade.FASTER)
    return None


def _launch_bound(job: SampledJob, gpus: list[GpuId], lost_share: float, grade: Grade) -> Issue:
    sums = job.epochs[["train_seconds", "steps"]].sum()
    stages = job.epochs.stage.astype(str)
    has_gaps = not job.mean_of_gpus(gpus, "utilisation") >= BUSY_UTILISATION_PERCENT
    evidence = LaunchBound(
        load=_mean_load(job, gpus),
        gap_share=_mean_gap_share(job, gpus),
        has_gaps=has_gaps,
        may_lack_batches=has_gaps and job.rank_shares.empty,
        step_seconds=sums.train_seconds / sums.steps if sums.steps else math.nan,
        is_data_parallel=stages.str.startswith(DP).any(),
        is_captured=stages.str.contains("captured").any(),
        power=_power(job, gpus),
    )
    return Issue(
        evidence,
        locations=gpus,
        lost_share=lost_share * len(gpus) / len(job.judged.gpus),
        grade=grade,
        explained_by=WHAT_MAKES_RANKS_WAIT,
    )


def _loads_of_used_gpus(job: SampledJob) -> dict[GpuId, float]:
    """Return the loads of the GPUs with a rank, as far as they are known."""
    loads = {gpu: job.gpu_load(gpu) for gpu in job.judged.gpus if not job.is_unused(gpu)}
    return {gpu: load for gpu, load in loads.items() if load > -math.inf}


def _idle_gpus(job: SampledJob, loads: dict[GpuId, float]) -> list[GpuId]:
    return [
        gpu
        for gpu, load in loads.items()
        if load < IDLE_LOAD and job.mean_of_gpus([gpu], "utilisation") < IDLE_UTILISATION_PERCENT
    ]


def _mean_load(job: SampledJob, gpus: list[GpuId]) -> float:
    return sum(job.gpu_load(gpu) for gpu in gpus) / len(gpus)


def _mean_gap_share(job: SampledJob, gpus: list[GpuId]) -> float:
    return sum(_gap_share(job, gpu) for gpu in gpus) / len(gpus)


def _gap_share(job: SampledJob, gpu: GpuId) -> float:
    """Return the share of the time that no kernel runs, though there is a batch to train on, or NaN.

    It excludes waiting for loader workers, and the time between epochs too short to be judged alone.
    """
    train_seconds = job.epochs.train_seconds.sum()
    judged_seconds = sum(window.ended - window.began for window in job.windows)
    between_epochs = max(0.0, 1 - train_seconds / judged_seconds) if train_seconds else 0.0
    waiting = 0.0
    if job.has_loader_workers and len(job.rank_shares):
        waiting = job.rank_shares.data.max()
    return 1 - job.mean_of_gpus([gpu], "utilisation") / 100 - between_epochs - waiting


def _power(job: SampledJob, gpus: Iterable[GpuId]) -> PowerReading:
    return PowerReading(
        power_w=job.mean_of_gpus(gpus, "power_w"),
        limit_w=job.mean_of_gpus(gpus, "power_limit_w"),
        utilisation_percent=job.mean_of_gpus(gpus, "utilisation"),
    )


RULES = (
    find_unused_gpus,
    find_throttled_gpus,
    find_full_gpu_memory,
    find_full_host_memory,
    find_idle_gpus,
    find_launch_bound_gpus,
)
