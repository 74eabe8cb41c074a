"""In what trainings differ that are no repeats of each other: the words of their records, and their rates.

The columns of `IN_WORDS` hold words, `name=value` or a name alone (training/identity.py).
"""

import math
from itertools import combinations

import pandas as pd

IN_WORDS = ("optimizer", "network", "schedule", "arguments")
# Shares of the largest learning rate. Within a configuration, whose steps are the same; between two, whose
# epochs may begin at another point of the schedule.
SAME_RATE, LIKE_RATE = 1e-3, 0.05
ON_ITS_OWN = "ReduceLROnPlateau"  # changes the rate by the losses, which differ between seeds
MOST_RATES = 4  # in words; of longer trainings only those that tell them apart


def apart(name: str, texts: list[str]) -> dict[str, str]:
    """Return for each text of a column the words that tell it from the others; "" for an empty one."""
    words = {text: text.split(" ") if text else [] for text in texts}
    of_kind: dict[str, list[set[str]]] = {}
    for text in words:
        of_kind.setdefault(_kind(name, text), []).append(set(words[text]))
    told = {}
    for text, own in words.items():
        kind = _kind(name, text)
        shared = set.intersection(*of_kind[kind])
        differ = [word for word in own if word not in shared]
        if len(of_kind) > 1 and kind:
            differ = [kind, *(word for word in differ if word != kind)]
        if name == "network":  # its digest says nothing to a person: see `structure`
            differ = [word for word in differ if not word.startswith("structure=")]
        told[text] = " ".join(_readable(name, word) for word in differ)
    return told


def structure(network: str) -> str:
    """Return the digest of a network's structure in words."""
    return f" structure {network.rpartition('=')[2]}" if network else ""


def _kind(name: str, text: str) -> str:
    """Return the class of an optimizer or a schedule: only words within a class are told from each other."""
    return text.partition(" ")[0] if name in ("optimizer", "schedule") else ""


def _readable(name: str, word: str) -> str:
    key, _, value = word.partition("=")
    if name == "network":
        return f"{value} {key}"
    return word if name == "arguments" and not word.startswith("-") else word.replace("=", " ", 1)


def split_by_rates(rows: pd.DataFrame, configuration: list[str]) -> pd.DataFrame:
    """Tell runs of a configuration apart, in the column `schedule`, whose learning rates differ.

    A Recorder need not know the schedule, and some consist of functions. Runs that have only trained for
    fewer epochs are not told apart.
    """
    known = (rows.optimizer != "") & ~rows.schedule.str.startswith(ON_ITS_OWN)
    for _, runs in rows[known].groupby(configuration):
        of_run = {run_id: _rates(run) for run_id, run in runs.groupby("run_id")}
        kinds: list[tuple[dict[int, float], list[str]]] = []  # the longest run's rates, and all runs
        for run_id in sorted(of_run, key=lambda run_id: -len(of_run[run_id])):
            rates = of_run[run_id]
            like = (kind for kind in kinds if not _differ_at(kind[0], rates, SAME_RATE))
            kind = next(like, None)
            if kind is None:
                kind = rates, []
                kinds.append(kind)
            kind[1].append(run_id)
        pairs = combinations([rates for rates, _ in kinds], 2)
        telling = {_differ_at(one, other, SAME_RATE)[0] for one, other in pairs}
        if telling:
            for rates, run_ids in kinds:
                told = f"{runs.schedule.iloc[0]} rates={_in_words(rates, telling)}".strip()
                rows.loc[rows.run_id.isin(run_ids), "schedule"] = told
    return rows


def rates_as_text(rows: pd.DataFrame) -> str:
    """Return the learning rates of the epochs of a configuration, as `1:0.1 2:0.05`.

    They are divided by its learning rate, so that those of a scaling rule are equal. "" if they follow from a
    recipe or from the losses.
    """
    if not rows.optimizer.iloc[0] or rows.schedule.iloc[0].startswith(ON_ITS_OWN):
        return ""
    lr = pd.to_numeric(rows.lr.iloc[0], errors="coerce")
    lr = lr if lr > 0 else 1.0
    return " ".join(f"{epoch}:{rate / lr:.6g}" for epoch, rate in _rates(rows).items())


def other_rates(of_one: str, of_other: str) -> bool:
    """Return whether two `rates_as_text` differ at equal epochs; False if one is unknown."""
    rates = [
        {int(epoch): float(rate) for epoch, rate in (word.split(":") for word in text.split())}
        for text in (of_one, of_other)
    ]
    if len(common := rates[0].keys() & rates[1].keys()) > 1:
        # The first step of a warm-up depends on the number of steps.
        rates = [{epoch: one[epoch] for epoch in common if epoch > 1} for one in rates]
    return bool(_differ_at(*rates, LIKE_RATE))


def _rates(rows: pd.DataFrame) -> dict[int, float]:
    return rows.groupby("epoch").learning_rate.first().to_dict()


def _differ_at(one: dict[int, float], other: dict[int, float], share: float) -> list[int]:
    """List the epochs of both in which the rates differ by more than a share of the largest one."""
    largest = max([*one.values(), *other.values()], default=math.nan)
    common = sorted(one.keys() & other.keys())
    return [epoch for epoch in common if abs(one[epoch] - other[epoch]) > share * largest]


def _in_words(rates: dict[int, float], telling: set[int]) -> str:
    if len(rates) <= MOST_RATES:
        return ",".join(f"{rate:.4g}" for _, rate in sorted(rates.items()))
    named = sorted({min(rates), *telling} & rates.keys())
    return ",".join(f"epoch-{epoch}:{rates[epoch]:.4g}" for epoch in named)
