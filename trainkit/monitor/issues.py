"""What a verdict may find: an issue of a kind, with its evidence in numbers.

A rule (rank_rules.py, device_rules.py) finds it, and wording.py says it in a sentence with its remedy.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from trainkit.monitor import samples
from trainkit.monitor.sample_tables import GpuId, RankId

# Where an issue is: on a node, by its name, a GPU or a rank.
Location = str | GpuId | RankId


class Grade(str, Enum):
    """How bad an issue is."""

    WASTE = "waste"
    DANGER = "danger"  # no loss yet
    FASTER = "could be faster"


class PauseCause(str, Enum):
    """Why a rank did nothing, by the state of its process in /proc."""

    STOPPED = "T"
    FILE_SYSTEM = "D"
    UNKNOWN = "S"


class ThrottlingCause(str, Enum):
    """Why a GPU's clock was low, as the column `throttled` says it."""

    HEAT = "heat"
    POWER = "power"
    OTHER = "other"


@dataclass(frozen=True)
class PowerReading:
    """The means of some GPUs; NaN where they were not seen."""

    power_w: float
    limit_w: float
    utilisation_percent: float


@dataclass(frozen=True)
class Evidence:
    """The numbers of an issue of one kind. Shares are from 0 to 1, and NaN is unknown."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class RanksNeverMet(Evidence):
    """Several ranks, each of which trained by itself."""

    kind = samples.NEVER_MET
    ranks: int


@dataclass(frozen=True)
class UnusedGpus(Evidence):
    """GPUs without a rank, and the number of those with one."""

    kind = "no_rank"
    gpus: int
    used_gpus: int


@dataclass(frozen=True)
class PausedRanks(Evidence):
    """Ranks that did nothing for a long time, one of them perhaps until the end of the job."""

    kind = samples.STALLED_RANK
    seconds: float
    cause: PauseCause
    until_the_end: bool = False


@dataclass(frozen=True)
class SlowRank(Evidence):
    """A rank that the others wait for, as its own part of a step takes so many times as long."""

    kind = samples.STALLED_RANK
    times_as_long: float
    waiting_share: float


@dataclass(frozen=True)
class WaitingForBatches(Evidence):
    """Ranks that wait for their loader workers, or prepare batches themselves.

    Attributes:
        waiting_share: of the training time, for the rank that waits most.
        loader_workers: of each rank for its training data.
        cores_per_worker: how many of its own each of these uses.
        all_cores_in_use: of those that the job may use.
        is_resident: whether the data is in the rank's memory, and only has to be prepared.
    """

    kind = "waiting_for_loader"
    waiting_share: float
    loader_workers: float
    cores_per_worker: float
    all_cores_in_use: bool
    is_resident: bool


@dataclass(frozen=True)
class SlowCommunication(Evidence):
    """Averaging the gradients, as a share of the training time, and what each of several nodes moves."""

    kind = "network_bound"
    communication_share: float
    network_mb_s: float


@dataclass(frozen=True)
class SharedCores(Evidence):
    """Ranks whose threads wait for a core.

    Attributes:
        waiting_share: of the time, for the rank that waits most.
        ranks: on its node.
        loader_workers: of these ranks.
        cores: that they may use.
        used_by_others: whether other programs take these cores.
        exclusive_helps: whether --exclusive would keep those programs away.
    """

    kind = "shared_cores"
    waiting_share: float
    ranks: int
    loader_workers: int
    cores: int
    used_by_others: bool
    exclusive_helps: bool


@dataclass(frozen=True)
class IdleCpus(Evidence):
    """Ranks on a CPU that hardly compute: at most for this share of the time."""

    kind = "idle_cpu"
    computing_share: float


@dataclass(frozen=True)
class ThrottledGpus(Evidence):
    """GPUs whose clock is low: the share of the time of the worst, and its means in that time."""

    kind = "throttled"
    cause: ThrottlingCause
    time_share: float
    clock_mhz: float
    clock_limit_mhz: float
    temperature_c: float
    power_limit_w: float


@dataclass(frozen=True)
class FullGpuMemory(Evidence):
    """The largest share of a GPU's memory that was in use at any moment."""

    kind = "memory_full"
    used_share: float


@dataclass(frozen=True)
class FullHostMemory(Evidence):
    """The largest share of the job's memory on a node that was in use at any moment."""

    kind = "host_memory"
    used_share: float


@dataclass(frozen=True)
class IdleGpus(Evidence):
    """GPUs that no work reaches."""

    kind = "idle_gpu"
    gpus: int
    others_work: bool
    power: PowerReading


@dataclass(frozen=True)
class LaunchBound(Evidence):
    """GPUs that wait for their next kernel, as the CPU launches them too slowly.

    Attributes:
        load: their power above idle, 0 to 1 at its limit.
        gap_share: of the time, in which no kernel runs though there is a batch to train on.
        has_gaps: whether the kernels have gaps between them; else they are short.
        may_lack_batches: whether it may also be for want of batches.
        step_seconds: the time of a step.
        is_data_parallel: whether it is DataParallel, whose step cannot be captured.
        is_captured: whether its step is a captured graph.
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


@dataclass(frozen=True)
class Issue:
    """An issue of a job.

    Attributes:
        evidence: its numbers; they also say of which kind it is.
        locations: the nodes, GPUs or ranks that have it, all of one of these.
        lost_share: the share of the devices' time that is lost, 0 to 1; for a danger 0.
        grade: how bad it is.
        explained_by: kinds of issues that explain it better: beside one of them it is not reported.
    """

    evidence: Evidence
    locations: list[Location]
    lost_share: float
    grade: Grade = Grade.WASTE
    explained_by: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        return self.evidence.kind


# What makes ranks wait leaves their GPUs and cores without work, too, and is the better explanation.
WHAT_MAKES_RANKS_WAIT = frozenset(
    {
        WaitingForBatches.kind,
        PausedRanks.kind,
        SlowRank.kind,
        SlowCommunication.kind,
        SharedCores.kind,
        ThrottledGpus.kind,
    }
)
