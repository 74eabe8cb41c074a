"""GPUs whose clock is low."""

from dataclasses import dataclass
from enum import Enum

import pandas as pd

from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.words import name_locations, percent
from manygpus.monitor.sample_tables import GpuId
from manygpus.monitor.sampled_job import SampledJob

# In a well-cooled server heat never slows a GPU down.
HOT_TIME_SHARE = 0.05
# At the limit of its power a GPU has 0.65 to 0.9 of its highest clock, and wastes nothing. Below is a cap.
CAPPED_CLOCK_SHARE = 0.6
CAPPED_TIME_SHARE = 0.2


class ThrottlingCause(str, Enum):
    """Why a GPU's clock was low, as the column `throttled` says it."""

    HEAT = "heat"
    POWER = "power"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Throttled(Finding):
    """GPUs whose clock is low: the share of the time of the worst, and its means in that time."""

    kind = "throttled"
    makes_ranks_wait = True
    cause: ThrottlingCause
    time_share: float
    clock_mhz: float
    clock_limit_mhz: float
    temperature_c: float
    power_limit_w: float

    @classmethod
    def find(cls, job: SampledJob) -> "Throttled | None":
        """Find GPUs with a low clock.

        Heat is always reported; for other reasons the clock has to be very low.
        """
        for cause in ThrottlingCause:
            least_share = HOT_TIME_SHARE if cause is ThrottlingCause.HEAT else CAPPED_TIME_SHARE
            slow_rows = {gpu: _throttled_rows(rows, cause) for gpu, rows in job.judged.gpus.items()}
            shares = {gpu: len(rows) / len(job.judged.gpus[gpu]) for gpu, rows in slow_rows.items()}
            throttled = [gpu for gpu, share in shares.items() if share >= least_share]
            if throttled:
                worst = max(throttled, key=shares.get)
                return cls._with_means(cause, throttled, time_share=shares[worst], rows=slow_rows[worst])
        return None

    @classmethod
    def _with_means(
        cls, cause: ThrottlingCause, gpus: list[GpuId], time_share: float, rows: pd.DataFrame
    ) -> "Throttled":
        """Return the finding on these GPUs, of which the worst had a low clock in these samples."""
        means = rows.mean(numeric_only=True)
        lost_share = 0.0
        if means.clock_mhz <= means.clock_limit_mhz:
            lost_share = time_share * (1 - means.clock_mhz / means.clock_limit_mhz)
        return cls(
            cause=cause,
            time_share=time_share,
            clock_mhz=means.clock_mhz,
            clock_limit_mhz=means.clock_limit_mhz,
            temperature_c=means.temperature_c,
            power_limit_w=means.power_limit_w,
            locations=gpus,
            lost_share=lost_share,
        )

    def sentence(self, is_plain: bool) -> str:
        slows_down = f"slows down {name_locations(self.locations)} for {percent(self.time_share)} of the time"
        if self.clock_mhz <= self.clock_limit_mhz:
            slows_down += f", to {self.clock_mhz:,.0f} of {self.clock_limit_mhz:,.0f} MHz"
        if self.cause is ThrottlingCause.HEAT:
            celsius = f" ({self.temperature_c:.0f} C)" if self.temperature_c > 0 else ""
            return f"heat{celsius} {slows_down}: report it to your admin, and use a different node."
        if self.cause is ThrottlingCause.POWER:
            limit = f" ({self.power_limit_w:.0f} W)" if self.power_limit_w > 0 else ""
            return f"a power cap{limit} {slows_down}: ask your admin why."
        return (
            f"something other than heat or a power cap, such as application clocks, {slows_down}: ask your "
            "admin (nvidia-smi -q -d CLOCK,PERFORMANCE)."
        )


def _throttled_rows(rows: pd.DataFrame, cause: ThrottlingCause) -> pd.DataFrame:
    """Return the samples in which a GPU's clock was low for this cause."""
    rows = rows[rows.throttled.str.contains(cause.value)]
    if cause is not ThrottlingCause.HEAT:
        rows = rows[rows.clock_mhz < CAPPED_CLOCK_SHARE * rows.clock_limit_mhz]
    return rows
