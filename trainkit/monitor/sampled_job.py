"""A job that was sampled, as its verdict needs it: by GPU, rank and node, the time to judge, the energy.

Only the standard library is used, as a job ends with this.
"""

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from trainkit.runtime.errors import UserError
from trainkit.schema import records, samples
from trainkit.schema.samples import GPU, NODE, RANK

# A day of 8 GPUs has 1.5 million rows: of these one moment in 30 s is looked at, which takes 100 MB.
MOST_ROWS, BYTES_OF_A_ROW = 50_000, 80
# Below these nothing is judged, of samples and of a record. Two epochs of 15 s together have as many past the
# warm-up. More samples in a second would tell no more: each is the mean of one, so a few will do.
LEAST_MOMENTS, LEAST_SECONDS = 4, 5.0
ENERGY_MOMENTS = 10  # below, the seconds at both ends, of which only a part is the training, count for much
SETTLE = 10.0  # s, from when all ranks are there: CUDA, NCCL and the data are made ready
SHORT_EPOCH = 3.0  # s: hardly a sample lies in a shorter one, so they are judged with what is between them
LONGEST_NUMBER = 9  # digits of that of a GPU or a rank
MOST_CORES = 4096  # of a node
UNSEEN = 0.9  # of the time that no rank is on a GPU that is unused
GAP = 10.0  # s without samples: the job was requeued, and others had its GPUs
IDLE_AT_MOST = 0.2  # of the limit of its power, that a GPU takes with a CUDA context and no work: 10 to 25 %

Row = dict[str, object]
Place = tuple[str, int]  # a node, and the number of a GPU or rank there
Series = dict[Place, list[Row]]
Window = tuple[float, float]  # s, since 1970


class SampledJob:
    """The samples in a folder, and the records of the trainings that ran there.

    `rows` has all samples in the order of time, `judged` those of the epochs past the warm-up of each
    training, without a record those from when all ranks are there; both by what they are of, then by its
    place. `judged` has none where there are too few; `moments` tells their number. `notes` tell what the
    sampler could not see, and which records cannot be read.

    Raises:
        UserError: if there are no samples.
    """

    def __init__(self, folder: Path) -> None:
        self.rows: dict[str, Series] = {NODE: {}, GPU: {}, RANK: {}}
        size = sum(file.stat().st_size for file in folder.glob("*.csv"))
        for row in samples.read(folder, every=1 + size // (MOST_ROWS * BYTES_OF_A_ROW)):
            number = "0" if row["what"] == NODE else row["number"]
            if row["what"] in self.rows and _is_number(number):
                self.rows[row["what"]].setdefault((row["node"], int(number)), []).append(row)
        if not self.rows[NODE]:
            raise UserError(f"the samples in {folder} have no row of a node: were they cut?")
        self.trainings, unread = _trainings(folder)
        self.notes = _notes(folder) + unread
        self.shares = _shares(self.trainings)
        self.windows = _merge_windows(window for training in self.trainings for window in training.windows)
        self.windows = self.windows or [(self._all_there() + SETTLE, math.inf)]
        self.judged = {what: self._in_windows(series) for what, series in self.rows.items()}
        self.moments = max(map(len, self.judged[NODE].values()), default=0)
        if self.moments < LEAST_MOMENTS:
            self.judged = {what: {} for what in self.rows}
        self.seconds = max(
            sum(after["time"] - before["time"] for before, after in consecutive(rows))
            for rows in self.rows[NODE].values()
        )

    @cached_property
    def steady(self) -> list[Row]:
        """The rows of the epochs past the warm-up."""
        return [row for training in self.trainings for row in training.steady]

    @property
    def has_loaders(self) -> bool:
        """Batches come from loader workers; what a resident loader takes is a rank's own work."""
        return any(row["loader"] == "workers" for row in self.steady)

    @cached_property
    def gpus_of_rank(self) -> dict[Place, list[Place]]:
        """The GPUs of each rank that is seen on one."""
        found: dict[Place, set[Place]] = defaultdict(set)
        for place, rows in (self.judged[GPU] or self.rows[GPU]).items():
            for rank in {rank for ranks in {row["ranks"] for row in rows} for rank in ranks.split("+")}:
                if _is_number(rank):
                    found[place[0], int(rank)].add(place)
        return {rank: sorted(gpus) for rank, gpus in found.items()}

    def judged_or_all(self, what: str, place: Place) -> list[Row]:
        """Return the samples of a place to judge, or all where there are none."""
        return self.judged[what].get(place) or self.rows[what][place]

    def is_unused(self, gpu: Place) -> bool:
        """Tell whether no rank uses the GPU."""
        rows = self.judged_or_all(GPU, gpu)
        return sum(row["ranks"] == "-" for row in rows) >= UNSEEN * len(rows)

    def mean(self, what: str, places: Iterable[Place], column: str) -> float:
        """Average a column over all samples to judge of these places; NaN if it is not known."""
        return mean([row for place in places for row in self.judged[what].get(place, [])], column)

    def place_of_rank(self, rank: int) -> Place:
        """Return where a rank of the record was sampled last: its host may have another name there."""
        for series in (self.judged[RANK], self.rows[RANK]):
            if places := [place for place in series if place[1] == rank]:
                return max(places, key=lambda place: series[place][-1]["time"])
        return "?", rank

    def most_at_once(self, what: str) -> list[Place]:
        """Return the most of a moment, on the nodes there in the end: before a requeue it had others."""
        nodes = {place: rows[-1]["time"] for place, rows in self.rows[NODE].items()}
        there = [node for (node, _), last in nodes.items() if last > max(nodes.values()) - GAP]
        moments: dict[tuple[str, float], list[Place]] = defaultdict(list)
        for place, rows in self.rows[what].items():
            for row in rows:
                moments[place[0], row["time"]].append(place)
        of_nodes = [[places for (name, _), places in moments.items() if name == node] for node in there]
        return sorted(place for places in of_nodes for place in max(places, key=len, default=[]))

    def load(self, gpu: Place) -> float:
        """Return the mean power of a GPU, 0 when idle and 1 at its limit; NaN if it is not known.

        What it takes when idle is the lowest that was seen, as far as that can be idle.
        """
        limit = mean(self.rows[GPU][gpu], "power_limit_w")
        lowest = min((row["power_w"] for row in self.rows[GPU][gpu] if row["power_w"] > 0), default=math.nan)
        idle = min(IDLE_AT_MOST * limit, lowest)
        return (self.mean(GPU, [gpu], "power_w") - idle) / (limit - idle) if limit else math.nan

    def load_of_rank(self, rank: Place) -> float:
        """Return how busy a rank's GPUs are, or on a CPU its first thread: 0 to 1, or NaN."""
        if rank in self.gpus_of_rank:
            return statistics.fmean(map(self.load, self.gpus_of_rank[rank]))
        return min(1.0, self.mean(RANK, [rank], "cores"))

    def waits_for_core(self, rank: Place) -> float:
        """Return in what part of the time a rank could run, and had no core; NaN if it is not known."""
        waiting, cores = (self.mean(RANK, [rank], column) for column in ("waiting", "cores"))
        if not waiting < 1:
            return waiting
        # It is of all threads: one that is woken now and then waits behind those that compute, at no loss.
        threads = max((row["threads_per_worker"] for row in self.steady), default=math.inf)
        idle = max(0.0, 1 - cores / threads)
        # And only the time in which they could run: little, where they mostly wait for something else.
        return min(waiting, cores * waiting / (1 - waiting), idle)

    def longest_pause(self, rank: Place, cores: float, utilisation: float) -> list[Row]:
        """Return the samples of the longest time, once it is judged, that a rank and its GPUs did nothing.

        So its process is stopped, or uses fewer `cores`, and its GPUs have a lower `utilisation` (%).
        """
        gpus = [self.rows[GPU][gpu] for gpu in self.gpus_of_rank.get(rank, [])]
        at_work = {row["time"] for rows in gpus for row in rows if row["utilisation"] >= utilisation}

        def idle(row: Row) -> bool:
            return row["name"] == "T" or row["cores"] < cores and row["time"] not in at_work

        longest, pause = [], []
        for before, after in consecutive(self.rows[RANK][rank]):
            if before["time"] > self.windows[0][0] and idle(before) and idle(after):
                pause = pause if pause and pause[-1] is before else [before]
                pause.append(after)
                longest = max(longest, pause, key=len)
        return longest

    def joules(self, began: float = -math.inf, ended: float = math.inf) -> tuple[float, str]:
        """Sum up the energy of all GPUs in that time; also: is it from the "counter" or from the "power".

        NaN and "" if that of one of them is not known, or there is none.
        """
        every = [_energy_of_gpu(rows, began, ended) for rows in self.rows[GPU].values()]
        if not every or any(math.isnan(joules) for joules, _ in every):
            return math.nan, ""
        source = "counter" if all(counted for _, counted in every) else "power"
        return sum(joules for joules, _ in every), source

    def joules_per_1000_images(self, trainings: list["TrainingRecord"]) -> float:
        """Return the energy from the first epoch to the end of the last; NaN of less than `ENERGY_MOMENTS`.

        And NaN if another training ran at the same time, as nobody knows whose the energy was.
        """
        spans = _merge_windows(training.span for training in trainings)
        others = [training.span for training in self.trainings if training not in trainings]
        if any(began < until and since < ended for began, ended in spans for since, until in others):
            return math.nan
        moments = [row["time"] for rows in list(self.rows[NODE].values())[:1] for row in rows]
        if not spans or any(
            sum(began <= time <= ended for time in moments) < ENERGY_MOMENTS for began, ended in spans
        ):
            return math.nan
        images = sum(row["images"] for training in trainings for row in training.epochs)
        return sum(self.joules(*span)[0] for span in spans) / images * 1000

    def cores_in_use(self, node: str) -> float:
        """Return what the job uses of the cores that it may use on a node, 0 to 1; NaN if it is not known."""
        cores = parse_cores(row["core_list"] for row in self.judged[NODE].get((node, 0), []))
        return self.mean(NODE, [(node, 0)], "cores") / len(cores) if cores else math.nan

    def _all_there(self) -> float:
        series = self.rows[RANK] or self.rows[NODE]
        return max(rows[0]["time"] for rows in series.values())

    def _in_windows(self, series: Series) -> Series:
        starts = [began for began, _ in self.windows]

        def inside(row: Row) -> bool:  # with all of the second that the sample is of
            i = bisect.bisect_right(starts, row["time"] - samples.PERIOD) - 1
            return i >= 0 and row["time"] <= self.windows[i][1]

        found = {place: list(filter(inside, rows)) for place, rows in series.items()}
        return {place: rows for place, rows in found.items() if rows}


@dataclass(frozen=True)
class TrainingRecord:
    """The record of a training: a row for each epoch, and one for each epoch and rank."""

    path: Path
    epochs: list[Row]
    of_ranks: list[Row]

    @property
    def steady(self) -> list[Row]:
        """The epochs past the warm-up, or all of a run that has no others."""
        return [row for row in self.epochs if not row["warmup"]] or self.epochs

    @property
    def span(self) -> Window:
        """The first epoch's beginning and the last one's end; NaN in files that do not tell it."""
        return _training_window(self.epochs[0])[0], since_1970(self.epochs[-1]["recorded_at"])

    @property
    def windows(self) -> list[Window]:
        """When it was trained, without evaluations, unless the epochs are too short for that."""
        found = [window for window in map(_training_window, self.steady) if window[0] < window[1]]
        if found and statistics.fmean(ended - began for began, ended in found) < SHORT_EPOCH:
            return [(found[0][0], found[-1][1])]
        return found


@dataclass(frozen=True)
class Shares:
    """The parts of the training time that a rank worked, and in that waited for batches; 0 to 1, or NaN."""

    own: float
    data: float


def mean(rows: Iterable[Row], column: str) -> float:
    """Average the cells that are known; NaN if none is."""
    known = [row[column] for row in rows if not math.isnan(row[column])]
    return statistics.fmean(known) if known else math.nan


def consecutive(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Pair each sample with the next, where none is missing in between."""
    times = [row["time"] for row in rows]
    usual = statistics.median(after - before for before, after in pairwise(times)) if len(rows) > 1 else 0
    for before, after in pairwise(rows):
        if 0 < after["time"] - before["time"] <= max(GAP, 3 * usual):
            yield before, after


def _notes(folder: Path) -> list[str]:
    with suppress(OSError):
        return (folder / samples.NOTES).read_text(errors="replace").splitlines()
    return []


def _trainings(folder: Path) -> tuple[list[TrainingRecord], list[str]]:
    found, notes = [], []
    for path in samples.runs(folder):
        try:
            epochs = records.read(path)
            of_ranks = records.read_ranks(path) if records.beside(path).exists() else []
            found.append(TrainingRecord(path, epochs, of_ranks))
        except (UserError, OSError) as error:  # the second of a name that is too long
            notes.append(str(error))
    return found, notes


def _shares(trainings: list[TrainingRecord]) -> dict[int, Shares]:
    """Return the shares of each rank; none of less than `LEAST_SECONDS`."""
    train, own, data = defaultdict(float), defaultdict(float), defaultdict(float)
    for training in trainings:
        seconds = {row["epoch"]: row["train_seconds"] for row in training.steady}
        # DataParallel has a row for each device of its one rank.
        for row in {(row["epoch"], row["rank"]): row for row in training.of_ranks}.values():
            if row["epoch"] in seconds:
                rank = row["rank"]
                train[rank] += seconds[row["epoch"]]
                own[rank] += row["own_seconds"]
                data[rank] += row["data_seconds"]
    if max(train.values(), default=0) < LEAST_SECONDS:
        return {}
    return {rank: Shares(own[rank] / train[rank], data[rank] / train[rank]) for rank in train}


def _training_window(epoch: Row) -> Window:
    ended = since_1970(epoch["recorded_at"]) - epoch["eval_seconds"]
    return ended - epoch["train_seconds"], ended


def since_1970(text: str) -> float:
    """Return the seconds of a time in a record; NaN if it cannot be read."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return math.nan


def _merge_windows(windows: Iterable[Window]) -> list[Window]:
    """Put windows in the order of time, without overlaps."""
    joined: list[Window] = []
    for began, ended in sorted(windows):
        if joined and began <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(ended, joined[-1][1])
        else:
            joined.append((began, ended))
    return joined


def parse_cores(core_lists: Iterable[str]) -> set[int]:
    """Return the cores of lists such as "0-1,4": all that are in any."""
    cores: set[int] = set()
    for core_list in set(core_lists) - {""}:
        with suppress(ValueError):
            for ends in (part.split("-") for part in core_list.split(",")):
                cores |= set(range(int(ends[0]), min(int(ends[-1]), MOST_CORES) + 1))
    return cores


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= LONGEST_NUMBER


def _energy_of_gpu(rows: list[Row], began: float, ended: float) -> tuple[float, bool]:
    """Sum up the energy of a GPU; also: by its counter? NaN if neither that nor its power is known."""
    counted = any(row["energy_j"] >= 0 for row in rows)
    total, known = 0.0, False
    for before, after in consecutive(rows):
        seconds = after["time"] - before["time"]
        inside = min(after["time"], ended) - max(before["time"], began)
        joules = after["energy_j"] - before["energy_j"]
        if not joules >= 0:  # it began anew, or there is none
            joules = (before["power_w"] + after["power_w"]) / 2 * seconds
        if inside > 0 and joules >= 0:
            total, known = total + joules * inside / seconds, True
    return total if known else math.nan, counted
