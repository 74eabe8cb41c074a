"""The exercises of a stage: progress and the next one, checks, hints, a fresh start, the solution.

Every exercise is a folder next to its stage's check.py, such as `01_clock`, and is called `clock`. Its number
is that of no other exercise of any stage; those of the core path come first, in its order:

    README.md   `# Title`, then `**Core, 1 of 10.** 10 minutes. What you learn.` (or `**Extra.** 10 ...`),
                for a core exercise a paragraph `**Read first:**` with a link to each section that it needs,
                then the question and the commands
    check.py    `check(workspace)` returns what the exercise shows, or raises `Wrong`
    starter/    the files to work on, if any; the first command copies them to mine/, which git ignores

In check.py `ANSWERS` has the lines of answers.txt, where the learner finds a `?` for each answer, and
`HINTS` has three, each under a line that begins with `## `. There may also be `SOLUTION`, for each file of
starter/ that changes a diff whose hunks begin with a line `@@`, and `RECORDED`, what learners take who cannot
run the exercise: a log, a folder with the files of runs, or a CSV with the rows of many runs, each with the
names of the runs to take, or none for all that is there.

For test_exercises.py it has `STARTS_WITH`, a part of the answer to the untouched starter, and `WRONG`,
typical wrong answers: (file in mine/, text of the solution, its replacement, part of the resulting hint); for
runs, the file may be `runs/*.csv`. `TOLD_WHEN_DONE` has mistakes of the same form that the check names
although the exercise is done, as they are of an extra part.
"""

import ast
import difflib
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from manygpus.config.command_line import Parser
from manygpus.errors import UserError, print_line
from manygpus.files import explained, replacing
from manygpus.process import end_with
from manygpus.record import records
from manygpus.workshop.sections import WORDS_PER_MINUTE, Section
from manygpus.workshop.work import ANSWERS, OPEN, Workspace, Wrong, explain

PROGRESS = "progress.json"
HEADER = re.compile(
    r"^# (?P<title>.+)\n\n\*\*(?P<kind>Core|Extra)\b.*?\.\*\* (?P<minutes>\d+) minutes\. ", re.MULTILINE
)
READ_FIRST = re.compile(r"^\*\*Read first:\*\* (.+?)\n\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^]]+)\]\(([^)#]+)#([^)]+)\)")
CHECK_SECONDS = 120  # for a check, on an otherwise idle machine
TOO_LONG = (
    f"The check takes longer than {CHECK_SECONDS} seconds (more if the machine is busy). Does a loop in your "
    "program never end? If every loop ends, check again when the machine is quiet."
)
ENDED = "Your program ended the check. Does it call `exit`, or was there too little memory?"


class Exercise:
    """One exercise, in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        number, _, self.name = folder.name.partition("_")
        self.number = int(number)
        self.stage = folder.parents[1]
        self.readme = folder / "README.md"
        self.workspace = Workspace(folder / "mine")
        text = self.readme.read_text()
        header = HEADER.search(text)
        self.title = header["title"]
        self.minutes = int(header["minutes"])
        self.kind = header["kind"].lower()
        read_first = READ_FIRST.search(text)
        self.sections = [
            Section(Path(os.path.normpath(folder / page)), anchor, " ".join(title.split()))
            for title, page, anchor in (LINK.findall(read_first[1]) if read_first else [])
        ]

    @cached_property
    def minutes_to_read(self) -> int:
        """Return how long it takes to read the sections that the exercise needs."""
        return math.ceil(sum(len(section.text.split()) for section in self.sections) / WORDS_PER_MINUTE)

    @cached_property
    def hints(self) -> list[str]:
        text = "\n" + self.constants["HINTS"]
        return [hint.partition("\n")[2].strip() for hint in text.split("\n## ")[1:]]

    @property
    def definitions(self) -> dict[str, object]:
        """Return what check.py defines."""
        return runpy.run_path(str(self.folder / "check.py"))

    @cached_property
    def constants(self) -> dict[str, object]:
        """Return the plain texts, lists and dicts in check.py, without running it, which loads PyTorch."""
        constants = {}
        for node in ast.parse((self.folder / "check.py").read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                with suppress(ValueError):
                    constants[node.targets[0].id] = ast.literal_eval(node.value)
        return constants

    def check(self) -> str:
        """Check the learner's work in a separate process, and return what the exercise shows.

        That process ends with its answer, or when the time is over, whatever the program still does.

        Raises:
            Wrong: if something is not right yet, or the learner's program fails or does not end.
        """
        seconds = CHECK_SECONDS * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        # A forked process has imported already what the check imports.
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=self._answer, args=(sender,))
        process.start()
        sender.close()
        try:
            if not receiver.poll(seconds):
                raise Wrong(TOO_LONG)
            answer = receiver.recv()
        except EOFError:
            raise Wrong(ENDED) from None
        finally:
            process.kill()
            process.join()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _answer(self, sender: Connection) -> None:
        """Send what the check returns, or the exception that tells what is not right yet."""
        end_with(multiprocessing.parent_process().pid)
        # A check says the same on every machine, and it may fork, which CUDA does not survive.
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        try:
            answer = self.definitions["check"](self.workspace)
        except UserError as error:
            answer = error
        except BaseException as error:
            # Also the exit of the learner's program.
            answer = explain(error, self.workspace)
        # Print what the learner's program has written, before the answer ends this process.
        sys.stdout.flush()
        sender.send(answer)

    def begin(self) -> None:
        """Copy the starter, and the open answers, unless one of these files is there."""
        folder = self.workspace.folder
        starter = self.folder / "starter"
        names = [ANSWERS, *(path.name for path in starter.glob("*"))]
        if any((folder / name).exists() for name in names):
            return
        # A `?` in place of each value in lines `name = value  # comment`.
        blank = re.sub(
            r"^(\w+ =) [^#\n]*?( *#.*)?$", rf"\1 {OPEN}\2", self.constants["ANSWERS"], flags=re.MULTILINE
        )
        # A class may share one checkout.
        advice = "free some space, or work in a checkout of your own; `reset` then restores the files."
        with explained(f"{relative(folder)} cannot be written to", advice):
            folder.mkdir(exist_ok=True)
            if starter.exists():
                shutil.copytree(starter, folder, dirs_exist_ok=True)
            (folder / ANSWERS).write_text(blank)

    def diff(self) -> str:
        """Return the diff from the learner's files to those of the solution."""
        lines = []
        for name, text in self.solution.items():
            exists = (self.workspace.folder / name).exists()
            learner_text = self.workspace.text(name) if exists else ""
            lines += difflib.unified_diff(
                learner_text.splitlines(),
                text.splitlines(),
                fromfile=f"mine/{name}",
                tofile=f"solution/{name}",
                lineterm="",
            )
        return "\n".join(lines)

    @property
    def solution(self) -> dict[str, str]:
        """Return the text of the finished files that the learner changes, by name."""
        finished = {ANSWERS: self.constants["ANSWERS"]}
        for name, diff in self.constants.get("SOLUTION", {}).items():
            finished[name] = _patched((self.folder / "starter" / name).read_text(), diff)
        return finished


def _patched(text: str, diff: str) -> str:
    """Return the text with each hunk of the diff in its place, which is the only one where it fits."""
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        before, after = text.split(old)
        text = before + new + after
    return text


class Workbook:
    """The exercises of a stage, in order, and which are done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exercises = [Exercise(path.parent) for path in sorted(folder.glob("*/check.py"))]
        self.read()

    def read(self) -> None:
        """Read the names of the finished exercises, and the number of hints given, by name."""
        path = self.folder / PROGRESS
        progress = json.loads(path.read_text()) if path.exists() else {"done": [], "hints": {}}
        self.done: list[str] = progress["done"]
        self.hints: dict[str, int] = progress["hints"]

    def find(self, name: str) -> Exercise:
        """Return the exercise with this name, number or folder."""
        for exercise in self.exercises:
            if _is_called(exercise, name):
                return exercise
        for exercise in Course(self.folder.parents[1]).exercises:
            if _is_called(exercise, name):
                raise UserError(
                    f"exercise {exercise.name} is in another folder: cd {relative(exercise.stage)} first."
                )
        names = ", ".join(exercise.name for exercise in self.exercises)
        raise UserError(f"there is no exercise {name!r} here: the exercises are {names}.")

    def save(self) -> None:
        with replacing(self.folder / PROGRESS) as file:
            json.dump({"done": self.done, "hints": self.hints}, file, indent=1)

    @property
    def open(self) -> list[Exercise]:
        """Return the exercises that are not done."""
        return [exercise for exercise in self.exercises if exercise.name not in self.done]


def _is_called(exercise: Exercise, name: str) -> bool:
    return Path(name).name in (exercise.name, str(exercise.number), exercise.folder.name)


class Course:
    """The exercises of all stages, by number: first those of the core path, in its order."""

    def __init__(self, repository: Path) -> None:
        workbooks = [Workbook(path.parent) for path in sorted(repository.glob("0*/exercises/check.py"))]
        every = [exercise for workbook in workbooks for exercise in workbook.exercises]
        self.repository = repository
        self.exercises = sorted(every, key=lambda exercise: exercise.number)
        self.core = [exercise for exercise in self.exercises if exercise.kind == "core"]
        self._open = {exercise.folder for workbook in workbooks for exercise in workbook.open}

    def listed(self, exercises: list[Exercise]) -> str:
        """List the exercises, with a cross where one is done."""
        width = max(len(exercise.name) for exercise in exercises)
        return "\n".join(
            f"[{' ' if exercise.folder in self._open else 'x'}] {exercise.number:2}  {exercise.name:{width}}"
            f"  {exercise.minutes:3} min  {exercise.kind:5}  {exercise.title}"
            for exercise in exercises
        )

    def core_path(self) -> str:
        """List the core path, under a line that says how long it takes."""
        hours, minutes = divmod(self.minutes, 60)
        extras = len(self.exercises) - len(self.core)
        return (
            f"The core path: {len(self.core)} exercises with their reading, {hours} h {minutes:02} min. "
            f"{extras} more are extra.\n{self.listed(self.core)}"
        )

    @property
    def minutes(self) -> int:
        """Return how long the core path takes: to read the sections, and to do the exercises."""
        return sum(exercise.minutes + exercise.minutes_to_read for exercise in self.core)

    @property
    def following(self) -> Exercise | None:
        """Return the next core exercise, None if all are done.

        Whoever has left one out is not sent back to it before the end.
        """
        still_open = [exercise for exercise in self.core if exercise.folder in self._open]
        done = [exercise for exercise in self.core if exercise not in still_open]
        furthest = max((exercise.number for exercise in done), default=0)
        ahead = [exercise for exercise in still_open if exercise.number > furthest]
        return next(iter(ahead or still_open), None)

    def progress(self) -> str:
        """Return how much of the core path is done, what comes next, and what to read for it."""
        following = self.following
        done = sum(exercise.folder not in self._open for exercise in self.core)
        bar = f"[{'#' * done}{'.' * (len(self.core) - done)}] {done} of {len(self.core)} exercises done."
        if following is None:
            page = relative(self.repository / "YOUR_TRAINING.md")
            return (
                f"Core path: {bar}\nThe core path is done. Next: a training of your own, {page}, or an extra "
                "exercise."
            )
        return "\n".join(
            [
                f"Core path: {bar}",
                f"Next: {following.number} {following.name}, {following.minutes} minutes. "
                f"Read first, {following.minutes_to_read} min:",
                *(f"  {relative(section.page)}: {section.title}" for section in following.sections),
                f"Then do what {relative(following.readme)} says.",
            ]
        )


def main(folder: Path, description: str) -> int:
    """Do what the command line of the exercises in `folder` asks for; return the exit code.

    Raises:
        UserError: if there is no such exercise.
        OSError: if one cannot be written.
    """
    parser = Parser(description=description)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        with_name = commands.add_parser(name, help=command.help, description=command.help)
        with_name.set_defaults(act=command.act)
        with_name.add_argument("name", help="the exercise: its name or number")
    args = parser.parse_args()
    workbook = Workbook(folder)
    for exercise in workbook.exercises:
        exercise.begin()
    if args.command:
        return args.act(workbook, workbook.find(args.name))
    course = Course(folder.parents[1])
    listed = [exercise for exercise in course.exercises if exercise.stage == folder.parent]
    print_line(f"{course.listed(listed)}\n\n{course.progress()}")
    return 0


def _check(workbook: Workbook, exercise: Exercise) -> int:
    try:
        conclusion = exercise.check()
    except Wrong as wrong:
        print_line(f"{exercise.name}: not yet.\n{wrapped(str(wrong))}\n")
        hint = _command_line(workbook, "hint", exercise)
        print_line(f"Your files are in {relative(exercise.workspace.folder)}. For a hint: {hint}")
        return 1
    # Another terminal may have changed it during the check.
    workbook.read()
    if exercise.name not in workbook.done:
        workbook.done.append(exercise.name)
    print_line(f"{exercise.name}: done.\n{wrapped(conclusion)}\n")
    workbook.save()
    print_line(Course(workbook.folder.parents[1]).progress())
    return 0


def _hint(workbook: Workbook, exercise: Exercise) -> int:
    most = len(exercise.hints)
    number = min(workbook.hints.get(exercise.name, 0) + 1, most)
    workbook.hints[exercise.name] = number
    print_line(f"{exercise.name}, hint {number} of {most}:\n{wrapped(exercise.hints[number - 1])}")
    workbook.save()
    if number == most:
        print_line(
            f"\nThat was the last hint. For the solution: {_command_line(workbook, 'solution', exercise)}"
        )
    return 0


def _reset(_: Workbook, exercise: Exercise) -> int:
    folder = exercise.workspace.folder
    if folder.exists():
        print_line(f"What you wrote is kept in {relative(folder.rename(_unused(folder)))}.")
    exercise.begin()
    print_line(f"{exercise.name}: the starter is in {relative(folder)} again.")
    return 0


def _recorded(_: Workbook, exercise: Exercise) -> int:
    """Copy the recorded runs to the place of the learner's own, which are kept under another name."""
    recorded = exercise.definitions.get("RECORDED")
    if not recorded:
        raise UserError(f"there are no recorded runs for {exercise.name}, which needs none.")
    repository = exercise.folder.parents[2]
    runs = exercise.workspace.folder / "runs"
    if runs.exists():
        kept = runs.rename(_unused(exercise.workspace.folder / "own-runs"))
        print_line(f"Your own runs are kept in {relative(kept)}.")
    runs.mkdir()
    for name, run_ids in recorded.items():
        path = repository / name
        if path.is_dir():
            shutil.copytree(path, runs, dirs_exist_ok=True)
        elif path.suffix == ".csv":
            _copy_runs(path, runs, run_ids)
        else:
            shutil.copy(path, runs)
    print_line(f"{exercise.name}: the recorded runs are in {relative(runs)}.")
    return 0


def _copy_runs(path: Path, folder: Path, run_ids: list[str]) -> None:
    """Write the rows of these runs, or of all, in the CSV at `path` to a CSV for each run in `folder`."""
    for run_id, rows in records.by_run(records.read(path)).items():
        if not run_ids or run_id in run_ids:
            records.put_table(folder / f"{run_id}.csv", records.COLUMNS, rows)


def _solution(_: Workbook, exercise: Exercise) -> int:
    print_line(exercise.diff() or f"Your files of {exercise.name} are equal to those of the solution.")
    return 0


class Command(NamedTuple):
    """A command of check.py."""

    act: Callable[[Workbook, Exercise], int]  # returns the exit code
    help: str


COMMANDS = {
    "check": Command(_check, help="check what you did"),
    "hint": Command(_hint, help="show the next of three hints"),
    "reset": Command(_reset, help="put the starter back; what you wrote is kept under a different name"),
    "recorded": Command(_recorded, help="use our recorded runs instead of your own"),
    "solution": Command(_solution, help="show how your files differ from the solution"),
}


def _command_line(workbook: Workbook, command: str, exercise: Exercise) -> str:
    return f"python {relative(workbook.folder / 'check.py')} {command} {exercise.name}"


def _unused(path: Path) -> Path:
    """Return `path` with the first number that no other file has."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(candidate for candidate in numbered if not candidate.exists())


def wrapped(text: str) -> str:
    """Indent a text for the learner, and wrap long lines."""
    lines = (textwrap.fill(line, 110, break_on_hyphens=False) for line in text.splitlines())
    return textwrap.indent("\n".join(lines), "  ")


def relative(path: Path) -> str:
    """Return the path from the current folder, or from the root where that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)
