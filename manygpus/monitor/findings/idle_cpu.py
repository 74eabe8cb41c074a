"""Ranks on a CPU that hardly compute."""

from dataclasses import dataclass

from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.words import debugger, name_locations, percent
from manygpus.monitor.sampled_job import SampledJob

# Of the time without work, for a rank on a CPU that has nothing to wait for.
IDLE_CPU_TIME_SHARE = 0.7


@dataclass(frozen=True, kw_only=True)
class IdleCpu(Finding):
    """Ranks on a CPU that hardly compute: at most for this share of the time."""

    kind = "idle_cpu"
    computing_share: float

    @classmethod
    def find(cls, job: SampledJob) -> "IdleCpu | None":
        """Find ranks on a CPU that hardly compute, if nothing that is known explains it."""
        if job.judged.gpus:
            return None
        idle_shares = {
            rank: 1 - job.rank_load(rank) for rank in job.judged.ranks if rank not in job.launchers
        }
        idle = sorted(rank for rank, share in idle_shares.items() if share >= IDLE_CPU_TIME_SHARE)
        if not idle:
            return None
        return cls(
            computing_share=1 - min(idle_shares[rank] for rank in idle),
            locations=idle,
            lost_share=sum(idle_shares[rank] for rank in idle) / len(job.judged.ranks),
            explained_by_waiting=True,
        )

    def sentence(self, is_plain: bool) -> str:
        return (
            f"{name_locations(self.locations)} computed for at most {percent(self.computing_share)} of the "
            f"time, and waited for something that cannot be seen from outside: {debugger(is_plain)} shows "
            "what."
        )
