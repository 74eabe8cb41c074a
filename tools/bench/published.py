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

import numpy as np
import pandas as pd
from predictions import as_texts

from trainkit import errors
from trainkit.advice.advice import AS_GOOD, INTERVAL, RunSet, advise, choose
from trainkit.advice.constraints import Constraints
from trainkit.advice.scaling import Scaling, Shape, fit
from trainkit.compare.page import markdown
from trainkit.config.command_line import Parser
from trainkit.errors import UserError
from trainkit.files import check_writable

HERE = Path(__file__).resolve().parent
SERIES = json.loads((HERE / "published.json").read_text())
SCATTER, EPOCHS = 0.01, 4  # the first is a warm-up
FASTER, DEARER = 1.3, 1.15
SECONDS = 3_600  # of an epoch at the lowest speed
DEADLINES = (1.1, 2, 4)  # times the seconds of the fastest published point
APART = {series["name"] for series in SERIES[::3]}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="for the tables (default: tools/bench/out)"
    )
    out = parser.parse_args().out
    check_writable(out, "the benchmark", "give another --out.")
    tables = {"choices": choices(), "predictions": predictions(), "calibration": calibration()}
    for name, table in tables.items():
        table.round(4).to_csv(out / f"published_{name}.csv", index=False)
    print(tables.pop("choices").to_string(index=False))
    for name, table in tables.items():
        shown = as_texts(in_short(table) if name == "predictions" else by_sureness(table))
        (out / f"{name}.md").write_text(markdown(shown) + "\n")
        print(f"\n{name}\n{shown.to_string(index=False)}")


def as_runs(series: dict) -> pd.DataFrame:
    """Make runs that have the published throughputs, as `comparison.load` reads them."""
    random = np.random.default_rng(0)
    points = series["points"]
    images = SECONDS * min(point["throughput"] for point in points)
    rows = []
    for number, point in enumerate(points):
        gpus, batch = point["gpus"], point["gpus"] * point["batch_per_gpu"]
        steps, elapsed = max(int(images // batch), 1), 0.0
        for epoch in range(1, EPOCHS + 1):
            speed = point["throughput"] * math.exp(random.normal(0, SCATTER))
            elapsed += steps * batch / speed
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
                    "train_seconds": steps * batch / speed,
                    "images_per_s": speed,
                    "eval_seconds": 0.0,
                    "elapsed_s": elapsed,
                    "test_accuracy": math.nan,
                    "parameters": series["parameters"],
                }
            )
    return pd.DataFrame(rows)


def choices(every: list[dict] = SERIES) -> pd.DataFrame:
    """Ask for a number of GPUs of every series, and look for a measured option that is clearly better."""
    rows = []
    for series in every:
        answer = advise(as_runs(series), Constraints(epochs=EPOCHS))
        best, points = answer.best, series["points"]
        row = {"series": series["name"], "asked for": best.shape.devices if best else 0, "sure": answer.sure}
        if best:
            speed = float(np.median(best.images_per_s))
            better = [
                point["throughput"] / speed
                for point in points
                if point["throughput"] >= FASTER * speed
                and point["gpus"] / point["throughput"] <= DEARER * best.shape.devices / speed
            ]
            row["times as fast"] = max(better, default=1.0)
        rows.append(row)
    return pd.DataFrame(rows)


def predictions() -> pd.DataFrame:
    """Predict points of every series from some of its others."""
    rows = []
    for series in SERIES:
        for question, asked, shown in questions(series["points"]):
            numbers = tuple(map(series["points"].index, shown))
            rows.append(
                {"question": question, "series": series["name"]} | predict(series["name"], numbers, asked)
            )
    return pd.DataFrame(rows)


def questions(points: list[dict]) -> Iterator[tuple[str, dict, list[dict]]]:
    """Name each question with the point that is asked for and those that are shown."""
    counts = {point["gpus"] for point in points}
    for asked in points:
        if asked["gpus"] == max(counts) and len(counts) > 2:
            yield "the largest count", asked, [point for point in points if point["gpus"] < asked["gpus"]]
        half = asked["gpus"] // 2
        if asked["nodes"] == 1 and half > 1 and half in counts:
            yield "twice a count", asked, [point for point in points if point["gpus"] in (1, half)]
        if asked["nodes"] == 4 and any(point["nodes"] == 2 for point in points):
            yield "four nodes", asked, [point for point in points if point["nodes"] <= 2]


def predict(series: str, shown: tuple[int, ...], asked: dict) -> dict[str, object]:
    """Predict the throughput of one point of a series from the points that are shown, by their numbers."""
    shape = shape_of(asked)
    try:
        model = fit_to(series, shown)
    except UserError:
        return {"predicted": False}
    if model.why_unknown(shape):
        return {"predicted": False}
    speeds = shape.devices * shape.batch / model.step_seconds(shape)
    low, middle, high = np.percentile(speeds, INTERVAL)
    return {
        "predicted": True,
        "error": middle / asked["throughput"] - 1,
        "held": low <= asked["throughput"] <= high,
        "width": high / low - 1,
    }


def shape_of(point: dict) -> Shape:
    return Shape(point["gpus"], point["nodes"], point["batch_per_gpu"])


@cache
def fit_to(name: str, shown: tuple[int, ...]) -> Scaling:
    """Fit the models to these points of a series; each question is asked of several."""
    (series,) = (one for one in SERIES if one["name"] == name)
    runs = as_runs(series)
    run_set = RunSet(runs[runs.run_id.isin(map(str, shown))], Constraints(epochs=EPOCHS))
    return fit(run_set.measured("ddp"), [], 4 * int(runs.parameters.max()))


def in_short(table: pd.DataFrame) -> pd.DataFrame:
    """Sum up each question: how many points were predicted, how well, and how many refused."""
    apart = table[table.series.isin(APART)]
    tables = {"all 19": table, "12 of them": table.drop(apart.index), "the 7 others": apart}
    table = pd.concat([part.assign(series=name) for name, part in tables.items()])
    table = table.assign(error=table.error.abs(), held=table.held == 1, refused=~table.predicted)
    known, by = table[table.predicted], ["question", "series"]
    short = known.groupby(by, sort=False).agg(
        points=("error", "size"), median_error=("error", "median"), held=("held", "mean"),
        median_width=("width", "median"),
    )  # fmt: skip
    short["refused"] = table.groupby(by).refused.sum()
    return short.rename(columns=lambda name: name.replace("_", " ")).reset_index()


def calibration() -> pd.DataFrame:
    """Choose the cheapest point within a deadline, from what each question shows and predictions of the rest.

    A choice is right that keeps the deadline and costs no more than the best, both within 5 %.
    """
    rows = []
    for series in SERIES:
        points, runs = series["points"], as_runs(series)
        truth = {shape_of(point): EPOCHS * runs.images.max() / point["throughput"] for point in points}
        asked = {tuple(map(points.index, shown)) for _, _, shown in questions(points)}
        for shown, times in product(sorted(asked), DEADLINES):
            limit = times * min(truth.values())
            constraints = Constraints(epochs=EPOCHS, deadline_s=limit, min_efficiency=0)
            run_set = RunSet(runs[runs.run_id.isin(map(str, shown))], constraints)
            model = fit_to(series["name"], shown)
            options = [run_set.option("ddp", shape, model) for shape in truth if not model.why_unknown(shape)]
            best = choose(options, constraints)
            if best.best:
                hours = {
                    o.shape: truth[o.shape] * o.shape.devices for o in options if truth[o.shape] <= limit
                }
                taken = best.best.shape
                right = truth[taken] <= (1 + AS_GOOD) * limit
                right &= truth[taken] * taken.devices <= (1 + AS_GOOD) * min(hours.values(), default=math.inf)
                rows.append({"series": series["name"], "sure": best.sure, "right": right})
    return pd.DataFrame(rows)


def by_sureness(table: pd.DataFrame) -> pd.DataFrame:
    """Count the choices that were so sure, and how many of them were right."""
    ends = [0, 50, 70, 90, 100]
    labels = [f"{low} to {high} of 100" for low, high in pairwise(ends)]
    sure = pd.cut(100 * table.sure, [*ends[:-1], math.inf], labels=labels, right=False)
    return (
        table.groupby(sure, observed=True)
        .agg(choices=("right", "size"), right=("right", "mean"))
        .reset_index()
    )


if __name__ == "__main__":
    errors.run(main)
