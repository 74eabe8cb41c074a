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

import numpy as np
import pandas as pd

from trainkit import errors
from trainkit.advice.advice import (  # fmt: skip
    AS_GOOD,
    INTERVAL,
    Answer,
    Constraints,
    Option,
    RunSet,
    advise,
    all_reduces,
    interval,
    sets,
)
from trainkit.advice.scaling import Measured, Shape, fit
from trainkit.compare import comparison
from trainkit.compare.page import markdown
from trainkit.config.command_line import Parser, at_least
from trainkit.files import check_writable

HERE = Path(__file__).resolve().parent
SAMPLES = HERE.parents[1] / "results" / "sample" / "cpu-xeon-2-cores"
IMAGES, EPOCHS = 65_536, 20
START_SECONDS, EVALUATION_SECONDS = 10.0, 1.0
COUNTS = ((1, 2), (1, 2, 4), (1, 2, 4, 8))
BATCHES = ((256,), (256, 1024), (128, 512, 2048), (64, 128, 256, 512, 1024, 2048))
Law = Callable[[int, int], float]  # seconds of a step, from devices and global batch


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laws", type=at_least(0), default=2000, metavar="N", help="default: 2000")
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="for the CSVs (default: tools/bench/out)"
    )
    args = parser.parse_args()
    check_writable(args.out, "the benchmark", "give another --out.")
    tables = {"nodes": of_nodes(SAMPLES / "slow_network"), "runs": of_runs(SAMPLES / "scaling")}
    if args.laws:
        tables["laws"], tables["choices"] = of_laws(args.laws, seed=0)
    page = []
    for name, table in tables.items():
        table.round(4).to_csv(args.out / f"{name}.csv", index=False)
        shown = in_short(table) if name == "runs" else table
        if "law" in shown:  # the CSV has each kind
            shown = shown[shown.law == "all"].drop(columns="law")
        page.append(f"## {name}\n\n{markdown(as_texts(shown))}\n")
        print(f"\n{name}\n{as_texts(shown).to_string(index=False)}", flush=True)
    (args.out / "predictions.md").write_text("\n".join(page))


def as_texts(table: pd.DataFrame) -> pd.DataFrame:
    """Write shares and errors in percent, seconds in milliseconds."""
    texts = table.astype(object)
    for name in table.select_dtypes("float"):
        milliseconds = name.endswith("seconds")
        number = 1000 * table[name] if milliseconds else 100 * table[name]
        texts[name] = number.map("{:.1f}".format)
        texts = texts.rename(columns={name: name.replace("seconds", "ms") if milliseconds else f"{name}, %"})
    return texts.astype(str)


# --- laws whose truth is known --------------------------------------------------------------------


def of_laws(count: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Count how often the intervals hold the truth, and how often the choice is as good as the best."""
    random, held, choices = np.random.default_rng(seed), [], []
    for _ in range(count):
        kind, law = draw_law(random)
        runs = measure(law, random)
        if runs.devices.max() == 1:
            continue  # all others were lost, and then there is no answer
        fastest = min(
            true_seconds(law, *shape) for shape in zip(runs.devices, runs.global_batch, strict=True)
        )
        deadline = random.choice([None, fastest * random.uniform(1, 2)])
        answer = advise(
            runs, Constraints(epochs=EPOCHS, deadline_s=deadline, gpus_per_node=2 * max(map(max, COUNTS)))
        )
        for option in answer.options:
            low, _, high = np.percentile(option.images_per_s, INTERVAL)
            true = option.global_batch / law(option.shape.devices, option.global_batch)
            beyond = option.shape.devices > runs.devices.max()
            where = "beyond the largest count" if beyond else "inside the range"
            held.append({"where": where, "law": kind, "held": low <= true <= high, "width": high / low - 1})
        wish = "cheapest within a deadline" if deadline else "fastest"
        choices.append({"wish": wish, "law": kind, "good": is_as_good(answer, law, deadline)})
    return _shares(held, "where", "held", width="median"), _shares(choices, "wish", "good")


def _shares(found: list[dict], by: str, what: str, **also: str) -> pd.DataFrame:
    """Count each group, and within it each kind of law: how many there are, and the share that holds."""
    table, how = pd.DataFrame(found), {"cases": (what, "size"), what: (what, "mean")}
    how |= {name: (name, kind) for name, kind in also.items()}
    every = table.assign(law="all")
    return pd.concat([every, table]).groupby([by, "law"]).agg(**how).reset_index()


def draw_law(random: np.random.Generator) -> tuple[str, Law]:
    """Draw a law of one of five kinds; the last two are none of the models'."""
    kind = str(random.choice(["amdahl", "ring", "overlap", "crowded", "stairs"]))
    image = 10 ** random.uniform(-5, -3)
    fixed, latency = image * random.uniform(0, 100), image * random.uniform(0, 10)
    transfer, share, g = image * random.uniform(0, 256), random.uniform(0, 0.1), random.uniform(1, 6)

    def law(devices: int, batch: int) -> float:
        each = batch / devices
        computation = fixed + image * each
        exchange = 2 * (devices - 1) * latency + 2 * (devices - 1) / devices * transfer
        return {
            "amdahl": image * each * (1 + share * (devices - 1)),
            "ring": computation + exchange,
            "overlap": (computation**g + exchange**g) ** (1 / g),
            "crowded": computation * devices ** (share / 2) + exchange,
            "stairs": fixed + image * 32 * math.ceil(each / 32) + exchange,
        }[kind]

    return kind, law


def measure(law: Law, random: np.random.Generator) -> pd.DataFrame:
    """Make runs that follow the law, with noise, stragglers and gaps, as `comparison.load` reads them."""
    counts, batches = COUNTS[random.integers(len(COUNTS))], BATCHES[random.integers(len(BATCHES))]
    repeats, epochs = random.integers(1, 4), random.integers(2, 5)
    of_runs, of_epochs = random.uniform(0, 0.02), random.uniform(0.003, 0.03)
    rows = []
    for number, (devices, batch, _) in enumerate(product(counts, batches, range(repeats))):
        if random.random() < 0.1 and devices > 1:  # this run was lost
            continue
        steps, slower, elapsed = IMAGES // batch, math.exp(random.normal(0, of_runs)), START_SECONDS
        for epoch in range(1, epochs + 2):
            straggler = random.uniform(1.1, 1.5) if random.random() < 0.05 else 1
            seconds = steps * law(devices, batch) * slower * math.exp(random.normal(0, of_epochs)) * straggler
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
                    "eval_seconds": EVALUATION_SECONDS,
                    "elapsed_s": elapsed,
                    "test_accuracy": math.nan,
                    "parameters": 0,
                }
            )
    return pd.DataFrame(rows)


def true_seconds(law: Law, devices: int, batch: int) -> float:
    """Return the seconds of a whole training."""
    return START_SECONDS + EPOCHS * (IMAGES // batch * law(devices, batch) + EVALUATION_SECONDS)


def is_as_good(answer: Answer, law: Law, deadline: float | None) -> bool:
    """Return whether the choice truly costs at most `AS_GOOD` more than the best of the same options."""

    def seconds(option: Option) -> float:
        return true_seconds(law, option.shape.devices, option.global_batch)

    def efficiency(option: Option) -> float:
        devices, batch = option.shape.devices, option.global_batch
        return law(1, batch) / law(devices, batch) / devices

    def cost(option: Option) -> float:
        return seconds(option) * (option.shape.devices if deadline else 1)

    eligible = [option for option in answer.options if efficiency(option) >= Constraints().min_efficiency]
    eligible = [option for option in eligible if not deadline or seconds(option) <= deadline]
    if answer.best is None or not eligible:
        return answer.best is None and not eligible
    late = deadline is not None and seconds(answer.best) > (1 + AS_GOOD) * deadline
    wasteful = efficiency(answer.best) < (1 - AS_GOOD) * Constraints().min_efficiency
    return not late and not wasteful and cost(answer.best) <= (1 + AS_GOOD) * min(map(cost, eligible))


# --- recorded runs --------------------------------------------------------------------------------


def of_runs(folder: Path) -> pd.DataFrame:
    """Predict every measured point of each set of runs in `folder` from all others."""
    rows, _ = comparison.load([folder])
    tables = []
    for what, runs in sets(rows):
        run_set = RunSet(runs, Constraints())
        for stage in run_set.stages:
            table = leave_one_out(run_set.measured(stage))
            tables.append(table.assign(set=what, stage=stage, error=table.predicted / table.seconds - 1))
    return pd.concat(tables)


def leave_one_out(measured: Measured) -> pd.DataFrame:
    """Predict every shape from all others: `seconds`, `predicted`, and the interval, `low` to `high`."""
    rows = []
    for shape, runs in measured.items():
        others = {other: runs for other, runs in measured.items() if other != shape}
        low, middle, high = np.percentile(fit(others).step_seconds(shape), INTERVAL)
        seconds = np.median(np.concatenate(runs))
        rows.append({**shape._asdict(), "seconds": seconds, "predicted": middle, "low": low, "high": high})
    return pd.DataFrame(rows)


def in_short(table: pd.DataFrame) -> pd.DataFrame:
    """Sum up the errors of `of_runs` by their sets."""
    table = table.assign(error=table.error.abs(), within=table.seconds.between(table.low, table.high))
    by_set = table.groupby("set")
    return by_set.agg(
        points=("error", "size"),
        median=("error", "median"),
        largest=("error", "max"),
        within=("within", "mean"),
    ).reset_index()


def of_nodes(folder: Path) -> pd.DataFrame:
    """Predict a step on two nodes, by the images of each, from one node and the doctor's all-reduce."""
    one, two = (comparison.load([folder / name])[0] for name in ("one_node", "two_nodes"))
    doctor, _ = all_reduces([folder / "two_nodes"], two)
    alone, together = (RunSet(rows, Constraints()).measured("ddp") for rows in (one, two))
    gradient_bytes = 4 * one.parameters.max()
    model = fit(alone, doctor, gradient_bytes)
    rows = []
    for shape, runs in together.items():
        seconds = np.median(runs)
        low, predicted, high = interval(model.step_seconds(shape))
        rows.append(
            {
                "batch of each node": shape.batch,
                "one node, seconds": np.median(alone[Shape(1, 1, shape.batch)]),
                "low, seconds": low,
                "predicted, seconds": predicted,
                "high, seconds": high,
                "measured, seconds": seconds,
                "error": predicted / seconds - 1,
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    errors.run(main)
