"""Rules of the verdict on how the ranks spend their time. Each finds one kind of issue, or None."""

import math

import pandas as pd

from trainkit.monitor.device_rules import HOT_TIME_SHARE, IDLE_UTILISATION_PERCENT, LOW_LOAD
from trainkit.monitor.issues import (
    WHAT_MAKES_RANKS_WAIT,
    IdleCpus,
    Issue,
    PauseCause,
    PausedRanks,
    RanksNeverMet,
    SharedCores,
    SlowCommunication,
    SlowRank,
    WaitingForBatches,
)
from trainkit.monitor.sample_tables import RankId, mean
from trainkit.monitor.sampled_job import SampledJob
from trainkit.ranges import parse_ranges
from trainkit.record import records

# A smaller share of the time is not worth a line.
LEAST_LOST_SHARE = 0.1
# Of the training time. With enough loader workers ahead of it, the training waits for 0 to 5 %. A resident
# loader causes no waiting, but to index and normalise is up to a third of a step that is all launches.
LOADER_WAIT_SHARE = 0.2
RESIDENT_WAIT_SHARE = 0.4
# Of the training time. From 0.5 on two devices are no faster than one.
COMMUNICATION_SHARE = 0.4
# In a shorter epoch, what comes once in an epoch would be taken for communication.
LONG_EPOCH_SECONDS = 1.0
# Of the time, that a rank could run but waits for a core: alone on it, below 0.05.
CORE_WAIT_SHARE = 0.2
# Of the cores that may be used: below this, other programs fill them.
CORES_IN_USE_SHARE = 0.85
# A CPU rank that waits for batches uses fewer cores, and each of its loader workers then more.
STARVED_RANK_CORES = 0.5
BUSY_LOADER_CORES = 0.8
# Of the time without work, for a rank on a CPU that has nothing to wait for.
IDLE_CPU_TIME_SHARE = 0.7
# A process that does nothing uses fewer cores, and after so long it is paused.
IDLE_PROCESS_CORES = 0.05
PAUSE_SECONDS = 30.0
# When a job is ended, its processes may use a core once more.
END_SECONDS = 5.0


def find_ranks_that_never_met(job: SampledJob) -> Issue | None:
    """Find ranks that each trained by itself. Those of one record have met: it needs their process group."""
    have_one_record = any((training.epochs.world_size > 1).any() for training in job.trainings)
    if have_one_record or not job.never_met():
        return None
    ranks = job.last_ranks
    return Issue(RanksNeverMet(ranks=len(ranks)), locations=ranks, lost_share=1 - 1 / len(ranks))


def find_paused_ranks(job: SampledJob) -> Issue | None:
    """Find ranks that did nothing for a long time: stopped, stuck in a file system, or waiting for one.

    Waiting for batches is another issue.
    """
    ranks = sorted(job.sampled.ranks.keys() - _waiting_shares(job).keys())
    pauses = {rank: job.longest_pause(rank, IDLE_PROCESS_CORES, IDLE_UTILISATION_PERCENT) for rank in ranks}
    seconds = {rank: rows.seconds[1:].sum() for rank, rows in pauses.items()}
    least_seconds = max(PAUSE_SECONDS, LEAST_LOST_SHARE * job.seconds)
    paused = [rank for rank in ranks if seconds[rank] >= least_seconds]
    if not paused:
        return None
    states = {rank: pauses[rank]["name"].mode()[0] for rank in paused}
    cause = PauseCause.UNKNOWN
    for known in (PauseCause.STOPPED, PauseCause.FILE_SYSTEM):
        of_this_cause = [rank for rank in paused if states[rank] == known.value]
        if of_this_cause:
            cause = known
            paused = of_this_cause
            break
    longest = max(seconds[rank] for rank in paused)
    silent_at_the_end = [
        rank
        for rank in paused
        if job.sampled.ranks[rank].time.iloc[-1] - pauses[rank].time.iloc[-1] <= END_SECONDS
    ]
    return Issue(
        PausedRanks(seconds=longest, cause=cause, until_the_end=bool(silent_at_the_end)),
        locations=paused,
        # Samples that come late, as on a file system that hangs, may count as the time of a rank without
        # others, and as gaps in that of its node.
        lost_share=longest / max(job.seconds, longest),
    )


def find_waiting_for_batches(job: SampledJob) -> Issue | None:
    """Find ranks that wait for their next batch."""
    waiting_shares = _waiting_shares(job)
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
    evidence = WaitingForBatches(
        waiting_share=waiting_share,
        loader_workers=loader_workers,
        cores_per_worker=cores_per_worker,
        all_cores_in_use=_all_cores_in_use(job, ranks[0].node),
        is_resident=set(job.epochs.loader) == {"resident"},
    )
    return Issue(evidence, locations=ranks, lost_share=waiting_share)


def _all_cores_in_use(job: SampledJob, node: str) -> bool:
    """Return whether the job uses all cores of a node that it may use; False if these are unknown."""
    if node not in job.judged.nodes:
        return False
    rows = job.judged.nodes[node]
    cores = set(parse_ranges(",".join(rows.core_list.unique())))
    return len(cores) > 0 and rows.cores.mean() >= CORES_IN_USE_SHARE * len(cores)


def _waiting_shares(job: SampledJob) -> dict[RankId, float]:
    """Return the ranks that wait for batches, and for which share of the time.

    They have timed this themselves; or it shows from outside, where there is no record.
    """
    shares = job.rank_shares.data[job.rank_shares.data >= _least_wait_share(job)]
    have_timed_it = (job.rank_shares.own > 0).any()
    if len(shares) or have_timed_it:
        return {job.find_rank(rank): share for rank, share in shares.items()}
    return {rank: 1 - job.rank_load(rank) for rank in job.judged.ranks if _is_starved(job, rank)}


def _least_wait_share(job: SampledJob) -> float:
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


def find_slow_communication(job: SampledJob) -> Issue | None:
    """Find that the ranks wait for communication, by the times that each has measured itself."""
    communication_share = 1 - _own_shares(job).max()
    if (
        not communication_share >= COMMUNICATION_SHARE
        or not job.epochs.train_seconds.mean() >= LONG_EPOCH_SECONDS
    ):
        return None
    network_mb_s = math.nan
    if len(job.last_nodes) > 1:
        network_mb_s = mean(job.judged.nodes.values(), "network_mb_s")
    return Issue(
        SlowCommunication(communication_share=communication_share, network_mb_s=network_mb_s),
        locations=job.last_nodes,
        lost_share=communication_share,
    )


def find_shared_cores(job: SampledJob) -> Issue | None:
    """Find ranks whose threads wait for a core, unless their GPU is busy meanwhile."""
    shares = {rank: job.core_wait_share(rank) for rank in job.judged.ranks}
    waiting = [rank for rank, share in shares.items() if share >= CORE_WAIT_SHARE]
    waiting = [
        rank for rank in waiting if rank not in job.gpus_of_ranks or not job.rank_load(rank) >= LOW_LOAD
    ]
    if not waiting:
        return None
    worst = max(waiting, key=shares.get)
    tables = [rows for rank, rows in job.judged.ranks.items() if rank.node == worst.node]
    cores = set(parse_ranges(",".join(rows.core_list.iloc[-1] for rows in tables)))
    loader_workers = [rows.loaders.mean() for rows in tables]
    cores_in_use = mean([job.judged.nodes[worst.node]] if worst.node in job.judged.nodes else [], "cores")
    evidence = SharedCores(
        waiting_share=shares[worst],
        ranks=len(tables),
        loader_workers=sum(round(number) for number in loader_workers if number > 0),
        cores=len(cores),
        used_by_others=cores_in_use < CORES_IN_USE_SHARE * len(cores),
        exclusive_helps=job.asked is not None and job.asked.exclusive_helps,
    )
    return Issue(evidence, locations=waiting, lost_share=shares[worst])


def find_slow_rank(job: SampledJob) -> Issue | None:
    """Find the rank that the others wait for, by the times that each has measured itself."""
    own_shares = _own_shares(job)
    if own_shares.empty:
        return None
    slowest = own_shares.idxmax()
    times_as_long = own_shares[slowest] / own_shares.drop(slowest).median()
    waiting_share = own_shares[slowest] - own_shares.mean()
    if not (times_as_long >= records.SLOW_RANK_FACTOR and waiting_share >= LEAST_LOST_SHARE):
        return None
    if _is_slow_for_another_reason(job, slowest):
        return None
    return Issue(
        SlowRank(times_as_long=times_as_long, waiting_share=waiting_share),
        locations=[job.find_rank(slowest)],
        lost_share=waiting_share,
    )


def _is_slow_for_another_reason(job: SampledJob, slowest: int) -> bool:
    """Return whether another rule finds why a rank is slow: batches, cores, or a hot GPU."""
    if job.rank_shares.data[slowest] >= _least_wait_share(job):
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


def find_idle_cpus(job: SampledJob) -> Issue | None:
    """Find ranks on a CPU that hardly compute, if nothing that is known explains it."""
    if job.judged.gpus:
        return None
    idle_shares = {rank: 1 - job.rank_load(rank) for rank in job.judged.ranks if rank not in job.launchers}
    idle = sorted(rank for rank, share in idle_shares.items() if share >= IDLE_CPU_TIME_SHARE)
    if not idle:
        return None
    return Issue(
        IdleCpus(computing_share=1 - min(idle_shares[rank] for rank in idle)),
        locations=idle,
        lost_share=sum(idle_shares[rank] for rank in idle) / len(job.judged.ranks),
        explained_by=WHAT_MAKES_RANKS_WAIT,
    )


def _own_shares(job: SampledJob) -> pd.Series:
    """Return the share of the training time that each rank works itself; none if alone, or if unknown."""
    own_shares = job.rank_shares.own
    if len(own_shares) > 1 and (own_shares > 0).all():
        return own_shares
    return own_shares[:0]


RULES = (
    find_ranks_that_never_met,
    find_paused_ranks,
    find_waiting_for_batches,
    find_slow_communication,
    find_shared_cores,
    find_slow_rank,
    find_idle_cpus,
)
