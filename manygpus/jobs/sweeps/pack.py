"""A pack: runs of a sweep that share a job, several at a time (sweep.py --per-job).

Its job asks Slurm for what so many runs need. In there run_pack.py starts them as processes of the node, each
in its own place, and the next one where a place is free. What it is to run stands in a file in the folder of
the sweep, `packs/N`, for task N of an array: N is the number of the first run in `commands.txt`. A run is
over when its outcome is in its folder, so that a job that comes back does the others.
"""

import math
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manygpus import job_folder
from manygpus.files import replacing
from manygpus.jobs import local_job
from manygpus.jobs.stages import Resources
from manygpus.jobs.submit.request import Request
from manygpus.jobs.watch.job_status import OUTCOME_SECONDS, SlurmHandle, State

# What starts the runs in the job.
PROGRAM = Path(__file__).with_name("run_pack.py")


@dataclass(frozen=True)
class Pack:
    """What a job does that several runs share.

    Attributes:
        requests: its runs, in the order in which they begin.
        places: how many of them run at a time.
        gpus: the GPUs of the job.
    """

    requests: tuple[Request, ...]
    places: int
    gpus: int

    def write(self, path: Path) -> None:
        """Write it into a file.

        Raises:
            OSError: if that fails.
        """
        path.parent.mkdir(exist_ok=True)
        with replacing(path, "wb") as file:
            pickle.dump(self, file)

    @classmethod
    def read(cls, path: Path) -> "Pack":
        """Return what is in a file."""
        return pickle.loads(path.read_bytes())


def shape(run: Resources, places: int, gpus: int | None) -> Resources:
    """Return the shape of a job with places for so many runs; `gpus` of them are enough if it is given."""
    gpus_of_all = places * run.gpus_per_node
    return Resources(
        nodes=1,
        tasks_per_node=1,
        gpus_per_node=min(gpus or gpus_of_all, gpus_of_all),
        cpus_per_task=places * run.tasks_per_node * run.cpus_per_task,
        processes_per_task=places * max(run.tasks_per_node, run.gpus_per_node),
    )


def within(request: Request) -> Request:
    """Return the request for a run in a job that it shares, whose time limit is the only one."""
    return replace(request, why_here="in a job with other runs", minutes=365 * local_job.DAY_MINUTES)


def shares(runs: Sequence, per_job: int, most_jobs: int) -> list[list]:
    """Return the runs of each job: as many jobs as may run at a time, if each has enough runs.

    The first runs of all jobs are the first of the sweep.
    """
    jobs = min(most_jobs, math.ceil(len(runs) / per_job))
    return [[*runs[number::jobs]] for number in range(jobs)]


def ended(folder: Path) -> job_folder.Outcome | None:
    """Return how the run with this job's folder has ended; None if it has not, or its job is to resume it."""
    outcome = job_folder.read_outcome(folder)
    return None if outcome and outcome.requeued else outcome


@dataclass
class RunInPack(SlurmHandle):
    """A run in a job that it shares; the number, and Slurm's status, are those of the job.

    Attributes:
        job: the job.
    """

    job: SlurmHandle | None = None

    def judge(self) -> State:
        """Return the run's state.

        Raises:
            UserError: as `SlurmHandle.judge`.
        """
        outcome = ended(self.folder)
        if outcome:
            return self._done() if outcome.well else State("failed", outcome.why[0])
        self.job.status, self.job.answered_at = self.status, self.answered_at
        state = self.job.judge()
        if state.is_final:
            return self._left_over(state)
        if state.name == "running":
            return self._running() if self.folder.exists() else State("running", "its job has begun")
        return state

    def _left_over(self, of_job: State) -> State:
        """Return the state of a run whose job has ended, as far as is seen here, before the run did."""
        if self.ended_at is None:
            self.ended_at = time.monotonic()
        if time.monotonic() - self.ended_at <= OUTCOME_SECONDS:
            return State("running", f"job {self.job_id} has ended")
        why = of_job.detail if of_job.name == "failed" else f"see {self.job.log}"
        return State("failed", f"its job ended before it: {why}")
