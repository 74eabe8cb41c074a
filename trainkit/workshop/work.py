"""What a learner has made in an exercise, as its check reads it: answers, runs, programs."""

import math
import os
import subprocess
import sys
from configparser import ConfigParser, Error
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

ANSWERS = "answers.txt"
OPEN = "?"  # an answer that is not given yet


class Wrong(Exception):  # noqa: N818  not an error of the program: what the learner is told
    """What is not right yet; its text says what, and gives a hint."""


class Mine:
    """The learner's files of one exercise, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def text(self, name: str) -> str:
        """What is in a file.

        Raises:
            Wrong: if it is not there.
        """
        try:
            return (self.folder / name).read_text(errors="replace")
        except FileNotFoundError:
            raise Wrong(f"mine/{name} is not there: `reset` lays it out again.") from None

    def answers(self) -> "Answers":
        """The lines `name = value` of answers.txt, all of them given.

        Raises:
            Wrong: if one is not given yet, or is not of that form.
        """
        parser = ConfigParser(
            interpolation=None, delimiters=["="], comment_prefixes="#", inline_comment_prefixes="#"
        )
        parser.optionxform = str
        try:
            parser.read_string(f"[answers]\n{self.text(ANSWERS)}")
        except Error as error:
            line = str(error).splitlines()[0].replace("<string>", f"mine/{ANSWERS}")
            raise Wrong(
                f"mine/{ANSWERS} has lines `name = value` and comments behind #, once each: {line}"
            ) from None
        answers = Answers(parser["answers"])
        for name, value in answers.items():
            if value.strip() in (OPEN, ""):
                raise Wrong(f"mine/{ANSWERS}: `{name}` is still open. Fill it in before you check.")
        return answers

    def table(self, **equal: object) -> "pd.DataFrame":
        """The comparison of the runs in mine/runs (`comparison.compare`), of those with `equal` columns.

        Raises:
            Wrong: if there is none with an epoch behind the warm-up.
        """
        from trainkit.analysis import comparison  # loads pandas

        runs = self.folder / "runs"
        rows, skipped = comparison.load([runs] if runs.is_dir() else [])
        if len(rows):
            table = comparison.compare(comparison.summarize(rows))
            chosen = table.images_per_s > 0
            for name, value in equal.items():
                chosen &= table[name] == value
            if chosen.any():
                return table[chosen]
        what = " of " + " and ".join(f"{name} {value}" for name, value in equal.items()) if equal else ""
        raise Wrong(
            f"mine/runs has no run{what} with two epochs or more. Give the commands of the README, or "
            "`recorded` to take runs of ours." + "".join(f"\n{sentence}" for sentence in skipped)
        )

    def module(self, name: str) -> ModuleType:
        """The learner's program, imported.

        Raises:
            Wrong: if it ends with an error.
        """
        program = ModuleType(name)
        program.__file__ = str(self.folder / name)
        sys.path.insert(0, str(self.folder))  # where it finds files beside it
        try:
            exec(compile(self.text(name), program.__file__, "exec"), program.__dict__)
        except Exception as error:
            raise Wrong(
                f"mine/{name} ends with {type(error).__name__}: {error}{_line_of(error, name)}."
            ) from None
        finally:
            sys.path.remove(str(self.folder))
        return program

    def run(self, *command: object, timeout: float = 120, **environment: str) -> str:
        """What `python <command>` prints, in the folder, without GPUs.

        Raises:
            Wrong: if it fails, or takes longer than `timeout` seconds.
        """
        shown = "python " + " ".join(map(str, command))
        hidden = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *map(str, command)], cwd=self.folder, env=os.environ | hidden | environment,
                capture_output=True, text=True, timeout=timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Wrong(f"`{shown}` takes longer than {timeout:.0f} seconds: it hangs.") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Wrong(f"`{shown}` ends with exit code {done.returncode}: {last}")
        return done.stdout


class Answers(dict):
    """What answers.txt says, by name."""

    def number(self, name: str) -> float:
        """The number in an answer; a unit or a % sign may follow it.

        Raises:
            Wrong: if it does not begin with a number.
        """
        text = self[name].replace(",", "").split(" ")[0].rstrip("%x")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise Wrong(f"mine/{ANSWERS}: `{name} = {self[name]}` is not a number.")
        return number

    def word(self, name: str, *allowed: str) -> str:
        """The one of `allowed` that an answer is, in small letters.

        Raises:
            Wrong: if it is none of them.
        """
        word = self[name].strip().lower()
        if word not in allowed:
            raise Wrong(f"mine/{ANSWERS}: `{name}` is one of {', '.join(allowed)}, not {self[name]!r}.")
        return word


def near(given: float, true: float, share: float = 0.02) -> bool:
    """Whether two numbers are equal up to rounding."""
    return abs(given - true) <= share * abs(true)


def _line_of(error: Exception, name: str) -> str:
    trace, line = error.__traceback__, None
    while trace:
        if trace.tb_frame.f_code.co_filename.endswith(name):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""
