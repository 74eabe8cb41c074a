"""Files that are written whole or not at all, and folders that are checked before any work is done."""

import fcntl
import io
import os
import platform
import secrets
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from manygpus import job_folder
from manygpus.errors import UserError


class _LockFile(io.FileIO):
    """A lock file, which its last user closes by forgetting it: no mistake of which Python should warn."""

    def __del__(self) -> None:
        self.close()


# The files that this process has locked, by device and inode; a lock ends with its file's last user.
_HELD: weakref.WeakValueDictionary[tuple[int, int], io.FileIO] = weakref.WeakValueDictionary()


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO]:
    """Open a file to write to; it replaces `path` atomically when the block ends well.

    A reader never sees half a file, even after a kill or on a full disk: it is written next to `path` as a
    new `.<name>.<random>.tmp`, synced, and renamed. A link at `path` is replaced, not followed. If the block
    fails, `path` keeps its old content.

    Raises:
        OSError: if it cannot be written; it names a file.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with temporary.open(mode.replace("w", "x"), **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # an error in writing names no file
        raise


@contextmanager
def explained(what: str, fix: str) -> Iterator[None]:
    """Turn an OSError of the block into one sentence.

    Raises:
        UserError: "<what> (<reason>): <fix>".
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} ({error.strerror or error}): {fix}") from None


def locked(path: Path, held: str) -> AbstractContextManager:
    """Hold `path`, a lock file, for as long as what is returned is kept.

    Nothing is held where the file system has no locks, nor if an earlier start of this process's job has left
    one: its node may have failed, and a file server keeps the locks of such a node.

    Raises:
        UserError: with the text `held`, if another process holds it; also if it is another user's.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return lock(path) or nullcontext()
    except BlockingIOError:
        if _is_of_an_earlier_start(path):
            return nullcontext()
        raise UserError(held) from None
    except PermissionError:
        raise UserError(f"{path} belongs to another user: give a folder of your own.") from None
    except OSError:
        return nullcontext()


def lock(path: Path) -> io.FileIO | None:
    """Lock the file `path` until it is closed, and note there who did; None if its file system has no locks.

    A process may lock a file again that it has locked: it gets the same.

    Raises:
        BlockingIOError: if another process holds it.
        OSError: if it cannot be opened.
    """
    file = _LockFile(path, "ab")
    status = os.fstat(file.fileno())
    held = _HELD.get((status.st_dev, status.st_ino))
    if held and not held.closed:
        file.close()
        return held
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise
        return None  # as Lustre without `flock` (ENOSYS), or NFS whose server has no lockd (ENOLCK)
    _HELD[status.st_dev, status.st_ino] = file
    with suppress(OSError):  # a full disk
        file.truncate(0)
        file.write(_this_process().encode())
    return file


def holder(path: Path) -> str:
    """Return which process has locked `path`, such as "process 17 on n1"; "" if that is not known."""
    return job_folder.read(path).partition("\n")[0]


def _this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}\n{_job_and_start()}\n"


def _job_and_start() -> str:
    job = job_folder.here()
    if not job:
        return ""
    return f"start {job_folder.restarts_from_queue()}.{job_folder.restarts_in_job()} of {job}"


def _is_of_an_earlier_start(path: Path) -> bool:
    """Return whether the job of this process has locked `path`, in another start than this one."""
    start, _, job = job_folder.read(path).partition("\n")[2].partition(" of ")
    own_start, _, own_job = _job_and_start().partition(" of ")
    return bool(job) and job == own_job and start != own_start


def check_writable(folder: Path, what: str, fix: str) -> None:
    """Make `folder` if it does not exist, and check that a file can be written to it.

    Raises:
        UserError: "<what> cannot be written to <folder> (<reason>): <fix>".
    """
    with explained(f"{what} cannot be written to {folder}", fix):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))  # an empty file would fit on a full disk
            probe.flush()
            os.fsync(probe.fileno())
