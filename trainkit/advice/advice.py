"""How many devices to ask for: time and cost by the models of `scaling.py`, and how sure that is.

for runs in sets(rows):
    answer = advise(runs, Constraints(target=97, deadline_s=600))
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from trainkit.advice import scaling
from trainkit.advice.constraints import Constraints
from trainkit.advice.scaling import DRAWS, LEAST_SECONDS, AllReduce, Measured, Scaling, Shape
from trainkit.compare import comparison
from trainkit.errors import UserError
from trainkit.record import records
from trainkit.record.columns import COLUMNS, DDP, DP, SINGLE, lr_factor

INTERVAL = (5, 50, 95)  # percent of the draws: the interval, and its middle
AS_GOOD = 0.05  # of the cost: a choice that costs at most this much more is as good
SURE = 0.9  # the share of the draws in which the choice has to be as good as the best
NEXT_EPOCHS = 3  # of a run that measures a speed: one to warm up, two to measure
EPOCHS_SCATTER = 0.3  # in logarithms, of the epochs needed: per doubling from a batch that was tried
ENOUGH_RUNS = 3  # that are equal: another would add little
BINS = 5  # of the possible results of a run, to estimate what will be known after it
# What is equal in all runs of a set. The models describe the batch; of the learning rate only the part that
# does not follow from the batch by the scaling rule has to be equal.
OF_A_SET = [name for name in comparison.MUST_BE_EQUAL if name not in ("global_batch", "images", "lr")]


class NextRun(NamedTuple):
    """A run that would help, its epochs, and its largest cost in device-hours."""

    stage: str
    shape: Shape
    epochs: int
    hours: float
    shows: str


@dataclass(frozen=True)
class Option:
    """One way to train, and `DRAWS` equally likely values of each of its numbers."""

    stage: str
    shape: Shape
    basis: str  # "measured", "predicted", or "predicted: " and what of it was never observed
    runs: int
    images_per_s: np.ndarray
    efficiency: np.ndarray  # speedup over one device, divided by the devices; NaN if unknown
    efficiency_at: str  # what is equal on the one device: "global batch" or "batch per device"
    seconds: np.ndarray  # start, training and evaluations; infinite if the target was not reached
    next_epochs: int  # of a run that would measure it
    next_hours: float  # device-hours of that run
    break_even: np.ndarray  # images per epoch from which it finishes before one device, or NaN

    @property
    def global_batch(self) -> int:
        return self.shape.devices * self.shape.batch

    @property
    def hours(self) -> np.ndarray:
        """Device-hours."""
        return self.shape.devices * self.seconds / 3600

    def next_run(self, shows: str) -> NextRun:
        """Return the run that measures this option."""
        return NextRun(self.stage, self.shape, self.next_epochs, self.next_hours, shows)


@dataclass(frozen=True)
class Answer:
    """The answer that one set of runs supports.

    `sure` is the share of the draws in which nothing is better than `best` by more than `AS_GOOD`.
    `next_runs` exist if it is below `SURE`, cheapest first. `unknown` lists what is not predicted.
    """

    goal: str
    options: list[Option]
    best: Option | None
    why: str
    sure: float
    next_runs: list[NextRun]
    unknown: list[str]
    models: dict[str, Scaling]


def sets(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Split the rows of `comparison.load` into sets that may be pooled, each with a name of its settings."""
    base = pd.to_numeric(rows.lr, errors="coerce") / list(map(lr_factor, rows.lr_scale, rows.global_batch))
    on_cpu = rows.device_name.map(comparison.is_cpu)
    rows = rows.assign(
        base_lr=base.map("{:.4g}".format),
        # More CPU threads do not make a GPU faster.
        threads_per_worker=rows.threads_per_worker.where(on_cpu, 0),
    )
    names = {name: COLUMNS[name].words for name in OF_A_SET} | {"base_lr": COLUMNS["lr"].words}
    # A schedule that counts steps has other constants at another batch, and a script other arguments on more
    # devices, such as fewer micro-batches. Only what differs at equal sizes does not follow from them.
    of_equal_size = rows.groupby([*names, "devices", "nodes", "global_batch"])[comparison.DOUBTED].nunique()
    names |= {name: COLUMNS[name].words for name in comparison.DOUBTED if of_equal_size[name].max() > 1}
    differ = [name for name in names if comparison.varies(rows, name)]
    groups = [group for _, group in rows.groupby(list(names))]
    return [(", ".join(f"{names[name]} {group[name].iloc[0]}" for name in differ), group) for group in groups]


def all_reduces(paths: Iterable[Path], rows: pd.DataFrame) -> tuple[list[AllReduce], list[str]]:
    """Read the doctor's measurements on the devices of `rows`, and a sentence for every unreadable file.

    They are in folders `all_reduce`: below the paths of the runs, next to them, or in their folder `results`.
    For each number of devices and nodes the newest file counts: the network may have been repaired.
    """
    parents = [[*Path(os.path.realpath(path)).parents] for path in paths]
    above = [one for first, *more in parents for one in [first, *(p for p in more if p.name == "results")]]
    files = {file.absolute() for path in paths for file in path.rglob("all_reduce/*.tsv")}
    files |= {file for folder in above for file in folder.glob("all_reduce/*.tsv")}
    newest, skipped = {}, []
    for file in sorted(files):
        try:
            measured = records.read_all_reduce(file)
        except records.RecordError as error:
            skipped.append(str(error))
            continue
        first = measured[0]
        if first["device_name"] == rows.device_name.iloc[0]:
            shape = first["ranks"], first["nodes"]
            newest[shape] = max(newest.get(shape, measured), measured, key=lambda m: m[0]["started_at"])
    every = chain.from_iterable(newest.values())
    return [AllReduce(row["ranks"], row["nodes"], row["bytes"], row["seconds"]) for row in every], skipped


def advise(rows: pd.DataFrame, constraints: Constraints, all_reduces: Sequence[AllReduce] = ()) -> Answer:
    """Recommend the choice that one set of `sets` supports under these constraints.

    Raises:
        UserError: if none of its epochs was measured, or no run reached the target.
    """
    runs = RunSet(rows, constraints)
    gradient_bytes = 4 * int(rows.parameters.max())
    models = {stage: scaling.fit(runs.measured(stage), all_reduces, gradient_bytes) for stage in runs.stages}
    options, unknown, missing = runs.options(models)
    if not options:
        what = "; ".join(unknown) or "no batch divides evenly among the devices"
        raise UserError(f"none of the choices can be predicted ({what}): give others.")
    choice = choose(options, constraints)
    only_one_device = bool(missing) and all(option.shape.devices == 1 for option in options)
    if only_one_device:
        reasons = "; ".join(missing)
        choice = choice._replace(best=None, why=f"runs on one device say nothing about several: {reasons}")
    next_runs = []
    if choice.best and choice.sure < SURE:
        next_runs = _runs_to_be_sure(choice)
    if choice.sure < SURE:
        next_runs = sorted(next_runs or missing.values(), key=attrgetter("hours"))
    return Answer(runs.goal, options, choice.best, choice.why, choice.sure, next_runs, unknown, models)


class RunSet:
    """The runs of one set, and what all their shapes share: the data, the epochs, the start."""

    def __init__(self, rows: pd.DataFrame, constraints: Constraints) -> None:
        self._constraints = constraints
        steady = rows[~rows.warmup]
        if steady.empty:
            raise UserError("no epoch after the warm-up was measured: train for --epochs 3 or more.")
        self._steady = steady.assign(step_seconds=steady.global_batch / steady.images_per_s)
        self._has_single = (rows.stage == SINGLE).any()
        self._images = rows.images.max()
        self._epochs = constraints.epochs or int(rows.epoch.max())
        self.goal = f"{self._epochs} epoch(s) of {self._images:,} images"
        self._next_epochs = NEXT_EPOCHS
        self._curves: dict[int, np.ndarray] | None = None
        # Runs on less data learn less in an epoch.
        whole = rows[rows.images + rows.global_batch > self._images]
        target = constraints.target
        if target is None and not constraints.epochs:
            target = _reached_by_most(whole)
        if target is not None:
            self._set_target(target, whole)
        outside = rows.groupby("run_id").agg(
            devices=("devices", "first"), trained=("train_seconds", "sum"), tested=("eval_seconds", "sum"),
            elapsed=("elapsed_s", "max"),
        )  # fmt: skip
        outside["start"] = (outside.elapsed - outside.trained - outside.tested).clip(lower=0)
        self._start = outside.groupby("devices").start.median()
        self._evaluation = self._steady.groupby("devices").eval_seconds.median().clip(lower=LEAST_SECONDS)
        parallel = set(rows.stage[rows.devices > 1]) | (set(rows.stage) - set(comparison.TUTORIAL_STAGES))
        self.stages = sorted(stage for stage in parallel or {DDP} if self.measured(stage))
        if not self.stages:
            raise UserError(
                "DataParallel on one device is the plain model: run stage single, or use more devices."
            )

    def _set_target(self, target: float, rows: pd.DataFrame) -> None:
        """Count the time until this test accuracy (%), from the runs on all of the data."""
        best = rows.test_accuracy.max()
        if not best >= target:
            best = f"the best had {best:.2f} %" if best >= 0 else "none was tested"
            what_to_do = "lower --target, or train for more --epochs first."
            raise UserError(f"no run has reached {target:g} % ({best}): {what_to_do}")
        chosen = "" if self._constraints.target else " (half of the batches reach it)"
        self.goal = f"{target:g} % test accuracy{chosen}, on {self._images:,} images"
        # To find the epochs that a batch needs to the target takes as many as the other runs had.
        self._next_epochs = self._epochs
        self._target, self._accuracy_error = target, _accuracy_error(target, rows)
        self._curves = {
            batch: curves
            for batch, runs in rows.groupby("global_batch")
            if len(curves := _accuracy_curves(runs, target, self._epochs))
        }

    def measured(self, stage: str) -> Measured:
        """Return the seconds of its steps; on one device those of stage single, if any."""
        of_stage = self._steady[(self._steady.stage == stage) & ((self._steady.devices > 1) | (stage != DP))]
        single = self._steady[self._steady.stage == SINGLE]
        own = of_stage[(of_stage.devices > 1) | ~of_stage.global_batch.isin(single.global_batch)]
        measured: Measured = {}
        for (devices, nodes, batch, _), run in pd.concat([single, own]).groupby(
            ["devices", "nodes", "batch_per_device", "run_id"]
        ):
            measured.setdefault(Shape(devices, nodes, batch), []).append(list(run.step_seconds))
        return measured

    def options(self, models: dict[str, Scaling]) -> tuple[list[Option], list[str], dict[str, NextRun]]:
        """Return the options, clauses on what is not predicted, and the cheapest run for each reason."""
        options: dict[tuple[str, Shape], Option] = {}
        unknown: dict[str, list[str]] = {}
        missing: dict[str, NextRun] = {}
        for stage, model in models.items():
            for shape in self.shapes(model):
                name = SINGLE if shape.devices == 1 and self._has_single else stage
                if why := model.why_unknown(shape):
                    # It is on several nodes only because no larger node was seen.
                    guessed = shape.nodes > 1 and not self._constraints.gpus_per_node
                    hint = " (--gpus-per-node N if a node has more than were used)" * guessed
                    what = f"x{shape.devices} with batch {shape.devices * shape.batch}"
                    unknown.setdefault(f"{comparison.stage_name(stage)}: {why}{hint}", []).append(what)
                    if run := self._missing_run(name, shape, model, why):
                        missing[why] = min(missing.get(why, run), run, key=attrgetter("hours"))
                elif (name, shape) not in options:
                    options[name, shape] = self.option(name, shape, model)
        return list(options.values()), [f"{why}: {', '.join(of)}" for why, of in unknown.items()], missing

    def shapes(self, model: Scaling) -> list[Shape]:
        """Return the shapes to choose from."""
        seen, constraints = [*model.measured, *model.all_reduces], self._constraints
        found = {s.devices for s in seen}
        counts = constraints.gpus or sorted({1, *found, 2 * max(found)})
        # A node has as many devices as were seen in one, unless given; one device says nothing of its node.
        several = any(s.devices > 1 for s in seen)
        per_node = max(s.devices // s.nodes for s in seen) if several else max(counts)
        per_node = constraints.gpus_per_node or per_node
        batches = constraints.batches or sorted({s.devices * s.batch for s in model.measured})
        if max(batches) > self._images:
            where = "--batch-size" if constraints.batches else "these runs: their batch"
            raise UserError(f"{where} {max(batches)} is more than the {self._images:,} images: correct that.")
        layouts = {(s.devices, s.nodes) for s in seen if s.devices in counts}
        layouts |= {(count, math.ceil(count / per_node)) for count in counts}
        if constraints.gpus_per_node:
            layouts = {(devices, nodes) for devices, nodes in layouts if devices <= per_node * nodes}
        return [
            Shape(devices, nodes, batch // devices)
            for devices, nodes in sorted(layouts)
            for batch in batches
            if batch % devices == 0 and devices % nodes == 0
        ]

    def option(self, stage: str, shape: Shape, model: Scaling) -> Option:
        """Return the expected numbers of a training of this shape, measured or from the model."""
        batch, step = shape.devices * shape.batch, model.step_seconds(shape)
        unknown = np.full(DRAWS, math.nan)
        alone, part_alone = (
            unknown if model.why_unknown(one) else model.step_seconds(one)
            for one in (shape.on_one_device(), Shape(1, 1, shape.batch))
        )
        efficiency, equal = alone / step / shape.devices, "global batch"
        if np.isnan(alone).all():  # only weak scaling was measured
            efficiency, equal = part_alone / step, "batch per device"
        epochs, steps = self._epochs_needed(batch), self._images // batch
        outside, outside_alone = (self._seconds_outside_steps(n, epochs) for n in (shape.devices, 1))
        with np.errstate(all="ignore"):
            gained = epochs * (alone - step) / batch  # seconds per image of an epoch
            even = np.where(gained > 0, np.maximum((outside - outside_alone) / gained, 0), math.inf)
            even = np.where(np.isnan(gained), math.nan, even)
        guessed = self._curves is not None and batch not in self._curves
        return Option(
            stage,
            shape,
            model.basis(shape) + ", its epochs guessed from other batches" * guessed,
            len(model.measured.get(shape, [])),
            batch / step,
            efficiency,
            "" if np.isnan(efficiency).all() else equal,
            outside + epochs * steps * step,
            self._next_epochs,
            self._next_run_hours(shape, shape, model),
            np.where(even < 1, 0, even),
        )

    def _missing_run(self, stage: str, shape: Shape, model: Scaling, why: str) -> NextRun | None:
        """Return the run that would measure what is not predicted; None if its cost is unknown."""
        one = shape.on_one_device()
        if shape != one and model.why_unknown(one) or not np.isfinite(self._epochs_needed(one.batch)).any():
            return None
        hours = self._next_run_hours(shape, one, model)
        return NextRun(stage, shape, self._next_epochs, hours, f"what is missing ({why})")

    def _next_run_hours(self, shape: Shape, timed_as: Shape, model: Scaling) -> float:
        """Return the device-hours of a run that measures `shape`, if it is as fast as `timed_as`."""
        steps = self._images // (timed_as.devices * timed_as.batch)
        trained = self._next_epochs * steps * float(np.median(model.step_seconds(timed_as)))
        outside = float(self._seconds_outside_steps(timed_as.devices, self._next_epochs))
        return shape.devices * (outside + trained) / 3600

    def _seconds_outside_steps(self, devices: int, epochs: np.ndarray | int) -> np.ndarray | float:
        """Return the seconds of the start and of all evaluations of a run."""
        start, evaluation = (np.interp(devices, of.index, of) for of in (self._start, self._evaluation))
        shared = min(1, self._evaluation.index.max() / devices)  # each device evaluates its part
        return start + epochs * evaluation * shared

    def _epochs_needed(self, batch: int) -> np.ndarray:
        """Draw how many epochs a training with this batch takes; infinite if it misses the target."""
        if self._curves is None:
            return np.full(DRAWS, float(self._epochs))
        random = np.random.default_rng(batch)  # the same for every number of devices
        if batch in self._curves:
            curves = self._curves[batch]
            drawn = curves[random.integers(len(curves), size=DRAWS)]
            return _first_epoch(drawn + random.normal(0, self._accuracy_error, (DRAWS, 1)) >= self._target)
        # A batch that did not reach the target needs at least one epoch more than it had.
        most, wanted = self._epochs + 1, math.log2(batch)
        tried = [math.log2(known) for known in self._curves]
        first = [_first_epoch(curves >= self._target) for curves in self._curves.values()]
        near = min(abs(wanted - known) for known in tried)
        middle = np.interp(wanted, tried, np.log([np.median(np.minimum(epochs, most)) for epochs in first]))
        return np.maximum(np.round(np.exp(random.normal(middle, EPOCHS_SCATTER * near, DRAWS))), 1)


class Choice(NamedTuple):
    """The best option, if any, and why; whether each keeps the rules, and is as good as the best."""

    options: list[Option]
    best: Option | None
    why: str
    kept: np.ndarray  # (options, draws)
    good: np.ndarray  # (options, draws)

    @property
    def sure(self) -> float:
        return float(self.good[self.options.index(self.best)].mean()) if self.best else 0.0


def choose(options: list[Option], constraints: Constraints) -> Choice:
    """Choose the cheapest option within the deadline, or the fastest if there is none."""
    seconds, hours = (
        np.array([getattr(option, name) for option in options]) for name in ("seconds", "hours")
    )
    efficiency = np.array([option.efficiency for option in options])
    alone = np.array([[option.shape.devices == 1] for option in options])
    efficient = alone | (efficiency >= constraints.min_efficiency)
    deadline_s, budget_hours = constraints.deadline_s, constraints.budget_hours
    limits = {}
    if deadline_s:
        limits[f"the deadline of {deadline_s / 60:,.4g} min"] = seconds <= deadline_s
    if budget_hours:
        limits[f"the budget of {budget_hours:g} GPU-hours"] = hours <= budget_hours
    within = reduce(np.logical_and, limits.values(), np.isfinite(seconds))
    kept = efficient & within
    what, cost, other = ("cheapest", hours, seconds) if deadline_s else ("fastest", seconds, hours)
    least = np.where(kept, cost, math.inf).min(axis=0)
    good = kept & (cost <= (1 + AS_GOOD) * least)
    rules = {f"{100 * constraints.min_efficiency:g} % efficiency": efficient} | limits
    if all(np.isnan(option.efficiency).all() for option in options):
        rules = {"an efficiency that is not known without a run on one device with the same batch": efficient}
    # Prefer a choice that surely keeps the limits.
    for share, how in ((0.95, ""), (0.5, ", as likely as not")):
        eligible = (within.mean(axis=1) >= share) & (efficient.mean(axis=1) >= 0.5)
        if eligible.any():
            middle = np.where(eligible, np.median(cost, axis=1), math.inf)
            as_good = middle <= (1 + AS_GOOD) * middle.min()
            best = np.where(as_good, np.median(other, axis=1), math.inf).argmin()
            why = f"the {what} that keeps {' and '.join(rules)}{how}"
            return Choice(options, options[best], why, kept, good)
    rules = {"the target": np.isfinite(seconds)} | rules
    never = [rule for rule, holds in rules.items() if not (holds.mean(axis=1) >= 0.5).any()]
    why = f"nothing keeps {' and '.join(never or rules)}"
    return Choice(options, None, why, kept, good)


def _runs_to_be_sure(choice: Choice) -> list[NextRun]:
    now, found = choice.good.mean(axis=1).max(), []
    for option in choice.options:
        if option.runs < ENOUGH_RUNS:
            order = np.argsort(option.seconds, kind="stable")
            # The run's result shows which part of the draws holds the truth; choose again among those.
            parts = np.array_split(order, BINS)
            then = np.mean([choice.good[:, part].mean(axis=1).max() for part in parts])
            if then > now + 0.02:
                shows = f"a sure choice in {100 * then:.0f} % of cases instead of {100 * now:.0f} %"
                found.append((then - now, option.next_run(shows)))
    most = max((gain for gain, _ in found), default=0)
    return [run for gain, run in found if gain >= most / 2]


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the lower end, the middle and the upper end of the draws."""
    # Nearest, as infinite values cannot be interpolated.
    return tuple(np.percentile(values, INTERVAL, method="nearest").tolist())


def _accuracy_curves(rows: pd.DataFrame, target: float, epochs: int) -> np.ndarray:
    """Return test accuracies of the runs that reached the target or had so many epochs, (seeds, epochs).

    NaN if a run was shorter. Runs with the same seed differ in their devices and hardly in what they learn:
    they count as one.
    """
    curves = rows.pivot_table("test_accuracy", "seed", "epoch", "median", dropna=False)
    curves = curves.reindex(columns=range(1, epochs + 1)).to_numpy(float)
    return curves[(curves >= target).any(axis=1) | ~np.isnan(curves[:, -1])]


def _first_epoch(reached: np.ndarray) -> np.ndarray:
    """Return the first epoch that reached the target, by rows of epochs; infinite if none did."""
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1.0, math.inf)


def _reached_by_most(rows: pd.DataFrame) -> float | None:
    """Return the highest half percent that half of the batches clearly reach; None without accuracies."""
    best = rows.groupby(["global_batch", "run_id"]).test_accuracy.max().groupby("global_batch").median()
    middle = best.dropna().median()
    return math.floor(2 * (middle - 2 * _accuracy_error(middle, rows))) / 2 if middle > 0 else None


def _accuracy_error(accuracy: float, rows: pd.DataFrame) -> float:
    """Return the standard deviation of an accuracy (%), given the number of test images."""
    return math.sqrt(accuracy * (100 - accuracy) / max(rows.test_images.median(), 1))
