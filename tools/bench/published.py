"""How good is how_many_gpus.py on throughputs that others measured and published?

published.json has 19 series, each with its source. Only means are published there: every epoch here has them
with a scatter of 1 %, drawn by chance.

choices      all counts are shown: is there a measured option that is at least 1.3 times as fast as the
             recommended one, for at most 15 % more GPU-hours?
predictions  the largest count, from all others; twice a count within a node, from it and one GPU; four nodes,
             from up to two: does the 90 % interval hold what was published?
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from predictions import as_texts

from trainkit.advice.advice import INTERVAL, RunSet, advise
from trainkit.advice.constraints import Constraints
from trainkit.advice.scaling import Shape, fit
from trainkit.compare.text import markdown
from trainkit.runtime import errors
from trainkit.runtime.command_line import Parser
from trainkit.runtime.errors import UserError
from trainkit.runtime.files import check_writable

HERE = Path(__file__).resolve().parent
SERIES = json.loads((HERE / "published.json").read_text())
SCATTER, EPOCHS = 0.01, 4  # the first is a warm-up
FASTER, DEARER = 1.3, 1.15
SECONDS = 3_600  # of an epoch at the lowest speed


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="for the tables (default: tools/bench/out)"
    )
    out = parser.parse_args().out
    check_writable(out, "the benchmark", "give another --out.")
    tables = {"choices": choices(), "predictions": predictions()}
    for name, table in tables.items():
        table.round(4).to_csv(out / f"published_{name}.csv", index=False)
    shown = as_texts(in_short(tables["predictions"]))
    (out / "published.md").write_text(markdown(shown) + "\n")
    print(f"{tables['choices'].to_string(index=False)}\n\n{shown.to_string(index=False)}")


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
        runs = as_runs(series)
        for question, asked, shown in questions(series["points"]):
            numbers = [str(number) for number, point in enumerate(series["points"]) if point in shown]
            rows.append({"question": question, "series": series["name"]} | predict(runs, numbers, asked))
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


def predict(runs: pd.DataFrame, shown: list[str], asked: dict) -> dict[str, object]:
    """Predict the throughput of one point from the runs that are shown."""
    shape = Shape(asked["gpus"], asked["nodes"], asked["batch_per_gpu"])
    try:
        run_set = RunSet(runs[runs.run_id.isin(shown)], Constraints(epochs=EPOCHS))
    except UserError:
        return {"predicted": False}
    model = fit(run_set.measured("ddp"), [], 4 * int(runs.parameters.max()))
    if model.unknown(shape):
        return {"predicted": False}
    speeds = shape.devices * shape.batch / model.step_seconds(shape)
    low, middle, high = np.percentile(speeds, INTERVAL)
    return {
        "predicted": True,
        "error": middle / asked["throughput"] - 1,
        "held": low <= asked["throughput"] <= high,
        "width": high / low - 1,
    }


def in_short(table: pd.DataFrame) -> pd.DataFrame:
    """Sum up each question: how many points were predicted, how well, and how many refused."""
    known = table[table.predicted]
    known = known.assign(error=known.error.abs(), held=known.held == 1)
    short = known.groupby("question").agg(
        points=("error", "size"), median_error=("error", "median"), held=("held", "mean"),
        median_width=("width", "median"),
    )  # fmt: skip
    short["refused"] = (~table.predicted).groupby(table.question).sum()
    return short.rename(columns=lambda name: name.replace("_", " ")).reset_index()


if __name__ == "__main__":
    errors.run(main)
