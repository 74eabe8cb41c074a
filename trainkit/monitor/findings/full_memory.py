"""Memory of a GPU or of the job on a node that is nearly full."""

import math
from dataclasses import dataclass

import pandas as pd

from trainkit.monitor.findings.finding import Evidence, Grade, Issue, Location, sentence
from trainkit.monitor.findings.words import name_locations, percent
from trainkit.monitor.sampled_job import SampledJob

# A GPU's memory is there to be filled; on a host the kernel kills as soon as --mem is reached.
FULL_GPU_MEMORY_SHARE = 0.95
FULL_HOST_MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class FullGpuMemory(Evidence):
    """The largest share of a GPU's memory that was in use at any moment."""

    kind = "memory_full"
    used_share: float


@dataclass(frozen=True)
class FullHostMemory(Evidence):
    """The largest share of the job's memory on a node that was in use at any moment."""

    kind = "host_memory"
    used_share: float


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


@sentence.register
def _full_gpu_memory(evidence: FullGpuMemory, issue: Issue, is_plain: bool) -> str:
    remedy = "use a smaller batch per GPU, or bf16"
    return _full_memory("the memory of", issue, evidence.used_share, remedy)


@sentence.register
def _full_host_memory(evidence: FullHostMemory, issue: Issue, is_plain: bool) -> str:
    remedy = "ask for more (--mem), or use fewer loader workers"
    return _full_memory("the job's memory on", issue, evidence.used_share, remedy)


def _full_memory(memory: str, issue: Issue, used_share: float, remedy: str) -> str:
    where = name_locations(issue.locations)
    return f"{percent(used_share)} of {memory} {where} was in use, and at 100 % the job fails: {remedy}."
