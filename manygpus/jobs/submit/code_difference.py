"""How the frozen code of a job differs from its checkout of today."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from manygpus.frozen_code import FrozenCode
from manygpus.jobs.git_checkout import files_of
from manygpus.jobs.submit.freezing import select


@dataclass(frozen=True)
class CodeDifference:
    """The files that differ, by their names from the top of the checkout.

    Attributes:
        changed: those that have another content today.
        deleted: those that are gone.
        new: those that would be frozen today, and were not there.
    """

    changed: list[str]
    deleted: list[str]
    new: list[str]

    @property
    def names(self) -> list[str]:
        """Return all of them."""
        return sorted([*self.changed, *self.deleted, *self.new])


def difference(code: FrozenCode) -> CodeDifference:
    """Compare the frozen files with those of today.

    Raises:
        GitError: if git cannot list those of today.
        OSError: if a file cannot be read.
    """
    frozen = code.files()
    today = select(code.checkout, files_of(code.checkout)).files
    deleted = [name for name in frozen if not (code.checkout / name).is_file()]
    return CodeDifference(
        changed=[name for name in frozen if name not in deleted and _has_changed(code, name)],
        deleted=deleted,
        new=sorted(today.keys() - {*frozen}),
    )


def _has_changed(code: FrozenCode, name: str) -> bool:
    copy, original = code.folder / name, code.checkout / name
    was, now = copy.stat(), original.stat()
    if was.st_size != now.st_size:
        return True
    # The copy has the time of its original.
    return was.st_mtime_ns != now.st_mtime_ns and copy.read_bytes() != original.read_bytes()


def unified_diff(code: FrozenCode, name: str) -> Iterator[str]:
    """Yield the lines of `diff -u` from the frozen file to that of today."""
    try:
        was, now = ((folder / name).read_text(encoding="utf-8") for folder in (code.folder, code.checkout))
    except UnicodeDecodeError:
        yield f"{name} is not text, and differs"
        return
    names = (f"frozen/{name}", f"today/{name}")
    yield from difflib.unified_diff(was.splitlines(), now.splitlines(), *names, lineterm="")
