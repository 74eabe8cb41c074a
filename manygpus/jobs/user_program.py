"""A program that does not use the kit, and how a job starts it: what stands before --plain, and behind it.

    --plain train.py ...                             a Python script
    --plain -m package.train ...                     a module, as for `python -m`
    --plain run.sh ...                               any other program, once in each process
    --plain torchrun ...                             one that is installed, on PATH or beside --python
    --python ~/envs/mine/bin/python --plain ...      with the Python of another environment than the kit's
    --when-requeued "--resume" --plain ...           with more arguments when the job comes back, also
                                                     where Slurm has ended it before it has saved
    --when-requeued "--resume {folder}/*.pt" ...     with the newest of these files, if there is one
    --when-requeued "" --plain ...                   it comes back after a preemption, to start anew
    --plain train.py --save {folder}/model.pt        with the job's own folder in an argument
    --one-process-per-node --plain ...               it starts the ranks of its node itself

submit.py, sweep.py, the doctor and the job scripts read these words. inside/run_plain.py runs the program in
every process of a job. It needs only the standard library.
"""

import argparse
import glob
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manygpus import project
from manygpus.config.command_line import Parser, given, given_path
from manygpus.errors import REPOSITORY, UserError
from manygpus.job_folder import Script

OPTIONS = ("--python", "--when-requeued", "--one-process-per-node")
FOLDER = (
    "{folder}"  # in the arguments: the job's own folder; in a sweep, the run's (sweeps/varied_options.py)
)
# The variables with the environment that is active, and what the folder of such an environment has.
ACTIVE = {"VIRTUAL_ENV": "pyvenv.cfg", "CONDA_PREFIX": "conda-meta"}
# A word of --when-requeued with a path: an option in front of it, as --resume=, and the path, with / or *.
WITH_PATH = re.compile(r"([^/=*]*=)?((?!-)(?!.*://).*[/*].*)")
# How the files of programs begin that Linux can start: scripts with an interpreter, and compiled ones.
STARTABLE = (b"#!", b"\x7fELF")
BASH = "/bin/bash"


@dataclass(frozen=True)
class Program:
    """A program that does not use the kit.

    Attributes:
        path: its file. For a module that is not found from `user_folder`, it is that folder.
        user_folder: the folder that its user is in. Modules are found from there, wherever the program itself
            starts.
        module: the name of the module, or "".
        python: the Python that runs it, or with which it is surrounded; None for that of the job.
        when_requeued: more arguments, for every start but the first (`newest`); None if the job is to come
            back only when it has saved.
        one_process_per_node: whether it starts the ranks of its node itself.
        starter: the words that start its file, if that does not start by itself: bash, of a shell script.
        is_frozen: whether `path` and `user_folder` are in the frozen code of the job (frozen_code.py).
    """

    path: Path
    user_folder: Path = Path()
    module: str = ""
    python: Path | None = None
    when_requeued: tuple[str, ...] | None = None
    one_process_per_node: bool = False
    starter: tuple[str, ...] = ()
    is_frozen: bool = False

    @property
    def label(self) -> str:
        """Return the name of its runs, for jobs and folders."""
        return self.module or self.path.stem

    @property
    def is_python(self) -> bool:
        """Return whether it is Python code, which a Python has to be started for."""
        return bool(self.module) or self.path.suffix == ".py"

    @property
    def folder(self) -> Path:
        """Return the folder of its code; an installed program works on that of its user."""
        if self.path.parent.name == "bin":
            return self.user_folder
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def words(self) -> list[str]:
        """Return the words by which a command line names it; its arguments come behind them."""
        words = []
        if self.python:
            words += ["--python", str(self.python)]
        if self.when_requeued is not None:
            words += ["--when-requeued", shlex.join(self.when_requeued)]
        if self.one_process_per_node:
            words.append("--one-process-per-node")
        if self.is_frozen:
            words += ["--frozen", str(self.user_folder)]
        return [*words, "--plain", *self.name]

    @property
    def name(self) -> list[str]:
        """Return the words behind --plain."""
        return ["-m", self.module] if self.module else [str(self.path)]

    @property
    def command(self) -> list[str]:
        """Return the words by which its user would start it, before its arguments."""
        start = [str(self.python or "python")] if self.is_python else self.starter
        return [*start, *self.name]

    def in_start(self, earlier_starts: int, arguments: Sequence[str], folder: Path | None) -> list[str]:
        """Return its arguments in a start of the job.

        Args:
            earlier_starts: how often the job has started before.
            arguments: the arguments that its user has given.
            folder: the job's own, which stands for {folder}; None outside of a job.
        """
        added = newest(self.added_to(folder) or ()) if earlier_starts else []
        return [*_with_folder(arguments, folder), *added]

    def added_to(self, folder: Path | None) -> list[str] | None:
        """Return the words of --when-requeued for a job with this folder; None if there is no such option."""
        return None if self.when_requeued is None else _with_folder(self.when_requeued, folder)

    def described(self, arguments: Sequence[str], python: str, folder: Path | None = None) -> Script:
        """Return what a job says that it runs, without its commit; `python` and `folder` are the job's."""
        return Script(
            path=str(self.path),
            arguments=[*arguments],
            module=self.module,
            python=str(self.python or python),
            when_requeued=self.added_to(folder),
        )


def _with_folder(words: Sequence[str], folder: Path | None) -> list[str]:
    return [*words] if folder is None else [word.replace(FOLDER, str(folder)) for word in words]


def newest(words: Sequence[str]) -> list[str]:
    """Return words of --when-requeued with the newest file or folder in place of each path.

    A path has a / or a *, which stands for any part of a name. If nothing is there that one of them names,
    nothing has been saved, and there are no words: with them the script would look for it in vain, and end
    (seen: MAE's main_pretrain.py, preempted in its first epoch, lost its place in the queue).
    """
    newest_words = []
    for word in words:
        option_and_path = WITH_PATH.fullmatch(word)
        if not option_and_path:
            newest_words.append(word)
            continue
        option, path = option_and_path.groups(default="")
        name = _newest_name(path)
        if name is None:
            return []
        newest_words.append(option + name)
    return newest_words


def saved_at(words: Sequence[str]) -> float | None:
    """Return when the newest file that words of --when-requeued name was saved, in seconds since 1970.

    None if they name none.
    """
    matched = filter(None, map(WITH_PATH.fullmatch, words))
    names = filter(None, (_newest_name(option_and_path[2]) for option_and_path in matched))
    return max((Path(name).stat().st_mtime for name in names), default=None)


def _newest_name(path: str) -> str | None:
    """Return the name of the newest file or folder that a path names, in which * stands for anything."""
    # Other special characters may be in the names of folders.
    pattern = glob.escape(str(Path(path).expanduser())).replace("[*]", "*")
    names = glob.glob(pattern)  # noqa: PTH207  Path.glob also finds hidden files, as of a save that was cut off
    times = {name: Path(name).stat().st_mtime_ns for name in names if Path(name).exists()}
    return max(times, key=times.get, default=None)


def python_of_job() -> str:
    """Return the Python that runs scripts, where it is asked for in a job.

    In a checkout it is that of the kit, which activate_environment has chosen. Where the kit is installed in
    an environment of its own, scripts run with the one of the shell from which the job was sent.
    """
    return sys.executable if project.IS_CHECKOUT else shutil.which("python") or "python3"


def without_the_kit(path: str) -> str:
    """Return a PYTHONPATH without this checkout, which scripts/site_env.sh has put there."""
    folders = [folder for folder in path.split(os.pathsep) if folder and Path(folder).resolve() != REPOSITORY]
    return os.pathsep.join(folders)


def note_on_environment(program: Program) -> str:
    """Return which Python runs a program where its user may expect that of the active environment; or ""."""
    if not project.IS_CHECKOUT:
        return ""
    for name in ACTIVE:
        active = Path(os.environ.get(name, sys.prefix))
        python = active / "bin" / "python"
        if program.path.parent == python.parent:
            continue
        if program.python is None and active.resolve() != Path(sys.prefix).resolve() and python.exists():
            return f"it runs with the job's Python; for the environment active here, give --python {python}"
    return ""


def add_options(group: argparse._ActionsContainer) -> None:
    """Add the options before --plain, which has another help in each command."""
    group.add_argument(
        "--python",
        metavar="FILE",
        type=given,
        help="for --plain: the Python that runs the script, such as "
        "~/envs/mine/bin/python (default: the job's)",
    )
    group.add_argument(
        "--one-process-per-node",
        action="store_true",
        help="for --plain: one process per node, which has all of its GPUs and starts its ranks itself",
    )
    group.add_argument(
        "--when-requeued",
        metavar="WORDS",
        help="for --plain: extra arguments for when the job comes back from the queue, such as '--resume' or "
        "'--resume {folder}/*.pt', which is the newest of these files; with them it also comes back if the "
        "time limit or a preemption ends a script that handles no signal; '': after a preemption it starts "
        "anew",
    )


def split(words: Sequence[str], parser: Parser) -> tuple[list[str], list[str]]:
    """Split off what always goes to the training: what follows -- or the name of a plain program.

    In a checkout the name comes after --plain, as other words are for a stage. Where the kit is installed
    without stages, the first word that is no option and no value of one is a name, too.

    The name becomes one word with its option, such as `--plain=-m package.train`, and so do the words of
    --when-requeued: argparse would take what begins with a dash for another option.

    Args:
        words: those of the command line.
        parser: the parser of the words in front.
    """
    before: list[str] = []
    left = [*words]
    while left:
        word = left.pop(0)
        if word == "--":
            return before, left
        if word == "--plain":
            length = 2 if left[:1] == ["-m"] else 1
            name = " ".join(left[:length])
            return [*before, f"--plain={name}"], left[length:]
        if not project.IS_CHECKOUT and not word.startswith("-"):
            return [*before, f"--plain={word}"], left
        if word == "--when-requeued" and left:
            word = f"{word}={left.pop(0)}"
        before.append(word)
        if word.startswith("--plain="):
            return before, left
        if parser.takes_value(word):
            before += left[:1]
            del left[:1]
    return before, []


def parse(words: Sequence[str]) -> tuple[Program, list[str]]:
    """Return the program that the arguments of a job script name, and its own arguments.

    Raises:
        UserError: as `from_options`, and for other options than these.
    """
    parser = Parser(prog="--plain", add_help=False)
    parser.add_argument("--plain", type=given)
    # The folder in place of the current one; only submit.py and sweep.py write it.
    parser.add_argument("--frozen", type=given_path)
    add_options(parser)
    own_words, arguments = split(words, parser)
    own_options, unknown = parser.parse_known_args(own_words)
    if not own_options.plain:
        raise UserError(f"{', '.join(OPTIONS)} are for plain scripts: put --plain and the script after them.")
    if unknown:
        raise UserError(misplaced(unknown[0], own_options.plain))
    frozen = own_options.frozen
    program = from_options(own_options, [frozen or Path.cwd()])
    return replace(program, is_frozen=frozen is not None), arguments


def misplaced(word: str, name: str) -> str:
    """Return what to say of an option before --plain that is not for plain programs."""
    return f"{word} is not for plain scripts: put the arguments of {name} after its name"


def from_options(own_options: argparse.Namespace, folders: Sequence[Path]) -> Program:
    """Return the program of a command line with `add_options` and --plain.

    Args:
        own_options: the options of that command line.
        folders: the folders in which its file is looked for; modules in the first one only.

    Raises:
        UserError: if it is not there or cannot be started.
    """
    name = own_options.plain
    module = ""
    starter: tuple[str, ...] = ()
    python = _python(own_options.python, folders[0]) if own_options.python else None
    if re.match(r"-m\b", name):
        module = name.removeprefix("-m").strip()
        path = _file_of(module, folders[0])
    else:
        path = _find(name, folders, python)
        if path.suffix != ".py":
            starter = _starter(path, name)
    when_requeued = own_options.when_requeued
    if when_requeued is not None:
        try:
            when_requeued = tuple(shlex.split(when_requeued))
        except ValueError as error:
            raise UserError(f"--when-requeued {own_options.when_requeued!r}: {error}.") from None
    return Program(
        path=path,
        user_folder=folders[0],
        module=module,
        python=python,
        when_requeued=when_requeued,
        one_process_per_node=own_options.one_process_per_node,
        starter=starter,
    )


def _file_of(module: str, folder: Path) -> Path:
    """Return the file of a module, or `folder` if it is not in there: it may be installed."""
    if not re.fullmatch(r"\w+(\.\w+)*", module):
        raise UserError(f"--plain -m takes the name of a module, as in -m package.train, not {module!r}.")
    path = folder.joinpath(*module.split("."))
    for candidate in (path.with_name(f"{path.name}.py"), path / "__main__.py"):
        if candidate.is_file():
            return candidate
    return folder


def _find(name: str, folders: Sequence[Path], python: Path | None) -> Path:
    """Return the file of a script in one of the folders, or else of an installed program."""
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None and "/" not in name:
        path = _installed(name, python)
    if path is None:
        correction = "correct its name"
        submitted_from = os.environ.get("SLURM_SUBMIT_DIR")
        if submitted_from and Path.cwd() != Path(submitted_from):
            correction += ", or leave out --chdir"
        raise UserError(
            f"there is no script {name} in {' or '.join(map(str, folders))}, and no such program on PATH: "
            f"{correction}."
        )
    return Path(os.path.normpath(path.absolute()))


def _installed(name: str, python: Path | None) -> Path | None:
    """Return the file of a program as a shell finds it, such as nnUNetv2_train (MIC-DKFZ/nnUNet#2367)."""
    on_path = os.environ.get("PATH", os.defpath)
    # The environment of the job's own Python may not be active where the job is sent from.
    places = [str(python.parent), on_path] if python else [on_path, str(Path(sys.executable).parent)]
    path = shutil.which(name, path=os.pathsep.join(places))
    return Path(path) if path else None


def _starter(path: Path, name: str) -> tuple[str, ...]:
    """Return the words that start the file of a program: none if it starts by itself.

    A shell script may lack its x bit, its first line, or both, where its users call it by `bash x.sh` (all
    of Time-Series-Library).

    Raises:
        UserError: if nothing starts it.
    """
    with path.open("rb") as file:
        first_line = file.readline(1000)
    is_executable = os.access(path, os.X_OK)
    if is_executable and first_line.startswith(STARTABLE):
        return ()
    if path.suffix == ".sh":
        return tuple(shlex.split(os.fsdecode(first_line[2:]))) if first_line.startswith(b"#!") else (BASH,)
    lacks = [] if is_executable else [f"chmod +x {name}"]
    if not first_line.startswith(STARTABLE):
        lacks.append("a first line that says what runs it, such as #!/bin/bash")
    raise UserError(
        f"{name} is no Python script (.py) or shell script (.sh), and to start as a program it needs "
        f"{' and '.join(lacks)}."
    )


def _python(text: str, folder: Path) -> Path:
    # Not resolved: in an environment of its own, `python` is a link to the Python that it was made with.
    path = Path(os.path.normpath(folder.absolute() / Path(text).expanduser()))
    if not path.is_file() or not os.access(path, os.X_OK):
        example = path / "bin" / "python" if (path / "bin" / "python").exists() else "~/envs/mine/bin/python"
        raise UserError(
            f"--python {text} is not a program: give the Python of your environment, as {example}."
        )
    return path
