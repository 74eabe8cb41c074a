"""Ranks that each trained by itself, as they never met."""

from dataclasses import dataclass

from trainkit.monitor import samples
from trainkit.monitor.findings.finding import Evidence, Issue, sentence
from trainkit.monitor.sampled_job import SampledJob


@dataclass(frozen=True)
class RanksNeverMet(Evidence):
    """Several ranks, each of which trained by itself."""

    kind = samples.NEVER_MET
    ranks: int


def find_ranks_that_never_met(job: SampledJob) -> Issue | None:
    """Find ranks that each trained by itself. Those of one record have met: it needs their process group."""
    have_one_record = any((training.epochs.world_size > 1).any() for training in job.trainings)
    if have_one_record or not job.never_met():
        return None
    ranks = job.last_ranks
    return Issue(RanksNeverMet(ranks=len(ranks)), locations=ranks, lost_share=1 - 1 / len(ranks))


@sentence.register
def _ranks_never_met(evidence: RanksNeverMet, issue: Issue, is_plain: bool) -> str:
    return (
        f"the {evidence.ranks} ranks never met: each trained on its own, and may have overwritten the files "
        "of the others. Ask for a single task, or make them one training with init_process_group (torchrun's "
        "variables are set) and DistributedDataParallel."
    )
