"""Ranks that wait for their next batch."""

import math
from dataclasses import dataclass

from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.gpu_power import LOW_LOAD
from manygpus.monitor.findings.shared_cores import CORES_IN_USE_SHARE
from manygpus.monitor.findings.words import count, name_locations, options_in_brackets, percent
from manygpus.monitor.sample_tables import RankId
from manygpus.monitor.sampled_job import IDLE_PROCESS_CORES, SampledJob
from manygpus.ranges import parse_ranges

# Of the training time. With enough loader workers ahead of it, the training waits for 0 to 5 %. A resident
# loader causes no waiting, but to index and normalise is up to a third of a step that is all launches.
LOADER_WAIT_SHARE = 0.2
RESIDENT_WAIT_SHARE = 0.4
# A CPU rank that waits for batches uses fewer cores, and each of its loader workers then more.
STARVED_RANK_CORES = 0.5
BUSY_LOADER_CORES = 0.8


@dataclass(frozen=True, kw_only=True)
class WaitingForLoader(Finding):
    """Ranks that wait for their loader workers, or prepare batches themselves.

    Attributes:
        waiting_share: the share of the training time that the rank which waits most waits.
        loader_workers: how many loader workers each rank has for its training data.
        cores_per_worker: how many cores each of these uses; NaN if there are none.
        all_cores_in_use: whether the job uses all cores that it may use.
        is_resident: whether the data is in the rank's memory, and only has to be prepared.
    """

    kind = "waiting_for_loader"
    makes_ranks_wait = True
    remedy_takes_cores = True
    waiting_share: float
    loader_workers: float
    cores_per_worker: float
    all_cores_in_use: bool
    is_resident: bool

    @classmethod
    def find(cls, job: SampledJob) -> "WaitingForLoader | None":
        """Find ranks that wait for their next batch."""
        waiting_shares = batch_wait_shares(job)
        if not waiting_shares:
            return None
        ranks = list(waiting_shares)
        waiting_share = max(waiting_shares.values())
        # Of the loader workers that are seen, some are for the test set, and idle.
        seen = job.mean_of_ranks(ranks, "loaders")
        loader_workers = job.epochs.workers_per_loader.max() if len(job.epochs) else seen
        cores_per_worker = math.nan
        if loader_workers:
            cores_per_worker = job.mean_of_ranks(ranks, "loader_cores") / loader_workers
        return cls(
            waiting_share=waiting_share,
            loader_workers=loader_workers,
            cores_per_worker=cores_per_worker,
            all_cores_in_use=_all_cores_in_use(job, ranks[0].node),
            is_resident=set(job.epochs.loader) == {"resident"},
            locations=ranks,
            lost_share=waiting_share,
        )

    def sentence(self, is_plain: bool) -> str:
        if self.loader_workers > 0:
            workers = count(round(self.loader_workers), "loader worker")
            if len(self.locations) > 1:
                workers += " each"
            if self.cores_per_worker >= 0:
                workers += f", at {percent(self.cores_per_worker)} of a core"
        else:
            workers = "no loader workers"
        if self.is_resident:
            other_remedy = "do less work for each batch"
        else:
            other_remedy = "keep the data in memory" + options_in_brackets("--loader resident", is_plain)
        return (
            f"waiting for batches takes {percent(self.waiting_share)} of the training time of "
            f"{name_locations(self.locations)} ({workers}): {self._remedy_for_workers(is_plain)}, "
            f"or {other_remedy}."
        )

    def _remedy_for_workers(self, is_plain: bool) -> str:
        if not self.loader_workers > 0:
            options = "--loader workers --num-workers 4, and --cpus-per-task for them"
            return "use some" + options_in_brackets(options, is_plain)
        if self.all_cores_in_use:
            return "all cores are busy, so ask for more (--cpus-per-task)"
        if self.cores_per_worker < BUSY_LOADER_CORES:
            return "the workers wait as well, for files (stage these on the node) or for cores"
        return "use more" + options_in_brackets("--num-workers", is_plain)


def batch_wait_shares(job: SampledJob) -> dict[RankId, float]:
    """Return the ranks that wait for batches, and for which share of the time.

    They have timed this themselves; or it shows from outside, where there is no record.
    """
    shares = job.rank_shares.data[job.rank_shares.data >= least_wait_share(job)]
    have_timed_it = (job.rank_shares.own > 0).any()
    if len(shares) or have_timed_it:
        return {job.find_rank(rank): share for rank, share in shares.items()}
    return {rank: 1 - job.rank_load(rank) for rank in job.judged.ranks if _is_starved(job, rank)}


def least_wait_share(job: SampledJob) -> float:
    return LOADER_WAIT_SHARE if job.has_loader_workers else RESIDENT_WAIT_SHARE


def _is_starved(job: SampledJob, rank: RankId) -> bool:
    """Return whether a rank without times of its own waits for batches, such as one of a split network."""
    if rank in job.launchers:
        return False
    rows = job.judged.ranks[rank]
    load = job.rank_load(rank)
    loader_cores = rows.loader_cores.mean()
    # These may have few cores themselves.
    if load < IDLE_PROCESS_CORES <= loader_cores:
        return True
    # Half of the loader workers may be for the test set, and idle.
    least_loader_cores = BUSY_LOADER_CORES * rows.loaders.mean() / 2
    loaders_are_busy = loader_cores >= least_loader_cores > 0
    return loaders_are_busy and load < (LOW_LOAD if rank in job.gpus_of_ranks else STARVED_RANK_CORES)


def _all_cores_in_use(job: SampledJob, node: str) -> bool:
    """Return whether the job uses all cores of a node that it may use; False if these are unknown."""
    if node not in job.judged.nodes:
        return False
    rows = job.judged.nodes[node]
    cores = set(parse_ranges(",".join(rows.core_list.unique())))
    return len(cores) > 0 and rows.cores.mean() >= CORES_IN_USE_SHARE * len(cores)
