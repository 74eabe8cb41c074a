"""How good is how_many_gpus.py on throughputs that others measured and published?

published.json has 19 series, each with its source. Only means are published there: every epoch here has them
with a scatter of 1 %, drawn by chance.

choices      all counts are shown: is there a measured option that is at least 1.3 times as fast as the
             recommended one, for at most 15 % more GPU-hours?
predictions  the largest count, from all others; twice a count within a node, from it and one GPU; four nodes,
             from up to two: does the 90 % interval hold what was published? Every third series also stands
             apart.
calibration  the cheapest within a deadline, of what the questions of `predictions` show and leave out: how
             often is a choice right of which it was so sure?
"""

import argparse
import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from predictions import as_texts

from manygpus import UserError, entrypoint
from manygpus.config.command_line import Parser
from manygpus.files import check_writable
from manygpus.reports.advice.choice import (
    AS_GOOD,
    BYTES_OF_A_GRADIENT,
    INTERVAL,
    Constraints,
    advise,
    choose,
    predict_option,
)
from manygpus.reports.advice.run_set import RunSet
from manygpus.reports.advice.scaling import Scaling, Shape, fit
from manygpus.reports.page import markdown

BENCH = Path(__file__).resolve().parent
SERIES = json.loads((BENCH / "published.json").read_text())
# Relative, of the throughputs of the epochs.
SCATTER = 0.01
# The first is a warm-up.
EPOCHS = 4
# A point is clearly better if it is so many times as fast, for at most so many times the GPU-hours.
TIMES_AS_FAST = 1.3
TIMES_AS_DEAR = 1.15
# Of an epoch at the lowest speed.
EPOCH_SECONDS = 3_600
# As many times the seconds of the fastest published point.
DEADLINES = (1.1, 2, 4)
APART = {series["name"] for series in SERIES[::3]}


class Question(NamedTuple):
    """A point of a series that is asked for, and the points that are shown."""

    name: str
    asked: dict
    shown: list[dict]


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=BENCH / "out", help="for the tables (default: tools/bench/out)"
    )
    out = parser.parse_args().out
    check_writable(out, "the benchmark", "give a different --out.")
    tables = {"choices": choices(), "predictions": predictions(), "calibration": calibration()}
    for name, table in tables.items():
        table.round(4).to_csv(out / f"published_{name}.csv", index=False)
    print(tables["choices"].to_string(index=False))
    shown = {
        "predictions": in_short(tables["predictions"]),
        "calibration": by_sureness(tables["calibration"]),
    }
    for name, table in shown.items():
        texts = as_texts(table)
        (out / f"{name}.md").write_text(markdown(texts) + "\n")
        print(f"\n{name}\n{texts.to_string(index=False)}")


def as_runs(series: dict) -> pd.DataFrame:
    """Make runs that have the published throughputs, as `comparison.load` reads them."""
    random = np.random.default_rng(0)
    points = series["points"]
    images = EPOCH_SECONDS * min(point["throughput"] for point in points)
    rows = []
    for number, point in enumerate(points):
        gpus = point["gpus"]
        batch = gpus * point["batch_per_gpu"]
        steps = max(int(images // batch), 1)
        elapsed = 0.0
        for epoch in range(1, EPOCHS + 1):
            throughput = point["throughput"] * math.exp(random.normal(0, SCATTER))
            seconds = steps * batch / throughput
            elapsed += seconds
            rows.append(
                {
                    "run_id": str(number),
                    "stage": "ddp" if gpus > 1 else "single",
                    "epoch": epoch,
                    "warmup": epoch == 1,
                    "devices": gpus,
                    "nodes": point["nodes"],
                    "global_batch": batch,
                    "batch_per_device": point["batch_per_gpu"],
                    "images": steps * batch,
                    "train_seconds": seconds,
                    "images_per_s": throughput,
                    "unit": "images",
                    "per_sample": 1,
                    "eval_seconds": 0.0,
                    "elapsed_s": elapsed,
                    "test_accuracy": math.nan,
                    "parameters": series["parameters"],
                }
            )
    return pd.DataFrame(rows)


def choices(all_series: list[dict] = SERIES) -> pd.DataFrame:
    """Ask for a number of GPUs of every series, and look for a measured option that is clearly better."""
    rows = []
    for series in all_series:
        answer = advise(as_runs(series), Constraints(epochs=EPOCHS))
        best = answer.best
        row = {
            "series": series["name"],
            "asked for": best.shape.devices if best else 0,
            "sure": answer.sure,
        }
        if best:
            throughput = float(np.median(best.images_per_s))
            gpu_seconds = best.shape.devices / throughput
            row["times as fast"] = 1.0
            for point in series["points"]:
                times_as_fast = point["throughput"] / throughput
                times_as_dear = point["gpus"] / point["throughput"] / gpu_seconds
                if times_as_fast >= TIMES_AS_FAST and times_as_dear <= TIMES_AS_DEAR:
                    row["times as fast"] = max(row["times as fast"], times_as_fast)
        rows.append(row)
    return pd.DataFrame(rows)


def predictions() -> pd.DataFrame:
    """Predict points of every series from some of its others."""
    rows = []
    for series in SERIES:
        points = series["points"]
        for question in questions(points):
            row = {"question": question.name, "series": series["name"]}
            rows.append(row | predict(series["name"], numbers_of(question.shown, points), question.asked))
    return pd.DataFrame(rows)


def questions(points: list[dict]) -> Iterator[Question]:
    """Ask for the points of a series."""
    counts = {point["gpus"] for point in points}
    for asked in points:
        gpus = asked["gpus"]
        if gpus == max(counts) and len(counts) > 2:
            yield Question("the largest count", asked, [point for point in points if point["gpus"] < gpus])
        half = gpus // 2
        if asked["nodes"] == 1 and half > 1 and half in counts:
            yield Question("twice a count", asked, [point for point in points if point["gpus"] in (1, half)])
        if asked["nodes"] == 4 and any(point["nodes"] == 2 for point in points):
            yield Question("four nodes", asked, [point for point in points if point["nodes"] <= 2])


def numbers_of(shown: list[dict], points: list[dict]) -> tuple[int, ...]:
    """Return the numbers of points in their series."""
    return tuple(points.index(point) for point in shown)


def predict(series: str, shown: tuple[int, ...], asked: dict) -> dict[str, object]:
    """Predict the throughput of one point of a series from the points that are shown, by their numbers."""
    shape = shape_of(asked)
    try:
        model = fit_to(series, shown)
    except UserError:
        return {"predicted": False}
    if model.why_unknown(shape):
        return {"predicted": False}
    throughputs = shape.global_batch / model.step_seconds(shape)
    low, middle, high = np.percentile(throughputs, INTERVAL)
    return {
        "predicted": True,
        "error": middle / asked["throughput"] - 1,
        "held": low <= asked["throughput"] <= high,
        "width": high / low - 1,
    }


def shape_of(point: dict) -> Shape:
    return Shape(devices=point["gpus"], nodes=point["nodes"], batch=point["batch_per_gpu"])


def runs_shown(runs: pd.DataFrame, shown: tuple[int, ...]) -> RunSet:
    """Return the runs of these points, by their numbers."""
    return RunSet(runs[runs.run_id.isin(map(str, shown))], epochs=EPOCHS)


@cache
def fit_to(name: str, shown: tuple[int, ...]) -> Scaling:
    """Fit the model to these points of a series; each question is asked of several."""
    (series,) = (series for series in SERIES if series["name"] == name)
    runs = as_runs(series)
    gradient_bytes = BYTES_OF_A_GRADIENT * int(runs.parameters.max())
    return fit(runs_shown(runs, shown).measured("ddp"), [], gradient_bytes)


def in_short(table: pd.DataFrame) -> pd.DataFrame:
    """Sum up each question: how many points were predicted, how well, and how many refused."""
    is_apart = table.series.isin(APART)
    groups = {"all 19": table, "12 of them": table[~is_apart], "the 7 others": table[is_apart]}
    table = pd.concat([group.assign(series=name) for name, group in groups.items()])
    table = table.assign(error=table.error.abs(), held=table.held == 1, refused=~table.predicted)
    question_and_series = ["question", "series"]
    short = (
        table[table.predicted]
        .groupby(question_and_series, sort=False)
        .agg(
            points=("error", "size"),
            median_error=("error", "median"),
            held=("held", "mean"),
            median_width=("width", "median"),
        )
    )
    short["refused"] = table.groupby(question_and_series).refused.sum()
    return short.rename(columns=lambda name: name.replace("_", " ")).reset_index()


def calibration() -> pd.DataFrame:
    """Choose the cheapest point within a deadline, from what each question shows and predictions of the rest.

    A choice is right that keeps the deadline and costs no more than the best, both within 5 %.
    """
    rows = []
    for series in SERIES:
        points = series["points"]
        runs = as_runs(series)
        images = EPOCHS * runs.images.max()
        true_seconds = {shape_of(point): images / point["throughput"] for point in points}
        all_shown = {numbers_of(question.shown, points) for question in questions(points)}
        for shown, factor in product(sorted(all_shown), DEADLINES):
            deadline = factor * min(true_seconds.values())
            constraints = Constraints(epochs=EPOCHS, deadline_s=deadline, min_efficiency=0)
            model = fit_to(series["name"], shown)
            run_set = runs_shown(runs, shown)
            options = [
                predict_option(run_set, "ddp", shape, model)
                for shape in true_seconds
                if not model.why_unknown(shape)
            ]
            choice = choose(options, constraints)
            if choice.best:
                chosen = choice.best.shape
                gpu_seconds = {
                    option.shape: option.shape.devices * true_seconds[option.shape]
                    for option in options
                    if true_seconds[option.shape] <= deadline
                }
                least = min(gpu_seconds.values(), default=math.inf)
                is_in_time = true_seconds[chosen] <= (1 + AS_GOOD) * deadline
                is_cheap = chosen.devices * true_seconds[chosen] <= (1 + AS_GOOD) * least
                rows.append({"series": series["name"], "sure": choice.sure, "right": is_in_time and is_cheap})
    return pd.DataFrame(rows)


def by_sureness(table: pd.DataFrame) -> pd.DataFrame:
    """Count the choices that were so sure, and how many of them were right."""
    limits = [0, 50, 70, 90, 100]
    labels = [f"{low} to {high} of 100" for low, high in pairwise(limits)]
    # The last one includes 100.
    sure = pd.cut(100 * table.sure, [*limits[:-1], math.inf], labels=labels, right=False)
    by_label = table.groupby(sure, observed=True).agg(choices=("right", "size"), right=("right", "mean"))
    return by_label.reset_index()


if __name__ == "__main__":
    main()
