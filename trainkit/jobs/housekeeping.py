"""List the folders of all jobs, and remove those no longer needed: slurm/jobs.py."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from trainkit.jobs import local, slurm
from trainkit.runtime import job_folder
from trainkit.runtime.errors import printable
from trainkit.schema import samples

# Folders of job_env.sh: of a job, and of an older one whose number was reused.
NUMBERED = re.compile(r"(\d+)(-\d{8}-\d{6})?")
MONITORED = re.compile(r"monitored-\d{8}-\d{6}-[0-9a-f]{6}")
SUBMITTED = re.compile(r".+-\d{8}-\d{6}-[0-9a-f]{6}")
# What is in them: notes of ranks and samples, or what submitit keeps.
OF_A_JOB = re.compile(f"{job_folder.NOTE.pattern}|{samples.FOLDER}")
OF_SUBMITIT = re.compile(r".*\.pkl|.*_log\.out|\.submission_file_.*")
UNKNOWN = "unknown"
ENDED = ("COMPLETED", "ended", *slurm.FAILED)


@dataclass(frozen=True)
class JobFolder:
    """A folder of a job: its notes and checkpoints, or what submit.py keeps, or both without Slurm.

    `state` is Slurm's, or RUNNING, ended or unknown. `newest` is the checkpoint to resume from, if there
    is one: the job did not finish, or was asked to keep them.
    """

    path: Path
    state: str
    newest: Path | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def row(self, jobs_dir: Path) -> tuple[str, ...]:
        """Return its cells in the list: name, last change, size, state, and the checkpoint to resume from."""
        when = datetime.fromtimestamp(self.path.stat().st_mtime)
        on_from = f"to go on from: {self.newest.name}" if self.newest else ""
        name = printable(str(self.path.relative_to(jobs_dir)))
        return name, f"{when:%Y-%m-%d %H:%M}", f"{size(self.path) / 1e6:,.1f} MB", self.state, on_from


def look(jobs_dir: Path) -> list[JobFolder]:
    """List the folders of the user's jobs, oldest first."""
    found = [_judge(path, jobs_dir) for path in _folders(jobs_dir)]
    return sorted(found, key=lambda folder: folder.path.stat().st_mtime)


def remove(folder: JobFolder) -> str | None:
    """Remove the folder of a job that has ended; return the reason if that fails."""
    checkpoints = folder.path / "checkpoints"
    try:
        # A later job may have been sent there, by --checkpoint-dir.
        with FileLock(checkpoints / ".lock", timeout=0) if checkpoints.exists() else nullcontext():
            shutil.rmtree(folder.path)
    except Timeout:
        return "a run is at work with its checkpoints"
    except OSError as error:
        return str(error.strerror)
    return None


def size(folder: Path) -> int:
    """Count the bytes in a folder; a link counts as itself."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # the job may be running
                total += Path(place, name).lstat().st_size
    return total


def _folders(jobs_dir: Path) -> Iterator[Path]:
    """Yield jobs' folders, by name, owner and content: a folder called 2024 may be the user's photographs."""
    kinds = ((jobs_dir, NUMBERED, OF_A_JOB), (jobs_dir, MONITORED, OF_A_JOB))
    for place, name, marks in (*kinds, (jobs_dir / "submitit", SUBMITTED, OF_SUBMITIT)):
        if place.is_symlink() and place != jobs_dir:
            continue
        for path in place.iterdir() if place.is_dir() else ():
            if not name.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
                continue
            if path.stat().st_uid == os.getuid():
                inside = [entry.name for entry in path.iterdir()]
                if not inside or any(map(marks.fullmatch, inside)):
                    yield path


def _judge(path: Path, jobs_dir: Path) -> JobFolder:
    numbered, (number, by_slurm) = NUMBERED.fullmatch(path.name), local.submitted(path)
    holds, state = path, UNKNOWN
    if numbered and numbered[2]:
        state = "ended"
    elif numbered or (number and by_slurm):
        job_id = numbered[1] if numbered else number
        holds, state = jobs_dir / job_id, slurm.job_facts(job_id)["JobState"]
    elif number or path.parent == jobs_dir:  # else it may be on its way to Slurm
        state = _state_here(path)
    return JobFolder(path, UNKNOWN if state == "UNKNOWN" else state, _newest(holds))


def _state_here(job: Path) -> str:
    """Return the state of processes of this machine, or of another one that shares the folders."""
    mark = os.fsencode(f"{job_folder.VARIABLE}={job}")
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in environment.read_bytes().split(b"\0"):
                return "RUNNING"
    nodes = {job_folder.read(note) for note in job_folder.notes(job, "started").values()}
    nodes |= {path.stem for path in (job / samples.FOLDER).glob("*.csv")}
    return "ended" if nodes <= {os.uname().nodename} else UNKNOWN


def _newest(folder: Path) -> Path | None:
    pattern = "[!.]*" if (folder / job_folder.PLAIN).exists() else "epoch-*-step-*.pt"
    checkpoints = (folder / "checkpoints").glob(pattern)
    return max(checkpoints, key=lambda path: samples.natural(path.name), default=None)
