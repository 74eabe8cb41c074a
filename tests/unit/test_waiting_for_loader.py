"""Ranks that wait for their next batch."""

import math
from dataclasses import replace

import pytest
from sampled_jobs import MakeJob, change, finding_of, kinds_of, without
from traces import FROM_LOADERS, FULL, STARVED, Gpu

from manygpus.monitor import samples
from manygpus.monitor.findings import paused_ranks


def test_a_resident_loader_works_itself(make_job: MakeJob) -> None:
    resident = replace(STARVED, loaders=0, loader_cores=0, data_share=0.3)
    assert kinds_of(make_job([resident])) == ["launch_bound"]
    finding = finding_of(make_job([replace(resident, data_share=0.5)]), "waiting_for_loader")
    assert finding.is_resident


@pytest.mark.parametrize(
    ("loaders", "loader_cores", "cores_per_worker", "all_cores_in_use"),
    [(0, 0, math.nan, False), (2, 1.98, 0.99, False), (2, 3.6, 1.8, True), (2, 0.5, 0.25, False)],
)
def test_the_evidence_on_a_waiting_loader(
    make_job: MakeJob, loaders: int, loader_cores: float, cores_per_worker: float, all_cores_in_use: bool
) -> None:
    gpu = replace(STARVED, loaders=loaders, loader_cores=loader_cores)
    record = FROM_LOADERS | {"workers_per_loader": loaders}
    finding = finding_of(make_job([gpu] * 2, facts=record), "waiting_for_loader")
    assert finding.loader_workers == loaders and not finding.is_resident
    assert finding.cores_per_worker == pytest.approx(cores_per_worker, nan_ok=True)
    assert finding.all_cores_in_use == all_cores_in_use


def test_a_training_without_a_record(make_job: MakeJob) -> None:
    """What shows from outside."""
    assert kinds_of(make_job([FULL] * 2, record=False)) == []
    assert kinds_of(make_job([STARVED] * 2, record=False)) == ["waiting_for_loader"]
    short_kernels = Gpu(power_w=110, utilisation=95)
    assert kinds_of(make_job([short_kernels] * 2, record=False)) == ["launch_bound"]


@pytest.mark.parametrize(
    ("loader_cores", "kind"),
    [("1.98", "waiting_for_loader"), ("0.6", "waiting_for_loader"), ("0", "stalled_rank")],
)
def test_a_loader_that_starves_its_rank_is_one_finding(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, loader_cores: str, kind: str
) -> None:
    """Also where its workers get a part of a core each; where they rest, too, it just does nothing."""
    monkeypatch.setattr(paused_ranks, "PAUSE_SECONDS", 10)
    folder = make_job([FULL], record=False)
    change(folder, without(samples.GPU))
    starved = {"name": "S", "cores": "0.01", "loaders": "2", "loader_cores": loader_cores}
    change(folder, lambda row: row | starved)
    assert kinds_of(folder) == [kind]


def test_a_record_without_samples_of_its_ranks(make_job: MakeJob) -> None:
    folder = make_job([STARVED] * 2, facts=FROM_LOADERS)
    change(folder, without(samples.RANK))
    assert kinds_of(folder) == ["waiting_for_loader"]
