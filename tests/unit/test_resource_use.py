"""What a job asked Slurm for, and what would have been enough."""

import pytest
from sampled_jobs import MakeJob, Row, change, has_asked, with_cells
from traces import FROM_LOADERS, STARVED, Gpu

from manygpus.monitor import samples
from manygpus.monitor.resource_use import CORES, MEMORY, measure_resource_use
from manygpus.monitor.sampled_job import SampledJob
from manygpus.monitor.verdict import judge

LOADING = Gpu(loaders=2, loader_cores=1.98)


@pytest.mark.parametrize(
    ("gpu", "asked", "enough"),
    [
        (LOADING, "8 2 61440 1", {MEMORY: 10, CORES: 4}),
        # With torchrun, one task has all ranks of its node.
        (LOADING, "8 1 61440 1", {MEMORY: 10}),
        (LOADING, "4 2 61440 1", {MEMORY: 10}),
        # Where batches are late, a remedy takes cores.
        (STARVED, "8 2 61440 1", {MEMORY: 10}),
        # No --mem was given.
        (LOADING, "8 2 0 1", {CORES: 4}),
        (LOADING, "", {}),
    ],
)
def test_the_next_request_is_the_peak_and_a_margin(
    make_job: MakeJob, gpu: Gpu, asked: str, enough: dict[str, int]
) -> None:
    """Only what saves something, of a job script that asked for it."""
    folder = make_job([gpu] * 2, host_memory_share=0.13, facts=FROM_LOADERS)
    has_asked(folder, asked)
    resources = judge(folder).too_much
    assert {resource.option: resource.enough for resource in resources} == enough
    used = {MEMORY: 7.7, CORES: 2.98}
    assert all(resource.used == pytest.approx(used[resource.option], abs=0.05) for resource in resources)


@pytest.mark.parametrize(
    ("of_a_rank", "of_the_node", "used"),
    [
        ({"cores": "1", "loader_cores": "2", "other_cores": "1.5"}, "4", 4.5),
        ({"cores": "1", "loader_cores": "2", "other_cores": ""}, "4", 3),
        ({"cores": "1", "loader_cores": "", "other_cores": "1.5"}, "4", 2.5),
        ({"cores": "1", "loader_cores": "", "other_cores": ""}, "4", 2),
        ({"cores": "1", "loader_cores": "", "other_cores": ""}, "", 1),
    ],
)
def test_the_cores_of_a_task_are_those_of_all_its_processes(
    make_job: MakeJob, of_a_rank: dict[str, str], of_the_node: str, used: float
) -> None:
    """The rank, its loader workers, and what its script has started; or its part of those of the node."""
    folder = make_job([LOADING] * 2)
    has_asked(folder, "8 2 0 1")
    change(folder, with_cells(of_a_rank, samples.RANK))
    change(folder, with_cells({"cores": of_the_node}, samples.NODE))
    (resource,) = measure_resource_use(SampledJob.read(folder))
    assert resource.option == CORES and resource.used == pytest.approx(used)


def test_the_highest_moment_counts(make_job: MakeJob) -> None:
    """Of one rank, and of one node: the others use less."""
    folder = make_job([LOADING] * 2, nodes=2)
    has_asked(folder, "8 2 61440 1")
    peaks = {samples.RANK: {"cores": "4", "loader_cores": "3"}, samples.NODE: {"memory_mb": "20000"}}
    seen = set()

    def only_once(row: Row) -> Row:
        kind = row["what"]
        if kind not in peaks or kind in seen:
            return row
        seen.add(kind)
        return row | peaks[kind]

    change(folder, only_once)
    resources = measure_resource_use(SampledJob.read(folder))
    assert {resource.option: resource.used for resource in resources} == pytest.approx(
        {MEMORY: 20000e6 / 2**30, CORES: 7}
    )


@pytest.mark.parametrize("ended", ["137", "1", ""])
def test_what_is_enough_is_unknown_of_a_job_that_did_not_end_well(make_job: MakeJob, ended: str) -> None:
    """It may have been killed because memory ran out; or it still runs."""
    folder = make_job([LOADING] * 2)
    has_asked(folder, "8 2 61440 1", ended=ended)
    assert judge(folder).too_much == []


def test_what_is_enough_is_unknown_of_a_job_too_short(make_job: MakeJob) -> None:
    folder = make_job([LOADING] * 2, epochs=1, train_seconds=1, record=False)
    has_asked(folder, "8 2 61440 1")
    assert judge(folder).too_much == []


def test_a_resume_and_shared_files_need_memory(make_job: MakeJob) -> None:
    folder = make_job([LOADING] * 2, host_memory_share=0.13)
    has_asked(folder, "4 2 61440 1")
    change(folder, with_cells({"checkpoint_mb": "2000"}, samples.NODE))
    (resource,) = judge(folder).too_much
    assert resource.enough == 14 and resource.resume == pytest.approx(3.7, abs=0.05)
    change(folder, with_cells({"checkpoint_mb": "", "shared_files_mb": "3000"}, samples.NODE))
    (resource,) = judge(folder).too_much
    assert resource.enough == 13 and resource.used == pytest.approx(10.5, abs=0.05)
