"""Memory of the job on a node that is nearly full."""

from dataclasses import dataclass

from manygpus.monitor.findings.finding import Finding, Grade
from manygpus.monitor.findings.used_memory import full_memories, used_memory_sentence
from manygpus.monitor.findings.words import name_locations
from manygpus.monitor.sampled_job import SampledJob

# The kernel kills as soon as --mem is reached.
FULL_HOST_MEMORY_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class HostMemory(Finding):
    """The largest share of the job's memory on a node that was in use at any moment."""

    kind = "host_memory"
    used_share: float

    @classmethod
    def find(cls, job: SampledJob) -> "HostMemory | None":
        """Find nodes on which the job's memory was nearly full at any moment."""
        full = full_memories(job.sampled.nodes, FULL_HOST_MEMORY_SHARE)
        if not full:
            return None
        return cls(used_share=max(full.values()), locations=list(full), lost_share=0.0, grade=Grade.DANGER)

    def sentence(self, is_plain: bool) -> str:
        memory = f"the job's memory on {name_locations(self.locations)}"
        return used_memory_sentence(
            self.used_share, memory, "ask for more (--mem), or use fewer loader workers"
        )
