"""Jobs of one shape that are sent together, as an array of Slurm.

They share a folder for submitit's files and their logs. Slurm calls the third job of array 17 `17_2`, as do
squeue and the names of its files, but each also has a number of its own, by which its folder is called
(slurm/job_env.sh). A link `element-2` leads there from the shared folder.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# In the shared folder: what its jobs are, in the order of the array.
ELEMENTS = "array.json"


@dataclass(frozen=True)
class Element:
    """A job of an array, as `jobs_in` finds it again.

    Attributes:
        arguments: of its script.
        results_dir: the folder of its results, which no other job of the array has.
    """

    arguments: list[str]
    results_dir: str


def keep(folder: Path, elements: Sequence[Element]) -> None:
    """Note which jobs are sent from `folder`, before they are.

    Raises:
        OSError: if it cannot be written.
    """
    (folder / ELEMENTS).write_text(json.dumps([asdict(element) for element in elements]), encoding="utf-8")


def read(folder: Path) -> list[Element]:
    """Return the jobs of the array that was sent from `folder`; none if it is a single job."""
    try:
        text = (folder / ELEMENTS).read_text(encoding="utf-8")
    except OSError:
        return []
    return [Element(**element) for element in json.loads(text)]


def array_id(job_id: str) -> str:
    """Return the number of the array that a job is in; that of the job itself if it is in none."""
    return job_id.partition("_")[0]


def link_to_folder(folder: Path, index: int | str) -> Path:
    """Return the link to the own folder of a job of the array."""
    return folder / f"element-{index}"


def setup(folder: Path, jobs_dir: Path, before: Sequence[str], own: Sequence[Sequence[str]]) -> list[str]:
    """Return the shell code with which each job of an array begins.

    Args:
        folder: the shared one.
        jobs_dir: where each job has a folder of its own.
        before: the lines that all jobs have, of which the first sets the options of the shell.
        own: the lines of each job.
    """
    options, *others = before
    link = link_to_folder(folder, "$SLURM_ARRAY_TASK_ID")
    lines = [
        options,
        "array_of_runs=1",
        f'ln -sfn {shlex.quote(str(jobs_dir))}/"$SLURM_JOB_ID" {shlex.quote(str(folder))}/"{link.name}"',
        *others,
        "case $SLURM_ARRAY_TASK_ID in",
    ]
    for index, lines_of_job in enumerate(own):
        lines += [f"{index})", *lines_of_job, ";;"]
    return [*lines, "esac"]


def name_pickles(folder: Path, number: str) -> None:
    """Give submitit's pickles the names under which the jobs of array `number` look for them.

    submitit does so itself, unless sbatch has not named the array, or its caller was killed. Jobs with the
    same arguments are the same to it.
    """
    from submitit.core.utils import DelayedSubmission

    names = [folder / f"{number}_{index}_submitted.pkl" for index in range(len(read(folder)))]
    without_pickle = {
        name: element.arguments
        for name, element in zip(names, read(folder), strict=True)
        if not name.exists()
    }
    for pickled in folder.glob("*.pkl"):
        if pickled in names:
            continue
        arguments = [*DelayedSubmission.load(pickled).function.arguments]
        name = next(name for name, of_element in without_pickle.items() if of_element == arguments)
        del without_pickle[name]
        pickled.rename(name)
