"""GPUs that have a rank, and no work."""

from dataclasses import dataclass

from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.gpu_power import (
    IDLE_LOAD,
    IDLE_UTILISATION_PERCENT,
    LOW_LOAD,
    PowerReading,
    loads_of_used_gpus,
    power_of,
    power_words,
)
from manygpus.monitor.findings.words import name_locations
from manygpus.monitor.sample_tables import GpuId
from manygpus.monitor.sampled_job import SampledJob


@dataclass(frozen=True, kw_only=True)
class IdleGpu(Finding):
    """GPUs that no work reaches."""

    kind = "idle_gpu"
    gpus: int
    others_work: bool
    power: PowerReading

    @classmethod
    def find(cls, job: SampledJob) -> "IdleGpu | None":
        """Find GPUs that have a rank, and no work."""
        loads = loads_of_used_gpus(job)
        idle = idle_gpus(job, loads)
        if not idle:
            return None
        others_work = max(loads.values()) >= LOW_LOAD
        return cls(
            gpus=len(idle),
            others_work=len(idle) < len(loads),
            power=power_of(job, idle),
            locations=idle,
            lost_share=len(idle) / len(job.judged.gpus),
            explained_by_waiting=not others_work,
        )

    def sentence(self, is_plain: bool) -> str:
        others = ", while other GPUs work" if self.others_work else ""
        return (
            f"no work reaches {name_locations(self.locations)}{others} ({power_words(self.power)}): check "
            "in the log which device its rank computes on."
        )


def idle_gpus(job: SampledJob, loads: dict[GpuId, float]) -> list[GpuId]:
    return [
        gpu
        for gpu, load in loads.items()
        if load < IDLE_LOAD and job.mean_of_gpus([gpu], "utilisation") < IDLE_UTILISATION_PERCENT
    ]
