"""The model of how a step scales: laws whose truth is known, points left out of real runs, and limits."""

import runpy
from collections.abc import Callable

import numpy as np
import pytest
from conftest import REPOSITORY

from manygpus.reports.advice import scaling
from manygpus.reports.advice.scaling import AllReduce, Measured, Shape

PREDICTIONS = runpy.run_path(str(REPOSITORY / "tools" / "bench" / "predictions.py"))


def runs_of(law: Callable[[int, int], float], counts: tuple[int, ...] = (1, 2)) -> Measured:
    return {Shape(n, 1, batch): [[law(n, batch)] * 2] for n in counts for batch in (64, 256, 1024)}


def ring(n: int, batch: int) -> float:
    return 0.001 + batch * 1e-4 + 2 * (n - 1) * 1e-4 + 2 * (n - 1) / n * 0.01


def test_the_intervals_hold_what_they_say_and_the_choice_is_good() -> None:
    """As in docs/dev/METHODS.md, of fewer laws; the same seed draws the same ones."""
    held, choices = PREDICTIONS["of_laws"](100, seed=1)
    held = held[held.law == "all"].set_index("where").held
    assert 0.85 <= held["inside the range"] <= 0.95
    assert held["beyond the largest count"] >= 0.85
    assert (choices[choices.law == "all"].good >= 0.9).all()


def test_every_point_left_out_of_real_runs_is_predicted() -> None:
    table = PREDICTIONS["of_runs"](PREDICTIONS["SAMPLES"] / "scaling")
    errors = table.error.abs()
    assert len(table) == 24 and errors.median() <= 0.05 and errors.max() <= 0.15


def test_two_nodes_are_predicted_from_one_and_the_doctor() -> None:
    """Real runs on the practice cluster, with a network of 100 Mbit/s between its nodes."""
    table = PREDICTIONS["of_nodes"](PREDICTIONS["SAMPLES"] / "slow_network")
    assert len(table) == 5 and table.error.abs().max() <= 0.15
    measured = table["measured, seconds"]
    assert (measured > 1.5 * table["one node, seconds"])[:3].all()  # or the network was no obstacle
    assert measured.between(table["low, seconds"], table["high, seconds"]).all()


@pytest.mark.parametrize("counts", [(1, 2, 4), (1, 2)], ids=str)
def test_a_ring_is_found_again(counts: tuple[int, ...]) -> None:
    model = scaling.fit(runs_of(ring, counts))
    low, middle, high = np.percentile(model.step_seconds(Shape(2 * counts[-1], 1, 256)), (5, 50, 95))
    truth = ring(2 * counts[-1], 256)
    assert low < truth < high
    assert abs(middle / truth - 1) < 0.05


def test_of_proportional_costs_the_first_one_counts() -> None:
    """Bytes and rounds of a single count cannot be told apart, and rounding must not choose between them."""
    shapes = np.array([Shape(devices, 1, batch) for devices in (1, 4) for batch in (64, 96)], float)
    columns = scaling._columns(shapes)
    random = np.random.default_rng(0)
    costs = np.exp(random.normal(np.log([0.01, 0.001, 0.01]), 1, (400, 3)))
    noise = np.exp(random.normal(0, 0.05, (400, len(shapes))))
    seconds = costs @ columns[:, :3].T * noise
    _, _, bytes_in_node, rounds_in_node, *_ = scaling._fit_non_negative(columns, seconds).T
    assert bytes_in_node.any() and not rounds_in_node.any()


def test_one_device_and_the_doctor_are_enough() -> None:
    """Between no overlap at all and communication that hides as well as it can."""
    doctor = [AllReduce(2, 2, bytes, 0.002 + bytes / 1e9) for bytes in (1e3, 1e6, 1e7)]
    model = scaling.fit(runs_of(ring, counts=(1,)), doctor, gradient_bytes=5e6)
    for batch in (64, 256, 1024):
        computation, communication = 0.001 + batch * 1e-4, 0.007
        low, high = np.percentile(model.step_seconds(Shape(2, 2, batch)), (5, 95))
        assert low < computation + communication
        assert high > max(computation, communication)
        assert 0.9 * max(computation, communication) < low < high < 1.1 * (computation + communication)


def test_runs_within_a_node_make_no_crossing_free() -> None:
    """An all-reduce within a node says nothing of one between nodes, for which the doctor took a second."""
    doctor = [AllReduce(2, 2, bytes, bytes / 5e6) for bytes in (1e3, 1e6, 1e7)]
    model = scaling.fit(runs_of(ring), doctor, gradient_bytes=5e6)
    assert model.step_seconds(Shape(2, 2, 64)).min() > 0.9


@pytest.mark.parametrize(
    "shape, key_words",
    [
        (Shape(2, 1, 64), ""),
        (Shape(4, 1, 64), ""),
        (Shape(8, 1, 64), "2 times the 2 device(s)"),
        (Shape(2, 2, 64), "between nodes"),
        (Shape(2, 1, 1_000_000), "far from the 64 to 1024"),
    ],
    ids=str,
)
def test_what_was_never_observed_is_not_predicted(shape: Shape, key_words: str) -> None:
    why = scaling.fit(runs_of(ring)).why_unknown(shape)
    assert key_words in why and bool(why) == bool(key_words)


def test_no_prediction_is_below_nothing() -> None:
    """Two devices that are faster than ideal leave no time for communication."""
    model = scaling.fit(runs_of(lambda n, batch: batch * 1e-4 / n))
    assert (model.step_seconds(Shape(4, 1, 256)) > 0).all()


@pytest.mark.parametrize("counts", [(1, 2), (1, 2, 4)], ids=str)
def test_rounding_changes_no_prediction(counts: tuple[int, ...]) -> None:
    """Or the answer would depend on the processor, whose last digits are its own."""
    law = {(n, batch): ring(n, batch) for n in counts for batch in (128, 512)}
    random = np.random.default_rng(1)
    seen = []
    for spread in (0, 4e-16, 4e-16, 4e-16):
        off = {shape: step * (1 + spread * random.standard_normal()) for shape, step in law.items()}
        model = scaling.fit(
            {Shape(n, 1, batch // n): [[step, 1.02 * step]] for (n, batch), step in off.items()}
        )
        seen.append(model.step_seconds(Shape(2 * counts[-1], 1, 64)))
    for other in seen[1:]:
        assert other == pytest.approx(seen[0], rel=1e-6)
