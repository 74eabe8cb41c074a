"""What all findings of a verdict have in common."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import ClassVar

from manygpus.monitor.sample_tables import GpuId, RankId
from manygpus.monitor.sampled_job import SampledJob

# A smaller share of the time is not worth a line.
LEAST_LOST_SHARE = 0.1
# Where a finding is: on a node, by its name, a GPU or a rank.
Location = str | GpuId | RankId


class Grade(str, Enum):
    """How bad a finding is."""

    WASTE = "waste"
    DANGER = "danger"  # no loss yet
    FASTER = "could be faster"


@dataclass(frozen=True, kw_only=True)
class Finding(ABC):
    """What a job wastes, or could do faster.

    Each kind adds its evidence: numbers with their units in their names. Shares are from 0 to 1, and NaN is
    unknown.

    Attributes:
        kind: what programs call it.
        makes_ranks_wait: whether it leaves the GPUs and cores of ranks without work, too, and explains this.
        remedy_takes_cores: whether the remedy takes cores, so that the job has not asked for too many.
        locations: the nodes, GPUs or ranks that have it, all of one of these.
        lost_share: the share of the devices' time that is lost, 0 to 1; for a danger 0.
        grade: how bad it is.
        explained_by_waiting: whether ranks that wait explain it: beside what makes them wait it is not
            reported.
    """

    kind: ClassVar[str]
    makes_ranks_wait: ClassVar[bool] = False
    remedy_takes_cores: ClassVar[bool] = False
    locations: list[Location]
    lost_share: float
    grade: Grade = Grade.WASTE
    explained_by_waiting: bool = False

    @classmethod
    @abstractmethod
    def find(cls, job: SampledJob) -> "Finding | None":
        """Return what is found in a job; None if it is not there, or cannot be told."""

    @abstractmethod
    def sentence(self, is_plain: bool) -> str:
        """Return what was found and its remedy; for a plain script without the options of the kit."""

    def evidence(self) -> dict[str, object]:
        """Return the numbers that only findings of this kind have, by their names."""
        common = {field.name for field in fields(Finding)}
        return {name: value for name, value in asdict(self).items() if name not in common}
