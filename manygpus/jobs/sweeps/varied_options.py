"""What a sweep varies besides GPUs and batch sizes, and the words in braces that it fills in.

`--vary lr=0.1,0.01` gives an option of the script its values in turn: each stands where the arguments of the
script say `{lr}`, or behind them as `--lr VALUE` if they do not. `--vary use-ema` varies a flag: `--use-ema`
is there or not, and `{use-ema}` stands for true or false. With `--vary ema=--use-ema,` the empty value leaves
out the word `{ema}`. `--vary width,lr=[64,0.1],[128,0.05]` varies options together. A YAML file has lists of
values, or a list of parts with such lists, each a grid for itself.

Only the names that a sweep knows are filled in, so that other braces, such as those of JSON or of Hydra's
`${oc.env:HOME}`, reach the script as they are.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

from manygpus.errors import UserError, reason

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
# A run with a flag, and one without it.
WITH, WITHOUT = "true", "false"
# Of a value in the name of a run: a folder's name has 255 characters at most.
MOST_OF_A_VALUE = 40


class Setting(NamedTuple):
    """An option of the script and what a run makes of it.

    Attributes:
        value: its value; of a flag `WITH` or `WITHOUT`.
        is_flag: whether it is an option without a value, which is there or not.
    """

    name: str
    value: str
    is_flag: bool = False

    @property
    def label(self) -> str:
        """Return it as a part of a folder's name, as `lr0.1`."""
        name = self.name.rpartition(".")[2]
        text = f"{name}{self.value}"
        if self.is_flag:
            text = name if self.value == WITH else f"no-{name}"
        word = re.sub(r"[^\w.+-]", "_", text)
        return word[-MOST_OF_A_VALUE:]

    @property
    def words(self) -> list[str]:
        """Return the words by which it follows the arguments of the script."""
        if self.is_flag:
            return [f"--{self.name}"] if self.value == WITH else []
        if self.value.startswith("-"):
            # As a word of its own, argparse would take -1e-3 for another option (python/cpython#105712).
            return [f"--{self.name}={self.value}"]
        return [f"--{self.name}", self.value]


# What a run makes of one or more options.
Settings = tuple[Setting, ...]


@dataclass(frozen=True)
class Varied:
    """One or more options of the script, and the settings of them of which each is tried."""

    choices: tuple[Settings, ...]

    @property
    def names(self) -> list[str]:
        """Return the names of the options."""
        return list(dict.fromkeys(setting.name for settings in self.choices for setting in settings))


def varied(text: str) -> Varied:
    """Parse `NAME=LIST`, `NAME,NAME=[VALUE,VALUE],...`, a flag's `NAME` or `FILE.yaml`: an argparse type."""
    name, equals, values = text.partition("=")
    if not name or (equals and not values):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither NAME=VALUE,VALUE nor the NAME of a flag nor a FILE.yaml"
        )
    if not equals and Path(text).suffix in (".yaml", ".yml"):
        options = _of_file(Path(text))
    elif "," in name:
        options = _together(name.split(","), _split(values))
    else:
        options = _each(name, _split(values) if equals else None)
    for known in options.names:
        if known in NOT_TO_VARY:
            raise argparse.ArgumentTypeError(f"{known} is known to the sweep: {NOT_TO_VARY[known]}")
    return options


def _each(name: str, values: Sequence[str] | None) -> Varied:
    """Return an option with each of its values; None for a flag."""
    if values is None:
        settings = [Setting(name, value, is_flag=True) for value in (WITH, WITHOUT)]
    else:
        settings = [Setting(name, value) for value in values]
    return Varied(tuple((setting,) for setting in settings))


def _together(names: Sequence[str], groups: Sequence[str]) -> Varied:
    """Return options that vary together: each group, in brackets, has a value for each of them.

    Raises:
        argparse.ArgumentTypeError: if one has not.
    """
    choices = []
    for group in groups:
        values = _split(group[1:-1]) if group[:1] + group[-1:] in ("()", "[]") else (group,)
        if len(values) != len(names):
            raise argparse.ArgumentTypeError(
                f"{group} is not a value for each of {', '.join(names)}: write [VALUE,VALUE],[VALUE,VALUE]"
            )
        choices.append(tuple(map(Setting, names, values)))
    return Varied(tuple(choices))


def _of_file(path: Path) -> Varied:
    """Return what a YAML file says: every combination of the lists in it, or in each of its parts.

    Its values are texts, as on a command line: PyYAML would make False of off, and 45045 of 12:30:45.

    Raises:
        argparse.ArgumentTypeError: if it cannot be read, or has something else.
    """
    import yaml

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        raise argparse.ArgumentTypeError(f"{path} is no YAML in line {line}: {error.problem}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read ({reason(error)})") from None
    choices: list[Settings] = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or not part:
            raise argparse.ArgumentTypeError(
                f"{path} must have lines such as `lr: [0.1, 0.01]`, or a list of such parts"
            )
        choices += _product([_in_file(path, name, values) for name, values in part.items()])
    return Varied(tuple(choices))


def _in_file(path: Path, name: str, values: object) -> Varied:
    """Return what a line of a YAML file says: a list of values, one value, or of a flag nothing.

    Raises:
        argparse.ArgumentTypeError: if it says something else.
    """
    if isinstance(values, str):
        return _each(name, [values] if values else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return _each(name, values)
    raise argparse.ArgumentTypeError(
        f"{path}: {name} must have a list of values, as in `lr: [0.1, 0.01]`; put a value that has brackets "
        "itself in quotes"
    )


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


def combinations(options: Sequence[Varied]) -> tuple[Settings, ...]:
    """Return every combination of the settings.

    Raises:
        UserError: if an option is there twice.
    """
    names = [name for option in options for name in option.names]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--vary {name} is given twice: give all its values in one list.")
    return _product(options)


def _product(options: Sequence[Varied]) -> tuple[Settings, ...]:
    lists = [option.choices for option in options]
    return tuple(tuple(chain.from_iterable(settings)) for settings in product(*lists))


def values(settings: Settings) -> dict[str, str]:
    """Return the values of options by their names."""
    return {setting.name: setting.value for setting in settings}


def in_braces(arguments: Sequence[str]) -> set[str]:
    """Return the names that stand in braces in the arguments."""
    return {name for argument in arguments for name in IN_BRACES.findall(argument)}


def filled(arguments: Sequence[str], settings: Settings, known: Mapping[str, object]) -> tuple[str, ...]:
    """Return the arguments of a run.

    Args:
        arguments: the arguments of all runs, with names in braces. A name alone, with an empty value, is left
            out.
        settings: what the run varies; one that has no place in the arguments is added behind them.
        known: what stands for the other names.
    """
    replacements = {**known, **values(settings)}
    named = in_braces(arguments)

    def value(name: re.Match[str]) -> str:
        return str(replacements.get(name[1], name[0]))

    words = []
    for argument in arguments:
        word = IN_BRACES.sub(value, argument)
        if word or not IN_BRACES.fullmatch(argument):
            words.append(word)
    for setting in settings:
        if setting.name not in named:
            words += setting.words
    return tuple(words)
