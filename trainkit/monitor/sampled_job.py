"""A sampled job, for its verdict: the time to judge, GPUs, ranks, energy."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from trainkit import job_folder
from trainkit.errors import UserError
from trainkit.monitor.connections import HOST, NOBODY
from trainkit.record import records, samples
from trainkit.record.samples import GPU, NODE, RANK

# A day of 8 GPUs has 1.5 million rows: only one moment in 60 s is read, as a job waits for this.
MOST_ROWS, BYTES_OF_A_ROW = 25_000, 80
# With fewer samples or seconds of a record nothing is judged. Two epochs of 15 s together have enough past
# the warm-up. More samples per second would show no more: each is a mean over a second, so a few will do.
LEAST_MOMENTS, LEAST_SECONDS = 4, 5.0
SETTLE = 10.0  # s, from when all ranks are there: CUDA, NCCL and the data are made ready
SHORT_EPOCH = 3.0  # s: shorter ones hold hardly a sample, so they are judged with the time between them
NEARLY = 0.9  # of the time without a rank, a GPU is unused
GAP = 10.0  # s without samples: the job was requeued, and others had its GPUs
MARGIN = 1.2  # times the peak: the samples may miss the highest moment
CORES = "--cpus-per-task"
# Samples of each rank. From when PyTorch is loaded, ranks that train together meet within seconds; at most
# they make the data ready before, which takes minutes.
MEET_WITHIN, PREPARED_WITHIN = 10, 300
LAUNCHES, COMPUTE = 0.1, 0.1  # cores: of a rank that only waits for others; of the others that compute
IDLE_AT_MOST = 0.2  # of its power limit, that a GPU takes with a CUDA context and no work: 10 to 25 %

Place = tuple[str, int]  # a node, and the number of a GPU or rank there
ONE = ["what", "node", "number"]  # the columns that identify what was sampled, and where
Window = tuple[float, float]  # s, since 1970


@dataclass(frozen=True)
class Need:
    """What Slurm was `asked` for by an option of sbatch, in its `unit`, and the most `used` at once.

    A `resume` may take so much more. `known` is whether the job has ended well: what is enough for one that
    was killed, or still runs, nobody knows.
    """

    option: str
    unit: str
    asked: float
    used: float
    known: bool
    resume: float = 0

    @property
    def enough(self) -> int | None:
        """Return what would have been enough, with a margin; None if unknown."""
        if not self.known:
            return None
        return max(math.ceil(min(MARGIN * self.used + self.resume, self.asked)), 1)

    @property
    def less(self) -> bool:
        """Return whether less than what was asked for would have been enough."""
        return self.enough is not None and self.enough < self.asked


class SampledJob:
    """The samples in a folder, and the records of the trainings that ran there.

    `rows` has all samples in order of time; `judged` has those of the epochs past the warm-up of each
    training, or without a record those since all ranks are running: none if `moments`, their number, is too
    small. Both are dicts by kind, then by place; `seconds` is the time since the last sample, NaN if some are
    missing in between. `steady` has the rows of these epochs in the records. `notes` say what the sampler
    could not see, and which records cannot be read. `shares` has the shares of the training time, 0 to 1 or
    NaN, that each rank worked itself (`own`), and that it waited for batches within that (`data`). The script
    of a `plain` job does not use the kit. `of_slurm` is whether a job script sampled it; `ended_well`,
    whether it has ended, with exit code 0.

    Raises:
        UserError: if there are no samples.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.plain = folder, (folder.parent / job_folder.PLAIN).exists()
        self.of_slurm = (folder / samples.ASKED).exists()
        self.ended_well = job_folder.read(folder / samples.ENDED) == "0"
        size = sum(file.stat().st_size for file in folder.glob("*.csv"))
        table = pd.DataFrame(samples.read(folder, every=1 + size // (MOST_ROWS * BYTES_OF_A_ROW)))
        table.loc[table.what == NODE, "number"] = "0"
        if not (table.what == NODE).any():  # the sampler could not look at the processes
            raise UserError(f"the samples in {folder} have no row of a node: see {folder / samples.NOTES}.")
        table = table.astype({"number": int})
        seconds = table.groupby(ONE).time.diff()
        usual = seconds.groupby([table[name] for name in ONE]).transform("median")
        self.table = table.assign(seconds=seconds.where(seconds <= (3 * usual).clip(lower=GAP)))
        self.rows = _by_place(self.table)
        self.trainings, self.notes = [], job_folder.read(folder / samples.NOTES).splitlines()
        since = min(rows.time.iloc[0] for rows in self.rows[NODE].values()) - samples.PERIOD_SECONDS
        for path in samples.runs(folder):
            try:
                self.trainings.append(TrainingRecord(path, since))
            except (UserError, OSError) as error:
                self.notes.append(str(error))
        # A start that was stopped after its warm-up says nothing about the rest of its job.
        past_warmup = [training for training in self.trainings if not training.is_warmup]
        judged = past_warmup or self.trainings
        every = [training.steady for training in judged]
        self.steady = pd.concat(every) if every else pd.DataFrame(columns=[*records.COLUMNS])
        self.shares = _shares(judged)
        self.windows = _merge_windows(window for training in judged for window in training.windows)
        first = max(rows.time.iloc[0] for rows in (self.rows[RANK] or self.rows[NODE]).values())
        self.windows = self.windows or [(first + SETTLE, math.inf)]
        began, ended = np.array(self.windows).T
        # Including the whole second that the sample covers.
        window = began.searchsorted(table.time - samples.PERIOD_SECONDS, side="right") - 1
        inside = (window >= 0) & (table.time <= ended[window])
        self.judged = _by_place(self.table[inside])
        self.moments = max(map(len, self.judged[NODE].values()), default=0)
        if self.moments < LEAST_MOMENTS:
            self.judged = _by_place(self.table[:0])
        self.seconds = max(rows.seconds.sum() for rows in self.rows[NODE].values())

    @property
    def has_loaders(self) -> bool:
        """Return whether batches come from loader workers; a resident loader is a rank's own work."""
        return (self.steady.loader == "workers").any()

    @cached_property
    def gpus_of_rank(self) -> dict[Place, list[Place]]:
        """Return the GPUs of each rank that was seen on one."""
        table = pd.concat([self.table[:0], *(self.judged[GPU] or self.rows[GPU]).values()])
        table = table.assign(rank=table.ranks.astype(object).str.split("+")).explode("rank")
        table = table[table["rank"].str.isdecimal()].astype({"rank": int})
        return {
            rank: sorted({(rank[0], gpu) for gpu in rows.number})
            for rank, rows in table.groupby(["node", "rank"])
        }

    def is_unused(self, gpu: Place) -> bool:
        """Return whether no rank uses the GPU."""
        return (self.judged[GPU][gpu].ranks == "-").mean() >= NEARLY

    def mean(self, what: str, places: Iterable[Place], column: str) -> float:
        """Return the mean of a column over all samples to judge of these places; NaN if unknown."""
        known = [self.judged[what][place][column] for place in places if place in self.judged[what]]
        return pd.concat(known).mean() if known else math.nan

    def place_of_rank(self, rank: int) -> Place:
        """Return where a rank of the record was sampled last: its host may have another name there."""
        for series in (self.judged[RANK], self.rows[RANK]):
            if places := [place for place in series if place[1] == rank]:
                return max(places, key=lambda place: series[place].time.iloc[-1])
        return "?", rank

    def places_at_the_end(self, what: str) -> list[Place]:
        """Return the GPUs, ranks or nodes at the end of the job: before a requeue it had others."""
        last = {node: rows.time.iloc[-1] for (node, _), rows in self.rows[NODE].items()}
        there = {node for node in last if last[node] > max(last.values()) - GAP}
        return sorted(place for place in self.rows[what] if place[0] in there)

    def ranks_in_the_last_samples(self) -> dict[Place, pd.Series]:
        """Return the last row of each rank that was there at the end of the samples of its node."""
        ends = {node: rows.time.iloc[-1] for (node, _), rows in self.rows[NODE].items()}
        last = {rank: self.rows[RANK][rank].iloc[-1] for rank in self.places_at_the_end(RANK)}
        return {rank: row for rank, row in last.items() if row.time == ends[rank[0]]}

    def load(self, gpu: Place) -> float:
        """Return the mean power of a GPU, 0 when idle and 1 at its limit; NaN if unknown.

        Its idle power is the lowest that was seen, if that is low enough to be idle.
        """
        rows = self.rows[GPU][gpu]
        limit = rows.power_limit_w.mean()
        idle = min(IDLE_AT_MOST * limit, rows.power_w[rows.power_w > 0].min())
        return (self.mean(GPU, [gpu], "power_w") - idle) / (limit - idle) if limit else math.nan

    def load_of_rank(self, rank: Place) -> float:
        """Return how busy a rank's GPUs are, or, on a CPU, its first thread: 0 to 1, or NaN."""
        if gpus := self.gpus_of_rank.get(rank):
            return sum(map(self.load, gpus)) / len(gpus)
        return min(1.0, self.mean(RANK, [rank], "cores"))

    def waits_for_core(self, rank: Place) -> float:
        """Return the share of the time that a rank could run but had no core; NaN if unknown."""
        waiting, cores = (self.mean(RANK, [rank], column) for column in ("waiting", "cores"))
        if not waiting < 1:
            return waiting
        # It counts all threads: one that wakes now and then waits behind those that compute, at no loss.
        threads = self.steady.threads_per_worker.max() if len(self.steady) else math.inf
        idle = max(0.0, 1 - cores / threads)
        # And only the time in which they could run: little, if they mostly wait for something else.
        return min(waiting, cores * waiting / (1 - waiting), idle)

    def ranks_never_met(self) -> bool:
        """Return whether there are several ranks, none connected to another; False if unknown.

        A few samples may all be too early; and so may many, if the job did not end well.
        """
        ranks = self.places_at_the_end(RANK)
        words = {word for rank in ranks for word in self.rows[RANK][rank].met}
        alone = {NOBODY} if len({node for node, _ in ranks}) > 1 else {NOBODY, HOST}
        if len(ranks) < 2 or not words <= alone:
            return False
        moments = min(len(self.rows[RANK][rank]) for rank in ranks)
        at_work = all(self._judged_rows_of_rank(rank).cores.mean() >= LAUNCHES for rank in ranks)
        return self.ended_well and moments >= MEET_WITHIN or at_work and moments >= PREPARED_WITHIN

    def others(self, rank: Place) -> int:
        """Return how many processes that a rank's script started itself compute; 0 if they hardly do."""
        rows = self._judged_rows_of_rank(rank)
        if not rows.other_cores.mean() >= COMPUTE:
            return 0
        return round(rows.others[rows.others > 0].median())

    @cached_property
    def launchers(self) -> set[Place]:
        """Return the ranks that only wait for processes which their scripts started themselves."""
        idle = (rank for rank in self.rows[RANK] if self._judged_rows_of_rank(rank).cores.mean() < LAUNCHES)
        return {rank for rank in idle if self.others(rank)}

    def _judged_rows_of_rank(self, rank: Place) -> pd.DataFrame:
        """Return the samples to judge of a rank, or all if there are none."""
        return self.judged[RANK].get(rank, self.rows[RANK][rank])

    def needs(self) -> list[Need]:
        """List the memory of a node and the cores of a task; none where a job script did not ask for them."""
        asked = samples.read_asked(self.folder)
        if asked is None:
            return []
        cpus, tasks, mb = asked
        nodes, gb = pd.concat(self.rows[NODE].values()), 2**30 / 1e6
        of_ranks = [
            (rows.cores + rows.loader_cores.fillna(0) + rows.other_cores.fillna(0)).max()
            for rows in self.rows[RANK].values()
        ]
        # A task of torchrun has all ranks of its node.
        cores = pd.Series([nodes.cores.max() / max(tasks, 1), *of_ranks]).max()
        # Each rank loads the checkpoint, and a job that was not resumed has not shown what that takes.
        ranks = max(Counter(node for node, _ in self.rows[RANK]).values(), default=0)
        resume = ranks * nodes.checkpoint_mb.fillna(0).max() / gb
        used = (nodes.memory_mb + nodes.shared_files_mb.fillna(0)).max() / gb
        memory = Need("--mem", "G", round(mb / 1024, 2), used, self.ended_well, resume)
        needs = [memory, Need(CORES, "", cpus, cores, self.ended_well)]
        return [need for need in needs if need.asked > 0 and need.used >= 0]

    def longest_pause(self, rank: Place, cores: float, utilisation: float) -> pd.DataFrame:
        """Return the samples of the longest time to judge in which a rank and its GPUs did nothing.

        That is, its process is stopped, or uses fewer than `cores`, as do its loader workers together and the
        processes that it has started, and its GPUs less than `utilisation` (%).
        """
        rows = self.rows[RANK][rank]
        gpus = [self.rows[GPU][gpu] for gpu in self.gpus_of_rank.get(rank, [])]
        at_work = {time for gpu in gpus for time in gpu.time[gpu.utilisation >= utilisation]}
        by_others = rows[["loader_cores", "other_cores"]].max(axis=1).fillna(0)
        idle = (rows["name"] == "T") | (rows.cores < cores) & (by_others < cores) & ~rows.time.isin(at_work)
        idle &= rows.time > self.windows[0][0]
        goes_on = idle & idle.shift(fill_value=False) & rows.seconds.notna()
        pause = (~goes_on).cumsum()
        return rows[pause == pause.mode()[0]] if goes_on.any() else rows[:0]

    def joules(self) -> float:
        """Return the energy of all GPUs; NaN if that of one is unknown, or there are no GPUs."""
        every = [_energy_of_gpu(rows) for rows in self.rows[GPU].values()]
        return sum(every) if every else math.nan


class TrainingRecord:
    """The record of a training `since` then: a row for each of its `steady` epochs, those past the warm-up.

    If there is nothing but a warm-up, it `is_warmup`, and `steady` has that.

    An epoch is trained from `began` to `trained`, and tested until `tested`: s since 1970, NaN in files
    without them. `of_ranks` has a row for each epoch and rank. `windows` are the times of training, without
    evaluations, unless the epochs are too short for that.

    Raises:
        UserError, OSError: if it cannot be read, or has no such epoch.
    """

    def __init__(self, path: Path, since: float) -> None:
        self.path, epochs = path, pd.DataFrame(records.read(path))
        self.of_ranks = pd.DataFrame(records.read_ranks(path) if records.beside(path).exists() else [])
        tested = pd.to_datetime(epochs.recorded_at, utc=True, format="ISO8601", errors="coerce")
        # Without their zone, which older releases of pandas leave out where no time can be read.
        tested = (tested.dt.tz_localize(None) - pd.Timestamp(0)).dt.total_seconds()
        epochs = epochs.assign(tested=tested, trained=tested - epochs.eval_seconds)
        epochs = epochs.assign(began=epochs.trained - epochs.train_seconds)
        epochs = epochs[epochs.began >= since]
        if epochs.empty:
            raise UserError(f"{path}: no epoch of it was sampled.")
        self.is_warmup = bool(epochs.warmup.all())
        self.steady = epochs if self.is_warmup else epochs[~epochs.warmup]
        trained = self.steady[self.steady.began < self.steady.trained]
        self.windows: list[Window] = list(zip(trained.began, trained.trained, strict=True))
        if (trained.trained - trained.began).mean() < SHORT_EPOCH:
            self.windows = [(self.windows[0][0], self.windows[-1][1])]


def _by_place(table: pd.DataFrame) -> dict[str, dict[Place, pd.DataFrame]]:
    found: dict[str, dict[Place, pd.DataFrame]] = {NODE: {}, GPU: {}, RANK: {}}
    for (what, node, number), rows in table.groupby(ONE, sort=False):
        found[what][node, int(number)] = rows
    return found


def _shares(trainings: list[TrainingRecord]) -> pd.DataFrame:
    """Return the shares of each rank; none for less than `LEAST_SECONDS`."""
    every = [pd.DataFrame(columns=["epoch", "rank", "train_seconds", "own_seconds", "data_seconds"])]
    for training in trainings:
        if len(training.of_ranks):  # DataParallel has a row for each device of its one rank
            of_ranks = training.of_ranks.drop_duplicates(["epoch", "rank"], keep="last")
            every.append(of_ranks.merge(training.steady[["epoch", "train_seconds"]], on="epoch"))
    parts = pd.concat(every[1:] or every).groupby("rank")[["own_seconds", "data_seconds", "train_seconds"]]
    sums = parts.agg(lambda seconds: seconds.sum(skipna=False))
    if not sums.train_seconds.max() >= LEAST_SECONDS:
        sums = sums[:0]
    return sums.div(sums.train_seconds, axis=0).set_axis(["own", "data", "all"], axis=1)


def _merge_windows(windows: Iterable[Window]) -> list[Window]:
    """Sort windows by time, and merge overlapping ones."""
    joined: list[Window] = []
    for began, ended in sorted(windows):
        if joined and began <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(ended, joined[-1][1])
        else:
            joined.append((began, ended))
    return joined


def _energy_of_gpu(rows: pd.DataFrame) -> float:
    """Return the energy of a GPU, by its counter or its power; NaN if neither is known."""
    counted = rows.energy_j.diff()
    by_power = (rows.power_w + rows.power_w.shift()) / 2 * rows.seconds
    # Where the counter was reset, or there is none, the power tells.
    joules = counted.where(counted >= 0, by_power)
    # Over the gap of a requeued job nothing was sampled.
    known = rows.seconds.notna() & (joules >= 0)
    return joules[known].sum(min_count=1)
