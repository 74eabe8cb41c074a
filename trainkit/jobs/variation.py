"""What a sweep varies besides GPUs and batch sizes, and the words in braces that it fills in.

`--vary lr=0.1,0.01` gives an option of the script its values in turn: each stands where the arguments of the
script say `{lr}`, or behind them as `--lr VALUE` if they do not. Only the names that a sweep knows are filled
in, so that other braces, such as those of JSON or of Hydra's `${oc.env:HOME}`, reach the script as they are.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from trainkit.errors import UserError

# What a sweep knows of each run, by the names that stand in braces.
GPUS, NODES, BATCH, BATCH_PER_GPU, FOLDER = "gpus", "nodes", "batch", "batch/gpus", "folder"
# What to give instead of --vary with one of these names.
NOT_TO_VARY = {
    GPUS: "give --gpus, which takes a list",
    NODES: "give --gpus and --gpus-per-node",
    BATCH: "give --batch-size, which takes a list, and {batch} among the arguments of the script",
    BATCH_PER_GPU: "give --batch-size, a list, and {batch/gpus} among the arguments of the script",
    FOLDER: "each run has a folder of its own anyway",
}
# ${...} is of Hydra, or of a shell.
IN_BRACES = re.compile(r"(?<!\$)\{([^{}]+)\}")
# Of a value in the name of a run: a folder's name has 255 characters at most.
MOST_OF_A_VALUE = 40


class Setting(NamedTuple):
    """An option of the script and the value that a run gives it."""

    name: str
    value: str

    @property
    def label(self) -> str:
        """Return it as a part of a folder's name, as `lr0.1`."""
        word = re.sub(r"[^\w.+-]", "_", f"{self.name.rpartition('.')[2]}{self.value}")
        return word[-MOST_OF_A_VALUE:]


@dataclass(frozen=True)
class Varied:
    """An option of the script and all of its values."""

    name: str
    values: tuple[str, ...]


def varied(text: str) -> Varied:
    """Parse `NAME=VALUE,VALUE,...`: an argparse type."""
    name, _, values = text.partition("=")
    values = tuple(value.strip() for value in values.split(","))
    if not name or not all(values):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE,VALUE")
    if name in NOT_TO_VARY:
        raise argparse.ArgumentTypeError(f"{name} is known to the sweep: {NOT_TO_VARY[name]}")
    return Varied(name, values)


def combinations(options: Sequence[Varied]) -> tuple[tuple[Setting, ...], ...]:
    """Return every combination of the values.

    Raises:
        UserError: if an option is there twice.
    """
    names = [option.name for option in options]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--vary {name} is given twice: give all its values in one list.")
    settings = [[Setting(option.name, value) for value in option.values] for option in options]
    return tuple(product(*settings))


def in_braces(arguments: Sequence[str]) -> set[str]:
    """Return the names that stand in braces in the arguments."""
    return {name for argument in arguments for name in IN_BRACES.findall(argument)}


def filled(
    arguments: Sequence[str], settings: Sequence[Setting], known: Mapping[str, object]
) -> tuple[str, ...]:
    """Return the arguments of a run.

    Args:
        arguments: of all runs, with names in braces.
        settings: what the run varies; one that has no place in the arguments is added behind them.
        known: what stands for the other names.
    """
    values = {**known, **dict(settings)}
    named = in_braces(arguments)

    def value(found: re.Match[str]) -> str:
        return str(values.get(found[1], found[0]))

    words = [IN_BRACES.sub(value, argument) for argument in arguments]
    for setting in settings:
        if setting.name not in named:
            words += [f"--{setting.name}", setting.value]
    return tuple(words)
