"""How good are the predictions of how_many_gpus.py? On laws whose truth is known, and on runs.

laws    scaling laws drawn by chance, measured with noise, stragglers and missing epochs: does the 90 %
        interval hold the truth, and is the choice as good as the best?
runs    every point of recorded runs, predicted from all others
nodes   two nodes with a slow network, predicted from runs on one and the all-reduce that the doctor measured
"""

import argparse
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from manygpus import at_least, entrypoint
from manygpus.config.command_line import Parser
from manygpus.files import check_writable
from manygpus.reports import comparison
from manygpus.reports.advice.choice import (
    AS_GOOD,
    BYTES_OF_A_GRADIENT,
    INTERVAL,
    Answer,
    Constraints,
    Option,
    advise,
    interval,
    read_all_reduces,
)
from manygpus.reports.advice.run_set import RunSet, sets
from manygpus.reports.advice.scaling import Measured, Shape, fit
from manygpus.reports.page import markdown

BENCH = Path(__file__).resolve().parent
SAMPLES = BENCH.parents[1] / "results" / "sample" / "cpu-xeon-2-cores"
# A training of a law.
IMAGES = 65_536
EPOCHS = 20
START_SECONDS = 10.0
EVALUATION_SECONDS = 1.0
# Counts of devices, and global batches, that a law may be measured at.
COUNTS = ((1, 2), (1, 2, 4), (1, 2, 4, 8))
BATCHES = ((256,), (256, 1024), (128, 512, 2048), (64, 128, 256, 512, 1024, 2048))
MOST_DEVICES = max(max(counts) for counts in COUNTS)
# How likely it is that a run on several devices is lost, and that a straggler slows an epoch down.
LOST_SHARE = 0.1
STRAGGLER_SHARE = 0.05

# The seconds of a step, from devices and global batch.
StepSeconds = Callable[[int, int], float]


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laws", type=at_least(0), default=2000, metavar="N", help="default: 2000")
    parser.add_argument(
        "--out", type=Path, default=BENCH / "out", help="for the CSVs (default: tools/bench/out)"
    )
    args = parser.parse_args()
    check_writable(args.out, "the benchmark", "give a different --out.")
    tables = {"nodes": of_nodes(SAMPLES / "slow_network"), "runs": of_runs(SAMPLES / "scaling")}
    if args.laws:
        tables["laws"], tables["choices"] = of_laws(args.laws, seed=0)
    blocks = []
    for name, table in tables.items():
        table.round(4).to_csv(args.out / f"{name}.csv", index=False)
        shown = in_short(table) if name == "runs" else table
        if "law" in shown:
            # The CSV has each kind.
            shown = shown[shown.law == "all"].drop(columns="law")
        blocks.append(f"## {name}\n\n{markdown(as_texts(shown))}\n")
        print(f"\n{name}\n{as_texts(shown).to_string(index=False)}", flush=True)
    (args.out / "predictions.md").write_text("\n".join(blocks))


def as_texts(table: pd.DataFrame) -> pd.DataFrame:
    """Write shares and errors in percent, seconds in milliseconds."""
    texts = {}
    for name in table:
        if not pd.api.types.is_float_dtype(table[name]):
            texts[name] = table[name].astype(str)
        elif name.endswith("seconds"):
            texts[name.replace("seconds", "ms")] = (1000 * table[name]).map("{:.1f}".format)
        else:
            texts[f"{name}, %"] = (100 * table[name]).map("{:.1f}".format)
    return pd.DataFrame(texts)


# --- laws whose truth is known --------------------------------------------------------------------


class Law(NamedTuple):
    """How a step scales, in truth, and what kind of law that is."""

    kind: str
    step_seconds: StepSeconds

    def training_seconds(self, devices: int, batch: int) -> float:
        """Return the seconds of a whole training."""
        steps = IMAGES // batch
        return START_SECONDS + EPOCHS * (steps * self.step_seconds(devices, batch) + EVALUATION_SECONDS)

    def efficiency(self, devices: int, batch: int) -> float:
        return self.step_seconds(1, batch) / self.step_seconds(devices, batch) / devices


def of_laws(count: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Count how often the intervals hold the truth, and how often the choice is as good as the best."""
    random = np.random.default_rng(seed)
    predictions = []
    choices = []
    for _ in range(count):
        law = draw_law(random)
        runs = measure(law, random)
        if runs.devices.max() == 1:
            # All others were lost, and then there is no answer.
            continue
        measured = zip(runs.devices, runs.global_batch, strict=True)
        fastest = min(law.training_seconds(devices, batch) for devices, batch in measured)
        deadline = random.choice([None, fastest * random.uniform(1, 2)])
        constraints = Constraints(epochs=EPOCHS, deadline_s=deadline, gpus_per_node=2 * MOST_DEVICES)
        answer = advise(runs, constraints)
        for option in answer.options:
            low, _, high = np.percentile(option.images_per_s, INTERVAL)
            truth = option.global_batch / law.step_seconds(option.shape.devices, option.global_batch)
            is_beyond = option.shape.devices > runs.devices.max()
            predictions.append(
                {
                    "where": "beyond the largest count" if is_beyond else "inside the range",
                    "law": law.kind,
                    "held": low <= truth <= high,
                    "width": high / low - 1,
                }
            )
        choices.append(
            {
                "wish": "cheapest within a deadline" if deadline else "fastest",
                "law": law.kind,
                "good": is_as_good(answer, law, deadline),
            }
        )
    held = by_law(predictions, "where").agg(
        cases=("held", "size"), held=("held", "mean"), width=("width", "median")
    )
    good = by_law(choices, "wish").agg(cases=("good", "size"), good=("good", "mean"))
    return held.reset_index(), good.reset_index()


def by_law(rows: list[dict[str, object]], column: str) -> "pd.api.typing.DataFrameGroupBy":
    """Group rows by a column, for all laws and within it for each kind."""
    of_each_kind = pd.DataFrame(rows)
    of_all = of_each_kind.assign(law="all")
    return pd.concat([of_all, of_each_kind]).groupby([column, "law"])


def draw_law(random: np.random.Generator) -> Law:
    """Draw a law of one of five kinds; the last three are not of the form of the model."""
    kind = str(random.choice(["amdahl", "ring", "overlap", "crowded", "stairs"]))
    image = 10 ** random.uniform(-5, -3)
    fixed = image * random.uniform(0, 100)
    latency = image * random.uniform(0, 10)
    transfer = image * random.uniform(0, 256)
    share = random.uniform(0, 0.1)
    exponent = random.uniform(1, 6)

    def step_seconds(devices: int, batch: int) -> float:
        images = batch / devices
        computation = fixed + image * images
        communication = 2 * (devices - 1) * latency + 2 * (devices - 1) / devices * transfer
        if kind == "amdahl":
            return image * images * (1 + share * (devices - 1))
        if kind == "ring":
            return computation + communication
        if kind == "overlap":
            return (computation**exponent + communication**exponent) ** (1 / exponent)
        if kind == "crowded":
            return computation * devices ** (share / 2) + communication
        return fixed + image * 32 * math.ceil(images / 32) + communication

    return Law(kind, step_seconds)


def measure(law: Law, random: np.random.Generator) -> pd.DataFrame:
    """Make runs that follow the law, with noise, stragglers and gaps, as `comparison.load` reads them."""
    counts = COUNTS[random.integers(len(COUNTS))]
    batches = BATCHES[random.integers(len(BATCHES))]
    repeats = random.integers(1, 4)
    epochs = random.integers(2, 5)
    scatter_of_runs = random.uniform(0, 0.02)
    scatter_of_epochs = random.uniform(0.003, 0.03)
    rows = []
    for number, (devices, batch, _) in enumerate(product(counts, batches, range(repeats))):
        if random.random() < LOST_SHARE and devices > 1:
            continue
        steps = IMAGES // batch
        factor_of_run = math.exp(random.normal(0, scatter_of_runs))
        elapsed = START_SECONDS
        for epoch in range(1, epochs + 2):
            straggler = random.uniform(1.1, 1.5) if random.random() < STRAGGLER_SHARE else 1
            factor_of_epoch = math.exp(random.normal(0, scatter_of_epochs))
            seconds = steps * law.step_seconds(devices, batch) * factor_of_run * factor_of_epoch * straggler
            elapsed += seconds + EVALUATION_SECONDS
            rows.append(
                {
                    "run_id": str(number),
                    "stage": "ddp" if devices > 1 else "single",
                    "epoch": epoch,
                    "warmup": epoch == 1,
                    "devices": devices,
                    "nodes": 1,
                    "global_batch": batch,
                    "batch_per_device": batch // devices,
                    "images": steps * batch,
                    "train_seconds": seconds,
                    "images_per_s": steps * batch / seconds,
                    "unit": "images",
                    "per_sample": 1,
                    "eval_seconds": EVALUATION_SECONDS,
                    "elapsed_s": elapsed,
                    "test_accuracy": math.nan,
                    "parameters": 0,
                }
            )
    return pd.DataFrame(rows)


def is_as_good(answer: Answer, law: Law, deadline: float | None) -> bool:
    """Return whether the choice truly costs at most `AS_GOOD` more than the best of the same options."""
    least_efficiency = Constraints().min_efficiency

    def seconds(option: Option) -> float:
        return law.training_seconds(option.shape.devices, option.global_batch)

    def efficiency(option: Option) -> float:
        return law.efficiency(option.shape.devices, option.global_batch)

    def cost(option: Option) -> float:
        return option.shape.devices * seconds(option) if deadline else seconds(option)

    eligible = [option for option in answer.options if efficiency(option) >= least_efficiency]
    if deadline:
        eligible = [option for option in eligible if seconds(option) <= deadline]
    if answer.best is None or not eligible:
        return answer.best is None and not eligible
    is_late = deadline is not None and seconds(answer.best) > (1 + AS_GOOD) * deadline
    is_wasteful = efficiency(answer.best) < (1 - AS_GOOD) * least_efficiency
    least_cost = min(cost(option) for option in eligible)
    return not is_late and not is_wasteful and cost(answer.best) <= (1 + AS_GOOD) * least_cost


# --- recorded runs --------------------------------------------------------------------------------


def of_runs(folder: Path) -> pd.DataFrame:
    """Predict every measured point of each set of runs in `folder` from all others."""
    rows, _ = comparison.load([folder])
    tables = []
    for name, rows_of_set in sets(rows):
        run_set = RunSet(rows_of_set)
        for stage in run_set.stages:
            table = leave_one_out(run_set.measured(stage))
            error = table.predicted / table.seconds - 1
            tables.append(table.assign(set=name, stage=stage, error=error))
    return pd.concat(tables)


def leave_one_out(measured: Measured) -> pd.DataFrame:
    """Predict every shape from all others: `seconds`, `predicted`, and the interval, `low` to `high`."""
    rows = []
    for shape, runs in measured.items():
        others = {other: runs_of_other for other, runs_of_other in measured.items() if other != shape}
        low, middle, high = np.percentile(fit(others).step_seconds(shape), INTERVAL)
        seconds = np.median(np.concatenate(runs))
        rows.append(shape._asdict() | {"seconds": seconds, "predicted": middle, "low": low, "high": high})
    return pd.DataFrame(rows)


def in_short(table: pd.DataFrame) -> pd.DataFrame:
    """Sum up the errors of `of_runs` by their sets."""
    table = table.assign(error=table.error.abs(), within=table.seconds.between(table.low, table.high))
    by_set = table.groupby("set").agg(
        points=("error", "size"),
        median=("error", "median"),
        largest=("error", "max"),
        within=("within", "mean"),
    )
    return by_set.reset_index()


def of_nodes(folder: Path) -> pd.DataFrame:
    """Predict a step on two nodes, by the images of each, from one node and the doctor's all-reduce."""
    on_one_node, _ = comparison.load([folder / "one_node"])
    on_two_nodes, _ = comparison.load([folder / "two_nodes"])
    all_reduces, _ = read_all_reduces([folder / "two_nodes"], on_two_nodes)
    measured_on_one = RunSet(on_one_node).measured("ddp")
    measured_on_two = RunSet(on_two_nodes).measured("ddp")
    model = fit(measured_on_one, all_reduces, BYTES_OF_A_GRADIENT * on_one_node.parameters.max())
    rows = []
    for shape, runs in measured_on_two.items():
        seconds = np.median(runs)
        low, predicted, high = interval(model.step_seconds(shape))
        rows.append(
            {
                "batch of each node": shape.batch,
                "one node, seconds": np.median(measured_on_one[Shape(1, 1, shape.batch)]),
                "low, seconds": low,
                "predicted, seconds": predicted,
                "high, seconds": high,
                "measured, seconds": seconds,
                "error": predicted / seconds - 1,
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
