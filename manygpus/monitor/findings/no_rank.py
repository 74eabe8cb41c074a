"""GPUs that no rank uses."""

from dataclasses import dataclass

from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.words import count, name_locations
from manygpus.monitor.sampled_job import SampledJob


@dataclass(frozen=True, kw_only=True)
class NoRank(Finding):
    """GPUs without a rank, and the number of those with one."""

    kind = "no_rank"
    gpus: int
    used_gpus: int

    @classmethod
    def find(cls, job: SampledJob) -> "NoRank | None":
        """Find GPUs that no rank uses."""
        gpus = job.judged.gpus
        unused = [gpu for gpu in gpus if job.is_unused(gpu)]
        if not unused:
            return None
        return cls(
            gpus=len(unused),
            used_gpus=len(gpus) - len(unused),
            locations=unused,
            lost_share=len(unused) / len(gpus),
        )

    def sentence(self, is_plain: bool) -> str:
        if self.used_gpus:
            fewer = count(self.used_gpus, "GPU")
            remedy = (
                f"ask for {fewer}, or start one rank per GPU (only with DataParallel does one use several)"
            )
        else:
            remedy = "find out why the training runs on the CPU (its log names the device), or ask for no GPU"
        return f"no rank uses {name_locations(self.locations)}: {remedy}."
