"""What the records of a sampled job's trainings tell: when it trained, and what each rank did meanwhile."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from manygpus.errors import UserError
from manygpus.record import records

# Shorter epochs hold hardly a sample, so they are judged with the time between them.
SHORT_EPOCH_SECONDS = 3.0
# With fewer seconds of training no share of them is judged.
LEAST_TRAINING_SECONDS = 5.0


class Window(NamedTuple):
    """A time from `began` to `ended`, in seconds since 1970."""

    began: float
    ended: float


class TrainingRecord:
    """The record of a training `since` then, in seconds since 1970.

    Attributes:
        path: its CSV.
        is_warmup: whether there is nothing but a warm-up.
        epochs: a row for each epoch past the warm-up, or, if there is nothing else, of the warm-up. An epoch
            is trained from `began` to `trained`, and tested until `tested`: seconds since 1970, NaN in files
            that do not say when.
        ranks: a row for each epoch and rank.
        windows: the times of training, without evaluations, unless the epochs are too short for that.

    Raises:
        UserError, OSError: if it cannot be read, or has no such epoch.
    """

    def __init__(self, path: Path, since: float) -> None:
        self.path = path
        self.ranks = pd.DataFrame(records.read_ranks(path) if records.beside(path).exists() else [])
        epochs = _with_times(pd.DataFrame(records.read(path)))
        epochs = epochs[epochs.began >= since]
        if epochs.empty:
            raise UserError(f"no epoch of {path} was sampled.")
        self.is_warmup = bool(epochs.warmup.all())
        self.epochs = epochs if self.is_warmup else epochs[~epochs.warmup]
        self.windows = _training_windows(self.epochs)


def _with_times(epochs: pd.DataFrame) -> pd.DataFrame:
    recorded_at = pd.to_datetime(epochs.recorded_at, utc=True, format="ISO8601", errors="coerce")
    # Without their zone, which older releases of pandas leave out where no time can be read.
    tested = (recorded_at.dt.tz_localize(None) - pd.Timestamp(0)).dt.total_seconds()
    trained = tested - epochs.eval_seconds
    began = trained - epochs.train_seconds
    return epochs.assign(began=began, trained=trained, tested=tested)


def _training_windows(epochs: pd.DataFrame) -> list[Window]:
    trained = epochs[epochs.began < epochs.trained]
    windows = [Window(began, ended) for began, ended in zip(trained.began, trained.trained, strict=True)]
    if (trained.trained - trained.began).mean() < SHORT_EPOCH_SECONDS:
        windows = [Window(windows[0].began, windows[-1].ended)]
    return windows


def all_epochs(trainings: list[TrainingRecord]) -> pd.DataFrame:
    """Return the epochs of all trainings in one table, with the columns of a record."""
    if not trainings:
        return pd.DataFrame(columns=[*records.COLUMNS])
    return pd.concat([training.epochs for training in trainings])


def rank_shares(trainings: list[TrainingRecord]) -> pd.DataFrame:
    """Return how each rank spent the training time, by its own measurement: a row for each rank.

    `own` is the share in which it worked itself, `data` that in which it waited for batches within that: 0 to
    1, or NaN. Without a record of ranks, or for less than `LEAST_TRAINING_SECONDS`, there is no row.
    """
    seconds = ["own_seconds", "data_seconds", "train_seconds"]
    tables = []
    for training in trainings:
        if len(training.ranks):
            # DataParallel has a row for each device of its one rank.
            ranks = training.ranks.drop_duplicates(["epoch", "rank"], keep="last")
            tables.append(ranks.merge(training.epochs[["epoch", "train_seconds"]], on="epoch"))
    if not tables:
        return pd.DataFrame(columns=["own", "data"])
    sums = pd.concat(tables).groupby("rank")[seconds].agg(lambda column: column.sum(skipna=False))
    if not sums.train_seconds.max() >= LEAST_TRAINING_SECONDS:
        sums = sums[:0]
    return pd.DataFrame(
        {"own": sums.own_seconds / sums.train_seconds, "data": sums.data_seconds / sums.train_seconds}
    )


def merge_windows(windows: Iterable[Window]) -> list[Window]:
    """Sort windows by time, and merge overlapping ones."""
    merged: list[Window] = []
    for window in sorted(windows):
        if merged and window.began <= merged[-1].ended:
            merged[-1] = Window(merged[-1].began, max(window.ended, merged[-1].ended))
        else:
            merged.append(window)
    return merged
