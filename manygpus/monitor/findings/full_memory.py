"""Memory of a GPU or of the job on a node that is nearly full."""

import math
from dataclasses import dataclass

import pandas as pd

from manygpus.monitor.findings.finding import Finding, Grade, Location
from manygpus.monitor.findings.words import name_locations, percent
from manygpus.monitor.sampled_job import SampledJob

# A GPU's memory is there to be filled; on a host the kernel kills as soon as --mem is reached.
FULL_GPU_MEMORY_SHARE = 0.95
FULL_HOST_MEMORY_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class FullGpuMemory(Finding):
    """The largest share of a GPU's memory that was in use at any moment."""

    kind = "memory_full"
    used_share: float

    @classmethod
    def find(cls, job: SampledJob) -> "FullGpuMemory | None":
        """Find GPUs whose memory was nearly full at any moment."""
        full = _full_memories(job.sampled.gpus, FULL_GPU_MEMORY_SHARE)
        if not full:
            return None
        return cls(used_share=max(full.values()), locations=list(full), lost_share=0.0, grade=Grade.DANGER)

    def sentence(self, is_plain: bool) -> str:
        remedy = "use a smaller batch per GPU, or bf16"
        return _sentence(self.used_share, f"the memory of {name_locations(self.locations)}", remedy)


@dataclass(frozen=True, kw_only=True)
class FullHostMemory(Finding):
    """The largest share of the job's memory on a node that was in use at any moment."""

    kind = "host_memory"
    used_share: float

    @classmethod
    def find(cls, job: SampledJob) -> "FullHostMemory | None":
        """Find nodes on which the job's memory was nearly full at any moment."""
        full = _full_memories(job.sampled.nodes, FULL_HOST_MEMORY_SHARE)
        if not full:
            return None
        return cls(used_share=max(full.values()), locations=list(full), lost_share=0.0, grade=Grade.DANGER)

    def sentence(self, is_plain: bool) -> str:
        remedy = "ask for more (--mem), or use fewer loader workers"
        return _sentence(self.used_share, f"the job's memory on {name_locations(self.locations)}", remedy)


def _full_memories(tables: dict[Location, pd.DataFrame], least_share: float) -> dict[Location, float]:
    """Return the largest share in use of each memory of which at least that much was in use."""
    shares = {location: (rows.memory_mb / rows.memory_limit_mb).max() for location, rows in tables.items()}
    return {location: share for location, share in shares.items() if least_share <= share < math.inf}


def _sentence(used_share: float, memory: str, remedy: str) -> str:
    return f"{percent(used_share)} of {memory} was in use, and at 100 % the job fails: {remedy}."
