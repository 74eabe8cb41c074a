"""What a job would resume from if it started again: the newest checkpoint, or the words of --when-requeued.

It needs no packages.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from manygpus import job_folder
from manygpus.jobs.user_program import newest, saved_at


@dataclass(frozen=True)
class ResumePoint:
    """What the next start of a job would resume from.

    Attributes:
        text: in words, such as "from <path>".
        is_new: whether this start has made it.
    """

    text: str
    is_new: bool


def find(folder: Path) -> ResumePoint | None:
    """Return what a job would resume from; None if nothing is known that it could.

    A plain script that saves by itself resumes by --when-requeued only: without it, it may train anew, over
    what it has saved.
    """
    saved, resumed = (
        job_folder.read(folder / name) for name in (job_folder.NEWEST_CHECKPOINT, job_folder.RESUMED_FROM)
    )
    if saved or resumed:
        return ResumePoint(f"from {saved or resumed}", is_new=bool(saved))
    script = job_folder.read_script(folder)
    if script is None or script.when_requeued is None:
        return None
    words = newest(script.when_requeued)
    if script.when_requeued and not words:
        return None
    saved_last = saved_at(script.when_requeued)
    began = (folder / job_folder.SCRIPT).stat().st_mtime
    text = f"with {shlex.join(words)}" if words else "anew"
    return ResumePoint(text, is_new=saved_last is not None and saved_last > began)
