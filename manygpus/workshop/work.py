"""A learner's work in an exercise, as its check reads it: answers, runs, programs, job scripts."""

import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping
from configparser import ConfigParser, Error
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from manygpus.errors import UserError
from manygpus.jobs import slurm
from manygpus.jobs.site import read_site

if TYPE_CHECKING:
    import pandas as pd

ANSWERS = "answers.txt"
SHORT_OPTIONS = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task", "t": "time", "o": "output"}
# Columns in which two runs that are compared have to be equal.
SAME = ("dataset", "device_name", "images", "global_batch", "width", "precision", "threads_per_worker")
OPEN = "?"  # an answer that is not given yet


class Wrong(UserError):  # noqa: N818  not an error of the program: a message for the learner
    """What is not right yet; its text says what, and gives a hint."""


class Workspace:
    """The learner's files of one exercise, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def text(self, name: str) -> str:
        """Read a file.

        Raises:
            Wrong: if it does not exist, or is not a text file.
        """
        try:
            return (self.folder / name).read_text(encoding="utf-8-sig")
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise Wrong(f"mine/{name} cannot be read ({error}): `reset` restores it.") from None

    def answers(self) -> "Answers":
        """Read the lines `name = value` of answers.txt, all of them answered.

        Raises:
            Wrong: if one is still open, or is not of that form.
        """
        parser = ConfigParser(
            interpolation=None, delimiters=["="], comment_prefixes="#", inline_comment_prefixes="#"
        )
        parser.optionxform = str
        try:
            parser.read_string(f"[answers]\n{self.text(ANSWERS)}")
        except Error as error:
            line = str(error).splitlines()[0].replace("<string>", f"mine/{ANSWERS}")
            line = re.sub(r"(?<=\[line)( +\d+)", lambda number: f" {int(number[0]) - 1}", line)
            raise Wrong(
                f"mine/{ANSWERS} needs lines `name = value`, each name once, and comments after a #: {line}"
            ) from None
        answers = Answers(parser["answers"])
        unanswered = [f"`{name}`" for name, value in answers.items() if value.strip() in (OPEN, "")]
        if unanswered:
            verb = "is" if len(unanswered) == 1 else "are"
            raise Wrong(
                f"mine/{ANSWERS}: {', '.join(unanswered)} {verb} still open. Answer before you check."
            )
        return answers

    def table(self, target: float | None = None, **equal: object) -> "pd.DataFrame":
        """Compare the runs in mine/runs that have `equal` columns (`comparison.compare`).

        With a `target` (% accuracy) it has the columns of `comparison.summarize` on when it was reached.

        Raises:
            Wrong: if there is none with an epoch after the warm-up.
        """
        from manygpus.reports import comparison  # loads pandas

        runs = self.folder / "runs"
        rows, skipped = comparison.load([runs] if runs.is_dir() else [])
        if len(rows):
            table = comparison.compare(comparison.summarize(rows, target))
            chosen = table.images_per_s > 0
            for name, value in equal.items():
                chosen &= table[name] == value
            if chosen.any():
                return table[chosen]
        equal_in_words = f" of {_in_words(equal)}" if equal else ""
        unreadable = [f"\n- {sentence} Remove it." for sentence in skipped]
        raise Wrong(
            f"mine/runs has no run{equal_in_words} with two epochs or more. Run the commands of the README, "
            f"or use our runs with `recorded`.{''.join(unreadable)}"
        )

    def row(self, target: float | None = None, **equal: object) -> "pd.Series":
        """Return the one row of `table`.

        Raises:
            Wrong: if the runs differ in their settings, or there is none.
        """
        table = self.table(target, **equal)
        if len(table) > 1:
            raise Wrong(
                f"mine/runs has several runs of {_in_words(equal)}, which differ in the device, the number "
                "of images or some other setting. Remove mine/runs, and run the commands of the README "
                "unchanged."
            )
        return table.iloc[0]

    def run(self, name: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess:
        """Run the learner's program with these environment variables and no others; return what it prints."""
        script = [sys.executable, str(self.folder / name)]
        return subprocess.run(script, env=variables, capture_output=True, text=True, check=False)

    def module(self, name: str) -> ModuleType:
        """Import the learner's program. Names that it lacks raise `Wrong`, as do errors in it, also later.

        Raises:
            Wrong: if it does not exist.
        """
        program = _Program(name)
        program.__file__ = str(self.folder / name)
        # Dataclasses look there.
        sys.modules[name] = program
        # So the program finds the files next to it.
        sys.path.insert(0, str(self.folder))
        try:
            exec(compile(self.text(name), program.__file__, "exec"), program.__dict__)
        finally:
            sys.path.remove(str(self.folder))
        return program


class Answers(dict):
    """The answers in answers.txt, or another `file` of the learner, by name; a missing one raises `Wrong`."""

    file = ANSWERS

    def __missing__(self, name: str) -> NoReturn:
        raise Wrong(f"mine/{self.file}: the line `{name} = ...` is missing. Put it back.")

    def number(self, name: str) -> float:
        """Return the number in an answer; a unit or a % sign may follow it.

        Raises:
            Wrong: if it does not begin with a number.
        """
        text = re.sub(r"(?<=\d) (?=\d{3}\b)", "", self[name]).split(" ")[0].rstrip("%x")
        if re.match(r"[+-]?[1-9]\d{0,2}(,\d{3})+(?![\d,])", text):  # 1,327, and not 1,5
            text = text.replace(",", "")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise Wrong(f"mine/{self.file}: `{name} = {self[name]}` is not a number.")
        return number

    def word(self, name: str, *allowed: str) -> str:
        """Return which of `allowed` an answer is, in lower case.

        Raises:
            Wrong: if it is none of them.
        """
        word = re.sub(r"(?<=\d),(?=\d{3}\b)", "", self[name].strip().lower())
        if word not in allowed:
            raise Wrong(
                f"mine/{self.file}: `{name}` has to be one of {', '.join(allowed)}, not {self[name]!r}."
            )
        return word


def _in_words(equal: Mapping[str, object]) -> str:
    """Return columns and their values, as `stage ddp and devices 2`."""
    return " and ".join(f"{name} {value}" for name, value in equal.items())


def check_alike(run: Mapping, other: Mapping, *but: str) -> None:
    """Check that two runs that are compared are equal in SAME, `but` for columns that the exercise changes.

    Raises:
        Wrong: naming a column in which they differ.
    """
    for name in SAME:
        if name not in but and run[name] != other[name]:
            raise Wrong(f"The runs differ in {name} ({run[name]} and {other[name]}): use the same for both.")


def is_close(answer: float, true: float, share: float = 0.02) -> bool:
    """Return whether two numbers are equal up to rounding: to this share of the `true` one."""
    return abs(answer - true) <= share * abs(true)


def explain(error: BaseException, workspace: Workspace) -> BaseException:
    """Return the message for an error in a check: in the learner's program, or in what it gave the check.

    An `OSError` of ours, such as a full disk, stays one.
    """
    lines = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append((Path(error.filename), error.lineno))
    learner_lines = [(path.name, line) for path, line in lines if path.parent == workspace.folder]
    sentence = f"{type(error).__name__}: {getattr(error, 'msg', error)}".rstrip(": ")
    if learner_lines:
        name, line = learner_lines[-1]
        return Wrong(f"mine/{name} stops in line {line} with {sentence}.")
    if isinstance(error, OSError):
        return error
    return Wrong(
        f"The check cannot use what your program returns ({sentence}). Compare the names, the arguments and "
        "the returned values with the starter, which `reset` restores."
    )


def requested(text: str) -> dict[str, str]:
    """Return the options with a value in the #SBATCH lines before the first command, by their long names."""
    options = {}
    head = re.split(r"^(?=[^#\s])", text, maxsplit=1, flags=re.MULTILINE)[0]
    for line in re.findall(r"^#SBATCH\s+([^#\n]*)", head, re.MULTILINE):
        for short, long in SHORT_OPTIONS.items():
            line = re.sub(rf"(^|\s)-{short}\s*(?=\w)", rf"\1--{long}=", line)
        options |= dict(re.findall(r"(?<!\S)--([a-z-]+)(?:=|\s+)([^\s-]\S*)", line))
    return options


def ask_slurm(script: Path, stage: Path) -> str:
    """Ask Slurm whether it would accept the script, from the folder of the stage; return a sentence.

    Raises:
        Wrong: if it would not.
    """
    if slurm.why_not_here():
        return "(`sbatch --test-only` was not tried, since there is no Slurm here.)"
    environment = os.environ | read_site().sbatch
    reply = slurm.ask("sbatch", "--test-only", str(script), cwd=stage, env=environment)
    if reply.returncode:
        refusal = slurm.sbatch_message(reply.stderr)
        raise Wrong(f"Slurm would not accept the job ({refusal}): {slurm.advice(refusal)}.")
    return "Slurm would accept the job."


class _Program(ModuleType):
    def __getattr__(self, name: str) -> NoReturn:
        raise Wrong(
            f"mine/{self.__name__} no longer has `{name}`, which the check needs: `reset` restores it."
        )
