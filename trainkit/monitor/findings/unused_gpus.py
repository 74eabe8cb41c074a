"""GPUs that no rank uses."""

from dataclasses import dataclass

from trainkit.monitor.findings.finding import Evidence, Issue, sentence
from trainkit.monitor.findings.words import count, name_locations
from trainkit.monitor.sampled_job import SampledJob


@dataclass(frozen=True)
class UnusedGpus(Evidence):
    """GPUs without a rank, and the number of those with one."""

    kind = "no_rank"
    gpus: int
    used_gpus: int


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


@sentence.register
def _unused_gpus(evidence: UnusedGpus, issue: Issue, is_plain: bool) -> str:
    if evidence.used_gpus:
        fewer = count(evidence.used_gpus, "GPU")
        remedy = f"ask for {fewer}, or start one rank per GPU (only with DataParallel does one use several)"
    else:
        remedy = "find out why the training runs on the CPU (its log names the device), or ask for no GPU"
    return f"no rank uses {name_locations(issue.locations)}: {remedy}."
