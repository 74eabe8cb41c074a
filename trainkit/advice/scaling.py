"""Models of the time of a training step by number of devices and batch size, fitted to runs.

A model gives the seconds of a step from the shape of a run. Its weight depends on how well it predicts runs
that were held out.

    ring      a fixed cost, a cost per image, and a ring all-reduce within a node and another one between
              nodes, each of n members: 2 (n - 1) / n bytes / bandwidth + 2 (n - 1) latency
    shared    ring, with devices that slow each other down within a node (memory, cores, power)
    overlap   computation and communication partly at the same time, as in Pollux:
              (computation ^ g + communication ^ g) ^ (1 / g);
              g = 1: one after the other, 10: nearly hidden
    doctor    overlap, with the all-reduce that the doctor measured: runs on one device are enough

Sources: Qiao et al., Pollux, OSDI 2021. Venkataraman et al., Ernest, NSDI 2016 (non-negative least squares).
Patarasuk and Yuan, 2009 (ring all-reduce).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from scipy.optimize import nnls

# Equally likely values of everything that is predicted: the draws of the bootstrap.
DRAWS = 400
# Of a step or an evaluation, so that ratios of them are finite.
LEAST_SECONDS = 1e-9
# The g of `overlap`.
OVERLAP_EXPONENTS = np.array([1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0])
# Squared relative errors that differ by less are equal: that is rounding, which differs by processor.
EQUAL_SQUARED_ERROR = 1e-18
# The relative error of a prediction below which models are equally good.
LEAST_ERROR = 0.005
# By how much, relatively, equal runs differ if there are no repeats, and how many measurements that
# expectation is worth: as if two runs had shown 2 %.
EXPECTED_SCATTER = 0.008
EXPECTED_SCATTER_WEIGHT = 3
# The least relative error to expect of a prediction at twice the largest count.
EXPECTED_ERROR_BEYOND = 0.06
# The number of sizes of an all-reduce that count: those nearest to the bytes of the gradients.
NEAREST_SIZES = 3
# Nothing is predicted beyond so many times the largest count, or the batches, that were measured.
FURTHEST_FACTOR = 2

# (draws, shapes)
Seconds = np.ndarray
# Shapes as an array have the columns of `Shape`: (shapes, 3).
Predictor = Callable[[np.ndarray], Seconds]


class Shape(NamedTuple):
    """The shape of a run: devices in all, nodes, and images per device in a step."""

    devices: int
    nodes: int
    batch: int

    @property
    def global_batch(self) -> int:
        return self.devices * self.batch

    def on_one_device(self) -> "Shape":
        """Return the shape on one device with the same global batch."""
        return Shape(devices=1, nodes=1, batch=self.global_batch)


class AllReduce(NamedTuple):
    """An all-reduce of the doctor: the seconds to sum `bytes` over all devices."""

    devices: int
    nodes: int
    bytes: float
    seconds: float


# The seconds of a step, by shape: of each run, in each epoch.
Measured = dict[Shape, list[list[float]]]


@dataclass(frozen=True)
class Scaling:
    """The models of one comparable set of runs.

    `errors` has the relative error of each model on held-out points (root mean square; NaN if there are too
    few), `weights` its share of the draws.
    """

    measured: Measured
    errors: dict[str, float]
    weights: dict[str, float]
    all_reduces: tuple[AllReduce, ...]
    _draws_of_measured: dict[Shape, np.ndarray]
    _mixture: "_Mixture"

    @property
    def model(self) -> str:
        """Return the name of the model that predicts best."""
        return _heaviest(self.weights)

    def step_seconds(self, shape: Shape) -> np.ndarray:
        """Draw equally likely values, (draws,): around the measurement, if any, else by the models."""
        if shape in self._draws_of_measured:
            return self._draws_of_measured[shape]
        return self._mixture.predict(np.array([shape], float))[:, 0]

    def basis(self, shape: Shape) -> str:
        """Return the basis of `step_seconds`: "measured" or "predicted", and what was never observed."""
        if shape in self.measured:
            return "measured"
        never_observed = []
        most = self._most_devices()
        if shape.devices > most:
            never_observed.append(f"beyond the {most} devices measured, where a bus or a loader may be full")
        if shape.batch not in {run.batch for run in self.measured}:
            never_observed.append("no batch of that size per device")
        if shape.nodes > 1 and not any(run.nodes > 1 for run in self.measured):
            never_observed.append("no run between nodes")
        if not never_observed:
            return "predicted"
        return f"predicted: {'; '.join(never_observed)}"

    def why_unknown(self, shape: Shape) -> str:
        """Return why nothing is predicted for `shape`, as a clause; "" if something is."""
        most = self._most_devices()
        crosses_nodes = shape.nodes > 1
        measured_communication = {
            seen.nodes > 1 for seen in [*self.measured, *self.all_reduces] if seen.devices > 1
        }
        batches = [seen.batch for seen in self.measured]
        least_batch, most_batch = min(batches), max(batches)
        global_batches = {seen.global_batch for seen in self.measured}
        if shape.devices == 1 and not any(seen.devices == 1 for seen in self.measured):
            return "no run on one device was measured"
        if shape.devices > 1 and crosses_nodes not in measured_communication:
            members = "between nodes" if crosses_nodes else "between devices of one node"
            return f"no communication {members} was measured"
        if shape.devices > FURTHEST_FACTOR * most:
            return f"more than {FURTHEST_FACTOR} times the {most} device(s) that were measured"
        if least_batch == most_batch and shape.batch != least_batch:
            return f"with only {least_batch} images on each device, the cost of other batches is unknown"
        if len(global_batches) == 1 and shape.global_batch not in global_batches:
            return f"with only the global batch {min(global_batches)}, the cost of other batches is unknown"
        if not least_batch / FURTHEST_FACTOR <= shape.batch <= most_batch * FURTHEST_FACTOR:
            measured = f"the {least_batch} to {most_batch} that were measured"
            return f"{shape.batch} images on each device are far from {measured}"
        return ""

    def _most_devices(self) -> int:
        return max(seen.devices for seen in [*self.measured, *self.all_reduces])


def fit(measured: Measured, all_reduces: Sequence[AllReduce] = (), gradient_bytes: float = 0) -> Scaling:
    """Fit the ladder to the measurements of at least one shape.

    `all_reduces` count only if `gradient_bytes`, the bytes of the all-reduce of a step, is known.
    """
    shapes = np.array(list(measured), float)
    medians = np.array([np.median(np.concatenate(runs)) for runs in measured.values()])
    ladder = _ladder(shapes, _communication_of_doctor(all_reduces, gradient_bytes))
    errors = {name: _held_out_error(model, shapes, medians) for name, model in ladder.items()}
    weights = _weights(errors, points=len(medians))
    best = _heaviest(weights)

    random = np.random.default_rng(0)
    noise = _draw_noise(measured, random)
    scatter = _scatter_between_shapes(ladder[best], shapes, medians, noise)
    # Drawn in any case: what comes later has the same numbers with repeats and without.
    scatter_of_shapes = scatter.draw(random, noise.shape)
    if not any(len(runs) > 1 for runs in measured.values()):
        # With repeats the noise includes how equal runs differ, else only the model's residuals do.
        noise = noise + scatter_of_shapes
    draws = medians * np.exp(noise)
    scatter_elsewhere = np.exp(scatter.draw(random, (DRAWS, 1)))
    # No run shows a cliff beyond the largest count: expect at least the error on a held-out one.
    error_beyond = max(EXPECTED_ERROR_BEYOND, np.nan_to_num(errors[best]))
    growth_per_doubling = error_beyond * random.standard_t(EXPECTED_SCATTER_WEIGHT, DRAWS)
    model_of_draw = random.choice(len(ladder), DRAWS, p=list(weights.values()))
    mixture = _Mixture(
        predictors={name: model.fit(shapes, draws) for name, model in ladder.items()},
        growth_per_doubling=growth_per_doubling,
        model_of_draw=model_of_draw,
        scatter=scatter_elsewhere,
        largest_counts=_largest_counts(shapes),
        measured_communication={bool(nodes > 1) for devices, nodes, _ in shapes if devices > 1},
    )
    return Scaling(
        measured=measured,
        errors=errors,
        weights=weights,
        all_reduces=tuple(all_reduces) if "doctor" in ladder else (),
        _draws_of_measured=dict(zip(measured, draws.T, strict=True)),
        _mixture=mixture,
    )


@dataclass(frozen=True)
class _Mixture:
    """Predictions of all models, of which each draw takes one.

    Args:
        predictors: the fitted models by their names.
        growth_per_doubling: (draws,), in logarithms: by how much a step takes longer for each doubling of the
            devices beyond the largest count.
        model_of_draw: (draws,), the index of the model.
        scatter: (draws, 1), a factor on the seconds of shapes that were not measured.
        largest_counts: of devices, with runs between nodes (True) and within one (False).
        measured_communication: of runs on several devices, between nodes (True) and within one (False).
    """

    predictors: dict[str, Predictor]
    growth_per_doubling: np.ndarray
    model_of_draw: np.ndarray
    scatter: np.ndarray
    largest_counts: dict[bool, float]
    measured_communication: set[bool]

    def predict(self, shapes: np.ndarray) -> Seconds:
        predicted = np.stack([predictor(shapes) for predictor in self.predictors.values()])
        for i, (devices, nodes, _) in enumerate(shapes):
            crosses_nodes = bool(nodes > 1)
            is_unseen = devices > 1 and crosses_nodes not in self.measured_communication
            if is_unseen and "doctor" in self.predictors:
                # The other models have no such communication.
                predicted[:, :, i] = self.predictors["doctor"](shapes[i : i + 1])[:, 0]
                continue
            largest_count = self.largest_counts.get(crosses_nodes, devices)
            doublings = np.log2(max(devices / largest_count, 1))
            predicted[:, :, i] *= np.exp(self.growth_per_doubling * doublings)
        of_each_draw = predicted[self.model_of_draw, np.arange(DRAWS)]
        return np.maximum(of_each_draw * self.scatter, LEAST_SECONDS)


class _Scatter(NamedTuple):
    """How far the seconds of a shape are from the model, relatively: a Student's t distribution."""

    size: float
    degrees_of_freedom: int

    def draw(self, random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
        return self.size * random.standard_t(self.degrees_of_freedom, size)


def _scatter_between_shapes(
    model: "_Model", shapes: np.ndarray, seconds: np.ndarray, noise: np.ndarray
) -> _Scatter:
    """Estimate the scatter from what the model leaves unexplained beyond the noise, and from experience."""
    predicted = model.fit(shapes, seconds[None])(shapes)[0]
    misfits = np.log(predicted / seconds)
    spare_points = max(len(seconds) - model.parameters, 0)
    unexplained = 0.0
    if spare_points:
        explained_by_noise = spare_points * noise.var(axis=0).mean()
        unexplained = max((misfits**2).sum() - explained_by_noise, 0)
    degrees_of_freedom = EXPECTED_SCATTER_WEIGHT + spare_points
    expected = EXPECTED_SCATTER_WEIGHT * EXPECTED_SCATTER**2
    return _Scatter(np.sqrt((expected + unexplained) / degrees_of_freedom), degrees_of_freedom)


def _largest_counts(shapes: np.ndarray) -> dict[bool, float]:
    """Return the largest count of devices between nodes (True), and within one (False), if there are any."""
    largest: dict[bool, float] = {}
    for devices, nodes, _ in shapes:
        crosses_nodes = bool(nodes > 1)
        largest[crosses_nodes] = max(devices, largest.get(crosses_nodes, 0))
    return largest


# --- the models -------------------------------------------------------------------------------------


class _Model(Protocol):
    """A model of the seconds of a step, with so many parameters."""

    parameters: int

    def fit(self, shapes: np.ndarray, seconds: Seconds) -> Predictor:
        """Return predictions with as many draws as `seconds` has."""


def _ladder(shapes: np.ndarray, communication_of_doctor: Predictor | None) -> dict[str, _Model]:
    """Return the models that these shapes can determine."""
    on_several = shapes[:, 0] > 1
    ladder: dict[str, _Model] = {}
    if communication_of_doctor and not on_several.all():
        ladder["doctor"] = _OverlapModel(parameters=2, fit_communication=lambda *_: communication_of_doctor)
    if on_several.any() or "doctor" not in ladder:
        ladder["ring"] = _LinearModel(_rank(_ring_columns(shapes)), _ring_columns)
        ladder["shared"] = _LinearModel(_rank(_shared_columns(shapes)), _shared_columns)
    if on_several.any() and not on_several.all():
        ladder["overlap"] = _OverlapModel(parameters=4, fit_communication=_fit_communication_of_runs)
    return ladder


def _rank(columns: np.ndarray) -> int:
    return int(np.linalg.matrix_rank(columns))


@dataclass(frozen=True)
class _LinearModel:
    """A step takes a sum of costs, each times a column that the shape has."""

    parameters: int
    columns_of: Callable[[np.ndarray], np.ndarray]

    def fit(self, shapes: np.ndarray, seconds: Seconds) -> Predictor:
        costs = _fit_non_negative(self.columns_of(shapes), seconds)
        return lambda wanted: costs @ self.columns_of(wanted).T


@dataclass(frozen=True)
class _OverlapModel:
    """The computation of the runs on one device, and communication that overlaps with it.

    `fit_communication` fits the communication to the runs on several devices: their shapes and seconds, the
    costs of the computation, and the exponent of the overlap.
    """

    parameters: int
    fit_communication: Callable[[np.ndarray, Seconds, np.ndarray, float], Predictor]

    def fit(self, shapes: np.ndarray, seconds: Seconds) -> Predictor:
        on_several = shapes[:, 0] > 1
        costs = _fit_non_negative(_computation_columns(shapes[~on_several]), seconds[:, ~on_several])
        computation = costs @ _computation_columns(shapes).T
        communication_by_exponent = []
        squared_errors = []
        for exponent in OVERLAP_EXPONENTS:
            communication = self.fit_communication(
                shapes[on_several], seconds[:, on_several], costs, exponent
            )
            step = _overlapped(computation, communication(shapes), exponent)
            communication_by_exponent.append(communication)
            squared_errors.append(((step / seconds - 1) ** 2)[:, on_several].sum(axis=1))
        # Overlaps that explain the runs equally well, as all do without any, take turns.
        is_as_good = squared_errors <= np.min(squared_errors, axis=0) + EQUAL_SQUARED_ERROR
        turn = np.arange(len(seconds)) % is_as_good.sum(axis=0)
        overlap_of_draw = np.argmax(is_as_good.cumsum(axis=0) > turn, axis=0)

        def predict(wanted: np.ndarray) -> Seconds:
            computation = costs @ _computation_columns(wanted).T
            steps = [
                _overlapped(computation, communication(wanted), exponent)
                for communication, exponent in zip(communication_by_exponent, OVERLAP_EXPONENTS, strict=True)
            ]
            return np.stack(steps)[overlap_of_draw, np.arange(len(seconds))]

        return predict


def _overlapped(computation: Seconds, communication: Seconds, exponent: float) -> Seconds:
    return (computation**exponent + communication**exponent) ** (1 / exponent)


def _computation_columns(shapes: np.ndarray) -> np.ndarray:
    """Return a one and the images per device: (shapes, 2)."""
    return np.stack([np.ones(len(shapes)), shapes[:, 2]], axis=1)


def _communication_columns(shapes: np.ndarray, bytes: float | np.ndarray = 1.0) -> np.ndarray:
    """Return bytes and latencies of the rings within a node and between nodes: (shapes, 4).

    With a single count above one the two are indistinguishable: the fit takes the bytes, which come first.
    """
    devices, nodes, _ = shapes.T
    columns = []
    for members in (devices / nodes, nodes):
        rounds = 2 * (members - 1)
        columns += [rounds / members * bytes, rounds]
    return np.stack(columns, axis=1)


def _ring_columns(shapes: np.ndarray) -> np.ndarray:
    return np.column_stack([_computation_columns(shapes), _communication_columns(shapes)])


def _shared_columns(shapes: np.ndarray) -> np.ndarray:
    devices, nodes, batch = shapes.T
    return np.column_stack([_ring_columns(shapes), (devices / nodes - 1) * batch])


def _fit_communication_of_runs(
    shapes: np.ndarray, seconds: Seconds, computation_costs: np.ndarray, exponent: float
) -> Predictor:
    """Fit the time that runs on several devices take beyond their computation."""
    computation = computation_costs @ _computation_columns(shapes).T
    communication = np.maximum(seconds**exponent - computation**exponent, 0) ** (1 / exponent)
    costs = _fit_non_negative(
        _communication_columns(shapes), communication, weights=1 / np.median(seconds, axis=0)
    )
    return lambda wanted: costs @ _communication_columns(wanted).T


def _communication_of_doctor(all_reduces: Sequence[AllReduce], gradient_bytes: float) -> Predictor | None:
    """Predict communication by shape, (1, shapes), from the doctor's all-reduces of about as many bytes."""
    if not all_reduces or not gradient_bytes:
        return None
    # Small messages take the time of their rounds, which varies, and say little about large ones.
    sizes = {all_reduce.bytes for all_reduce in all_reduces}
    nearest = sorted(sizes, key=lambda size: abs(np.log(size / gradient_bytes)))[:NEAREST_SIZES]
    chosen = np.array([all_reduce for all_reduce in all_reduces if all_reduce.bytes in nearest])
    devices, nodes, bytes, seconds = chosen.T
    shapes = np.column_stack([devices, nodes, np.zeros_like(nodes)])
    costs = _fit_non_negative(_communication_columns(shapes, bytes), seconds[None])
    return lambda wanted: costs @ _communication_columns(wanted, gradient_bytes).T


def _fit_non_negative(columns: np.ndarray, seconds: Seconds, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the costs, (draws, columns), none below 0, with the least squared errors of each draw.

    The errors are relative to the median of the draws, or have these weights. Of columns that are
    proportional in all shapes, such as bytes and rounds of a single count, the first one has the cost.
    """
    if weights is None:
        weights = 1 / np.median(seconds, axis=0)
    scale = np.abs(columns).max(axis=0)
    independent: list[int] = []
    for i in np.flatnonzero(scale):
        unit = columns[:, i] / scale[i]
        if not any(np.allclose(unit, columns[:, j] / scale[j]) for j in independent):
            independent.append(i)
    scale = scale[independent]
    weighted = columns[:, independent] / scale * weights[:, None]
    costs = np.zeros((len(seconds), columns.shape[1]))
    for draw, wanted in enumerate(seconds * weights):
        solution, _ = nnls(weighted, wanted)
        costs[draw, independent] = solution / scale
    return costs


# --- how far to trust them --------------------------------------------------------------------------


def _held_out_error(model: _Model, shapes: np.ndarray, seconds: np.ndarray) -> float:
    """Leave out the largest counts and each batch in turn; return the root mean square relative error."""
    devices, nodes, batches = shapes.T
    left_out = _where_largest_counts_are(devices, nodes)
    left_out += [batches == batch for batch in np.unique(batches)]
    errors: list[float] = []
    for hidden in left_out:
        if _others_can_predict(hidden, devices, batches):
            predictor = model.fit(shapes[~hidden], seconds[None, ~hidden])
            predicted = np.maximum(predictor(shapes[hidden])[0], 1e-12)
            errors += list(np.log(predicted / seconds[hidden]))
    if not errors:
        return math.nan
    # Rounded, so that equally good models are equal on every processor, and the simplest one counts.
    return round(float(np.sqrt(np.mean(np.square(errors)))), 9)


def _others_can_predict(hidden: np.ndarray, devices: np.ndarray, batches: np.ndarray) -> bool:
    """Return whether a fit without the hidden points determines what their prediction needs."""
    shown = ~hidden
    if not shown.any():
        return False
    if devices[shown].max() == 1 and devices.max() > 1:
        return False
    if (devices == 1).any() and not (devices[shown] == 1).any():
        return False
    # Two batches are needed to separate a fixed cost from one per image, unless only one is asked for.
    batches_of_fewest_devices = np.unique(batches[shown & (devices == devices.min())])
    asks_for_no_other = np.isin(batches[hidden], batches[shown]).all()
    return len(batches_of_fewest_devices) > 1 or bool(asks_for_no_other)


def _where_largest_counts_are(devices: np.ndarray, nodes: np.ndarray) -> list[np.ndarray]:
    """Return where the largest counts within a node and between nodes are, if others can predict them."""
    masks = []
    within_a_node = (nodes == 1) & (devices > 1)
    between_nodes = nodes > 1
    for of_this_kind in (within_a_node, between_nodes):
        counts = np.unique(devices[of_this_kind])
        if len(counts) > 1:
            masks.append(of_this_kind & (devices == counts.max()))
    return masks or [devices == devices.max()]


def _weights(errors: dict[str, float], points: int) -> dict[str, float]:
    """Return each model's share, by the likelihood of its errors if they were normal."""
    log_likelihoods = -points * np.log(np.maximum(np.nan_to_num(list(errors.values())), LEAST_ERROR))
    shares = np.exp(log_likelihoods - log_likelihoods.max())
    return dict(zip(errors, shares / shares.sum(), strict=True))


def _heaviest(weights: dict[str, float]) -> str:
    return max(weights, key=weights.get)


def _draw_noise(measured: Measured, random: np.random.Generator) -> np.ndarray:
    """Draw the error of each median, in logarithms, from the scatter of epochs and runs: (draws, shapes).

    The scatter of all shapes is pooled: few epochs of one shape say little.
    """
    epoch_deviations, run_deviations = _deviations(measured)
    columns = []
    for runs in measured.values():
        drawn = []
        for epochs in runs:
            of_epochs = random.choice(epoch_deviations or [0.0], (DRAWS, len(epochs)))
            noise_of_run = np.median(of_epochs, axis=1)
            if run_deviations:
                # Two runs differ by plus and minus half of their distance; the factor, whose square is 1 on
                # average, fills what lies between.
                of_runs = random.choice(run_deviations, DRAWS)
                factor = random.uniform(0, np.sqrt(3), DRAWS)
                noise_of_run = noise_of_run + of_runs * factor
            drawn.append(noise_of_run)
        columns.append(np.median(drawn, axis=0))
    return np.stack(columns, axis=1)


def _deviations(measured: Measured) -> tuple[list[float], list[float]]:
    """Return how far, in logarithms, epochs are from the median of their run, and runs from that of all."""
    of_epochs: list[float] = []
    of_runs: list[float] = []
    for runs in measured.values():
        logs = [np.log(epochs) for epochs in runs]
        medians = np.array([np.median(log) for log in logs])
        for log, median in zip(logs, medians, strict=True):
            of_epochs += _corrected(log - median)
        of_runs += _corrected(medians - np.median(medians))
    return of_epochs, of_runs


def _corrected(deviations: np.ndarray) -> list[float]:
    """Enlarge deviations from the middle of a sample, which are too small as it is their own; none of one."""
    size = len(deviations)
    if size == 1:
        return []
    return list(deviations * np.sqrt(size / (size - 1)))
