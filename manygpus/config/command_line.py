"""What all command lines of the project share: types, and a parser that reports a mistake in one sentence."""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from manygpus.errors import UserError

LARGEST = 1e38  # about the largest float32
# The command whose subcommands the commands are, too.
PROGRAM = "manygpus"


class Parser(argparse.ArgumentParser):
    """argparse's parser. It raises mistakes as `UserError`s, and an abbreviated option is one."""

    def __init__(self, **arguments: object) -> None:
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**defaults | arguments)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help.")

    def takes_value(self, word: str) -> bool:
        """Return whether this word is an option whose value is the next word."""
        action = self._option_string_actions.get(word)
        return action is not None and action.nargs is None


def add_json(parser: argparse.ArgumentParser, document: str) -> None:
    """Add `--json`, which prints a document for a program (json_document.py)."""
    parser.add_argument(
        "--json",
        action="store_true",
        help=f"print {document} as JSON, for a program; notes go to stderr (slurm/REFERENCE.md)",
    )


def own_program() -> list[str]:
    """Return the words that start this program again, without its arguments."""
    program = sys.argv[0]
    if program.startswith(f"{PROGRAM} "):
        return [sys.executable, "-m", *program.split()]
    return [sys.executable, str(Path(program).absolute())]


def with_out(folder: Path, own_out: Path | None) -> str:
    """Return the command line of this program, with --out for its folder.

    Args:
        folder: the folder.
        own_out: its own --out; None if it has none, though the arguments of a user's script may have one.
    """
    out = [] if own_out else ["--out", str(folder)]
    return shlex.join([*own_program(), *out, *sys.argv[1:]])


def at_least(smallest: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argparse type: a whole number from `smallest` to `most`."""

    def whole_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not smallest <= number <= most:
            size = "small" if number < smallest else "large"
            raise argparse.ArgumentTypeError(f"{number} is too {size}: it must be {smallest} to {most}")
        return number

    return whole_number


def above_0(most: float = LARGEST) -> Callable[[str], float]:
    """Return an argparse type: a number above 0, `most` or less."""

    def positive_number(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not 0 < number <= most:
            raise argparse.ArgumentTypeError(f"{text} must be more than 0 and at most {most:g}")
        return number

    return positive_number


def time_limit(text: str) -> int:
    """Parse what `duration` takes, and return minutes, rounded up: an argparse type."""
    return math.ceil(duration(text) / 60)


def duration(text: str) -> float:
    """Parse Slurm's [days-]hours:minutes:seconds, or minutes, into seconds above 0: an argparse type."""
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    try:
        if not parts:
            return 60 * above_0()(text)
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        return above_0()(str(((days * 24 + hours) * 60 + minutes) * 60 + seconds))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither HH:MM:SS nor a number of minutes") from None


def list_of(kind: Callable[[str], object]) -> Callable[[str], tuple]:
    """Return an argparse type: values of `kind`, separated by commas."""
    return lambda text: tuple(kind(part.strip()) for part in text.split(","))


def given(text: str) -> str:
    """An argparse type: text, and not that of a variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give a name, or leave out the option")
    return text


def given_path(text: str) -> Path:
    """An argparse type: a path that is given."""
    return Path(given(text))


def one_of(words: Iterable[str]) -> Callable[[str], str]:
    """Return an argparse type: one of `words`, for use in a `list_of`."""

    def word(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return word


def check_divides(number: int, parts: int, what: str, option: str = "--batch-size") -> None:
    """Raise a UserError that names the nearest valid numbers if `number` is not a multiple of `parts`."""
    if number % parts:
        below, above = number // parts * parts, -(-number // parts) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"{option} {number} does not divide evenly among {parts} {what}: the nearest is {nearest}."
        )
