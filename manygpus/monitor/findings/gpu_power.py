"""How hard GPUs work, by the power that they take."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from manygpus.monitor.sample_tables import GpuId
from manygpus.monitor.sampled_job import SampledJob

# A GPU's load is its power, 0 when idle and 1 at its limit. Kernels that fill it take 0.4 to 1; short ones
# with gaps between them, or NCCL's that wait for another rank, below 0.25, at up to 100 % utilisation. An
# H100 that our network fills takes 0.6; at 0.35 it had no kernel for a third of the time, which a captured
# step saved.
IDLE_LOAD = 0.05
LOW_LOAD = 0.3
# With low power the utilisation shows the reason.
IDLE_UTILISATION_PERCENT = 5


@dataclass(frozen=True)
class PowerReading:
    """The means of some GPUs; NaN where they were not seen."""

    power_w: float
    limit_w: float
    utilisation_percent: float


def loads_of_used_gpus(job: SampledJob) -> dict[GpuId, float]:
    """Return the loads of the GPUs with a rank, as far as they are known."""
    loads = {gpu: job.gpu_load(gpu) for gpu in job.judged.gpus if not job.is_unused(gpu)}
    return {gpu: load for gpu, load in loads.items() if load > -math.inf}


def power_of(job: SampledJob, gpus: Iterable[GpuId]) -> PowerReading:
    return PowerReading(
        power_w=job.mean_of_gpus(gpus, "power_w"),
        limit_w=job.mean_of_gpus(gpus, "power_limit_w"),
        utilisation_percent=job.mean_of_gpus(gpus, "utilisation"),
    )


def power_words(power: PowerReading) -> str:
    text = f"{power.power_w:.0f} of {power.limit_w:.0f} W"
    if power.utilisation_percent >= 0:
        text += f", utilisation {power.utilisation_percent:.0f} %"
    return text
