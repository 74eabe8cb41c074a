"""In what trainings differ that are no repeats of each other: the words of their records, and their rates.

The columns of `IN_WORDS` hold words, `name=value` or a name alone (network/training_identity.py); the
arguments of a script do so once `arguments_in_words` has read its command line.
"""

import math
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import PurePath

import pandas as pd

from manygpus.record.digest import shortened

IN_WORDS = ("optimizer", "network", "schedule", "arguments")
# Relative to the largest learning rate. The first is for runs of one configuration, whose steps are the same,
# the second for two configurations, whose epochs may begin at another point of the schedule.
SAME_RATE = 1e-3
LIKE_RATE = 0.05
# The schedule that changes the rate by the losses, which differ between seeds.
BY_LOSSES = "ReduceLROnPlateau"
# Rates of a schedule that are all named; of longer trainings only those that tell them apart.
MOST_RATES = 4

# The names of arguments in which repeats differ: which repeat it is, where its files are, and how far it
# trains, as one that is resumed with more epochs than it had.
OF_A_REPEAT = re.compile(r"(\w+_)?(seed|folder)|((num|max)_)?epochs|resume\w*|run_(id|name)|out(put)?|\w*dir")

# A row of a comparison, as `DataFrame.itertuples` gives it.
TableRow = tuple
# The learning rate of each epoch.
Rates = dict[int, float]


def arguments_in_words(line: str) -> str:
    """Return the arguments of a command line that tell a training from another, as `--dropout=0.1 --fast`.

    Those of `OF_A_REPEAT` are left out, and paths: of a file only its name counts. The order of options means
    nothing.
    """
    positional = []
    options = []
    for flag, value in _arguments(shlex.split(line)):
        name = flag.strip("-+~").lower().replace("-", "_").rpartition(".")[2]
        if OF_A_REPEAT.fullmatch(name):
            continue
        if value.startswith(("/", "./", "../")):
            path = PurePath(value)
            if not path.suffix:
                continue
            value = path.name
        value = shortened("_".join(value.split()))
        if flag:
            options.append("=".join(filter(None, [flag, value])))
        else:
            positional.append(value)
    return " ".join([*positional, *sorted(options)])


def _arguments(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value, several joined by commas, and each value that belongs to none."""
    flag = ""
    values: list[str] = []
    for word in [*words, "--"]:
        is_option = re.match(r"--?[A-Za-z]|--$", word)
        # Hydra's settings are name=value.
        is_setting = re.match(r"[+~]{0,2}[\w.@/-]+=", word)
        if not is_option and not is_setting:
            values.append(word)
            continue
        if flag:
            yield flag, ",".join(values)
        else:
            yield from (("", value) for value in values)
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
        if flag == "--":
            flag = ""


def other_arguments(row: TableRow, baseline: TableRow) -> list[str]:
    """Return the arguments in which a row and its baseline differ; none if those are different scripts.

    Arguments that give a number that the record has, as of devices, are as different as they have to be.
    """
    if row.stage != baseline.stage:
        return []
    words_of_row, words_of_baseline = set(row.arguments.split()), set(baseline.arguments.split())
    only_one = [(word, row) for word in words_of_row - words_of_baseline]
    only_one += [(word, baseline) for word in words_of_baseline - words_of_row]
    return sorted(_readable("arguments", word) for word, run in only_one if not _is_recorded(word, run))


def _is_recorded(word: str, row: TableRow) -> bool:
    """Return whether the value of an argument is a number of the run's size."""
    sizes = [row.devices, row.nodes, row.devices // row.nodes]
    sizes += [row.global_batch, row.global_batch // row.devices, row.accumulate]
    with suppress(ValueError):
        return float(word.rpartition("=")[2]) in sizes
    return False


def words_that_differ(column: str, texts: list[str]) -> dict[str, str]:
    """Return for each text of a column the words that tell it from the others; "" for an empty one."""
    words_of = {text: text.split(" ") if text else [] for text in texts}
    kinds = {_kind(column, text) for text in texts}
    differing = {}
    for text, words in words_of.items():
        kind = _kind(column, text)
        words_of_same_kind = [set(words_of[other]) for other in texts if _kind(column, other) == kind]
        shared = set.intersection(*words_of_same_kind)
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
