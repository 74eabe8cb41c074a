"""manygpus/jobs/sweeps/pack.py: which runs share a job, and what it asks for."""

import pytest

from manygpus.jobs.stages import Resources
from manygpus.jobs.sweeps import pack


@pytest.mark.parametrize(
    ("per_job", "most_jobs", "jobs"),
    [
        (2, 4, ["ad", "be", "c"]),
        (4, 4, ["ace", "bd"]),
        (2, 1, ["abcde"]),
        (8, 4, ["abcde"]),
    ],
)
def test_runs_are_spread_evenly_over_few_jobs_in_their_order(
    per_job: int, most_jobs: int, jobs: list[str]
) -> None:
    assert pack.shares("abcde", per_job, most_jobs) == [[*job] for job in jobs]


@pytest.mark.parametrize(("gpus", "gpus_of_job"), [(None, 6), (2, 2), (8, 6)])
def test_a_shared_job_has_what_its_runs_need(gpus: int | None, gpus_of_job: int) -> None:
    ddp = Resources(nodes=1, tasks_per_node=2, gpus_per_node=2, cpus_per_task=3)
    shape = pack.shape(ddp, places=3, gpus=gpus)
    assert (shape.tasks, shape.gpus, shape.cpus_per_task) == (1, gpus_of_job, 18)
    assert shape.processes_per_task == 6
