"""Files that are there whole or not at all, and folders that are asked before work is done for them."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from trainkit.runtime.errors import UserError


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO]:
    """A file to write to, which takes the place of `path` at once when the block ends well.

    A reader, a kill or a full disk never meets half a file: it is written beside `path` as a new
    `.<name>.<random>.tmp`, synced, and renamed. A link at `path` is replaced, not followed. If the block
    fails, what `path` held before stays.

    Raises:
        OSError: if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # A name that is not UTF-8 does not end a run.
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "", "errors": "replace"}
    try:
        with temporary.open(mode.replace("w", "x"), **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def check_regular(path: Path) -> None:
    """Raise a ValueError if there is no such file, or one that has no end, such as a pipe."""
    if not path.is_file():
        raise ValueError("it is not a regular file" if path.exists() else "there is no such file")


def read_text(path: Path, most: int = 10**6) -> str:
    """Read a small file that anybody may have put there; what is not UTF-8 becomes a question mark.

    Raises:
        ValueError: if there is no such file, if it has no end, or more than `most` bytes.
        OSError: if it cannot be read.
    """
    check_regular(path)
    if (size := path.stat().st_size) > most:
        raise ValueError(f"it has {size:,} bytes, where {most:,} are the most")
    return path.read_text(encoding="utf-8", errors="replace")


def check_writable(folder: Path, what: str, fix: str) -> None:
    """Make `folder` if it is not there, and see that a file in it can be written.

    Raises:
        UserError: "<what> cannot be written to <folder> (<reason>): <fix>".
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))  # an empty file fits on a full disk
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise UserError(f"{what} cannot be written to {folder} ({error.strerror}): {fix}") from None
