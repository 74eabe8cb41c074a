"""Freeze the code of a job: copy the checkout of its script as it is now, for all starts of the job.

A job may wait for days, and come back after its script has been edited. It runs the copy: the files that git
tracks, as they are and not as they were committed, and new files of source code. All else is data or results,
and the copy has a link to it. Copies and links lie in the job's folder, and go with it (frozen_code.py).
"""

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from manygpus import frozen_code
from manygpus.files import replacing
from manygpus.frozen_code import FrozenCode
from manygpus.jobs.git_checkout import (
    GitError,
    Listing,
    changed_since_the_commit,
    clone_without_files,
    commit_of,
    files_of,
    top_of,
)
from manygpus.jobs.stages import JOB_ENV, Stage
from manygpus.jobs.user_program import Program
from manygpus.log_words import CODE, line, printable
from manygpus.record.digest import digest

# What is larger is linked, as weights are that somebody has committed.
MOST_MB_OF_A_FILE = 10
MOST_MB = 200
MOST_FILES = 20_000
# Of folders and files that the copy only links to. Where git ignores single files of a folder, as *.png,
# there may be very many.
MOST_LINKS = 5_000
# Names that are told of what is left out.
MOST_NAMES = 5
# Files that git does not track are copied with these names, and without a suffix if they can be executed.
SOURCES = {
    *(".py", ".pyi", ".pyx", ".pxd", ".ipynb", ".sh", ".bash", ".slurm", ".sbatch", ".mk"),
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".jl", ".lua", ".r", ".rs", ".sql", ".proto"),
    *(".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".gin", ".jsonnet", ".libsonnet"),
    *(".j2", ".jinja", ".jinja2", ".tmpl", ".template", ".md", ".rst"),
}
# An argument that names a file in the copy with one of these names is read there. Scripts also write JSON:
# that is read there if git tracks it.
READ_FROM_THE_COPY = {".py", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".gin", ".json"}
WRITTEN_BY_SCRIPTS = {".json", ".ipynb"}
# What tells that a file has not changed since the latest copy.
SAME = ("st_size", "st_mtime_ns", "st_mode")
# No use in a copy: Python makes its own.
BYTECODE = re.compile(r"(^|/)__pycache__/|\.py[co]$")
# In the folder of all jobs: links to the latest copies.
LATEST = "latest-code"
# Copies at a time: a shared file system answers late.
THREADS = 8


class NotFrozenError(Exception):
    """The code of a job cannot be frozen; the text says why."""


@dataclass(frozen=True)
class PlannedCopy:
    """What will be copied when the job is sent.

    Attributes:
        code: the frozen code that this becomes.
        sent_from: the folder that the job is sent from.
        files: the files to copy, by their names from the top of the checkout.
        tracked: those of them that git tracks.
        links: the links of the copy, by their names there, and where each leads.
        left_out: the names of what is linked instead of copied, first what is too large.
        size: of the files, in bytes.
        copies: the folder with a link to the latest copy of each checkout.
    """

    code: FrozenCode
    sent_from: Path
    files: frozenset[str]
    tracked: frozenset[str]
    links: Mapping[str, str]
    left_out: tuple[str, ...]
    size: int
    copies: Path

    @property
    def job_env(self) -> Path:
        """Return what the job script sources, which is in the copy if the kit is."""
        return self.path_in_copy(JOB_ENV)

    @property
    def kit(self) -> Path | None:
        """Return the folder of the kit in the copy, whose code the job then also runs; None if there is none.

        Besides in a copy of this checkout, it is in that of a project which has the kit as a submodule.
        """
        return None if self.job_env == JOB_ENV else self.job_env.parents[3]

    def stage(self, stage: Stage) -> Stage:
        """Return the stage with its script, and its program, in the copy."""
        program = stage.program
        if program is None:
            return replace(stage, script=self.path_in_copy(stage.script))
        program = replace(
            program,
            path=self.path_in_copy(program.path),
            user_folder=self.code.sent_from,
            is_frozen=True,
        )
        return replace(stage, script=program.path, program=program)

    def path_in_copy(self, path: Path) -> Path:
        """Return the path of a script in the copy; that of an installed program stays."""
        name = _name_in(self.code.checkout, path)
        return path if name is None or name not in self.files else self.code.folder / name

    def arguments(self, words: Iterable[str]) -> tuple[str, ...]:
        """Return arguments with the copy of each source file that they name, alone or as --config=FILE."""
        return tuple(map(self._argument, words))

    def _argument(self, word: str) -> str:
        option, value = re.fullmatch(r"(-[^=]*=)?(.*)", word, re.DOTALL).groups(default="")
        suffix = Path(value).suffix
        if suffix not in READ_FROM_THE_COPY:
            return word
        name = _name_in(self.code.checkout, self.sent_from / value)
        if name not in (self.tracked if suffix == ".json" else self.files):
            return word
        is_below = not Path(value).is_absolute() and self.sent_from.is_relative_to(self.code.checkout)
        return option + str(self.code.sent_from / value if is_below else self.code.folder / name)

    def sentences(self, program: Program | None) -> tuple[str, ...]:
        """Return what is told when a job is sent that runs this program; None for one that uses the kit."""
        frozen = f"{self.code.commit_in_words}, frozen in {self.code.folder}: {self._amount}"
        return (line(CODE, frozen), *self._told_of_links, *self._limits_of(program))

    @property
    def would_freeze(self) -> tuple[str, ...]:
        """Return what is told when nothing is sent."""
        would = f"not frozen by a dry run; otherwise {self.code.commit_in_words} would be: {self._amount}"
        return (line(CODE, would), *self._told_of_links)

    def _limits_of(self, program: Program | None) -> list[str]:
        """Return a note on a shell script that finds other files by their paths from the current folder."""
        if program is None or program.is_python or self.path_in_copy(program.path) == program.path:
            return []
        if frozen_code.VARIABLE in program.path.read_text(errors="replace"):
            return []
        return [
            f"note: {program.path.name} is frozen, but not what it starts from this folder by name: with "
            f'cd "${{{frozen_code.VARIABLE}:-.}}" as its first line it works in the copy'
        ]

    @property
    def is_there(self) -> bool:
        """Return whether the copy has been made."""
        return self.code.folder.with_name(frozen_code.FACTS).exists()

    @property
    def _amount(self) -> str:
        return f"{len(self.files)} files, {self.size / 1e6:.1f} MB"

    @property
    def _told_of_links(self) -> list[str]:
        return [line("", f"linked, not copied: {named(self.left_out)}")] if self.left_out else []

    def write(self) -> None:
        """Make the copy, if it is not there. What a killed program has left of one is replaced.

        Raises:
            OSError: if it cannot be written.
        """
        if self.is_there:
            return
        folder = self.code.folder
        if folder.exists():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A script may ask git for its commit, by its own folder. Above it may be the checkout of another
        # project, such as this one, which would answer. Before the first commit there is no answer.
        with suppress(GitError):
            clone_without_files(self.code.checkout, folder)
        for name in sorted(_folders_of([*self.files, *self.links])):
            (folder / name).mkdir(exist_ok=True)
        self._latest.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(THREADS) as pool:
            copied = [*pool.map(self._copy, self.files)]
        for name, target in self.links.items():
            (folder / name).symlink_to(target)
        with replacing(folder.with_name(frozen_code.FILES), "wb") as file:
            file.write(b"".join(os.fsencode(name) + b"\0" for name in sorted(filter(None, copied))))
        with replacing(folder.with_name(frozen_code.FACTS)) as file:
            file.write(self.code.as_json())
        new = self._latest.with_name(f"{self._latest.name}.{secrets.token_hex(4)}")
        new.symlink_to(folder)
        new.replace(self._latest)

    @property
    def _latest(self) -> Path:
        """Return the link to the latest copy of this checkout."""
        return self.copies / digest(os.fsencode(self.code.checkout))

    def _copy(self, name: str) -> str:
        """Copy a file with its mode and time, and return its name; "" if it cannot be read."""
        source, copy = self.code.checkout / name, self.code.folder / name
        if self._has_linked(name):
            return name
        try:
            content = source.open("rb")
        except (FileNotFoundError, PermissionError):
            return ""
        with content, copy.open("xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
            status = os.fstat(content.fileno())
        copy.chmod(stat.S_IMODE(status.st_mode))
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        return name

    def _has_linked(self, name: str) -> bool:
        """Link a file to that of the latest copy, if it is the same, which saves time and space.

        That is done with sources only: a job that changes one of its other files must not change that of
        other jobs.
        """
        suffix = Path(name).suffix
        if suffix not in SOURCES or suffix in WRITTEN_BY_SCRIPTS:
            return False
        try:
            now, then = (self.code.checkout / name).lstat(), (self._latest / name).lstat()
            is_same = all(getattr(now, field) == getattr(then, field) for field in SAME)
            # The latest copy may itself have a link to the original.
            if is_same and now.st_ino != then.st_ino:
                (self.code.folder / name).hardlink_to(self._latest / name)
                return True
        except OSError:  # there is none, or it is on another file system
            pass
        return False


def named(names: Sequence[str]) -> str:
    """Return the first of these names, and how many more there are."""
    words = [printable(name) for name in names[:MOST_NAMES]]
    if len(names) > MOST_NAMES:
        words.append(f"and {len(names) - MOST_NAMES} more")
    return ", ".join(words)


def planned_copy(
    stage: Stage, job_folder: Path, jobs_dir: Path, *, no_freeze: bool, dry_run: bool
) -> tuple[PlannedCopy | None, tuple[str, ...]]:
    """Return the copy of its code that a job or a sweep gets, and what is told of that.

    Args:
        stage: as for `plan`; so are the two folders.
        no_freeze: whether its user wants no copy.
        dry_run: whether nothing is sent, so that there is none.
    """
    if no_freeze:
        return None, _not_frozen("--no-freeze")
    try:
        code = plan(stage, job_folder, jobs_dir)
    except NotFrozenError as error:
        return None, _not_frozen(str(error))
    return (None, code.would_freeze) if dry_run else (code, code.sentences(stage.program))


def _not_frozen(reason: str) -> tuple[str, ...]:
    """Return what is told of a job whose code is not frozen."""
    return (line(CODE, f"not frozen ({reason}): the job runs what the files say when it starts"),)


def plan(stage: Stage, job_folder: Path, jobs_dir: Path) -> PlannedCopy:
    """Return what to copy for a job that runs the script of `stage`, and is sent from the current folder.

    Args:
        stage: what the job runs.
        job_folder: the folder of the job, or of the sweep, for the copy.
        jobs_dir: the folder of all jobs, in which the latest copy of each checkout is found.

    Raises:
        NotFrozenError: if the script is in no checkout, or in one of which no copy can be made.
    """
    try:
        return _plan(stage, job_folder.resolve() / frozen_code.FOLDER, jobs_dir / LATEST)
    except GitError as error:
        raise NotFrozenError(str(error)) from None


def _plan(stage: Stage, copy: Path, latest: Path) -> PlannedCopy:
    folder = stage.program.folder if stage.program else stage.script.parent
    # A link may lead to a script of a checkout.
    checkout = top_of(folder.resolve()) or top_of(stage.script.resolve().parent)
    if checkout is None:
        raise NotFrozenError(f"{folder} is not in a git checkout")
    if checkout == Path.home().resolve():
        raise NotFrozenError(f"the git checkout of {folder} is your whole home folder")
    listing = files_of(checkout)
    sent_from = Path.cwd()
    earlier = FrozenCode.read(copy.parent)
    if earlier and earlier.checkout == checkout:
        return _of_an_earlier_call(earlier, sent_from, listing, latest)
    selection = select(checkout, listing)
    is_installed = folder != stage.script.parent
    if not is_installed and _name_in(checkout, stage.script) not in selection.files:
        raise NotFrozenError(
            f"git ignores {stage.script}, it is larger than {MOST_MB_OF_A_FILE} MB, it is a link out of its "
            f"checkout, or the checkout has more than {MOST_MB} MB or {MOST_FILES} files of source code"
        )
    commit = commit_of(checkout)
    changed = changed_since_the_commit(checkout) if commit else listing.tracked
    below = sent_from.relative_to(checkout) if sent_from.is_relative_to(checkout) else Path()
    code = FrozenCode(
        folder=copy,
        checkout=checkout,
        sent_from=copy / below,
        commit=f"{commit}-dirty" if commit and changed else commit,
        changed_files=len(changed) + len(selection.files.keys() - {*listing.tracked}),
        made_at=f"{datetime.now().astimezone():%FT%T%z}",
    )
    linked = [name for name in _without_their_contents(selection) if not copy.is_relative_to(checkout / name)]
    return PlannedCopy(
        code=code,
        sent_from=sent_from,
        files=frozenset(selection.files),
        tracked=frozenset(selection.files).intersection(listing.tracked),
        links=selection.links | {name: str(checkout / name) for name in linked[:MOST_LINKS]},
        left_out=tuple(linked),
        size=sum(selection.files.values()),
        copies=latest,
    )


def _of_an_earlier_call(code: FrozenCode, sent_from: Path, listing: Listing, latest: Path) -> PlannedCopy:
    """Return the copy that the first call of a sweep has made: all of its runs see the same code."""
    files = frozenset(code.files())
    return PlannedCopy(
        code=code,
        sent_from=sent_from,
        files=files,
        tracked=files.intersection(listing.tracked),
        links={},
        left_out=(),
        size=sum((code.folder / name).stat().st_size for name in files),
        copies=latest,
    )


@dataclass
class Selection:
    """What to do with the files of a checkout, by their names from its top.

    Attributes:
        files: to copy, with their sizes.
        links: the links that git tracks, and where each leads in the copy.
        linked: to link, instead of a copy; first what is too large.
    """

    files: dict[str, int]
    links: dict[str, str]
    linked: list[str]


def select(checkout: Path, listing: Listing) -> Selection:
    """Return what to do with the files of a checkout."""
    tracked = {*listing.tracked}
    links: dict[str, str] = {}
    sizes: dict[str, int] = {}
    too_large, no_sources = [], []
    for name in (*listing.tracked, *listing.untracked):
        if name not in tracked and not _may_be_source(name):
            no_sources.append(name)
            continue
        try:
            status = (checkout / name).lstat()
        except OSError:  # deleted, but not for git
            continue
        if name in tracked and stat.S_ISLNK(status.st_mode):
            links[name] = _target(checkout, name)
        elif name not in tracked and not _is_new_source(checkout, name, status.st_mode):
            no_sources.append(name)
        elif status.st_size > MOST_MB_OF_A_FILE * 1_000_000:
            too_large.append(name)
        elif stat.S_ISREG(status.st_mode):
            sizes[name] = status.st_size
    # What git tracks comes first, then what is small.
    in_order = sorted(sizes, key=lambda name: (name not in tracked, sizes[name]))
    sums = accumulate(sizes[name] for name in in_order)
    within = [name for name, so_far in zip(in_order, sums, strict=True) if so_far <= MOST_MB * 1_000_000]
    files = {name: sizes[name] for name in within[:MOST_FILES]}
    too_large += [name for name in in_order if name not in files]
    return Selection(files, links, [*too_large, *listing.ignored, *no_sources])


def _may_be_source(name: str) -> bool:
    """Return whether a file that git does not track may be source code, by its name alone.

    There may be very many files of data, and to ask for each on a shared file system would take long.
    """
    _, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return not dot or f".{suffix.lower()}" in SOURCES


def _is_new_source(checkout: Path, name: str, mode: int) -> bool:
    """Return whether such a file is source code, and not of the copy of another job."""
    path = Path(name)
    is_program = stat.S_ISREG(mode) and mode & stat.S_IXUSR
    if not path.suffix and not is_program:
        return False
    return not any((checkout / folder / frozen_code.FACTS).exists() for folder in path.parents)


def _target(checkout: Path, name: str) -> str:
    """Return where a link of the checkout leads in the copy: to the same file there, or out of it."""
    link = checkout / name
    target = os.path.normpath(link.parent / link.readlink())
    return os.path.relpath(target, link.parent) if Path(target).is_relative_to(checkout) else target


def _without_their_contents(selection: Selection) -> list[str]:
    """Return the names to link: that of a folder in place of all that is in it, where that will do."""
    needed = _folders_of([*selection.files, *selection.links])
    names: dict[str, None] = {}
    for linked in selection.linked:
        if not BYTECODE.search(linked):
            name = linked.rstrip("/")
            while _folder_of(name) not in needed:
                name = _folder_of(name)
            names[name] = None
    return [*names]


def _folders_of(names: Iterable[str]) -> set[str]:
    """Return the folders of these files, and those that they are in, up to the top, which is ""."""
    folders = {""}
    for name in names:
        folder = _folder_of(name)
        while folder not in folders:
            folders.add(folder)
            folder = _folder_of(folder)
    return folders


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _name_in(checkout: Path, path: Path) -> str | None:
    """Return the name of a file from the top of the checkout; None if it is not there.

    Folders may be reached by a link, and so may the file.
    """
    for real in (path.parent.resolve() / path.name, path.resolve()):
        if real.is_relative_to(checkout):
            return str(real.relative_to(checkout))
    return None
