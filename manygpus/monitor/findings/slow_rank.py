"""A rank that the others wait for."""

from dataclasses import dataclass

from manygpus.monitor import samples
from manygpus.monitor.findings.finding import LEAST_LOST_SHARE, Finding
from manygpus.monitor.findings.shared_cores import CORE_WAIT_SHARE
from manygpus.monitor.findings.throttled import HOT_TIME_SHARE
from manygpus.monitor.findings.waiting_for_loader import least_wait_share
from manygpus.monitor.findings.words import name_locations, percent
from manygpus.monitor.sampled_job import SampledJob
from manygpus.record import records


@dataclass(frozen=True, kw_only=True)
class SlowRank(Finding):
    """A rank that the others wait for, as its own part of a step takes so many times as long."""

    kind = samples.STALLED_RANK
    makes_ranks_wait = True
    times_as_long: float
    waiting_share: float

    @classmethod
    def find(cls, job: SampledJob) -> "SlowRank | None":
        """Find the rank that the others wait for, by the times that each has measured itself."""
        own_shares = job.own_shares
        if own_shares.empty:
            return None
        slowest = own_shares.idxmax()
        times_as_long = own_shares[slowest] / own_shares.drop(slowest).median()
        waiting_share = own_shares[slowest] - own_shares.mean()
        if not (times_as_long >= records.SLOW_RANK_FACTOR and waiting_share >= LEAST_LOST_SHARE):
            return None
        if _is_slow_for_another_reason(job, slowest):
            return None
        return cls(
            times_as_long=times_as_long,
            waiting_share=waiting_share,
            locations=[job.find_rank(slowest)],
            lost_share=waiting_share,
        )

    def sentence(self, is_plain: bool) -> str:
        return (
            f"{name_locations(self.locations)} takes {self.times_as_long:.1f} times as long as the others "
            f"for its own part of a step, so they wait for {percent(self.waiting_share)} of the time: "
            "compare its cores, its clock and its work with theirs."
        )


def _is_slow_for_another_reason(job: SampledJob, slowest: int) -> bool:
    """Return whether another rule finds why a rank is slow: batches, cores, or a hot GPU."""
    if job.rank_shares.data[slowest] >= least_wait_share(job):
        return True
    rank = job.find_rank(slowest)
    others = [job.core_wait_share(other) for other in job.judged.ranks if other != rank]
    least_core_wait_share = max(CORE_WAIT_SHARE, LEAST_LOST_SHARE + max(others, default=0))
    if job.core_wait_share(rank) >= least_core_wait_share:
        return True
    for gpu in job.gpus_of_ranks.get(rank, []):
        if gpu in job.judged.gpus:
            is_hot = job.judged.gpus[gpu].throttled.str.contains("heat")
            if is_hot.mean() > HOT_TIME_SHARE:
                return True
    return False
