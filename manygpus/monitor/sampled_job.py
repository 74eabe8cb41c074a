"""A sampled job: what its samples and the records of its trainings show together.

The findings of the verdict (findings) and the use of resources (resource_use.py) ask it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from manygpus import job_folder
from manygpus.errors import UserError
from manygpus.monitor import samples
from manygpus.monitor.connections import HOST, NOBODY
from manygpus.monitor.sample_tables import GAP_SECONDS, GpuId, RankId, SampleTables, mean, read_samples
from manygpus.monitor.training_records import TrainingRecord, Window, all_epochs, merge_windows, rank_shares

# With fewer samples nothing is judged. Two epochs of 15 s together have enough past the warm-up. More samples
# per second would show no more: each is a mean over a second, so a few will do.
LEAST_SAMPLES = 4
# From when all ranks are there, CUDA, NCCL and the data are made ready.
SETTLE_SECONDS = 10.0
# A GPU is unused if it is without a rank for this share of the time.
UNUSED_TIME_SHARE = 0.9
# Samples of each rank. From when PyTorch is loaded, ranks that train together meet within seconds; at most
# they make the data ready before, which takes minutes.
SAMPLES_UNTIL_RANKS_MEET = 10
SAMPLES_UNTIL_DATA_IS_READY = 300
# A rank that uses fewer cores only waits for others.
WAITING_RANK_CORES = 0.1
# A process that does nothing uses fewer cores.
IDLE_PROCESS_CORES = 0.05
# Processes that a rank's script has started compute if they use so many cores together.
COMPUTING_CORES = 0.1
# The most that a GPU takes of its power limit with a CUDA context and no work: it is 10 to 25 %.
IDLE_POWER_SHARE_AT_MOST = 0.2


@dataclass(frozen=True)
class SampledJob:
    """The samples in a folder, and the records of the trainings that ran there.

    Attributes:
        sampled: all samples.
        judged: the samples of the epochs past the warm-up of each training, or without a record the samples
            since all ranks are running; none if there are too few.
        judged_moments: how many moments to judge were sampled, also if they are too few.
        windows: the times to judge.
        trainings: the records of its trainings.
        epochs: the rows of the records that are judged.
        rank_shares: how each rank spent the training time (training_records.py).
        notes: what the monitor could not see, and which records cannot be read, in sentences.
        asked: what a job script has asked Slurm for; None if none has sampled it.
        is_plain: whether its script does not use the kit.
        ended_well: whether it has ended, with exit code 0.
    """

    sampled: SampleTables
    judged: SampleTables
    judged_moments: int
    windows: list[Window]
    trainings: list[TrainingRecord]
    epochs: pd.DataFrame
    rank_shares: pd.DataFrame
    notes: list[str]
    asked: samples.RequestedResources | None
    is_plain: bool
    ended_well: bool

    @classmethod
    def read(cls, folder: Path) -> "SampledJob":
        """Read the samples in `folder`, and the records of the trainings that ran there.

        Raises:
            UserError: if there are no samples.
        """
        table = read_samples(folder)
        tables = SampleTables.split(table)
        notes = job_folder.read(folder / samples.NOTES).splitlines()
        trainings, problems = _read_trainings(folder, since=_first_time(tables) - samples.PERIOD_SECONDS)
        # A start that was stopped after its warm-up says nothing about the rest of its job.
        judged_trainings = [training for training in trainings if not training.is_warmup] or trainings
        windows = merge_windows(window for training in judged_trainings for window in training.windows)
        if not windows:
            windows = [Window(_time_of_last_start(tables) + SETTLE_SECONDS, math.inf)]
        judged = SampleTables.split(_rows_within(table, windows))
        judged_moments = max((len(rows) for rows in judged.nodes.values()), default=0)
        if judged_moments < LEAST_SAMPLES:
            judged = SampleTables.split(table[:0])
        return cls(
            sampled=tables,
            judged=judged,
            judged_moments=judged_moments,
            windows=windows,
            trainings=trainings,
            epochs=all_epochs(judged_trainings),
            rank_shares=rank_shares(judged_trainings),
            notes=notes + problems,
            asked=samples.read_asked(folder),
            is_plain=(folder.parent / job_folder.PLAIN).exists(),
            ended_well=job_folder.read(folder / samples.ENDED) == "0",
        )

    @property
    def seconds(self) -> float:
        """Return for how long it was sampled."""
        return max(rows.seconds.sum() for rows in self.sampled.nodes.values())

    @property
    def has_loader_workers(self) -> bool:
        """Return whether batches come from loader workers; a resident loader is a rank's own work."""
        return (self.epochs.loader == "workers").any()

    # --- nodes, GPUs and ranks ----------------------------------------------------------------------

    @cached_property
    def last_nodes(self) -> list[str]:
        """Return the nodes at the end of the job: before a requeue it had others."""
        last_times = {node: rows.time.iloc[-1] for node, rows in self.sampled.nodes.items()}
        end = max(last_times.values())
        return sorted(node for node, time in last_times.items() if time > end - GAP_SECONDS)

    @property
    def last_gpus(self) -> list[GpuId]:
        """Return the GPUs of the nodes at the end of the job."""
        return sorted(gpu for gpu in self.sampled.gpus if gpu.node in self.last_nodes)

    @property
    def last_ranks(self) -> list[RankId]:
        """Return the ranks on the nodes at the end of the job."""
        return sorted(rank for rank in self.sampled.ranks if rank.node in self.last_nodes)

    def ranks_in_the_last_samples(self) -> dict[RankId, pd.Series]:
        """Return the last row of each rank that was there at the end of the samples of its node."""
        rows = {rank: self.sampled.ranks[rank].iloc[-1] for rank in self.last_ranks}
        ends = {node: self.sampled.nodes[node].time.iloc[-1] for node in self.last_nodes}
        return {rank: row for rank, row in rows.items() if row.time == ends[rank.node]}

    def find_rank(self, rank: int) -> RankId:
        """Return where a rank of the record was sampled last: its host may have another name there."""
        for tables in (self.judged.ranks, self.sampled.ranks):
            sampled = [rank_id for rank_id in tables if rank_id.rank == rank]
            if sampled:
                return max(sampled, key=lambda rank_id: tables[rank_id].time.iloc[-1])
        return RankId("?", rank)

    @cached_property
    def gpus_of_ranks(self) -> dict[RankId, list[GpuId]]:
        """Return the GPUs of each rank that was seen on one."""
        gpus_of_ranks: dict[RankId, set[GpuId]] = {}
        for gpu, rows in (self.judged.gpus or self.sampled.gpus).items():
            # A cell is such as 0+1, or a sign in place of a rank.
            for cell in rows.ranks.astype(str).unique():
                for rank in cell.split("+"):
                    if rank.isdecimal():
                        gpus_of_ranks.setdefault(RankId(gpu.node, int(rank)), set()).add(gpu)
        return {rank: sorted(gpus) for rank, gpus in sorted(gpus_of_ranks.items())}

    # --- GPUs ---------------------------------------------------------------------------------------

    def mean_of_gpus(self, gpus: Iterable[GpuId], column: str) -> float:
        """Return the mean of a column over all samples to judge of these GPUs; NaN if unknown."""
        return mean((self.judged.gpus[gpu] for gpu in gpus if gpu in self.judged.gpus), column)

    def is_unused(self, gpu: GpuId) -> bool:
        """Return whether no rank uses the GPU."""
        return (self.judged.gpus[gpu].ranks == "-").mean() >= UNUSED_TIME_SHARE

    def gpu_load(self, gpu: GpuId) -> float:
        """Return the mean power of a GPU, 0 when idle and 1 at its limit; NaN if unknown.

        Its idle power is the lowest that was seen, if that is low enough to be idle.
        """
        rows = self.sampled.gpus[gpu]
        limit_w = rows.power_limit_w.mean()
        if not limit_w:
            return math.nan
        idle_w = min(IDLE_POWER_SHARE_AT_MOST * limit_w, rows.power_w[rows.power_w > 0].min())
        return (self.mean_of_gpus([gpu], "power_w") - idle_w) / (limit_w - idle_w)

    def energy_joules(self) -> float:
        """Return the energy of all GPUs; NaN if that of one is unknown, or there are no GPUs."""
        if not self.sampled.gpus:
            return math.nan
        return sum(_energy_joules(rows) for rows in self.sampled.gpus.values())

    # --- ranks --------------------------------------------------------------------------------------

    def rank_load(self, rank: RankId) -> float:
        """Return how busy a rank's GPUs are, or, on a CPU, its first thread: 0 to 1, or NaN."""
        gpus = self.gpus_of_ranks.get(rank)
        if gpus:
            return sum(self.gpu_load(gpu) for gpu in gpus) / len(gpus)
        return min(1.0, self.mean_of_ranks([rank], "cores"))

    def mean_of_ranks(self, ranks: Iterable[RankId], column: str) -> float:
        """Return the mean of a column over all samples to judge of these ranks; NaN if unknown."""
        return mean((self.judged.ranks[rank] for rank in ranks if rank in self.judged.ranks), column)

    @property
    def own_shares(self) -> pd.Series:
        """Return the share of the training time that each rank works itself; none if alone, or if unknown."""
        own_shares = self.rank_shares.own
        if len(own_shares) > 1 and (own_shares > 0).all():
            return own_shares
        return own_shares[:0]

    def core_wait_share(self, rank: RankId) -> float:
        """Return the share of the time that a rank could run but had no core; NaN if unknown."""
        waiting = self.mean_of_ranks([rank], "waiting")
        cores = self.mean_of_ranks([rank], "cores")
        if not waiting < 1:
            return waiting
        # It counts all threads: one that wakes now and then waits behind those that compute, at no loss.
        threads = self.epochs.threads_per_worker.max() if len(self.epochs) else math.inf
        idle = max(0.0, 1 - cores / threads)
        # And only the time in which they could run: little, if they mostly wait for something else.
        return min(waiting, cores * waiting / (1 - waiting), idle)

    def never_met(self) -> bool:
        """Return whether there are several ranks, none connected to another; False if unknown.

        A few samples may all be too early; and so may many, if the job did not end well.
        """
        ranks = self.last_ranks
        if len(ranks) < 2:
            return False
        # On one node another host is no rank of this job; on several it may be that of a rank.
        on_one_node = len({rank.node for rank in ranks}) == 1
        strangers = {NOBODY, HOST} if on_one_node else {NOBODY}
        if any(not strangers.issuperset(self.sampled.ranks[rank].met) for rank in ranks):
            return False
        moments = min(len(self.sampled.ranks[rank]) for rank in ranks)
        if self.ended_well and moments >= SAMPLES_UNTIL_RANKS_MEET:
            return True
        at_work = all(self._rows_to_judge(rank).cores.mean() >= WAITING_RANK_CORES for rank in ranks)
        return at_work and moments >= SAMPLES_UNTIL_DATA_IS_READY

    def started_processes(self, rank: RankId) -> int:
        """Return how many processes that a rank's script started itself compute; 0 if they hardly do."""
        rows = self._rows_to_judge(rank)
        if not rows.other_cores.mean() >= COMPUTING_CORES:
            return 0
        return round(rows.others[rows.others > 0].median())

    @cached_property
    def launchers(self) -> set[RankId]:
        """Return the ranks that only wait for processes which their scripts started themselves."""
        return {
            rank
            for rank in self.sampled.ranks
            if self._rows_to_judge(rank).cores.mean() < WAITING_RANK_CORES and self.started_processes(rank)
        }

    def longest_pause(self, rank: RankId, cores: float, utilisation: float) -> pd.DataFrame:
        """Return the samples of the longest time to judge in which a rank and its GPUs did nothing.

        That is, its process is stopped, or uses fewer than `cores`, as do its loader workers together and the
        processes that it has started, and its GPUs less than `utilisation` (%).
        """
        rows = self.sampled.ranks[rank]
        busy_times: set[float] = set()
        for gpu in self.gpus_of_ranks.get(rank, []):
            gpu_rows = self.sampled.gpus[gpu]
            busy_times.update(gpu_rows.time[gpu_rows.utilisation >= utilisation])
        cores_of_others = rows[["loader_cores", "other_cores"]].max(axis=1).fillna(0)
        does_nothing = (rows.cores < cores) & (cores_of_others < cores) & ~rows.time.isin(busy_times)
        is_stopped = rows["name"] == "T"
        is_idle = (is_stopped | does_nothing) & (rows.time > self.windows[0].began)
        goes_on = is_idle & is_idle.shift(fill_value=False) & rows.seconds.notna()
        if not goes_on.any():
            return rows[:0]
        pause = (~goes_on).cumsum()
        return rows[pause == pause.mode()[0]]

    def _rows_to_judge(self, rank: RankId) -> pd.DataFrame:
        """Return the samples to judge of a rank, or all if there are none."""
        return self.judged.ranks.get(rank, self.sampled.ranks[rank])


def _read_trainings(folder: Path, since: float) -> tuple[list[TrainingRecord], list[str]]:
    """Return the records of the trainings `since` then, and why others cannot be read."""
    trainings: list[TrainingRecord] = []
    problems: list[str] = []
    for path in samples.runs(folder):
        try:
            trainings.append(TrainingRecord(path, since))
        except (UserError, OSError) as error:
            problems.append(str(error))
    return trainings, problems


def _first_time(tables: SampleTables) -> float:
    return min(rows.time.iloc[0] for rows in tables.nodes.values())


def _time_of_last_start(tables: SampleTables) -> float:
    """Return when all ranks were there, or without ranks all nodes."""
    return max(rows.time.iloc[0] for rows in (tables.ranks or tables.nodes).values())


def _rows_within(table: pd.DataFrame, windows: list[Window]) -> pd.DataFrame:
    """Return the samples that lie within a window with the whole second that they cover."""
    began, ended = np.array(windows).T
    window = began.searchsorted(table.time - samples.PERIOD_SECONDS, side="right") - 1
    return table[(window >= 0) & (table.time <= ended[window])]


def _energy_joules(rows: pd.DataFrame) -> float:
    """Return the energy of a GPU, by its counter or its power; NaN if neither is known."""
    counted = rows.energy_j.diff()
    by_power = (rows.power_w + rows.power_w.shift()) / 2 * rows.seconds
    # Where the counter was reset, or there is none, the power tells.
    joules = counted.where(counted >= 0, by_power)
    # Over the gap of a requeued job nothing was sampled.
    is_known = rows.seconds.notna() & (joules >= 0)
    return joules[is_known].sum(min_count=1)
