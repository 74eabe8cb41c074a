"""GPUs that wait for their next kernel, and those that do not."""

import math
from dataclasses import replace

import pytest
from sampled_jobs import MakeJob, change, finding_of, kinds_of, only_finding
from traces import FROM_LOADERS, UNUSED, Gpu

from manygpus.monitor.findings.finding import Grade
from manygpus.monitor.verdict import judge

# A third of its power, and of its time without a kernel.
HALF_BUSY = Gpu(power_w=175, utilisation=70)


def test_utilisation_alone_decides_nothing(make_job: MakeJob) -> None:
    """Half of the time without a kernel, at a power that says it is busy; and then the other way round."""
    assert kinds_of(make_job([Gpu(utilisation=50)] * 2)) == []
    assert kinds_of(make_job([Gpu(utilisation=50, power_w=100)] * 2)) == ["launch_bound"]
    assert kinds_of(make_job([Gpu(utilisation=100, power_w=100)] * 2)) == ["launch_bound"]


def test_without_the_power_of_the_gpus_nothing_is_said_of_their_load(make_job: MakeJob) -> None:
    folder = make_job([Gpu(utilisation=3, power_w=60)])
    assert not judge(folder).is_gpu_power_unknown
    change(folder, lambda row: row | {"power_w": ""})
    verdict = judge(folder)
    assert verdict.findings == [] and verdict.is_gpu_power_unknown


def test_without_the_utilisation_the_power_is_enough(make_job: MakeJob) -> None:
    folder = make_job([Gpu(utilisation=100, power_w=100)])
    change(folder, lambda row: row | {"utilisation": ""})
    power = finding_of(folder, "launch_bound").power
    assert power.power_w == pytest.approx(100, abs=3) and math.isnan(power.utilisation_percent)


def test_what_could_be_faster_is_told_apart_from_waste(make_job: MakeJob) -> None:
    finding = only_finding(make_job([HALF_BUSY] * 2))
    assert (finding.kind, finding.grade) == ("launch_bound", Grade.FASTER)
    assert finding.gap_share == pytest.approx(0.3, abs=0.01)
    assert finding.lost_share == pytest.approx(0.3, abs=0.01)
    waste_first = judge(make_job([replace(HALF_BUSY, utilisation=30), UNUSED, UNUSED], ranks=1)).findings
    assert [finding.grade for finding in waste_first] == [Grade.WASTE, Grade.FASTER]


def test_the_remedy_against_gaps_fits_the_training(make_job: MakeJob) -> None:
    """DataParallel's step cannot be captured, and one that is captured already needs no graph."""
    assert finding_of(make_job([HALF_BUSY], record=False), "launch_bound").may_lack_batches
    for stage, is_data_parallel, is_captured in (
        ("ddp", False, False),
        ("ddp-captured", False, True),
        ("dp", True, False),
    ):
        finding = finding_of(make_job([HALF_BUSY] * 2, facts={"stage": stage}), "launch_bound")
        assert (finding.is_data_parallel, finding.is_captured) == (is_data_parallel, is_captured)
        assert not finding.may_lack_batches


def test_what_is_as_fast_as_it_can_be(make_job: MakeJob) -> None:
    """Kernels all the time, or power; gaps that are for want of batches, or of an evaluation in between."""
    assert kinds_of(make_job([replace(HALF_BUSY, utilisation=97)] * 2)) == []
    assert kinds_of(make_job([replace(HALF_BUSY, power_w=290)] * 2)) == []
    assert kinds_of(make_job([replace(HALF_BUSY, data_share=0.15)] * 2, facts=FROM_LOADERS)) == []
    # Nobody knows.
    assert kinds_of(make_job([replace(HALF_BUSY, data_share=math.nan)] * 2, facts=FROM_LOADERS)) == []
    assert kinds_of(make_job([HALF_BUSY] * 2, epochs=8, train_seconds=2)) == []
