"""Ranks whose threads wait for a core."""

from dataclasses import dataclass

from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.gpu_power import LOW_LOAD
from manygpus.monitor.findings.words import count, name_locations, percent
from manygpus.monitor.sample_tables import mean
from manygpus.monitor.sampled_job import SampledJob
from manygpus.ranges import parse_ranges

# Of the time, that a rank could run but waits for a core: alone on it, below 0.05.
CORE_WAIT_SHARE = 0.2
# Of the cores that may be used: below this, other programs fill them.
CORES_IN_USE_SHARE = 0.85


@dataclass(frozen=True, kw_only=True)
class SharedCores(Finding):
    """Ranks whose threads wait for a core.

    Attributes:
        waiting_share: the share of the time that the rank which waits most has no core.
        ranks: how many ranks are on its node.
        loader_workers: how many loader workers these ranks have.
        cores: how many cores they may use.
        used_by_others: whether other programs take these cores.
        exclusive_helps: whether --exclusive would keep those programs away.
    """

    kind = "shared_cores"
    makes_ranks_wait = True
    remedy_takes_cores = True
    waiting_share: float
    ranks: int
    loader_workers: int
    cores: int
    used_by_others: bool
    exclusive_helps: bool

    @classmethod
    def find(cls, job: SampledJob) -> "SharedCores | None":
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
        return cls(
            waiting_share=shares[worst],
            ranks=len(tables),
            loader_workers=sum(round(number) for number in loader_workers if number > 0),
            cores=len(cores),
            used_by_others=cores_in_use < CORES_IN_USE_SHARE * len(cores),
            exclusive_helps=job.asked is not None and job.asked.exclusive_helps,
            locations=waiting,
            lost_share=shares[worst],
        )

    def sentence(self, is_plain: bool) -> str:
        cores = count(self.cores, "core")
        if self.used_by_others:
            remedy = "end them, or wait until they end"
            if self.exclusive_helps:
                remedy = "ask for whole nodes (--exclusive)"
            reason = f"other programs also use its {cores}: {remedy}"
        else:
            sharing = count(self.ranks, "rank")
            if self.loader_workers:
                sharing += f" and {count(self.loader_workers, 'loader worker')}"
            reason = (
                f"{sharing} share {cores}: ask for more cores (--cpus-per-task, with srun --cpu-bind=cores), "
                "or use fewer threads (OMP_NUM_THREADS) and workers"
            )
        return (
            f"waiting for a core takes {percent(self.waiting_share)} of the time of "
            f"{name_locations(self.locations)}, because {reason}."
        )
