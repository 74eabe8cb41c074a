"""A job's own folder: its checkpoints, its samples, and the word that its ranks leave in it.

| name | what it says |
|---|---|
| `rank-N.started` | rank N runs, on the node that the file names |
| `rank-N.finished`, `.failed`, `.lost` | in its place: how it ended, and the error (lost: its peers left) |
| `first-failed` | a link to the note of the rank that failed first |
| `stopped` | the run has saved, and stopped by a signal; in the file the folder of its checkpoints |
| `checkpoints`, `monitor` | what rank/checkpoint.py has saved; the samples (schema/samples.py) |
| `plain` | the job's script knows nothing of the kit (runtime/plain.py); it may write `stopped` itself |

srun often reports another exit code than that of the rank that failed, and a log mixes the ranks' lines. From
the notes jobs/why.py tells which rank it was; one that is still "started" when all is over was killed.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from trainkit.runtime.place import rank_of

VARIABLE = "TRAINKIT_JOB_DIR"  # the environment variable with the path of this process's job
PLAIN = "plain"
NOTE = re.compile(r"rank-(\d+)\.(started|finished|failed|lost)")


def here() -> Path | None:
    """Return the folder of the job that this process belongs to; None outside of a job."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else None


def note(state: str, text: str = "") -> None:
    """In a job, leave word that this rank has started, finished, failed or lost its peers.

    It replaces the rank's earlier note. On a full disk there is none: the error that is noted counts more.
    """
    folder = here()
    if folder is None or rank_of() is None:
        return
    path = folder / f"rank-{rank_of()}.{state}"
    if state == "started":
        text = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    else:
        with suppress(OSError):  # there was none; renaming also works on a full disk
            path.with_suffix(".started").rename(path)
    if state == "failed":
        with suppress(OSError):  # a link can be made once only, whatever the clocks of the nodes say
            (folder / "first-failed").symlink_to(path.name)
    with suppress(OSError):
        path.write_text(f"{text}\n" if text else "")


def notes(folder: Path, *states: str) -> dict[int, Path]:
    """Find the notes of the ranks that are in one of `states`, by rank."""
    found = {path: NOTE.fullmatch(path.name) for path in folder.glob("rank-*")}
    return dict(sorted((int(name[1]), path) for path, name in found.items() if name and name[2] in states))


def first_failed(folder: Path) -> Path | None:
    """Find the note of the rank that failed first."""
    first = folder / "first-failed"
    failed = notes(folder, "failed")  # on some file systems there are no links
    return first.resolve() if first.exists() else next(iter(failed.values()), None)


def note_stop(checkpoints: Path) -> None:
    """In a job, leave word that the run has saved in `checkpoints`, and stopped, by a signal.

    Raises:
        OSError: if it cannot be written.
    """
    if folder := here():
        (folder / "stopped").write_text(f"{checkpoints.absolute()}\n")


def stopped(folder: Path) -> str | None:
    """Return where the run of this job that a signal has stopped saved; None if there is none."""
    path = folder / "stopped"
    return path.read_text().strip() if path.exists() else None
