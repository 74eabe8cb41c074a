"""GPUs that wait for their next kernel, as the CPU launches them too slowly."""

import math
from dataclasses import dataclass

from manygpus.monitor.findings.finding import Finding, Grade
from manygpus.monitor.findings.gpu_power import (
    LOW_LOAD,
    PowerReading,
    loads_of_used_gpus,
    power_of,
    power_words,
)
from manygpus.monitor.findings.idle_gpu import idle_gpus
from manygpus.monitor.findings.words import name_locations, options_in_brackets, percent
from manygpus.monitor.sample_tables import GpuId
from manygpus.monitor.sampled_job import SampledJob
from manygpus.record.columns import DP

LAUNCHES_PAGE = "01_singlegpu/README.md#when-the-gpu-waits-for-the-cpu"
HALF_LOAD = 0.5
BUSY_UTILISATION_PERCENT = 80
# With so much of the time without a kernel, at less than half of the power, it could be faster.
GAP_TIME_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class LaunchBound(Finding):
    """GPUs that wait for their next kernel, as the CPU launches them too slowly.

    Attributes:
        load: the power above idle, 0 to 1 at its limit.
        gap_share: the share of the time in which no kernel runs though there is a batch to train on.
        has_gaps: whether the kernels have gaps between them; else they are short.
        may_lack_batches: whether a want of batches may also be the reason.
        step_seconds: the time of a step.
        is_data_parallel: whether the training uses DataParallel, whose step cannot be captured.
        is_captured: whether the step is a captured graph.
        power: what the GPUs take.
    """

    kind = "launch_bound"
    load: float
    gap_share: float
    has_gaps: bool
    may_lack_batches: bool
    step_seconds: float
    is_data_parallel: bool
    is_captured: bool
    power: PowerReading

    @classmethod
    def find(cls, job: SampledJob) -> "LaunchBound | None":
        """Find GPUs that wait for their next kernel.

        They are those at low power, or else those that could be faster.
        """
        loads = loads_of_used_gpus(job)
        idle = idle_gpus(job, loads)
        at_low_load = [gpu for gpu, load in loads.items() if load < LOW_LOAD and gpu not in idle]
        if at_low_load:
            load = _mean_load(job, at_low_load)
            return cls._with_evidence(job, at_low_load, lost_share=1 - load, grade=Grade.WASTE)
        with_gaps = [
            gpu
            for gpu, load in loads.items()
            if LOW_LOAD <= load < HALF_LOAD and _gap_share(job, gpu) >= GAP_TIME_SHARE
        ]
        if with_gaps:
            gap_share = _mean_gap_share(job, with_gaps)
            return cls._with_evidence(job, with_gaps, lost_share=gap_share, grade=Grade.FASTER)
        return None

    @classmethod
    def _with_evidence(
        cls, job: SampledJob, gpus: list[GpuId], lost_share: float, grade: Grade
    ) -> "LaunchBound":
        """Return the finding on these GPUs, which lose this share of their own time."""
        sums = job.epochs[["train_seconds", "steps"]].sum()
        stages = job.epochs.stage.astype(str)
        has_gaps = not job.mean_of_gpus(gpus, "utilisation") >= BUSY_UTILISATION_PERCENT
        return cls(
            load=_mean_load(job, gpus),
            gap_share=_mean_gap_share(job, gpus),
            has_gaps=has_gaps,
            may_lack_batches=has_gaps and job.rank_shares.empty,
            step_seconds=sums.train_seconds / sums.steps if sums.steps else math.nan,
            is_data_parallel=stages.str.startswith(DP).any(),
            is_captured=stages.str.contains("captured").any(),
            power=power_of(job, gpus),
            locations=gpus,
            lost_share=lost_share * len(gpus) / len(job.judged.gpus),
            grade=grade,
            explained_by_waiting=True,
        )

    def sentence(self, is_plain: bool) -> str:
        gpus = name_locations(self.locations)
        if self.grade is Grade.FASTER:
            problem = (
                f"{Grade.FASTER.value}: no kernel runs for {percent(self.gap_share)} of the time, which "
                f"leaves {gpus}"
            )
        elif self.has_gaps:
            problem = f"gaps between kernels leave {gpus}"
        else:
            problem = f"short kernels leave {gpus}"
        seen = power_words(self.power)
        if self.step_seconds >= 0:
            seen += f", {1000 * self.step_seconds:.3g} ms a step"
        remedy = "use a larger batch per GPU" + options_in_brackets("--batch-size", is_plain)
        if self.may_lack_batches:
            remedy += ", loader workers if there are none"
        if self.is_data_parallel:
            remedy += ", or DDP (03_multigpu_ddp)"
        elif not self.is_captured:
            remedy += f", or a captured step (03_multigpu_ddp/beyond/by_feature/captured.py; {LAUNCHES_PAGE})"
        whose = "its" if len(self.locations) == 1 else "their"
        return f"{problem} at {percent(self.load)} of {whose} power above idle ({seen}): {remedy}."


def _mean_load(job: SampledJob, gpus: list[GpuId]) -> float:
    return sum(job.gpu_load(gpu) for gpu in gpus) / len(gpus)


def _mean_gap_share(job: SampledJob, gpus: list[GpuId]) -> float:
    return sum(_gap_share(job, gpu) for gpu in gpus) / len(gpus)


def _gap_share(job: SampledJob, gpu: GpuId) -> float:
    """Return the share of the time that no kernel runs, though there is a batch to train on, or NaN.

    It excludes waiting for loader workers, and the time between epochs too short to be judged alone.
    """
    train_seconds = job.epochs.train_seconds.sum()
    judged_seconds = sum(window.ended - window.began for window in job.windows)
    between_epochs = max(0.0, 1 - train_seconds / judged_seconds) if train_seconds else 0.0
    waiting = 0.0
    if job.has_loader_workers and len(job.rank_shares):
        waiting = job.rank_shares.data.max()
    return 1 - job.mean_of_gpus([gpu], "utilisation") / 100 - between_epochs - waiting
