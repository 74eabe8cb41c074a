"""The limits of a partition: what a job asks for beyond them, which Slurm itself may say late, or never.

With EnforcePartLimits=NO, its default, Slurm accepts a job that can never start. Seconds later, or when the
scheduler comes to it, it gives the reason (seen: 24.11); `sbatch --test-only` finds a start for it all the
same, from 26.05 on even on too many nodes. It needs only the standard library.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from manygpus.jobs import slurm


class Excess(NamedTuple):
    """What a job asks for beyond a limit of its partition.

    Attributes:
        reason: why it would wait forever, in Slurm's word.
        limit: the limit in words, such as "debug allows 15 minutes, not 30".
        lifted_by: the flag of a QOS whose jobs need not keep to it (man sacctmgr); "" if there is none.
    """

    reason: str
    limit: str
    lifted_by: str


class _Most(NamedTuple):
    """The most of something that a partition allows.

    Attributes:
        field: the field of `scontrol show partition` that has it.
        option: the option of sbatch that asks for it.
        number: returns what either of them says as a number of `unit`; None if it is none, as UNLIMITED.
        reason, lifted_by: those of the `Excess` beyond it.
    """

    field: str
    option: str
    number: Callable[[str], int | None]
    unit: str
    reason: str
    lifted_by: str = ""


def _whole_number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _in_mb(memory: str) -> int | None:
    """Return an amount of memory such as 16G, or 4096 for MB, in MB; None if it is no number."""
    parts = re.fullmatch(r"(\d+)([KMGT]?)", memory.upper())
    if not parts:
        return None
    return int(parts[1]) * 1024 ** "KMGT".index(parts[2] or "M") // 1024


LIMITS = (
    _Most("MaxTime", "time", slurm.in_minutes, "minutes", "PartitionTimeLimit", "PartitionTimeLimit"),
    _Most("MaxNodes", "nodes", _whole_number, "node(s)", "PartitionNodeLimit", "PartitionMaxNodes"),
    _Most("MaxMemPerNode", "mem", _in_mb, "MB of memory on a node", "MaxMemPerLimit"),
)


def read_partitions() -> list[dict[str, str]]:
    """Return the fields of all partitions: Slurm is asked once."""
    shown = slurm.ask("scontrol", "--all", "--oneliner", "show", "partition").stdout
    return [*map(slurm.fields, shown.splitlines())]


def excess(asked: Mapping[str, str], partitions: Sequence[Mapping[str, str]] | None = None) -> Excess | None:
    """Return what a job asks for that its partition does not allow, so that it would never start.

    Of several partitions one that allows it will do.

    Args:
        asked: options of sbatch by their names without dashes, of which partition, time, nodes and mem count.
        partitions: those of `read_partitions`, which is called without them.
    """
    names = asked.get("partition", "").split(",")
    excesses = []
    for partition in read_partitions() if partitions is None else partitions:
        is_default = names == [""] and partition.get("Default") == "YES"
        if is_default or partition.get("PartitionName") in names:
            excesses.append(excess_in(partition, asked))
    if not excesses or None in excesses or _is_lifted(excesses[0]):
        return None
    return excesses[0]


def excess_in(partition: Mapping[str, str], asked: Mapping[str, str]) -> Excess | None:
    """Return what a job asks for beyond the limits of one partition, whose fields are given."""
    name = partition["PartitionName"]
    for limit in LIMITS:
        wanted = limit.number(asked.get(limit.option, ""))
        most = limit.number(partition.get(limit.field, ""))
        if wanted is not None and most is not None and wanted > most:
            words = f"{name} allows {most} {limit.unit}, not {wanted}"
            return Excess(limit.reason, words, limit.lifted_by)
    nodes = _whole_number(asked.get("nodes", ""))
    least = _whole_number(partition.get("MinNodes", ""))
    if nodes is not None and least is not None and nodes < least:
        words = f"{name} takes jobs of {least} nodes or more, not {nodes}"
        return Excess("PartitionNodeLimit", words, "PartitionMinNodes")
    return None


def _is_lifted(beyond: Excess) -> bool:
    """Return whether a QOS of this cluster lifts the limit: Slurm alone knows whether the job has it."""
    if not beyond.lifted_by:
        return False
    shown = slurm.ask("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=flags").stdout
    return beyond.lifted_by in shown
