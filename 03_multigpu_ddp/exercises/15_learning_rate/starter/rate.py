"""Recorded trainings, beside the learning rates of two rules and a warm-up. Fill in the three gaps.

Try: python exercises/15_learning_rate/mine/rate.py SGD 1024
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

BASE_BATCH = 64
BASE_LR = {"SGD": 0.02, "AdamW": 0.001, "Adadelta": 1.0}  # good at a global batch of 64
RECORDED = Path(__file__).parents[4] / "results/sample/h100/one_gpu/learning_rate.csv"


def scaled(lr: float, rule: str, batch_per_rank: int, ranks: int) -> float:
    """Return the learning rate by the rule `none`, `linear` or `sqrt`; `lr` is for a global batch of 64."""
    if rule == "linear":
        return lr  # gap
    if rule == "sqrt":
        return lr  # gap
    return lr


def warmed_up(lr: float, step: int, warmup_steps: int) -> float:
    """Return the learning rate of step 1, 2, 3, ..., which rises by the same amount in each step.

    It is `lr` at step `warmup_steps`, and stays `lr` afterwards.
    """
    return lr  # gap


def main(optimizer: str, batch: int) -> None:
    """Print a line for each rule and warm-up, with the accuracies of all seeds."""
    accuracies = defaultdict(list)
    with RECORDED.open() as file:
        for row in csv.DictReader(file):
            if row["optimizer"] == optimizer and row["batch"] == str(batch):
                warmup = (row["rule"], int(row["warmup_updates"]), row["warmup"])
                accuracies[warmup].append(float(row["accuracy"]))
                updates = row["updates"]
    print(f"{optimizer}, global batch {batch}: {updates} updates in five epochs of 20,000 images")
    print("rule   learning rate   of update 1   warm-up                  accuracy (%) of each seed")
    for (rule, steps, name), seeds in sorted(accuracies.items()):
        lr = scaled(BASE_LR[optimizer], rule, BASE_BATCH, batch // BASE_BATCH)
        first = warmed_up(lr, 1, steps)
        warmup = f"{steps} updates" if "updates" in name else f"{steps} updates = {name}"
        listed = "  ".join(f"{accuracy:5.2f}" for accuracy in seeds)
        print(f"{rule:6} {lr:13.4g} {first:13.2g}   {warmup:22}   {listed}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("optimizer", choices=BASE_LR)
    parser.add_argument("batch", type=int, choices=(64, 256, 1024, 4096), help="the global batch")
    opts = parser.parse_args()
    main(opts.optimizer, opts.batch)
