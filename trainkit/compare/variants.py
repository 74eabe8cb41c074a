"""In what trainings differ that are no repeats of each other: the words of their records, and their rates.

The columns of `IN_WORDS` hold words, `name=value` or a name alone (training/identity.py).
"""

import math
from dataclasses import dataclass
from itertools import combinations

import pandas as pd

IN_WORDS = ("optimizer", "network", "schedule", "arguments")
# Relative to the largest learning rate. The first is for runs of one configuration, whose steps are the same,
# the second for two configurations, whose epochs may begin at another point of the schedule.
SAME_RATE = 1e-3
LIKE_RATE = 0.05
# The schedule that changes the rate by the losses, which differ between seeds.
BY_LOSSES = "ReduceLROnPlateau"
# Rates of a schedule that are all named; of longer trainings only those that tell them apart.
MOST_RATES = 4

# The learning rate of each epoch.
Rates = dict[int, float]


def words_that_differ(column: str, texts: list[str]) -> dict[str, str]:
    """Return for each text of a column the words that tell it from the others; "" for an empty one."""
    words_of = {text: text.split(" ") if text else [] for text in texts}
    kinds = {_kind(column, text) for text in texts}
    differing = {}
    for text, words in words_of.items():
        kind = _kind(column, text)
        of_same_kind = [set(words_of[other]) for other in texts if _kind(column, other) == kind]
        shared = set.intersection(*of_same_kind)
        if len(kinds) > 1 and kind:
            # The kind itself is what differs, and comes first.
            words = [kind, *(word for word in words if word not in shared and word != kind)]
        else:
            words = [word for word in words if word not in shared]
        if column == "network":
            # The digest says nothing to a person: see `structure`.
            words = [word for word in words if not word.startswith("structure=")]
        differing[text] = " ".join(_readable(column, word) for word in words)
    return differing


def structure(network: str) -> str:
    """Return the digest of a network's structure in words."""
    return f" structure {network.rpartition('=')[2]}" if network else ""


def _kind(column: str, text: str) -> str:
    """Return the class of an optimizer or a schedule: only words within a class are told from each other."""
    return text.partition(" ")[0] if column in ("optimizer", "schedule") else ""


def _readable(column: str, word: str) -> str:
    """Return a word of a column as a person reads it, as `momentum 0.9` for `momentum=0.9`."""
    key, _, value = word.partition("=")
    if column == "network":
        return f"{value} {key}"
    if column == "arguments" and not word.startswith("-"):
        return word
    return word.replace("=", " ", 1)


@dataclass
class _RunsWithRates:
    """Runs of one configuration with the same learning rates, and the rates of the longest of them."""

    rates: Rates
    run_ids: list[str]


def split_by_rates(rows: pd.DataFrame, configuration: list[str]) -> pd.DataFrame:
    """Tell runs of a configuration apart, in the column `schedule`, whose learning rates differ.

    A Recorder need not know the schedule, and some consist of functions. Runs that have only trained for
    fewer epochs are not told apart.
    """
    known = (rows.optimizer != "") & ~rows.schedule.str.startswith(BY_LOSSES)
    for _, runs in rows[known].groupby(configuration):
        groups = _group_by_rates(runs)
        # For each pair the first epoch in which they differ.
        telling_epochs = {
            _differing_epochs(one.rates, other.rates, SAME_RATE)[0] for one, other in combinations(groups, 2)
        }
        if telling_epochs:
            for group in groups:
                rates = _rates_in_words(group.rates, telling_epochs)
                in_words = f"{runs.schedule.iloc[0]} rates={rates}".strip()
                rows.loc[rows.run_id.isin(group.run_ids), "schedule"] = in_words
    return rows


def _group_by_rates(runs: pd.DataFrame) -> list[_RunsWithRates]:
    """Group the runs of one configuration by their learning rates, the longest runs first."""
    rates_of = {run_id: _rates(run) for run_id, run in runs.groupby("run_id")}
    groups: list[_RunsWithRates] = []
    for run_id in sorted(rates_of, key=lambda run_id: -len(rates_of[run_id])):
        rates = rates_of[run_id]
        for group in groups:
            if not _differing_epochs(group.rates, rates, SAME_RATE):
                group.run_ids.append(run_id)
                break
        else:
            groups.append(_RunsWithRates(rates, [run_id]))
    return groups


def rates_as_text(rows: pd.DataFrame) -> str:
    """Return the learning rates of the epochs of a configuration, as `1:0.1 2:0.05`.

    They are divided by its learning rate, so that those of a scaling rule are equal. "" if they follow from a
    recipe or from the losses.
    """
    if not rows.optimizer.iloc[0] or rows.schedule.iloc[0].startswith(BY_LOSSES):
        return ""
    lr = pd.to_numeric(rows.lr.iloc[0], errors="coerce")
    if not lr > 0:
        lr = 1.0
    return " ".join(f"{epoch}:{rate / lr:.6g}" for epoch, rate in _rates(rows).items())


def other_rates(one: str, other: str) -> bool:
    """Return whether two `rates_as_text` differ at equal epochs; False if one is unknown."""
    rates_of_one, rates_of_other = _parse_rates(one), _parse_rates(other)
    common = rates_of_one.keys() & rates_of_other.keys()
    if len(common) > 1:
        # The first step of a warm-up depends on the number of steps.
        later = sorted(common - {1})
        rates_of_one = {epoch: rates_of_one[epoch] for epoch in later}
        rates_of_other = {epoch: rates_of_other[epoch] for epoch in later}
    return bool(_differing_epochs(rates_of_one, rates_of_other, LIKE_RATE))


def _parse_rates(text: str) -> Rates:
    rates = {}
    for word in text.split():
        epoch, rate = word.split(":")
        rates[int(epoch)] = float(rate)
    return rates


def _rates(rows: pd.DataFrame) -> Rates:
    return rows.groupby("epoch").learning_rate.first().to_dict()


def _differing_epochs(one: Rates, other: Rates, tolerance: float) -> list[int]:
    """List the epochs of both in which the rates differ by more than a share of the largest one."""
    largest = max([*one.values(), *other.values()], default=math.nan)
    common = sorted(one.keys() & other.keys())
    return [epoch for epoch in common if abs(one[epoch] - other[epoch]) > tolerance * largest]


def _rates_in_words(rates: Rates, telling_epochs: set[int]) -> str:
    if len(rates) <= MOST_RATES:
        return ",".join(f"{rates[epoch]:.4g}" for epoch in sorted(rates))
    named = {min(rates), *telling_epochs} & rates.keys()
    return ",".join(f"epoch-{epoch}:{rates[epoch]:.4g}" for epoch in sorted(named))
