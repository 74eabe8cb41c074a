"""Models of the time of a training step by number of devices and batch size, fitted to runs.

A model gives the seconds of a step from the shape of a run. Its weight depends on how well it predicts runs
that were held out.

    ring      a fixed cost, a cost per image, and a ring all-reduce within a node and another one between
              nodes, each of n members: 2 (n - 1) / n bytes / bandwidth + 2 (n - 1) latency
    shared    ring, with devices that slow each other down within a node (memory, cores, power)
    overlap   computation and exchange partly at the same time, as in Pollux:
              (computation ^ g + exchange ^ g) ^ (1 / g); g = 1: one after the other, 10: nearly hidden
    doctor    overlap, with the exchange that the doctor measured: runs on one device are enough

Sources: Qiao et al., Pollux, OSDI 2021. Venkataraman et al., Ernest, NSDI 2016 (non-negative least squares).
Patarasuk and Yuan, 2009 (ring all-reduce).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

DRAWS = 400  # of the bootstrap
LEAST_SECONDS = 1e-9  # of a step or an evaluation, so that ratios of them are finite
OVERLAPS = np.array([1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0])  # the g of `overlap`
ROUNDING = 1e-18  # of a squared relative error
LEAST_ERROR = 0.005  # of a prediction: closer, the models are equally good
# How much equal runs differ if there are no repeats: as if two of them had shown 2 %.
EXPECTED_SCATTER, EXPECTED_WEIGHT = 0.008, 3
EXPECTED_BEYOND = 0.06  # of a prediction at twice the largest count
SIZES = 3  # of all-reduces, those nearest in size to the gradients
FURTHEST = 2  # times the largest count that was measured

Seconds = np.ndarray  # (draws, shapes)
Predictor = Callable[[np.ndarray], Seconds]  # of shapes, (shapes, 3), with the columns of `Shape`


class Shape(NamedTuple):
    """The shape of a run: devices in all, nodes, and images per device in a step."""

    devices: int
    nodes: int
    batch: int

    def on_one_device(self) -> "Shape":
        """Return the shape on one device with the same global batch."""
        return Shape(1, 1, self.devices * self.batch)


class AllReduce(NamedTuple):
    """An all-reduce of the doctor: the seconds to sum `bytes` over all devices."""

    devices: int
    nodes: int
    bytes: float
    seconds: float


Measured = dict[Shape, list[list[float]]]  # seconds of a step: of each run, in each epoch


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
    _draws: dict[Shape, np.ndarray]
    _predict: Predictor

    @property
    def model(self) -> str:
        """Return the name of the model that predicts best."""
        return max(self.weights, key=self.weights.get)

    def step_seconds(self, shape: Shape) -> np.ndarray:
        """Draw equally likely values, (draws,): around the measurement, if any, else by the models."""
        return self._draws[shape] if shape in self._draws else self._predict(np.array([shape], float))[:, 0]

    def basis(self, shape: Shape) -> str:
        """Return the basis of `step_seconds`: "measured" or "predicted", and what was never observed."""
        if shape in self.measured:
            return "measured"
        most = max(found.devices for found in [*self.measured, *self.all_reduces])
        beyond = f"beyond the {most} devices measured, where a bus or a loader may be full"
        missing = [beyond] if shape.devices > most else []
        if shape.batch not in {run.batch for run in self.measured}:
            missing.append("no batch of that size per device")
        if shape.nodes > 1 and not any(run.nodes > 1 for run in self.measured):
            missing.append("no run between nodes")
        return ": ".join(filter(None, ["predicted", "; ".join(missing)]))

    def unknown(self, shape: Shape) -> str:
        """Return why nothing is predicted for `shape`, as a clause; "" if something is."""
        seen = [*self.measured, *self.all_reduces]
        several = {found.nodes > 1 for found in seen if found.devices > 1}
        most = max(found.devices for found in seen)
        batches = [found.batch for found in self.measured]
        if shape.devices == 1 and not any(found.devices == 1 for found in self.measured):
            return "no run on one device was measured"
        if shape.devices > 1 and (shape.nodes > 1) not in several:
            where = "between nodes" if shape.nodes > 1 else "between devices of one node"
            return f"no exchange {where} was measured"
        if shape.devices > FURTHEST * most:
            return f"more than {FURTHEST} times the {most} device(s) that were measured"
        if len(set(batches)) == 1 and shape.batch not in batches:
            return f"with only {batches[0]} images on each device, the cost of other batches is unknown"
        every = {found.devices * found.batch for found in self.measured}  # the global batches
        if len(every) == 1 and shape.devices * shape.batch not in every:
            return f"with only the global batch {min(every)}, the cost of other batches is unknown"
        if not min(batches) / FURTHEST <= shape.batch <= max(batches) * FURTHEST:
            within = f"{min(batches)} to {max(batches)}"
            return f"{shape.batch} images on each device are far from the {within} that were measured"
        return ""


def fit(measured: Measured, all_reduces: Sequence[AllReduce] = (), gradient_bytes: float = 0) -> Scaling:
    """Fit the ladder to the measurements of at least one shape.

    `all_reduces` count only if `gradient_bytes`, the bytes exchanged in a step, is known.
    """
    shapes = np.array(list(measured), float)
    centre = np.array([np.median(np.concatenate(runs)) for runs in measured.values()])
    ladder = _ladder(shapes, _exchange_of_doctor(all_reduces, gradient_bytes) if gradient_bytes else None)
    errors = {name: _held_out_error(model, shapes, centre) for name, model in ladder.items()}
    weights = _weights(errors, len(centre))

    random = np.random.default_rng(0)
    noise = _draw_noise(measured, random)
    best = ladder[max(weights, key=weights.get)]
    misfit = np.log(best.fit(shapes, centre[None])(shapes)[0] / centre)
    spare = max(len(centre) - best.parameters, 0)
    unexplained = max((misfit**2).sum() - spare * noise.var(axis=0).mean(), 0) if spare else 0
    freedom = EXPECTED_WEIGHT + spare
    scatter = np.sqrt((EXPECTED_WEIGHT * EXPECTED_SCATTER**2 + unexplained) / freedom)
    # With repeats the noise includes how equal runs differ, else only the model's residuals do.
    repeated = any(len(runs) > 1 for runs in measured.values())
    draws = centre * np.exp(noise + (not repeated) * scatter * random.standard_t(freedom, noise.shape))
    elsewhere = np.exp(scatter * random.standard_t(freedom, (DRAWS, 1)))
    # No run shows a cliff beyond the largest count: expect at least the error on a held-out one.
    missed = max(EXPECTED_BEYOND, np.nan_to_num(errors[max(weights, key=weights.get)]))
    beyond = missed * random.standard_t(EXPECTED_WEIGHT, DRAWS)
    most = {nodes > 1: max(n for n, m, _ in shapes if (m > 1) == (nodes > 1)) for _, nodes, _ in shapes}

    chosen = random.choice(len(ladder), DRAWS, p=list(weights.values()))
    predictors = {name: model.fit(shapes, draws) for name, model in ladder.items()}
    crossed = {nodes > 1 for devices, nodes, _ in shapes if devices > 1}

    def predict(wanted: np.ndarray) -> Seconds:
        predicted = np.stack([predictor(wanted) for predictor in predictors.values()])
        for i, (devices, nodes, _) in enumerate(wanted):
            doublings = np.log2(max(devices / most.get(nodes > 1, devices), 1))
            predicted[:, :, i] *= np.exp(beyond * doublings)
            # The other models have no such exchange.
            if devices > 1 and (nodes > 1) not in crossed and "doctor" in predictors:
                predicted[:, :, i] = predictors["doctor"](wanted[i : i + 1])[:, 0]
        return np.maximum(predicted[chosen, np.arange(DRAWS)] * elsewhere, LEAST_SECONDS)

    used = tuple(all_reduces) if "doctor" in ladder else ()
    return Scaling(measured, errors, weights, used, dict(zip(measured, draws.T, strict=True)), predict)


class _Model(NamedTuple):
    parameters: int
    fit: Callable[[np.ndarray, Seconds], Predictor]  # shapes, and draws of their seconds


def _ladder(shapes: np.ndarray, exchange: Callable | None) -> dict[str, _Model]:
    """Return the models that these shapes can determine."""
    several = shapes[:, 0] > 1
    ladder = {}
    if exchange and not several.all():
        ladder["doctor"] = _overlap(lambda *_: lambda wanted: exchange(wanted)[None], parameters=2)
    if several.any() or "doctor" not in ladder:
        ladder["ring"] = _linear(_ring, shapes)
        ladder["shared"] = _linear(_shared, shapes)
    if several.any() and not several.all():
        ladder["overlap"] = _overlap(_exchange_of_runs, parameters=4)
    return ladder


def _computation(shapes: np.ndarray) -> np.ndarray:
    return np.stack([np.ones(len(shapes)), shapes[:, 2]], axis=1)


def _exchange(shapes: np.ndarray, bytes: float | np.ndarray = 1.0) -> np.ndarray:
    """Return bytes and latencies of the rings within a node and between nodes: (shapes, 4).

    With a single count above one the two are indistinguishable: the fit takes the bytes, which come first.
    """
    devices, nodes, _ = shapes.T
    rings = []
    for members in (devices / nodes, nodes):
        steps = 2 * (members - 1)
        rings += [steps / members * bytes, steps]
    return np.stack(rings, axis=1)


def _ring(shapes: np.ndarray) -> np.ndarray:
    return np.column_stack([_computation(shapes), _exchange(shapes)])


def _shared(shapes: np.ndarray) -> np.ndarray:
    devices, nodes, batch = shapes.T
    return np.column_stack([_ring(shapes), (devices / nodes - 1) * batch])


def _linear(columns: Callable[[np.ndarray], np.ndarray], shapes: np.ndarray) -> _Model:
    def fit(shapes: np.ndarray, seconds: Seconds) -> Predictor:
        costs = _fit_non_negative(columns(shapes), seconds)
        return lambda wanted: costs @ columns(wanted).T

    return _Model(np.linalg.matrix_rank(columns(shapes)), fit)


def _overlap(exchange_of: Callable, parameters: int) -> _Model:
    """Return a model from `exchange_of`, the computation of the runs and an overlap."""

    def fit(shapes: np.ndarray, seconds: Seconds) -> Predictor:
        several = shapes[:, 0] > 1
        costs = _fit_non_negative(_computation(shapes[~several]), seconds[:, ~several])
        exchanges, misfits = [], []
        for g in OVERLAPS:
            exchange = exchange_of(shapes[several], seconds[:, several], costs, g)
            step = _overlapped(costs @ _computation(shapes).T, exchange(shapes), g)
            exchanges.append(exchange)
            misfits.append(((step / seconds - 1) ** 2)[:, several].sum(axis=1))
        # Overlaps that explain the runs equally well, as all do without any, are equally likely.
        tied = misfits <= np.min(misfits, axis=0) + ROUNDING
        turns = np.arange(len(seconds)) % tied.sum(axis=0)
        best = np.argmax(tied.cumsum(axis=0) > turns, axis=0)

        def predict(wanted: np.ndarray) -> Seconds:
            computation = costs @ _computation(wanted).T
            steps = [_overlapped(computation, e(wanted), g) for e, g in zip(exchanges, OVERLAPS, strict=True)]
            return np.stack(steps)[best, np.arange(len(seconds))]

        return predict

    return _Model(parameters, fit)


def _overlapped(computation: Seconds, exchange: Seconds, g: float) -> Seconds:
    return (computation**g + exchange**g) ** (1 / g)


def _exchange_of_runs(shapes: np.ndarray, seconds: Seconds, costs: np.ndarray, g: float) -> Predictor:
    """Fit the time that runs on several devices take beyond their computation."""
    computation = costs @ _computation(shapes).T
    rest = np.maximum(seconds**g - computation**g, 0) ** (1 / g)
    rings = _fit_non_negative(_exchange(shapes), rest, 1 / np.median(seconds, axis=0))
    return lambda wanted: rings @ _exchange(wanted).T


def _exchange_of_doctor(all_reduces: Sequence[AllReduce], gradient_bytes: float) -> Callable | None:
    """Predict the seconds of the exchange by shape, from the doctor's all-reduces of about as many bytes."""
    if not all_reduces:
        return None
    # Small messages take the time of their rounds, which varies, and say little about large ones.
    sizes = {found.bytes for found in all_reduces}
    nearest = sorted(sizes, key=lambda size: abs(np.log(size / gradient_bytes)))[:SIZES]
    table = np.array([found for found in all_reduces if found.bytes in nearest])
    devices, nodes, bytes, seconds = table.T
    shapes = np.column_stack([devices, nodes, 0 * nodes])
    (rings,) = _fit_non_negative(_exchange(shapes, bytes), seconds[None])
    return lambda wanted: _exchange(wanted, gradient_bytes) @ rings


def _fit_non_negative(columns: np.ndarray, seconds: Seconds, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the costs, (draws, columns), none below 0, with the least relative errors of all subsets."""
    weights = 1 / np.median(seconds, axis=0) if weights is None else weights
    scale = np.abs(columns).max(axis=0)
    used = np.flatnonzero(scale)
    weighted = columns[:, used] / scale[used] * weights[:, None]
    wanted = seconds * weights
    best, least = np.zeros((len(seconds), columns.shape[1])), (wanted**2) @ np.ones(len(weights))
    for count in range(1, len(used) + 1):
        for subset in map(list, combinations(range(len(used)), count)):
            costs = wanted @ np.linalg.pinv(weighted[:, subset]).T
            errors = ((costs @ weighted[:, subset].T - wanted) ** 2).sum(axis=1)
            # By more than rounding, which differs by processor: of equal fits the first counts.
            better = (costs >= 0).all(axis=1) & (errors < least * (1 - 1e-9) - ROUNDING)
            best[better] = 0
            best[np.ix_(better, used[subset])] = costs[better] / scale[used[subset]]
            least = np.where(better, errors, least)
    return best


def _held_out_error(model: _Model, shapes: np.ndarray, seconds: np.ndarray) -> float:
    """Leave out the largest counts and each batch in turn; return the root mean square relative error."""
    devices, nodes, batches = shapes.T
    errors = []
    for hidden in [*_largest_counts(devices, nodes), *(batches == batch for batch in np.unique(batches))]:
        shown = devices[~hidden]
        # Two batches are needed to separate a fixed cost from one per image, unless only one is asked for.
        fewest = batches[~hidden & (devices == devices.min())]
        enough = len(np.unique(fewest)) > 1 or np.isin(batches[hidden], batches[~hidden]).all()
        alone = (shown == 1).any() or not (devices == 1).any()
        if enough and alone and (shown.max() > 1 or devices.max() == 1):
            predictor = model.fit(shapes[~hidden], seconds[None, ~hidden])
            errors += list(np.log(np.maximum(predictor(shapes[hidden])[0], 1e-12) / seconds[hidden]))
    # Rounded, so that equally good models are equal on every processor, and the simplest one counts.
    return round(float(np.sqrt(np.mean(np.square(errors)))), 9) if errors else np.nan


def _largest_counts(devices: np.ndarray, nodes: np.ndarray) -> list[np.ndarray]:
    """Return where the largest counts within a node and between nodes are, if others can predict them."""
    found = []
    for regime in ((nodes == 1) & (devices > 1), nodes > 1):
        counts = np.unique(devices[regime])
        if len(counts) > 1:
            found.append(regime & (devices == counts.max()))
    return found or [devices == devices.max()]


def _weights(errors: dict[str, float], points: int) -> dict[str, float]:
    """Return each model's share, by the likelihood of its errors if they were normal."""
    logs = -points * np.log(np.maximum(np.nan_to_num(list(errors.values())), LEAST_ERROR))
    shares = np.exp(logs - logs.max())
    return dict(zip(errors, shares / shares.sum(), strict=True))


def _draw_noise(measured: Measured, random: np.random.Generator) -> np.ndarray:
    """Draw the error of each median, in logarithms, from the scatter of epochs and runs.

    The scatter of all shapes is pooled: few epochs of one shape say little. Two runs differ by plus and minus
    half of their distance; the factor, whose square is 1 on average, fills what lies between.
    """
    epochs, runs = [], []
    for of_shape in measured.values():
        medians = np.array([np.median(np.log(seconds)) for seconds in of_shape])
        for seconds, median in zip(of_shape, medians, strict=True):
            if (k := len(seconds)) > 1:
                epochs += list((np.log(seconds) - median) * np.sqrt(k / (k - 1)))
        if (k := len(medians)) > 1:
            runs += list((medians - np.median(medians)) * np.sqrt(k / (k - 1)))
    columns = []
    for of_shape in measured.values():
        drawn = [
            np.median(random.choice(epochs or [0.0], (DRAWS, len(seconds))), axis=1)
            + (random.choice(runs, DRAWS) * random.uniform(0, np.sqrt(3), DRAWS) if runs else 0)
            for seconds in of_shape
        ]
        columns.append(np.median(drawn, axis=0))
    return np.stack(columns, axis=1)
