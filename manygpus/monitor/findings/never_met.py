"""Ranks that each trained by itself, as they never met."""

from dataclasses import dataclass

from manygpus.monitor import samples
from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.sampled_job import SampledJob


@dataclass(frozen=True, kw_only=True)
class NeverMet(Finding):
    """Several ranks, each of which trained by itself."""

    kind = samples.NEVER_MET
    ranks: int

    @classmethod
    def find(cls, job: SampledJob) -> "NeverMet | None":
        """Find ranks that each trained by itself.

        Those of one record have met: it needs their process group.
        """
        have_one_record = any((training.epochs.world_size > 1).any() for training in job.trainings)
        if have_one_record or not job.never_met():
            return None
        ranks = job.last_ranks
        return cls(ranks=len(ranks), locations=ranks, lost_share=1 - 1 / len(ranks))

    def sentence(self, is_plain: bool) -> str:
        return (
            f"the {self.ranks} ranks never met: each trained on its own, and may have overwritten the files "
            "of the others. Ask for a single task, or make them one training with init_process_group "
            "(torchrun's variables are set) and DistributedDataParallel."
        )
