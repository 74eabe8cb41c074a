"""Memory of a GPU that is nearly full."""

from dataclasses import dataclass

from manygpus.monitor.findings.finding import Finding, Grade
from manygpus.monitor.findings.used_memory import full_memories, used_memory_sentence
from manygpus.monitor.findings.words import name_locations
from manygpus.monitor.sampled_job import SampledJob

# A GPU's memory is there to be filled.
FULL_GPU_MEMORY_SHARE = 0.95


@dataclass(frozen=True, kw_only=True)
class MemoryFull(Finding):
    """The largest share of a GPU's memory that was in use at any moment."""

    kind = "memory_full"
    used_share: float

    @classmethod
    def find(cls, job: SampledJob) -> "MemoryFull | None":
        """Find GPUs whose memory was nearly full at any moment."""
        full = full_memories(job.sampled.gpus, FULL_GPU_MEMORY_SHARE)
        if not full:
            return None
        return cls(used_share=max(full.values()), locations=list(full), lost_share=0.0, grade=Grade.DANGER)

    def sentence(self, is_plain: bool) -> str:
        memory = f"the memory of {name_locations(self.locations)}"
        return used_memory_sentence(self.used_share, memory, "use a smaller batch per GPU, or bf16")
