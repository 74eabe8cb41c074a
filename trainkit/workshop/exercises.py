"""The exercises of a stage: what is done and what comes next, checks, hints, a fresh start, the solution.

Every exercise is a folder next to its stage's check.py, such as `01_clock`, and is called `clock`:

    README.md   `# Title`, then `**Core, 1 of 9.** 10 minutes. What you learn.` (or `**Extra.** 10 ...`), then
                the question and the commands
    check.py    `check(mine)` returns what there was to see, or raises `Wrong`
    starter/    the files to work on, if any; the first command copies them to mine/, which git ignores
    solution/   the files of starter/ that change, done

In check.py `ANSWERS` has the lines of answers.txt, where the learner finds a `?` for each answer, and
`HINTS` has three, each under a line that begins with `## `. There may also be `GIVEN`, folders of the
repository by where they go in mine/, and `RECORDED`, files of it for those who cannot run the exercise: logs,
and CSVs of many runs, each with the names of those to take, or none for all. For test_exercises.py it has
`STARTS_WITH`, a part of what the untouched starter is told, and `WRONG`, typical wrong answers: (file in
mine/, text of the solution, what stands there instead, part of the hint that this gets); of runs, the file
may be `runs/*.csv`.
"""

import ast
import difflib
import itertools
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import textwrap
from argparse import Namespace
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path

from trainkit.compare import packed
from trainkit.runtime.command_line import Parser
from trainkit.runtime.errors import UserError, tell
from trainkit.runtime.files import read_text, replacing
from trainkit.workshop.work import ANSWERS, OPEN, Workspace, Wrong, explain

PROGRESS = "progress.json"
HEADER = re.compile(r"\*\*(?:Core, (\d) of \d|Extra)\.\*\* (\d+) minutes\. ")
EXTRA = 99  # its step on the core path: behind all others
PATIENCE = 120  # seconds for a check, on a machine that has nothing else to do
TOO_LONG = (
    f"The check takes longer than {PATIENCE} seconds, and a busy machine was given more: does a loop in your "
    "program ever end? If it does, check again when the machine is quiet."
)


class Exercise:
    """One exercise, in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name.partition("_")[2]
        self.mine = Workspace(folder / "mine")
        title, _, header, *_ = (folder / "README.md").read_text().splitlines()
        step, minutes = HEADER.match(header).groups()
        self.title, self.minutes, self.step = title.removeprefix("# "), int(minutes), int(step or EXTRA)
        self.kind = "core" if step else "extra"

    @cached_property
    def hints(self) -> list[str]:
        text = "\n" + self.plain["HINTS"]
        return [hint.partition("\n")[2].strip() for hint in text.split("\n## ")[1:]]

    @property
    def program(self) -> dict[str, object]:
        """What check.py defines."""
        return runpy.run_path(str(self.folder / "check.py"))

    @cached_property
    def plain(self) -> dict[str, object]:
        """The plain texts, lists and dicts that check.py defines. To run it would load PyTorch."""
        found = {}
        for node in ast.parse((self.folder / "check.py").read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                with suppress(ValueError):
                    found[node.targets[0].id] = ast.literal_eval(node.value)
        return found

    def check(self) -> str:
        """Check the learner's work in a process of its own, and return what there was to see.

        Whatever the learner's program does to that process, it ends: with a thread or a loop that never does,
        by `os._exit`, or out of memory.

        Raises:
            Wrong: if something is not right yet, or the learner's program fails or does not end.
        """
        patience = PATIENCE * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=self._answer, args=(theirs, patience))
        process.start()
        theirs.close()
        try:
            if not wait([ours, process.sentinel], patience):
                raise Wrong(TOO_LONG)
            if not ours.poll():
                raise EOFError
            seen = ours.recv()
        except EOFError:
            raise Wrong("Your program ended the check: by an `exit`, or for want of memory?") from None
        finally:
            for kill in (os.killpg, os.kill):  # with the ranks it has started
                with suppress(ProcessLookupError):
                    kill(process.pid, signal.SIGKILL)
            process.join()
        if isinstance(seen, Exception):
            raise seen
        return seen

    def _answer(self, answer: Connection, patience: float) -> None:
        """Send what the check returns or raises."""
        os.setsid()
        signal.alarm(round(2 * patience))  # where the process that waits for the answer was killed
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the same on every machine, and a check may fork
        try:
            seen = self.program["check"](self.mine)
        except UserError as error:
            seen = error
        except BaseException as error:
            seen = explain(error, self.mine)
        sys.stdout.flush()
        answer.send(seen)

    def begin(self) -> None:
        """Lay out the starter, and the open answers, if they are not yet."""
        mine, starter = self.mine.folder, list(self.folder.glob("starter/*"))
        if any((mine / name).exists() for name in (ANSWERS, *(path.name for path in starter))):
            return
        mine.mkdir(exist_ok=True)
        if starter:
            shutil.copytree(self.folder / "starter", mine, dirs_exist_ok=True)
        for name, given in self.plain.get("GIVEN", {}).items():
            shutil.copytree(self.folder.parents[2] / given, mine / name)
        # A `?` in the place of each value in lines `name = value  # comment`.
        blank = re.sub(r"^(\w+ =) [^#\n]*?( *#.*)?$", rf"\1 {OPEN}\2", self.plain["ANSWERS"], flags=re.M)
        (mine / ANSWERS).write_text(blank)

    def diff(self) -> str:
        """Return the diff from the learner's files to those of the solution."""
        lines = []
        for name, text in self.solution.items():
            path = self.mine.folder / name
            mine, done = path.read_text(errors="replace") if path.exists() else "", text.splitlines()
            lines += difflib.unified_diff(
                mine.splitlines(), done, f"mine/{name}", f"solution/{name}", lineterm=""
            )
        return "\n".join(lines)

    @property
    def solution(self) -> dict[str, str]:
        """The learner's files that change, done: their text by their names."""
        programs = {path.name: path.read_text() for path in sorted(self.folder.glob("solution/*"))}
        return {ANSWERS: self.plain["ANSWERS"]} | programs


class Workbook:
    """The exercises of a stage, in their order, and what is done of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exercises = [Exercise(path.parent) for path in sorted(folder.glob("*/check.py"))]
        self.read()

    def read(self) -> None:
        """Read what is done, a list of names, and how many hints were given, by name.

        Raises:
            UserError: if the file is damaged.
        """
        path = self.folder / PROGRESS
        try:
            progress = json.loads(read_text(path)) if path.exists() else {"done": [], "hints": {}}
            self.done = list(progress["done"])
            self.hints = {name: max(int(number), 0) for name, number in dict(progress["hints"]).items()}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise UserError(f"{path} cannot be read: remove it, and check again what was done.") from None

    def find(self, name: str) -> Exercise:
        """Find an exercise by its name, its number, or the name of its folder."""
        for number, exercise in enumerate(self.exercises, start=1):
            if Path(name).name in (exercise.name, str(number), exercise.folder.name):
                return exercise
        names = ", ".join(exercise.name for exercise in self.exercises)
        raise UserError(f"there is no exercise {name!r} here: the exercises are {names}.")

    def save(self) -> None:
        with replacing(self.folder / PROGRESS) as file:
            json.dump({"done": self.done, "hints": self.hints}, file, indent=1)

    @property
    def open(self) -> list[Exercise]:
        """What is not done yet."""
        return [exercise for exercise in self.exercises if exercise.name not in self.done]

    @property
    def next(self) -> Exercise | None:
        """The next exercise of the core path, or else the first extra that is not done."""
        return min(self.open, key=lambda exercise: exercise.step, default=None)

    def listed(self) -> str:
        """List the exercises, with a cross where one is done."""
        width = max(len(exercise.name) for exercise in self.exercises)
        return "\n".join(
            f"[{' ' if exercise in self.open else 'x'}] {number:2}  {exercise.name:{width}}"
            f"  {exercise.minutes:3} min  {exercise.kind:5}  {exercise.title}"
            for number, exercise in enumerate(self.exercises, start=1)
        )

    def bar(self) -> str:
        """Say how much is done, and which exercise comes next."""
        count, done = len(self.exercises), len(self.exercises) - len(self.open)
        bar = f"[{'#' * done}{'.' * (count - done)}] {done} of {count} done."
        stages = [path.parent for path in sorted(self.folder.parents[1].glob("0*/exercises"))]
        ways = [relative(stage / "README.md") for stage in stages[stages.index(self.folder.parent) + 1 :][:1]]
        if following := self.next:
            readme = relative(following.folder / "README.md")
            way = f"{following.name} ({following.kind}), {following.minutes} minutes: read {readme}"
            ways = [way] if following.kind == "core" else [*ways, way]
        return f"{bar} Next: {' or '.join(ways)}" if ways else bar


def main(folder: Path, description: str) -> int:
    """Do what the command line of the exercises in `folder` asks for; returns the exit code.

    Raises:
        UserError: if there is no such exercise, or its files cannot be read or written.
    """
    parser = Parser(description=description)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command, (act, what) in COMMANDS.items():
        with_name = commands.add_parser(command, help=what, description=what)
        with_name.set_defaults(act=act)
        with_name.add_argument("name", help="the exercise: its name or number")
        if command == "solution":
            with_name.add_argument("--yes", action="store_true", help="show it without asking")
    args = parser.parse_args()
    try:
        workbook = Workbook(folder)
        for exercise in workbook.exercises:
            exercise.begin()
        if args.command:
            return args.act(workbook, workbook.find(args.name), args)
    except OSError as error:
        what = error.filename or folder
        raise UserError(f"{what} cannot be read or written ({error.strerror}): repair that.") from None
    tell(f"{workbook.listed()}\n\n{workbook.bar()}")
    return 0


def _check(workbook: Workbook, exercise: Exercise, _: Namespace) -> int:
    try:
        seen = exercise.check()
    except Wrong as wrong:
        tell(f"{exercise.name}: not yet.\n{wrapped(str(wrong))}\n")
        hint = _command(workbook, "hint", exercise)
        tell(f"Your files are in {relative(exercise.mine.folder)}. A hint: {hint}")
        return 1
    workbook.read()  # the check took a while, and there are other terminals
    if exercise.name not in workbook.done:
        workbook.done.append(exercise.name)
        workbook.save()
    tell(f"{exercise.name}: done.\n{wrapped(seen)}\n\n{workbook.bar()}")
    return 0


def _hint(workbook: Workbook, exercise: Exercise, _: Namespace) -> int:
    most = len(exercise.hints)
    number = workbook.hints[exercise.name] = min(workbook.hints.get(exercise.name, 0) + 1, most)
    workbook.save()
    tell(f"{exercise.name}, hint {number} of {most}:\n{wrapped(exercise.hints[number - 1])}")
    if number == most:
        tell(f"\nThere is no further one. The solution: {_command(workbook, 'solution', exercise)}")
    return 0


def _reset(_: Workbook, exercise: Exercise, __: Namespace) -> int:
    mine = exercise.mine.folder
    kept = mine.rename(_unused(mine)) if mine.exists() else None
    exercise.begin()
    tell(f"{exercise.name}: the starter is back in {relative(mine)}.")
    if kept:
        tell(f"What you wrote is kept in {relative(kept)}.")
    return 0


def _recorded(_: Workbook, exercise: Exercise, __: Namespace) -> int:
    """Copy the recorded runs to where the learner's own would be, which are kept under another name."""
    recorded = exercise.program.get("RECORDED")
    if not recorded:
        raise UserError(f"there are no recorded runs for {exercise.name}: it needs none but its own program.")
    repository, runs = exercise.folder.parents[2], exercise.mine.folder / "runs"
    if runs.exists():
        kept = runs.rename(_unused(exercise.mine.folder / "own-runs"))
        tell(f"Your own runs are kept in {relative(kept)}.")
    runs.mkdir()
    for name, run_ids in recorded.items():
        if name.endswith(".csv"):
            packed.unpack(repository / name, runs, run_ids)
        else:
            shutil.copy(repository / name, runs)
    tell(f"{exercise.name}: recorded runs are in {relative(runs)}.")
    return 0


def _solution(_: Workbook, exercise: Exercise, args: Namespace) -> int:
    if not args.yes:
        if not sys.stdin.isatty():
            raise UserError("it asks before it shows the solution, and there is no terminal: give --yes.")
        if input(f"Show the solution of {exercise.name}? [y/N] ").strip().lower() not in ("y", "yes"):
            return 0
    tell(exercise.diff() or f"Your files of {exercise.name} are those of the solution.")
    return 0


COMMANDS = {
    "check": (_check, "check what you did"),
    "hint": (_hint, "the next of three hints"),
    "reset": (_reset, "put the starter back; what you wrote is kept under another name"),
    "recorded": (_recorded, "take recorded runs in place of yours"),
    "solution": (_solution, "the difference between your files and the solution"),
}


def _command(workbook: Workbook, command: str, exercise: Exercise) -> str:
    return f"python {relative(workbook.folder / 'check.py')} {command} {exercise.name}"


def _unused(path: Path) -> Path:
    """`path` with the first number that no file beside it has."""
    places = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())


def wrapped(text: str) -> str:
    """Indent what a learner is told, and fold what is too long for a line of it."""
    lines = (textwrap.fill(line, 110, break_on_hyphens=False) for line in text.splitlines())
    return textwrap.indent("\n".join(lines), "  ")


def relative(path: Path) -> str:
    """Show a path from the current folder where it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
