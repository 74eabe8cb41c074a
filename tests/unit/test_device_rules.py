"""What GPUs and memories waste: the evidence of the rules on them."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import traces
from sampled_jobs import (
    MakeJob,
    change,
    finding_of,
    kinds_of,
    only_finding,
    write_job,
)
from traces import (
    FROM_LOADERS,
    FULL,
    UNUSED,
    Gpu,
    Throttling,
)

from trainkit.monitor.findings.finding import Grade
from trainkit.monitor.findings.throttled_gpus import ThrottlingCause
from trainkit.monitor.sample_tables import GpuId
from trainkit.monitor.verdict import judge

# A third of its power, and of its time without a kernel.
HALF_BUSY = Gpu(power_w=175, utilisation=70)


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    return partial(write_job, tmp_path / "monitor")


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


def test_why_a_clock_is_low(make_job: MakeJob) -> None:
    other = Gpu(power_w=148, clock_mhz=690, throttling=Throttling("other", 1))
    finding = finding_of(make_job([other] * 2), "throttled")
    assert finding.cause is ThrottlingCause.OTHER
    assert (finding.clock_mhz, finding.clock_limit_mhz) == (690, traces.CLOCK_MHZ)
    capped = Gpu(clock_mhz=690, throttling=Throttling("power+other", 1))
    assert finding_of(make_job([capped]), "throttled").cause is ThrottlingCause.POWER
    hot = Gpu(clock_mhz=690, throttling=Throttling("heat", 1), celsius=math.nan)
    finding = finding_of(make_job([hot]), "throttled")
    assert finding.cause is ThrottlingCause.HEAT and math.isnan(finding.temperature_c)


def test_a_gpu_at_its_power_limit_is_not_throttled(make_job: MakeJob) -> None:
    """It has a lower clock, and full power."""
    at_limit = Gpu(power_w=399, clock_mhz=1_050, throttling=Throttling("power", 1))
    assert kinds_of(make_job([at_limit] * 2)) == []


def test_a_gpu_is_unused_without_a_rank(make_job: MakeJob) -> None:
    finding = only_finding(make_job([FULL, UNUSED], ranks=1, nodes=2))
    assert finding.locations == [GpuId("n1", 1), GpuId("n2", 1)]
    assert (finding.gpus, finding.used_gpus) == (2, 2)
    finding = only_finding(make_job([FULL, *[UNUSED] * 5], ranks=1, nodes=3))
    assert (finding.gpus, finding.used_gpus) == (15, 3)
