"""GPUs whose clock is low."""

import math

import traces
from sampled_jobs import MakeJob, finding_of, kinds_of
from traces import Gpu, Throttling

from manygpus.monitor.findings.throttled import ThrottlingCause


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
