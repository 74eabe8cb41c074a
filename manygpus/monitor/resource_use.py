"""What a job asked Slurm for, what it used of it, and what would have been enough."""

import math
from collections import Counter
from dataclasses import dataclass

import pandas as pd

from manygpus.monitor.sampled_job import SampledJob

# Times the peak: the samples may miss the highest moment.
MARGIN = 1.2
# A GiB, as Slurm's G, in the megabytes of the samples.
MB_PER_GIB = 2**30 / 1e6
MIB_PER_GIB = 1024
MEMORY = "--mem"
CORES = "--cpus-per-task"


@dataclass(frozen=True)
class ResourceUse:
    """What Slurm was asked for by an option of sbatch, and what the job used of it.

    Attributes:
        option: the option of sbatch.
        unit: the unit of the other values, as sbatch writes it.
        asked: what the job asked for.
        used: the most that it used at once.
        is_peak_known: whether the job has ended well: what is enough for one that was killed, or still runs,
            nobody knows.
        resume: what a resume may take in addition.
    """

    option: str
    unit: str
    asked: float
    used: float
    is_peak_known: bool
    resume: float = 0

    @property
    def enough(self) -> int | None:
        """Return what would have been enough, with a margin; None if unknown."""
        if not self.is_peak_known:
            return None
        return max(math.ceil(min(MARGIN * self.used + self.resume, self.asked)), 1)

    @property
    def is_too_much(self) -> bool:
        """Return whether less than what was asked for would have been enough."""
        return self.enough is not None and self.enough < self.asked

    def as_json(self) -> dict[str, object]:
        """Return it for JSON, with the unit in the name of each number; None for what is unknown."""
        unit = {MEMORY: "gib", CORES: "cores"}[self.option]
        return {
            "option": self.option,
            f"asked_{unit}": self.asked,
            f"used_{unit}": self.used,
            f"enough_{unit}": self.enough,
        }


def measure_resource_use(job: SampledJob) -> list[ResourceUse]:
    """List a node's memory and a task's cores; without those that the job script did not ask for."""
    if job.asked is None:
        return []
    resources = [
        ResourceUse(
            option=MEMORY,
            unit="G",
            asked=round(job.asked.mb_per_node / MIB_PER_GIB, 2),
            used=_memory_gib(job),
            is_peak_known=job.ended_well,
            resume=_checkpoint_gib(job),
        ),
        ResourceUse(
            option=CORES,
            unit="",
            asked=job.asked.cpus_per_task,
            used=_cores_of_a_task(job, job.asked.tasks_per_node),
            is_peak_known=job.ended_well,
        ),
    ]
    return [resource for resource in resources if resource.asked > 0 and resource.used >= 0]


def _memory_gib(job: SampledJob) -> float:
    nodes = pd.concat(job.sampled.nodes.values())
    return (nodes.memory_mb + nodes.shared_files_mb.fillna(0)).max() / MB_PER_GIB


def _checkpoint_gib(job: SampledJob) -> float:
    """Return what a resume takes: each rank loads the checkpoint, which this job may not have done."""
    nodes = pd.concat(job.sampled.nodes.values())
    ranks_of_nodes = Counter(rank.node for rank in job.sampled.ranks)
    most_ranks = max(ranks_of_nodes.values(), default=0)
    return most_ranks * nodes.checkpoint_mb.fillna(0).max() / MB_PER_GIB


def _cores_of_a_task(job: SampledJob, tasks_per_node: float) -> float:
    """Return the most cores of a task at once: a task of torchrun has all ranks of its node."""
    nodes = pd.concat(job.sampled.nodes.values())
    cores = [nodes.cores.max() / max(tasks_per_node, 1)]
    for rows in job.sampled.ranks.values():
        with_others = rows.cores + rows.loader_cores.fillna(0) + rows.other_cores.fillna(0)
        cores.append(with_others.max())
    return pd.Series(cores).max()
