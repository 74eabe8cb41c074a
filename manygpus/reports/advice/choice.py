"""How many devices to ask for: the options with their time and cost, the choice, and how sure it is.

for name, rows in sets(rows):
    answer = advise(rows, Constraints(target=97, deadline_s=600))
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from manygpus import frozen_code
from manygpus.errors import UserError
from manygpus.record import records
from manygpus.record.columns import SINGLE
from manygpus.reports import comparison
from manygpus.reports.advice import scaling
from manygpus.reports.advice.run_set import RunSet
from manygpus.reports.advice.scaling import DRAWS, AllReduce, Scaling, Shape

# Percent of the draws: the lower end of the interval, its middle, and its upper end.
INTERVAL = (5, 50, 95)
# A choice that costs at most this share more than another is as good.
AS_GOOD = 0.05
# The share of the draws in which a sure choice is as good as the best.
SURE = 0.9
# The share of the draws in which a choice keeps a limit surely, and as likely as not.
SURELY = 0.95
AS_LIKELY_AS_NOT = 0.5
BYTES_OF_A_GRADIENT = 4
SECONDS_OF_AN_HOUR = 3600


@dataclass(frozen=True)
class Constraints:
    """The limits that the choice has to keep.

    With a `target`, a test accuracy (%), the time until it is reached counts, else that of `epochs`. `gpus`,
    `batches` and `gpus_per_node` are the values to choose from: if empty, those measured, and twice the
    largest count. `price` is the cost of a GPU-hour, and does not affect the choice.
    """

    target: float | None = None
    epochs: int | None = None
    deadline_s: float | None = None
    budget_hours: float | None = None
    min_efficiency: float = 0.7
    gpus: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    gpus_per_node: int | None = None
    price: float | None = None


class Interval(NamedTuple):
    """The 90 % interval of equally likely values, and their middle."""

    low: float
    middle: float
    high: float


def interval(values: np.ndarray) -> Interval:
    """Return the lower end, the middle and the upper end of the draws."""
    # Nearest, as infinite values cannot be interpolated.
    return Interval(*np.percentile(values, INTERVAL, method="nearest").tolist())


@dataclass(frozen=True)
class Option:
    """One way to train, and `DRAWS` equally likely values of each of its numbers.

    Args:
        basis: "measured", "predicted", or "predicted: " and what of it was never observed.
        runs: the runs that measured it.
        efficiency: speedup over one device, divided by the devices; NaN if unknown.
        efficiency_at: what is equal on the one device: "global batch" or "batch per device".
        seconds: start, training and evaluations; infinite if the target was not reached.
        break_even: images per epoch from which it finishes before one device, or NaN.
    """

    stage: str
    shape: Shape
    basis: str
    runs: int
    images_per_s: np.ndarray
    efficiency: np.ndarray
    efficiency_at: str
    seconds: np.ndarray
    break_even: np.ndarray

    @property
    def global_batch(self) -> int:
        return self.shape.global_batch

    @property
    def hours(self) -> np.ndarray:
        """Device-hours."""
        return self.shape.devices * self.seconds / SECONDS_OF_AN_HOUR


@dataclass(frozen=True)
class Answer:
    """The answer that one set of runs supports.

    `sure` is the share of the draws in which nothing is better than `best` by more than `AS_GOOD`.
    `unknown` lists what is not predicted.
    """

    goal: str
    options: list[Option]
    best: Option | None
    why: str
    sure: float
    unknown: list[str]
    models: dict[str, Scaling]


def advise(rows: pd.DataFrame, constraints: Constraints, all_reduces: Sequence[AllReduce] = ()) -> Answer:
    """Recommend the choice that one set of `sets` supports under these constraints.

    Raises:
        UserError: if none of its epochs was measured, or no run reached the target.
    """
    runs = RunSet(rows, target=constraints.target, epochs=constraints.epochs)
    gradient_bytes = BYTES_OF_A_GRADIENT * int(rows.parameters.max())
    models = {stage: scaling.fit(runs.measured(stage), all_reduces, gradient_bytes) for stage in runs.stages}
    predicted = find_options(runs, models, constraints)
    if not predicted.options:
        reasons = "; ".join(predicted.unknown) or "no batch divides evenly among the devices"
        raise UserError(f"none of the choices can be predicted ({reasons}): give different ones.")
    choice = choose(predicted.options, constraints)
    if predicted.why_not_several and all(option.shape.devices == 1 for option in predicted.options):
        reasons = "; ".join(predicted.why_not_several)
        choice = choice._replace(best=None, why=f"runs on one device say nothing about several: {reasons}")
    return Answer(
        goal=runs.epochs.goal,
        options=predicted.options,
        best=choice.best,
        why=choice.why,
        sure=choice.sure,
        unknown=predicted.unknown,
        models=models,
    )


def read_all_reduces(paths: Iterable[Path], rows: pd.DataFrame) -> tuple[list[AllReduce], list[str]]:
    """Read the doctor's measurements on the devices of `rows`, and a sentence for every unreadable file.

    They are in folders `all_reduce`: below the paths of the runs, next to them, or in their folder `results`.
    For each number of devices and nodes the newest file counts: the network may have been repaired.
    """
    files: set[Path] = set()
    for path in paths:
        for file in path.rglob("all_reduce/*.tsv"):
            if not any(map(frozen_code.is_copy, file.relative_to(path).parents)):
                files.add(file.absolute())
        next_to_it, *further_up = path.resolve().parents
        for folder in [next_to_it, *(folder for folder in further_up if folder.name == "results")]:
            files.update(folder.glob("all_reduce/*.tsv"))
    newest: dict[tuple[int, int], list[records.Row]] = {}
    skipped = []
    for file in sorted(files):
        try:
            measured = records.read_all_reduce(file)
        except records.RecordError as error:
            skipped.append(str(error))
            continue
        first = measured[0]
        if first["device_name"] == rows.device_name.iloc[0]:
            devices_and_nodes = (first["ranks"], first["nodes"])
            earlier = newest.get(devices_and_nodes)
            if earlier is None or first["started_at"] > earlier[0]["started_at"]:
                newest[devices_and_nodes] = measured
    all_reduces = [
        AllReduce(devices=row["ranks"], nodes=row["nodes"], bytes=row["bytes"], seconds=row["seconds"])
        for row in chain.from_iterable(newest.values())
    ]
    return all_reduces, skipped


# --- the options ------------------------------------------------------------------------------------


class FoundOptions(NamedTuple):
    """The options, clauses on what is not predicted, and the reasons why that is so on several devices."""

    options: list[Option]
    unknown: list[str]
    why_not_several: list[str]


def find_options(runs: RunSet, models: dict[str, Scaling], constraints: Constraints) -> FoundOptions:
    """Predict all shapes to choose from."""
    options: dict[tuple[str, Shape], Option] = {}
    # By the name of the stage, and the reason.
    unknown_shapes: dict[tuple[str, str], list[str]] = {}
    why_not_several: list[str] = []
    for stage, model in models.items():
        for shape in _shapes(runs, model, constraints):
            # On one device all stages of the tutorial are stage single, if that was measured.
            name = SINGLE if shape.devices == 1 and runs.has_single else stage
            why_unknown = model.why_unknown(shape)
            if not why_unknown:
                if (name, shape) not in options:
                    options[name, shape] = predict_option(runs, name, shape, model)
                continue
            if shape.devices > 1 and why_unknown not in why_not_several:
                why_not_several.append(why_unknown)
            reason = why_unknown
            if shape.nodes > 1 and not constraints.gpus_per_node:
                # It is on several nodes only because no larger node was seen.
                reason += " (if a node has more GPUs than were used, give --gpus-per-node N)"
            in_words = f"x{shape.devices} with batch {shape.global_batch}"
            unknown_shapes.setdefault((comparison.stage_name(stage), reason), []).append(in_words)
    unknown = [
        f"{stage_name} {', '.join(shapes)}: {reason}"
        for (stage_name, reason), shapes in unknown_shapes.items()
    ]
    return FoundOptions(list(options.values()), unknown, why_not_several)


def _shapes(runs: RunSet, model: Scaling, constraints: Constraints) -> list[Shape]:
    """Return the shapes to choose from."""
    seen = [*model.measured, *model.all_reduces]
    counts_seen = {shape.devices for shape in seen}
    counts = constraints.gpus or sorted({1, *counts_seen, 2 * max(counts_seen)})
    batches = constraints.batches or sorted({shape.global_batch for shape in model.measured})
    if max(batches) > runs.images:
        source = "--batch-size" if constraints.batches else "these runs: their batch"
        raise UserError(f"{source} {max(batches)} is more than the {runs.images:,} images: correct that.")
    if constraints.gpus_per_node:
        per_node = constraints.gpus_per_node
    elif max(counts_seen) > 1:
        per_node = max(shape.devices // shape.nodes for shape in seen)
    else:
        # One device says nothing of its node.
        per_node = max(counts)
    layouts = {(shape.devices, shape.nodes) for shape in seen if shape.devices in counts}
    layouts |= {(devices, math.ceil(devices / per_node)) for devices in counts}
    shapes = []
    for devices, nodes in sorted(layouts):
        if constraints.gpus_per_node and devices > per_node * nodes:
            continue
        for batch in batches:
            if batch % devices == 0 and devices % nodes == 0:
                shapes.append(Shape(devices=devices, nodes=nodes, batch=batch // devices))
    return shapes


def predict_option(runs: RunSet, stage: str, shape: Shape, model: Scaling) -> Option:
    """Return the expected numbers of a training of this shape, measured or from the model."""
    batch = shape.global_batch
    step = model.step_seconds(shape)
    step_on_one_device = _step_seconds_if_known(model, shape.on_one_device())
    efficiency = step_on_one_device / step / shape.devices
    efficiency_at = "global batch"
    if np.isnan(efficiency).all():
        # Perhaps weak scaling was measured.
        efficiency = _step_seconds_if_known(model, Shape(devices=1, nodes=1, batch=shape.batch)) / step
        efficiency_at = "" if np.isnan(efficiency).all() else "batch per device"
    epochs = runs.epochs.draw(batch)
    steps = runs.images // batch
    overhead = runs.overhead.seconds(shape.devices, epochs)
    # A draw that misses the target takes infinitely long on one device too: by how much more is unknown.
    with np.errstate(invalid="ignore"):
        more_overhead = overhead - runs.overhead.seconds(1, epochs)
        gained_per_image = epochs * (step_on_one_device - step) / batch
    basis = model.basis(shape)
    if runs.epochs.is_guessed(batch):
        basis += ", its epochs guessed from other batches"
    return Option(
        stage=stage,
        shape=shape,
        basis=basis,
        runs=len(model.measured.get(shape, [])),
        images_per_s=batch / step,
        efficiency=efficiency,
        efficiency_at=efficiency_at,
        seconds=overhead + epochs * steps * step,
        break_even=_break_even(more_overhead, gained_per_image),
    )


def _step_seconds_if_known(model: Scaling, shape: Shape) -> np.ndarray:
    if model.why_unknown(shape):
        return np.full(DRAWS, math.nan)
    return model.step_seconds(shape)


def _break_even(more_overhead: np.ndarray, gained_per_image: np.ndarray) -> np.ndarray:
    """Return the images of an epoch from which a run on several devices finishes before one on one device.

    Args:
        more_overhead: seconds that it takes longer outside its steps.
        gained_per_image: seconds that it gains for each image of an epoch; NaN if that is unknown.
    """
    with np.errstate(all="ignore"):
        images = np.maximum(more_overhead / gained_per_image, 0)
    images = np.where(gained_per_image > 0, images, math.inf)
    images = np.where(np.isnan(gained_per_image), math.nan, images)
    return np.where(images < 1, 0, images)


# --- the choice -------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The best option, if any, and why.

    `is_good`, (options, draws), is whether an option keeps the rules, and is as good as the best.
    """

    options: list[Option]
    best: Option | None
    why: str
    is_good: np.ndarray

    @property
    def sure(self) -> float:
        if self.best is None:
            return 0.0
        return float(self.is_good[self.options.index(self.best)].mean())


def choose(options: list[Option], constraints: Constraints) -> Choice:
    """Choose the cheapest option within the deadline, or the fastest if there is none."""
    seconds = np.array([option.seconds for option in options])
    hours = np.array([option.hours for option in options])
    efficiency = np.array([option.efficiency for option in options])
    is_on_one_device = np.array([[option.shape.devices == 1] for option in options])
    is_efficient = is_on_one_device | (efficiency >= constraints.min_efficiency)
    # What an option has to keep, in words: (options, draws) each.
    limits: dict[str, np.ndarray] = {}
    if constraints.deadline_s:
        limits[f"the deadline of {constraints.deadline_s / 60:,.4g} min"] = seconds <= constraints.deadline_s
    if constraints.budget_hours:
        limits[f"the budget of {constraints.budget_hours:g} GPU-hours"] = hours <= constraints.budget_hours
    reaches_target = np.isfinite(seconds)
    is_within = np.logical_and.reduce([reaches_target, *limits.values()])
    if constraints.deadline_s:
        superlative, cost, second_cost = "cheapest", hours, seconds
    else:
        superlative, cost, second_cost = "fastest", seconds, hours
    keeps_all = is_efficient & is_within
    least_cost = np.where(keeps_all, cost, math.inf).min(axis=0)
    is_good = keeps_all & (cost <= (1 + AS_GOOD) * least_cost)
    rules = {f"{100 * constraints.min_efficiency:g} % efficiency": is_efficient} | limits
    if np.isnan(efficiency).all():
        rules = {
            "an efficiency that is not known without a run on one device with the same batch": is_efficient
        }
    # Prefer a choice that surely keeps the limits.
    for share, likelihood in ((SURELY, ""), (AS_LIKELY_AS_NOT, ", as likely as not")):
        is_eligible = (is_within.mean(axis=1) >= share) & (is_efficient.mean(axis=1) >= AS_LIKELY_AS_NOT)
        if is_eligible.any():
            middle_cost = np.where(is_eligible, np.median(cost, axis=1), math.inf)
            is_as_good = middle_cost <= (1 + AS_GOOD) * middle_cost.min()
            best = np.where(is_as_good, np.median(second_cost, axis=1), math.inf).argmin()
            why = f"the {superlative} that keeps {' and '.join(rules)}{likelihood}"
            return Choice(options, options[best], why, is_good)
    rules = {"the target": reaches_target} | rules
    never_kept = [rule for rule, keeps in rules.items() if not _is_kept_by_one(keeps)]
    return Choice(options, None, f"nothing keeps {' and '.join(never_kept or rules)}", is_good)


def _is_kept_by_one(keeps: np.ndarray) -> bool:
    """Return whether an option keeps a rule as likely as not; `keeps` is (options, draws)."""
    return bool((keeps.mean(axis=1) >= AS_LIKELY_AS_NOT).any())
