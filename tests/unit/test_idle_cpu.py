"""Ranks on a CPU that hardly compute."""

import pytest
from sampled_jobs import MakeJob, change, kinds_of, only_finding, without
from traces import FULL

from manygpus.monitor import samples


def test_ranks_on_cpus_that_hardly_compute(make_job: MakeJob) -> None:
    """For no reason that shows."""
    folder = make_job([FULL] * 2, record=False)
    change(folder, without(samples.GPU))
    change(folder, lambda row: row | {"cores": "0.08"})
    finding = only_finding(folder)
    assert finding.kind == "idle_cpu" and finding.computing_share == pytest.approx(0.08)
    change(folder, lambda row: row | {"cores": "0.5"})
    assert kinds_of(folder) == []
