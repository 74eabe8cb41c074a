"""What git knows of a checkout: its files as they are now, its commit, and what has changed since.

It needs only the standard library.
"""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

# On a shared file system git may be slow.
GIT_SECONDS = 20
# The mode of a submodule in the index.
SUBMODULE = "160000"


class GitError(Exception):
    """Git is missing, refuses, or does not answer in time; the text says which."""


@dataclass
class Listing:
    """The files of a checkout, by their names from its top folder.

    Attributes:
        tracked: those that git tracks, with those of submodules, as far as they are there.
        untracked: those that git neither tracks nor ignores.
        ignored: files, and folders without any other file, which end in a /.
    """

    tracked: list[str] = field(default_factory=list)
    untracked: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def top_of(folder: Path) -> Path | None:
    """Return the top folder of the checkout that a folder is in, of a submodule that of the whole.

    It is None if the folder is in none.

    Raises:
        GitError: if git cannot tell.
    """
    try:
        output = _git(folder, "rev-parse", "--show-toplevel", "--show-superproject-working-tree")
    except GitError as error:
        if "not a git repository" in str(error):
            return None
        raise
    top, *whole = os.fsdecode(output).splitlines()
    return (top_of(Path(whole[0])) if whole else None) or Path(top)


def commit_of(checkout: Path) -> str:
    """Return the name of the commit, as `git describe --always` tells it; "" before the first one."""
    return _answer(checkout, "describe", "--always")


def version_of(folder: Path) -> tuple[str, str]:
    """Return the commit of the code in a folder, with -dirty if it has changed since, and its top folder.

    Each is "" where git cannot tell.
    """
    return _answer(folder, "describe", "--always", "--dirty"), _answer(folder, "rev-parse", "--show-toplevel")


def _answer(folder: Path, *command: str) -> str:
    """Return what git says in one line; "" if it cannot tell."""
    try:
        return os.fsdecode(_git(folder, *command)).strip()
    except GitError:
        return ""


def changed_since_the_commit(checkout: Path) -> list[str]:
    """Return the names of the tracked files that differ from the commit.

    Raises:
        GitError: if git cannot tell.
    """
    return _names(checkout, "diff", "--name-only", "HEAD")


def files_of(checkout: Path, prefix: str = "") -> Listing:
    """List the files of a checkout, with those of other checkouts in it, such as submodules.

    Args:
        checkout: its top folder.
        prefix: what to put in front of the names.

    Raises:
        GitError: if git cannot tell.
    """
    others = ("ls-files", "--others", "--exclude-standard")
    ignored = _names(checkout, *others, "--ignored", "--directory")
    listing = Listing(ignored=[prefix + name for name in ignored])
    # Each name once: in the middle of a merge git lists a file for every side.
    in_index = _names(checkout, "ls-files", "--cached", "--stage")
    modes = {entry.partition("\t")[2]: entry.partition(" ")[0] for entry in in_index}
    for names, listed in ((modes, listing.tracked), (_names(checkout, *others), listing.untracked)):
        for name in names:
            # An untracked folder is listed as such if it is a checkout itself.
            if modes.get(name) != SUBMODULE and not name.endswith("/"):
                listed.append(prefix + name)
            elif (checkout / name / ".git").exists():
                inner = files_of(checkout / name, f"{prefix}{name.removesuffix('/')}/")
                listed += inner.tracked
                listing.untracked += inner.untracked
                listing.ignored += inner.ignored
    return listing


def clone_without_files(checkout: Path, folder: Path) -> None:
    """Make a folder a checkout of the same commit, whose files are to be copied there.

    It has no objects of its own: it finds those of the other checkout.

    Raises:
        GitError: if git cannot do it.
    """
    # Without the user's templates, which may have hooks.
    options = ("--quiet", "--shared", "--no-checkout", "--template=")
    _git(checkout, "clone", *options, str(checkout), str(folder))
    # The index, without which all files would count as deleted.
    _git(folder, "read-tree", "HEAD")


def _names(checkout: Path, *command: str) -> list[str]:
    return [os.fsdecode(name) for name in _git(checkout, *command, "-z").split(b"\0") if name]


def _git(folder: Path, *command: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # It takes no lock, with which it would disturb a git that the user calls at the same time.
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            timeout=GIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise GitError(f"git does not answer within {GIT_SECONDS} s in {folder}") from None
    except OSError as error:
        raise GitError(f"git does not start ({error.strerror})") from None
    if done.returncode:
        message = os.fsdecode(done.stderr).strip().partition("\n")[0]
        raise GitError(f"git says: {message}")
    return done.stdout
