"""What a sweep varies besides GPUs and batch sizes, and the words in braces that it fills in.

`--vary lr=0.1,0.01` gives an option of the script its values in turn: each stands where the arguments of the
script say `{lr}`, or behind them as `--lr VALUE` if they do not. `--vary ema=--use-ema,` varies a flag: an
empty value leaves out the word `{ema}`. Only the names that a sweep knows are filled in, so that other
braces, such as those of JSON or of Hydra's `${oc.env:HOME}`, reach the script as they are.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from manygpus.errors import UserError

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
OPENING, CLOSING, QUOTES = "([{", ")]}", "\"'"
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
class VariedOption:
    """An option of the script and all of its values."""

    name: str
    values: tuple[str, ...]


def varied(text: str) -> VariedOption:
    """Parse `NAME=VALUE,VALUE,...`: an argparse type."""
    name, _, values = text.partition("=")
    if not name or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE,VALUE")
    if name in NOT_TO_VARY:
        raise argparse.ArgumentTypeError(f"{name} is known to the sweep: {NOT_TO_VARY[name]}")
    return VariedOption(name, _split(values))


def _split(text: str) -> tuple[str, ...]:
    """Split a list of values at its commas, but not within brackets or quotes (facebookresearch/hydra#573).

    Quotes around a whole value are not part of it: `"64,128",32` is 64,128 and 32. The one in don't is none.

    Raises:
        argparse.ArgumentTypeError: if a bracket or a quote is not closed.
    """
    values = [""]
    depth, quote = 0, ""
    for before, letter in zip(f",{text}", text, strict=False):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTES and not before.isalnum():
            quote = letter
        elif letter in OPENING:
            depth += 1
        elif letter in CLOSING:
            depth = max(depth - 1, 0)
        if letter == "," and not quote and not depth:
            values.append("")
        else:
            values[-1] += letter
    if quote or depth:
        raise argparse.ArgumentTypeError(f"{text!r} has a bracket or a quote that is not closed")
    return tuple(_without_quotes(value.strip()) for value in values)


def _without_quotes(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in QUOTES
    return value[1:-1] if is_quoted and value[0] not in value[1:-1] else value


def combinations(options: Sequence[VariedOption]) -> tuple[tuple[Setting, ...], ...]:
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
        arguments: the arguments of all runs, with names in braces. A name alone, with an empty value, is left
            out.
        settings: what the run varies; one that has no place in the arguments is added behind them.
        known: what stands for the other names.
    """
    values = {**known, **dict(settings)}
    named = in_braces(arguments)

    def value(name: re.Match[str]) -> str:
        return str(values.get(name[1], name[0]))

    words = []
    for argument in arguments:
        word = IN_BRACES.sub(value, argument)
        if word or not IN_BRACES.fullmatch(argument):
            words.append(word)
    for setting in settings:
        if setting.name in named:
            continue
        if setting.value.startswith("-"):
            # As a word of its own, argparse would take -1e-3 for another option (python/cpython#105712).
            words.append(f"--{setting.name}={setting.value}")
        else:
            words += [f"--{setting.name}", setting.value]
    return tuple(words)
