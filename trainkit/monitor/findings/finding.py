"""What all findings of a verdict have in common: an issue of a kind, with its evidence in numbers."""

from dataclasses import dataclass
from enum import Enum
from functools import singledispatch
from typing import ClassVar

from trainkit.monitor.sample_tables import GpuId, RankId

# A smaller share of the time is not worth a line.
LEAST_LOST_SHARE = 0.1
# Where an issue is: on a node, by its name, a GPU or a rank.
Location = str | GpuId | RankId


class Grade(str, Enum):
    """How bad an issue is."""

    WASTE = "waste"
    DANGER = "danger"  # no loss yet
    FASTER = "could be faster"


@dataclass(frozen=True)
class Evidence:
    """The numbers of an issue of one kind. Shares are from 0 to 1, and NaN is unknown.

    Attributes:
        kind: what programs call it.
        makes_ranks_wait: whether it leaves the GPUs and cores of ranks without work, too, and explains this.
        remedy_takes_cores: whether the remedy takes cores, so that the job has not asked for too many.
    """

    kind: ClassVar[str]
    makes_ranks_wait: ClassVar[bool] = False
    remedy_takes_cores: ClassVar[bool] = False


@dataclass(frozen=True)
class Issue:
    """An issue of a job.

    Attributes:
        evidence: its numbers; they also say of which kind it is.
        locations: the nodes, GPUs or ranks that have it, all of one of these.
        lost_share: the share of the devices' time that is lost, 0 to 1; for a danger 0.
        grade: how bad it is.
        explained_by_waiting: whether ranks that wait explain it: beside what makes them wait it is not
            reported.
    """

    evidence: Evidence
    locations: list[Location]
    lost_share: float
    grade: Grade = Grade.WASTE
    explained_by_waiting: bool = False

    @property
    def kind(self) -> str:
        return self.evidence.kind


@singledispatch
def sentence(evidence: Evidence, issue: Issue, is_plain: bool) -> str:
    """Return the sentence for evidence of one kind."""
    raise NotImplementedError(f"{type(evidence).__name__} has no words")
