"""A model of the time of a training step by number of devices and batch size, fitted to runs.

A step takes the sum of these costs. m is the number of members of a ring, the devices of a node or the nodes:

    fixed         in every step
    images        for each image of a device
    all-reduce    two rings, one within a node and one between nodes, each of
                  2 (m - 1) / m bytes / bandwidth + 2 (m - 1) latency
    sharing       for each image and each further device of the node: they share memory, cores and power

No cost is below 0. Communication that no run shows takes as long as the doctor measured. As nobody knows then
how much of it is hidden behind the computation, each draw takes an exponent g of Pollux's formula:
(computation ^ g + communication ^ g) ^ (1 / g); g = 1: one after the other, 10: nearly hidden.

Sources: Venkataraman et al., Ernest, NSDI 2016 (non-negative least squares). Patarasuk and Yuan, 2009 (ring
all-reduce). Qiao et al., Pollux, OSDI 2021.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

# Equally likely values of everything that is predicted: the draws of the bootstrap.
DRAWS = 400
# Of a step or an evaluation, so that ratios of them are finite.
LEAST_SECONDS = 1e-9
# The g of a communication that only the doctor measured.
OVERLAP_EXPONENTS = np.array([1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0])
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

# The costs of the model, in the order of `_columns`, that are computation: fixed, images, sharing.
COMPUTATION = [0, 1, 6]


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
    """The fitted model of one comparable set of runs.

    `error` is its relative error on held-out points (root mean square; NaN if there are too few).
    """

    measured: Measured
    error: float
    all_reduces: tuple[AllReduce, ...]
    _draws_of_measured: dict[Shape, np.ndarray]
    _model: "_Model"

    def step_seconds(self, shape: Shape) -> np.ndarray:
        """Draw equally likely values, (draws,): around the measurement, if any, else by the model."""
        if shape in self._draws_of_measured:
            return self._draws_of_measured[shape]
        return self._model.draw_seconds(shape)

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
        measured_communication = _communication_of([*self.measured, *self.all_reduces])
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
    """Fit the model to the measurements of at least one shape.

    `all_reduces` count only if `gradient_bytes`, the bytes of the all-reduce of a step, is known, and if runs
    on one device show the computation alone.
    """
    shapes = np.array(list(measured), float)
    medians = np.array([np.median(np.concatenate(runs)) for runs in measured.values()])
    communication_of_doctor = None
    if (shapes[:, 0] == 1).any():
        communication_of_doctor = _communication_of_doctor(all_reduces, gradient_bytes)
    error = _held_out_error(shapes, medians)

    random = np.random.default_rng(0)
    noise = _draw_noise(measured, random)
    scatter = _scatter_between_shapes(shapes, medians, noise)
    # Drawn in any case: what comes later has the same numbers with repeats and without.
    scatter_of_shapes = scatter.draw(random, noise.shape)
    if not any(len(runs) > 1 for runs in measured.values()):
        # With repeats the noise includes how equal runs differ, else only the model's residuals do.
        noise = noise + scatter_of_shapes
    draws = medians * np.exp(noise)
    scatter_elsewhere = np.exp(scatter.draw(random, (DRAWS,)))
    # No run shows a cliff beyond the largest count: expect at least the error on a held-out one.
    error_beyond = max(EXPECTED_ERROR_BEYOND, np.nan_to_num(error))
    growth_per_doubling = error_beyond * random.standard_t(EXPECTED_SCATTER_WEIGHT, DRAWS)
    model = _Model(
        costs=_fit_non_negative(_columns(shapes), draws),
        communication_of_doctor=communication_of_doctor,
        overlap_exponent=random.choice(OVERLAP_EXPONENTS, DRAWS),
        growth_per_doubling=growth_per_doubling,
        scatter=scatter_elsewhere,
        largest_counts=_largest_counts(measured),
    )
    return Scaling(
        measured=measured,
        error=error,
        all_reduces=tuple(all_reduces) if communication_of_doctor else (),
        _draws_of_measured=dict(zip(measured, draws.T, strict=True)),
        _model=model,
    )


@dataclass(frozen=True)
class _Model:
    """A fit to each draw.

    Args:
        costs: the seconds of each cost, (draws, 7), in the order of `_columns`.
        communication_of_doctor: its seconds by shapes; None if the doctor did not measure it.
        overlap_exponent: how well the computation hides that communication, (draws,).
        growth_per_doubling: by how much a step takes longer for each doubling of the devices beyond the
            largest count, in logarithms, (draws,).
        scatter: a factor on the seconds of shapes that were not measured, (draws,).
        largest_counts: the largest number of devices that has runs, between nodes (True) and within one
            (False).
    """

    costs: np.ndarray
    communication_of_doctor: Callable[[np.ndarray], np.ndarray] | None
    overlap_exponent: np.ndarray
    growth_per_doubling: np.ndarray
    scatter: np.ndarray
    largest_counts: dict[bool, int]

    def draw_seconds(self, shape: Shape) -> np.ndarray:
        """Return the seconds of a step, (draws,)."""
        shapes = np.array([shape], float)
        (columns,) = _columns(shapes)
        crosses_nodes = shape.nodes > 1
        largest_count = self.largest_counts.get(crosses_nodes)
        if shape.devices > 1 and largest_count is None and self.communication_of_doctor:
            computation = self.costs[:, COMPUTATION] @ columns[COMPUTATION]
            communication = self.communication_of_doctor(shapes)
            exponent = self.overlap_exponent
            seconds = (computation**exponent + communication**exponent) ** (1 / exponent)
        else:
            doublings = np.log2(max(shape.devices / (largest_count or shape.devices), 1))
            seconds = self.costs @ columns * np.exp(self.growth_per_doubling * doublings)
        return np.maximum(seconds * self.scatter, LEAST_SECONDS)


class _Scatter(NamedTuple):
    """How far the seconds of a shape are from the model, relatively: a Student's t distribution."""

    size: float
    degrees_of_freedom: int

    def draw(self, random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
        return self.size * random.standard_t(self.degrees_of_freedom, size)


def _scatter_between_shapes(shapes: np.ndarray, seconds: np.ndarray, noise: np.ndarray) -> _Scatter:
    """Estimate the scatter from what the model leaves unexplained beyond the noise, and from experience."""
    columns = _columns(shapes)
    (costs,) = _fit_non_negative(columns, seconds[None])
    misfits = np.log(columns @ costs / seconds)
    spare_points = max(len(seconds) - int(np.linalg.matrix_rank(columns)), 0)
    unexplained = 0.0
    if spare_points:
        explained_by_noise = spare_points * noise.var(axis=0).mean()
        unexplained = max((misfits**2).sum() - explained_by_noise, 0)
    degrees_of_freedom = EXPECTED_SCATTER_WEIGHT + spare_points
    expected = EXPECTED_SCATTER_WEIGHT * EXPECTED_SCATTER**2
    return _Scatter(np.sqrt((expected + unexplained) / degrees_of_freedom), degrees_of_freedom)


def _communication_of(seen: Iterable[Shape | AllReduce]) -> set[bool]:
    """Return whether there is communication between nodes (True), and within one (False)."""
    return {one.nodes > 1 for one in seen if one.devices > 1}


def _largest_counts(measured: Iterable[Shape]) -> dict[bool, int]:
    """Return the largest count of devices between nodes (True), and within one (False), above one."""
    largest: dict[bool, int] = {}
    for shape in measured:
        crosses_nodes = shape.nodes > 1
        if shape.devices > 1:
            largest[crosses_nodes] = max(shape.devices, largest.get(crosses_nodes, 0))
    return largest


# --- the costs --------------------------------------------------------------------------------------


def _columns(shapes: np.ndarray) -> np.ndarray:
    """Return how often each shape has each cost: (shapes, 7).

    They are fixed, images, bytes and latency within a node, bytes and latency between nodes, sharing.

    Args:
        shapes: the shapes, (shapes, 3), with the columns of `Shape`.
    """
    devices, nodes, batch = shapes.T
    computation = np.stack([np.ones(len(shapes)), batch], axis=1)
    sharing = (devices / nodes - 1) * batch
    return np.column_stack([computation, _communication_columns(devices, nodes), sharing])


def _communication_columns(
    devices: np.ndarray, nodes: np.ndarray, bytes: float | np.ndarray = 1.0
) -> np.ndarray:
    """Return bytes and latencies of the rings within a node and between nodes: (shapes, 4)."""
    columns = []
    for members in (devices / nodes, nodes):
        rounds = 2 * (members - 1)
        columns += [rounds / members * bytes, rounds]
    return np.stack(columns, axis=1)


def _communication_of_doctor(
    all_reduces: Sequence[AllReduce], gradient_bytes: float
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Predict communication by shapes, (shapes,), from the doctor's all-reduces of about as many bytes."""
    if not all_reduces or not gradient_bytes:
        return None
    # Small messages take the time of their rounds, which varies, and say little about large ones.
    sizes = {all_reduce.bytes for all_reduce in all_reduces}
    nearest = sorted(sizes, key=lambda size: abs(np.log(size / gradient_bytes)))[:NEAREST_SIZES]
    chosen = np.array([all_reduce for all_reduce in all_reduces if all_reduce.bytes in nearest])
    devices, nodes, bytes, seconds = chosen.T
    (costs,) = _fit_non_negative(_communication_columns(devices, nodes, bytes), seconds[None])
    return lambda shapes: _communication_columns(shapes[:, 0], shapes[:, 1], gradient_bytes) @ costs


def _fit_non_negative(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the costs, (draws, columns), none below 0, with the least squared errors of each draw.

    The errors are relative to the median of the draws. Of columns that are proportional in all shapes, such
    as bytes and rounds of a single count, the first one has the cost.

    Args:
        seconds: the seconds to fit, (draws, shapes).
    """
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


def _held_out_error(shapes: np.ndarray, seconds: np.ndarray) -> float:
    """Leave out the largest counts and each batch in turn; return the root mean square relative error."""
    columns = _columns(shapes)
    devices, nodes, batches = shapes.T
    left_out = _where_largest_counts_are(devices, nodes)
    left_out += [batches == batch for batch in np.unique(batches)]
    errors: list[float] = []
    for hidden in left_out:
        if _others_can_predict(hidden, devices, batches):
            (costs,) = _fit_non_negative(columns[~hidden], seconds[None, ~hidden])
            predicted = np.maximum(columns[hidden] @ costs, LEAST_SECONDS)
            errors += list(np.log(predicted / seconds[hidden]))
    if not errors:
        return math.nan
    return float(np.sqrt(np.mean(np.square(errors))))


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
    for links in (within_a_node, between_nodes):
        counts = np.unique(devices[links])
        if len(counts) > 1:
            masks.append(links & (devices == counts.max()))
    return masks or [devices == devices.max()]


def _draw_noise(measured: Measured, random: np.random.Generator) -> np.ndarray:
    """Draw the error of each median, in logarithms, from the scatter of epochs and runs: (draws, shapes).

    The scatter of all shapes is pooled: few epochs of one shape say little.
    """
    epoch_deviations, run_deviations = _deviations(measured)
    columns = []
    for runs in measured.values():
        drawn = []
        for epochs in runs:
            epoch_noise = random.choice(epoch_deviations or [0.0], (DRAWS, len(epochs)))
            noise_of_run = np.median(epoch_noise, axis=1)
            if run_deviations:
                # Two runs differ by plus and minus half of their distance; the factor, whose square is 1 on
                # average, fills what lies between.
                run_noise = random.choice(run_deviations, DRAWS)
                factor = random.uniform(0, np.sqrt(3), DRAWS)
                noise_of_run = noise_of_run + run_noise * factor
            drawn.append(noise_of_run)
        columns.append(np.median(drawn, axis=0))
    return np.stack(columns, axis=1)


def _deviations(measured: Measured) -> tuple[list[float], list[float]]:
    """Return how far, in logarithms, epochs are from the median of their run, and runs from that of all."""
    epoch_noise: list[float] = []
    run_noise: list[float] = []
    for runs in measured.values():
        logs = [np.log(epochs) for epochs in runs]
        medians = np.array([np.median(log) for log in logs])
        for log, median in zip(logs, medians, strict=True):
            epoch_noise += _corrected(log - median)
        run_noise += _corrected(medians - np.median(medians))
    return epoch_noise, run_noise


def _corrected(deviations: np.ndarray) -> list[float]:
    """Enlarge deviations from the middle of a sample, which are too small as it is their own; none of one."""
    size = len(deviations)
    if size == 1:
        return []
    return list(deviations * np.sqrt(size / (size - 1)))
