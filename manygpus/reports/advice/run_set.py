"""What the runs of one set say of the next training: its steps, the seconds around them, and its epochs."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import pandas as pd

from manygpus.errors import UserError
from manygpus.record.columns import COLUMNS, DDP, DP, SINGLE, lr_factor
from manygpus.reports import comparison
from manygpus.reports.advice.scaling import DRAWS, LEAST_SECONDS, Measured, Shape

# In logarithms: the scatter of the epochs needed, per doubling from a batch that was tried.
EPOCHS_SCATTER = 0.3
# What is equal in all runs of a set. The model describes the batch; of the learning rate only the part that
# does not follow from the batch by the scaling rule has to be equal.
OF_A_SET = [name for name in comparison.MUST_BE_EQUAL if name not in ("global_batch", "images", "lr")]


class NamedRuns(NamedTuple):
    """Rows that may be pooled, and the settings in which they differ from those of other sets, in words."""

    name: str
    rows: pd.DataFrame


def sets(rows: pd.DataFrame) -> list[NamedRuns]:
    """Split the rows of `comparison.load` into sets that may be pooled."""
    lr_factors = [
        lr_factor(rule, batch) for rule, batch in zip(rows.lr_scale, rows.global_batch, strict=True)
    ]
    base_lr = pd.to_numeric(rows.lr, errors="coerce") / lr_factors
    is_on_cpu = rows.device_name.map(comparison.is_cpu)
    rows = rows.assign(
        base_lr=base_lr.map("{:.4g}".format),
        # More CPU threads do not make a GPU faster.
        threads_per_worker=rows.threads_per_worker.where(is_on_cpu, 0),
    )
    name_in_words = {name: COLUMNS[name].words for name in OF_A_SET}
    name_in_words["base_lr"] = COLUMNS["lr"].words
    # A schedule that counts steps has other constants at another batch, and a script other arguments on more
    # devices, such as fewer micro-batches. Only what differs at equal sizes does not follow from them.
    runs_of_equal_size = rows.groupby([*name_in_words, "devices", "nodes", "global_batch"])
    for name in comparison.DOUBTED:
        if runs_of_equal_size[name].nunique().max() > 1:
            name_in_words[name] = COLUMNS[name].words
    differing = [name for name in name_in_words if comparison.varies(rows, name)]
    named = []
    for _, group in rows.groupby(list(name_in_words)):
        clauses = [f"{name_in_words[name]} {group[name].iloc[0]}" for name in differing]
        named.append(NamedRuns(", ".join(clauses), group))
    return named


class RunSet:
    """The runs of one set, and what all their shapes share: the data, the epochs, the seconds around steps.

    Args:
        rows: the rows of one of the `sets`.
        target: a test accuracy (%). The time until it is reached counts, else that of `epochs`; without
            either, one counts that half of the batches reach.
        epochs: the number of epochs of the training; by default as many as the longest run had.

    Raises:
        UserError: if none of the epochs was measured, or no run reached the target.
    """

    def __init__(self, rows: pd.DataFrame, target: float | None = None, epochs: int | None = None) -> None:
        steady = rows[~rows.warmup]
        if steady.empty:
            raise UserError("no epoch after the warm-up was measured: train for --epochs 3 or more.")
        self._steady = steady.assign(step_seconds=steady.global_batch / steady.images_per_s)
        self.images = rows.images.max()
        self.has_single = bool((rows.stage == SINGLE).any())
        self.epochs = _epochs_needed(rows, self.images, target, epochs)
        self.overhead = Overhead.of(rows)
        several = set(rows.stage[rows.devices > 1])
        own_trainings = set(rows.stage) - set(comparison.TUTORIAL_STAGES)
        parallel = several | own_trainings or {DDP}
        self.stages = sorted(stage for stage in parallel if self.measured(stage))
        if not self.stages:
            raise UserError(
                "DataParallel on one device is the plain model: run stage single, or use more devices."
            )

    def measured(self, stage: str) -> Measured:
        """Return the seconds of its steps; on one device those of stage single, if any."""
        steady = self._steady
        single = steady[steady.stage == SINGLE]
        stage_rows = steady[steady.stage == stage]
        if stage == DP:
            # On one device that is the plain model.
            stage_rows = stage_rows[stage_rows.devices > 1]
        is_replaced = (stage_rows.devices == 1) & stage_rows.global_batch.isin(single.global_batch)
        rows = pd.concat([single, stage_rows[~is_replaced]])
        measured: Measured = {}
        for (devices, nodes, batch, _), run in rows.groupby(
            ["devices", "nodes", "batch_per_device", "run_id"]
        ):
            shape = Shape(devices=devices, nodes=nodes, batch=batch)
            measured.setdefault(shape, []).append(list(run.step_seconds))
        return measured


@dataclass(frozen=True)
class Overhead:
    """The seconds of a run outside its steps: medians by number of devices."""

    start: pd.Series
    evaluation: pd.Series

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "Overhead":
        runs = rows.groupby("run_id").agg(
            devices=("devices", "first"),
            trained=("train_seconds", "sum"),
            evaluated=("eval_seconds", "sum"),
            elapsed=("elapsed_s", "max"),
        )
        runs["start"] = (runs.elapsed - runs.trained - runs.evaluated).clip(lower=0)
        evaluation = rows[~rows.warmup].groupby("devices").eval_seconds.median()
        return cls(
            start=runs.groupby("devices").start.median(), evaluation=evaluation.clip(lower=LEAST_SECONDS)
        )

    def seconds(self, devices: int, epochs: np.ndarray | int) -> np.ndarray | float:
        """Return the seconds of the start and of all evaluations of a run."""
        start = np.interp(devices, self.start.index, self.start)
        evaluation = np.interp(devices, self.evaluation.index, self.evaluation)
        # Each device evaluates its part, also on more devices than were measured.
        share = min(1, self.evaluation.index.max() / devices)
        return start + epochs * evaluation * share


# --- how many epochs a training takes ---------------------------------------------------------------


class EpochsNeeded(Protocol):
    """How many epochs a training takes, by its batch; `goal` names what is reached then."""

    goal: str

    def draw(self, batch: int) -> np.ndarray:
        """Draw equally likely numbers, (draws,); infinite if the goal is missed."""

    def is_guessed(self, batch: int) -> bool:
        """Return whether the number comes from other batches."""


@dataclass(frozen=True)
class FixedEpochs:
    """A training of so many epochs."""

    epochs: int
    goal: str

    def draw(self, batch: int) -> np.ndarray:
        return np.full(DRAWS, float(self.epochs))

    def is_guessed(self, batch: int) -> bool:
        return False


@dataclass(frozen=True)
class EpochsToTarget:
    """A training until it has reached a test accuracy.

    Args:
        target: the test accuracy, in %.
        accuracy_error: the standard deviation of an accuracy, in %.
        curves: the test accuracies of the runs of each batch size, (seeds, epochs).
        most_epochs: how many epochs of a run count at most.
    """

    target: float
    accuracy_error: float
    curves: dict[int, np.ndarray]
    goal: str
    most_epochs: int

    def is_guessed(self, batch: int) -> bool:
        return batch not in self.curves

    def draw(self, batch: int) -> np.ndarray:
        # The same for every number of devices.
        random = np.random.default_rng(batch)
        if self.is_guessed(batch):
            return self._draw_from_other_batches(batch, random)
        curves = self.curves[batch]
        drawn = curves[random.integers(len(curves), size=DRAWS)]
        noise = random.normal(0, self.accuracy_error, (DRAWS, 1))
        return _first_epoch(drawn + noise >= self.target)

    def _draw_from_other_batches(self, batch: int, random: np.random.Generator) -> np.ndarray:
        """Draw around what lies between the batches that were tried, further apart the further they are."""
        # A batch that did not reach the target needs at least one epoch more than it had.
        missed = self.most_epochs + 1
        medians = [
            np.median(np.minimum(_first_epoch(curves >= self.target), missed))
            for curves in self.curves.values()
        ]
        doublings = [math.log2(tried) for tried in self.curves]
        wanted = math.log2(batch)
        distance = min(abs(wanted - tried) for tried in doublings)
        middle = np.interp(wanted, doublings, np.log(medians))
        drawn = random.normal(middle, EPOCHS_SCATTER * distance, DRAWS)
        return np.maximum(np.round(np.exp(drawn)), 1)


def _epochs_needed(rows: pd.DataFrame, images: int, target: float | None, epochs: int | None) -> EpochsNeeded:
    """Return the goal that was asked for, or else an accuracy that most batches reach, if there is one."""
    most_epochs = epochs or int(rows.epoch.max())
    # Runs on less data learn less in an epoch.
    on_all_images = rows[rows.images + rows.global_batch > images]
    data = f"{images:,} {comparison.samples_in_words(rows)}"
    goal = f"test accuracy, on {data}"
    if target is not None:
        return _epochs_to_target(on_all_images, target, most_epochs, f"{target:g} % {goal}")
    if not epochs:
        target = _reached_by_most(on_all_images)
        if target is not None:
            goal = f"{target:g} % test accuracy (half of the batch sizes reach it), on {data}"
            return _epochs_to_target(on_all_images, target, most_epochs, goal)
    return FixedEpochs(most_epochs, goal=f"{most_epochs} epoch(s) of {data}")


def _epochs_to_target(rows: pd.DataFrame, target: float, most_epochs: int, goal: str) -> EpochsToTarget:
    best = rows.test_accuracy.max()
    if not best >= target:
        reached = "none was tested" if math.isnan(best) else f"the best had {best:.2f} %"
        raise UserError(
            f"no run has reached {target:g} % ({reached}): lower --target, or train for more --epochs first."
        )
    curves = {
        batch: _accuracy_curves(runs, target, most_epochs) for batch, runs in rows.groupby("global_batch")
    }
    return EpochsToTarget(
        target=target,
        accuracy_error=_accuracy_error(target, rows),
        curves={batch: epochs_of_batch for batch, epochs_of_batch in curves.items() if len(epochs_of_batch)},
        goal=goal,
        most_epochs=most_epochs,
    )


def _accuracy_curves(rows: pd.DataFrame, target: float, epochs: int) -> np.ndarray:
    """Return test accuracies of the runs that reached the target or had so many epochs, (seeds, epochs).

    NaN if a run was shorter. Runs with the same seed differ in their devices and hardly in what they learn:
    they count as one.
    """
    table = rows.pivot_table("test_accuracy", "seed", "epoch", "median", dropna=False)
    curves = table.reindex(columns=range(1, epochs + 1)).to_numpy(float)
    has_reached_target = (curves >= target).any(axis=1)
    is_whole = ~np.isnan(curves[:, -1])
    return curves[has_reached_target | is_whole]


def _first_epoch(has_reached: np.ndarray) -> np.ndarray:
    """Return the first epoch that reached the target, by rows of epochs; infinite if none did."""
    return np.where(has_reached.any(axis=1), has_reached.argmax(axis=1) + 1.0, math.inf)


def _reached_by_most(rows: pd.DataFrame) -> float | None:
    """Return the highest half percent that half of the batches clearly reach; None without accuracies."""
    best_of_runs = rows.groupby(["global_batch", "run_id"]).test_accuracy.max()
    middle = best_of_runs.groupby("global_batch").median().dropna().median()
    if not middle > 0:
        return None
    clearly_reached = middle - 2 * _accuracy_error(middle, rows)
    return math.floor(2 * clearly_reached) / 2


def _accuracy_error(accuracy: float, rows: pd.DataFrame) -> float:
    """Return the standard deviation of an accuracy (%), given the number of test images."""
    test_images = max(rows.test_images.median(), 1)
    return math.sqrt(accuracy * (100 - accuracy) / test_images)
