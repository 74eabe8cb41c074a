"""How many devices to ask for: what the models of `scaling.py` say about time and cost, and how sure that is.

for runs in sets(rows):
    answer = advise(runs, Constraints(target=97, deadline_s=600))
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from trainkit.advice import scaling
from trainkit.advice.scaling import DRAWS, AllReduce, Measured, Scaling, Shape
from trainkit.compare import comparison
from trainkit.runtime.errors import UserError
from trainkit.schema import records

INTERVAL = (5, 50, 95)  # percent of the draws: the interval, and what is in its middle
AS_GOOD = 0.05  # of the cost: a choice that costs more by less is as good
SURE = 0.9  # the share of the draws in which the choice has to be as good as the best
PROBE_EPOCHS = 3  # that tell a speed: one to warm up, two to measure
EPOCHS_SCATTER = (
    0.3  # per doubling of the batch, in logarithms, of the epochs needed at one that was not tried
)
UNLIKELY = 0.05  # share of the draws from which on a thing is possible
ENOUGH_RUNS = 3  # that are equal: another would tell little
BINS = 5  # of what a run may show, for what is expected to be known after it
# What is equal in all runs of a set. The batch is what the models know of; of the learning rate it is that
# which does not come from the rule by which it grows with the batch.
OF_A_SET = [name for name in comparison.MUST_BE_EQUAL if name not in ("global_batch", "images", "lr")]


@dataclass(frozen=True)
class Constraints:
    """What the choice has to hold to.

    With a `target`, a test accuracy (%), the time until it is reached counts, else that of `epochs`. `gpus`,
    `batches` and `gpus_per_node` are what there is to choose from: if empty, what was measured, and twice the
    largest count.
    """

    target: float | None = None
    epochs: int | None = None
    deadline_s: float | None = None
    budget_hours: float | None = None
    min_efficiency: float = 0.7
    gpus: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    gpus_per_node: int | None = None


@dataclass(frozen=True)
class Option:
    """One way to train, and `DRAWS` equally likely values of each number that it would show."""

    stage: str
    shape: Shape
    basis: str  # "measured", "predicted", or "predicted: " and what of it was never observed
    runs: int
    images_per_s: np.ndarray
    efficiency: np.ndarray  # speedup over one device with the same global batch, divided by the devices
    seconds: np.ndarray  # start, training and evaluations; infinite where the target was not reached
    probe_epochs: int  # of a run that would measure it
    probe_hours: float
    break_even: np.ndarray  # images of an epoch from which on it is sooner done than one device

    @property
    def global_batch(self) -> int:
        return self.shape.devices * self.shape.batch

    @property
    def hours(self) -> np.ndarray:
        """Device-hours."""
        return self.shape.devices * self.seconds / 3600


class Probe(NamedTuple):
    """A run that would help, of so many epochs, and what it costs at most, in device-hours."""

    stage: str
    shape: Shape
    epochs: int
    hours: float
    tells: str


@dataclass(frozen=True)
class Answer:
    """What one set of runs says.

    `sure` is the share of the draws in which nothing is better than `best` by more than `AS_GOOD`. `probes`
    are there if it is below `SURE`, cheapest first. `unknown` has a sentence for what is not predicted.
    """

    goal: str
    options: list[Option]
    best: Option | None
    why: str
    sure: float
    probes: list[Probe]
    unknown: list[str]
    models: dict[str, Scaling]


def sets(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of `comparison.load` in sets that may be pooled, each with what tells it from the others."""
    power = rows.lr_scale.map(records.LR_SCALES).fillna(0)
    base = pd.to_numeric(rows.lr, errors="coerce") / rows.global_batch**power
    on_cpu = rows.device_name.map(comparison.is_cpu)
    rows = rows.assign(
        base_lr=base.map("{:.4g}".format),
        # A GPU does not become faster by more CPU threads beside it.
        threads_per_worker=rows.threads_per_worker.where(on_cpu, 0),
    )
    names = {name: comparison.MUST_BE_EQUAL[name] for name in OF_A_SET} | {"base_lr": "learning rate"}
    told = [name for name in names if rows[name].nunique() > 1]
    groups = [group for _, group in rows.groupby(list(names))]
    return [(", ".join(f"{names[name]} {group[name].iloc[0]}" for name in told), group) for group in groups]


def all_reduces(paths: Iterable[Path], rows: pd.DataFrame) -> tuple[list[AllReduce], list[str]]:
    """What the doctor measured on the devices of `rows`, and a sentence for every file that cannot be read.

    It is in folders `all_reduce`: beneath the paths of the runs, beside them, or in the folder `results` that
    they are in. Of each number of devices and nodes the newest file counts: a network may have been mended.
    """
    parents = [[*path.resolve().parents] for path in paths]
    above = [one for first, *more in parents for one in [first, *(p for p in more if p.name == "results")]]
    files = {file.resolve() for path in paths for file in path.rglob("all_reduce/*.tsv")}
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
    found = [
        AllReduce(row["ranks"], row["nodes"], row["bytes"], row["seconds"])
        for measured in newest.values()
        for row in measured
    ]
    return found, skipped


def advise(rows: pd.DataFrame, wishes: Constraints, all_reduces: Sequence[AllReduce] = ()) -> Answer:
    """The choice that one set of `sets` supports under these wishes.

    Raises:
        UserError: if no epoch of it was measured, or the target was reached in no run.
    """
    training = Training(rows, wishes)
    options, unknown, gaps, models = {}, {}, {}, {}
    for stage in training.stages:
        measured = training.measured(stage)
        model = models[stage] = scaling.fit(measured, all_reduces, 4 * int(rows.parameters.max()))
        for shape in training.shapes(stage, model):
            one = Shape(1, 1, shape.devices * shape.batch)
            name = "single" if shape.devices == 1 and (rows.stage == "single").any() else stage
            if why := model.unknown(shape):
                unknown.setdefault(f"{comparison.stage_name(stage)}: {why}", []).append(shape)
                if (shape == one or not model.unknown(one)) and training.may_reach(one.batch):
                    hours = shape.devices * training.probe_seconds(one, model) / 3600
                    probe = Probe(name, shape, training.probe_epochs, hours, f"what is missing ({why})")
                    gaps[why] = min(gaps.get(why, probe), probe, key=_hours)
            elif (name, shape) not in options:
                options[name, shape] = training.option(name, shape, model)
    told = [f"{why}: {_listed(shapes)}" for why, shapes in unknown.items()]
    if all_reduces and not rows.parameters.max():
        told.append("from the doctor's all-reduce: these runs do not tell how many weights the network has")
    options = list(options.values())
    if not options:
        what = "; ".join(told) or "no batch can be shared out evenly"
        raise UserError(f"nothing of what is to be chosen from can be predicted ({what}): change it.")
    best, why, kept, good = _choose(options, wishes)
    alone = bool(gaps) and all(option.shape.devices == 1 for option in options)
    if alone:
        best, why = None, f"runs on one device tell nothing of several: {'; '.join(gaps)}"
    sure = float(good[options.index(best)].mean()) if best else 0.0
    probes = []
    if best and sure < SURE:
        probes = _probes(options, good)
    elif not best and not alone and not all(np.isnan(option.efficiency).all() for option in options):
        probes = _hopes(options, kept)
    if sure < SURE and not probes:
        probes = sorted(gaps.values(), key=_hours)
    return Answer(training.goal, options, best, why, sure, probes, told, models)


class Training:
    """What all shapes of a set have in common: its data, its epochs, its start."""

    def __init__(self, rows: pd.DataFrame, wishes: Constraints) -> None:
        self._wishes = wishes
        steady = rows[~rows.warmup]
        if steady.empty:
            raise UserError("no epoch after the warm-up was measured: train for --epochs 3 or more.")
        self._steady = steady.assign(step_seconds=steady.global_batch / steady.images_per_s)
        self.images = rows.images.max()
        # Runs on less data learn less in an epoch.
        whole = rows[rows.images + rows.global_batch > self.images]
        target = wishes.target
        if target is None and not wishes.epochs:
            target = _reached_by_most(whole)
        self._curves = None
        self._epochs = wishes.epochs or int(rows.epoch.max())
        # To know how many a batch needs to the target takes as many as the other runs had.
        self.probe_epochs = PROBE_EPOCHS if target is None else self._epochs
        self.goal = f"{self._epochs} epoch(s) of {self.images:,} images"
        if target is not None:
            self._target, best = target, whole.test_accuracy.max()
            chosen = "" if wishes.target else " (half of the batches reach it)"
            self.goal = f"{target:g} % test accuracy{chosen}, on {self.images:,} images"
            if not best >= target:
                raise UserError(
                    f"no run has reached {target:g} % (the best had {best:.2f} %): lower --target, or train "
                    "for more --epochs first."
                )
            curves = {
                batch: _curves(runs, target, self._epochs) for batch, runs in whole.groupby("global_batch")
            }
            self._curves = {batch: known for batch, known in curves.items() if len(known)}
            self._by_chance = _by_chance(target, whole)
        outside = rows.groupby("run_id").agg(
            devices=("devices", "first"), trained=("train_seconds", "sum"), tested=("eval_seconds", "sum"),
            elapsed=("elapsed_s", "max"),
        )  # fmt: skip
        outside["start"] = (outside.elapsed - outside.trained - outside.tested).clip(lower=0)
        self._start = outside.groupby("devices").start.median()
        self._evaluation = self._steady.groupby("devices").eval_seconds.median()
        parallel = set(rows.stage[rows.devices > 1]) | (set(rows.stage) - set(comparison.TUTORIAL_STAGES))
        self.stages = sorted(stage for stage in parallel or {"ddp"} if self.measured(stage))
        if not self.stages:
            raise UserError(
                "DataParallel on one device is the plain model: run stage single, or more devices."
            )

    def measured(self, stage: str) -> Measured:
        """The seconds of its steps; on one device those of stage single, where there are any."""
        of_stage = self._steady[
            (self._steady.stage == stage) & ((self._steady.devices > 1) | (stage != "dp"))
        ]
        single = self._steady[self._steady.stage == "single"]
        own = of_stage[(of_stage.devices > 1) | ~of_stage.global_batch.isin(single.global_batch)]
        measured: Measured = {}
        for (devices, nodes, batch, _), run in pd.concat([single, own]).groupby(
            ["devices", "nodes", "batch_per_device", "run_id"]
        ):
            measured.setdefault(Shape(devices, nodes, batch), []).append(list(run.step_seconds))
        return measured

    def shapes(self, stage: str, model: Scaling) -> list[Shape]:
        """What there is to choose from."""
        seen = [*model.measured, *model.all_reduces]
        found = {s.devices for s in seen}
        counts = self._wishes.gpus or sorted({1, *found, 2 * max(found)})
        crossed = any(s.nodes > 1 for s in seen)
        per_node = max(s.devices // s.nodes for s in seen) if crossed else max(counts)
        per_node = self._wishes.gpus_per_node or per_node
        batches = self._wishes.batches or sorted({s.devices * s.batch for s in model.measured})
        layouts = {(s.devices, s.nodes) for s in seen if s.devices in counts}
        layouts |= {(count, math.ceil(count / per_node)) for count in counts}
        if self._wishes.gpus_per_node:
            layouts = {(devices, nodes) for devices, nodes in layouts if devices <= per_node * nodes}
        return [
            Shape(devices, nodes, batch // devices)
            for devices, nodes in sorted(layouts)
            for batch in batches
            if batch % devices == 0 and devices % nodes == 0
        ]

    def option(self, stage: str, shape: Shape, model: Scaling) -> Option:
        batch = shape.devices * shape.batch
        step, one = model.step_seconds(shape), Shape(1, 1, batch)
        alone = np.full(DRAWS, math.nan) if model.unknown(one) else model.step_seconds(one)
        epochs, steps = self._epochs_needed(batch), self.images // batch
        around, around_one = (self._around(devices, epochs) for devices in (shape.devices, 1))
        with np.errstate(all="ignore"):
            gained = epochs * (alone - step) / batch  # seconds, by each image of an epoch
            even = np.where(gained > 0, np.maximum((around - around_one) / gained, 0), math.inf)
        return Option(
            stage,
            shape,
            model.basis(shape) + self._epochs_basis(batch),
            len(model.measured.get(shape, [])),
            batch / step,
            alone / step / shape.devices,
            around + epochs * steps * step,
            self.probe_epochs,
            shape.devices * self.probe_seconds(shape, model) / 3600,
            np.where(even < 1, 0, even),
        )

    def probe_seconds(self, shape: Shape, model: Scaling) -> float:
        """Of a run that would measure it."""
        steps = self.images // (shape.devices * shape.batch)
        trained = self.probe_epochs * steps * float(np.median(model.step_seconds(shape)))
        return float(self._around(shape.devices, self.probe_epochs)) + trained

    def _around(self, devices: int, epochs: np.ndarray | int) -> np.ndarray | float:
        """Seconds of a run outside its training steps: its start and its evaluations."""
        start, evaluation = (np.interp(devices, of.index, of) for of in (self._start, self._evaluation))
        shared = min(1, self._evaluation.index.max() / devices)  # each device evaluates its part
        return start + epochs * evaluation * shared

    def may_reach(self, batch: int) -> bool:
        """Whether a training with this batch may come to the target, if there is one."""
        return bool(np.isfinite(self._epochs_needed(batch)).any())

    def _epochs_needed(self, batch: int) -> np.ndarray:
        """Draws; infinite where the target was not reached."""
        if self._curves is None:
            return np.full(DRAWS, float(self._epochs))
        random = np.random.default_rng(batch)  # the same for every number of devices
        if batch in self._curves:
            curves = self._curves[batch]
            drawn = curves[random.integers(len(curves), size=DRAWS)]
            return _first(drawn + random.normal(0, self._by_chance, (DRAWS, 1)) >= self._target)
        # Of a batch that did not get there one epoch more than it had: at least that is needed.
        found = {
            math.log2(known): np.log(np.median(np.minimum(_first(curves >= self._target), self._epochs + 1)))
            for known, curves in self._curves.items()
        }
        near = min(abs(math.log2(batch) - known) for known in found)
        middle = np.interp(math.log2(batch), list(found), list(found.values()))
        return np.maximum(np.round(np.exp(random.normal(middle, EPOCHS_SCATTER * near, DRAWS))), 1)

    def _epochs_basis(self, batch: int) -> str:
        return (
            "" if self._curves is None or batch in self._curves else ", its epochs guessed from other batches"
        )


def _choose(options: list[Option], wishes: Constraints) -> tuple[Option | None, str, np.ndarray, np.ndarray]:
    """The best option and why; whether each keeps the rules, and is as good as the best, (options, draws)."""
    seconds, hours = (
        np.array([getattr(option, name) for option in options]) for name in ("seconds", "hours")
    )
    efficiency = np.array([option.efficiency for option in options])
    alone = np.array([[option.shape.devices == 1] for option in options])
    efficient = alone | (efficiency >= wishes.min_efficiency)
    limits = {}
    if wishes.deadline_s:
        limits[f"the deadline of {minutes(wishes.deadline_s)} min"] = seconds <= wishes.deadline_s
    if wishes.budget_hours:
        limits[f"the budget of {wishes.budget_hours:g} GPU-hours"] = hours <= wishes.budget_hours
    within = reduce(np.logical_and, limits.values(), np.isfinite(seconds))
    kept = efficient & within
    what, cost, other = ("cheapest", hours, seconds) if wishes.deadline_s else ("fastest", seconds, hours)
    least = np.where(kept, cost, math.inf).min(axis=0)
    good = kept & (cost <= (1 + AS_GOOD) * least)
    rules = {f"{100 * wishes.min_efficiency:g} % efficiency": efficient} | limits
    if np.isnan(efficiency).all():
        rules = {"an efficiency that is not known without a run on one device with the same batch": efficient}
    # Limits are to be kept surely, if that can be.
    for share, how in ((0.95, ""), (0.5, ", as likely as not")):
        able = (within.mean(axis=1) >= share) & (efficient.mean(axis=1) >= 0.5)
        if able.any():
            middle = np.where(able, np.median(cost, axis=1), math.inf)
            as_good = middle <= (1 + AS_GOOD) * middle.min()
            best = np.where(as_good, np.median(other, axis=1), math.inf).argmin()
            return options[best], f"the {what} that keeps {' and '.join(rules)}{how}", kept, good
    rules = {"the target": np.isfinite(seconds)} | rules
    never = [rule for rule, holds in rules.items() if not (holds.mean(axis=1) >= 0.5).any()]
    return None, f"nothing keeps {' and '.join(never or rules)}{_nearest(options)}", kept, good


def _nearest(options: list[Option]) -> str:
    reached = [option for option in options if np.isfinite(np.median(option.seconds))]
    if not reached:
        return ""
    told = []
    for what, of in (("fastest", lambda option: option.seconds), ("cheapest", lambda option: option.hours)):
        option = min(reached, key=lambda option, of=of: np.median(of(option)))
        time = f"{minutes(np.median(option.seconds))} min, {np.median(option.hours):.2g} GPU-hours"
        name = comparison.stage_name(option.stage)
        known = "" if option.runs else ", predicted"
        told.append(
            f"the {what} takes {time} ({name} x{option.shape.devices}, batch {option.global_batch}{known})"
        )
    return f": {', '.join(told)}"


def _probes(options: list[Option], good: np.ndarray) -> list[Probe]:
    """Runs that make the choice surer, cheapest first."""
    now, found = good.mean(axis=1).max(), []
    for option in options:
        if option.runs < ENOUGH_RUNS:
            order = np.argsort(option.seconds, kind="stable")
            # What the run shows tells in which part of the draws the truth is; there one chooses anew.
            then = np.mean([good[:, part].mean(axis=1).max() for part in np.array_split(order, BINS)])
            if then > now + 0.02:
                tells = f"a sure choice in {100 * then:.0f} % in place of {100 * now:.0f} %"
                found.append((then - now, probe_of(option, tells)))
    most = max((gain for gain, _ in found), default=0)
    return sorted((probe for gain, probe in found if gain >= most / 2), key=_hours)


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """The lower end, the middle and the upper end of what the draws say."""
    # Nearest, as nothing lies between infinite ones.
    return tuple(np.percentile(values, INTERVAL, method="nearest").tolist())


def _hopes(options: list[Option], kept: np.ndarray) -> list[Probe]:
    """Runs of what may keep the rules after all, cheapest first."""
    found = [
        probe_of(option, f"the wishes may be kept after all, in {100 * share:.0f} %")
        for option, share in zip(options, kept.mean(axis=1), strict=True)
        if share >= UNLIKELY and option.runs < ENOUGH_RUNS
    ]
    return sorted(found, key=_hours)


def _hours(probe: Probe) -> float:
    return probe.hours


def probe_of(option: Option, tells: str) -> Probe:
    """The run that measures the option."""
    return Probe(option.stage, option.shape, option.probe_epochs, option.probe_hours, tells)


def minutes(seconds: float) -> str:
    """With as many digits as are of use."""
    return f"{seconds / 60:,.0f}" if seconds >= 600 else f"{seconds / 60:.2g}"


def _listed(shapes: list[Shape]) -> str:
    return ", ".join(f"x{shape.devices} with batch {shape.devices * shape.batch}" for shape in shapes)


def _curves(rows: pd.DataFrame, target: float, epochs: int) -> np.ndarray:
    """Test accuracies of the runs that reached the target or had so many epochs, (seeds, epochs).

    NaN where a run was shorter. Runs with one seed differ in their devices and hardly in what they learn:
    they count as one.
    """
    curves = rows.pivot_table("test_accuracy", "seed", "epoch", "median", dropna=False)
    curves = curves.reindex(columns=range(1, epochs + 1)).to_numpy(float)
    return curves[(curves >= target).any(axis=1) | ~np.isnan(curves[:, -1])]


def _first(reached: np.ndarray) -> np.ndarray:
    """The first epoch that has reached it, by rows of epochs; infinite where none has."""
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1.0, math.inf)


def _reached_by_most(rows: pd.DataFrame) -> float | None:
    """The highest half percent that half of the batches clearly reach; None where there are no accuracies."""
    best = rows.groupby(["global_batch", "run_id"]).test_accuracy.max().groupby("global_batch").median()
    middle = best.dropna().median()
    return math.floor(2 * (middle - 2 * _by_chance(middle, rows))) / 2 if middle > 0 else None


def _by_chance(accuracy: float, rows: pd.DataFrame) -> float:
    """What an accuracy (%) on so many test images is known to: its standard deviation."""
    return math.sqrt(accuracy * (100 - accuracy) / rows.test_images.median())
