"""What Slurm says of its partitions, and of the accounts of a user; needs only the standard library."""

import getpass
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from subprocess import CompletedProcess

from manygpus.jobs import slurm
from manygpus.jobs.stages import Resources

# The QOS of a job whose association names none.
USUAL_QOS = "normal"


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of a partition that are alike.

    Attributes:
        gpus: the GPUs of one node by their kinds, which may have no name.
        features: what SBATCH_CONSTRAINT may name.
    """

    nodes: int
    gpus: Counter[str]
    features: tuple[str, ...]


@dataclass(frozen=True)
class Partition:
    """A partition.

    Attributes:
        fields: those of `scontrol show partition`.
    """

    fields: Mapping[str, str]
    groups: tuple[NodeGroup, ...]

    @property
    def name(self) -> str:
        return self.fields["PartitionName"]

    @property
    def is_default(self) -> bool:
        return self.fields.get("Default") == "YES"

    @property
    def is_up(self) -> bool:
        """Return whether its jobs start."""
        return self.fields.get("State", "UP") == "UP"

    @property
    def has_whole_nodes(self) -> bool:
        """Return whether a job holds whole nodes."""
        return self.fields.get("OverSubscribe") == "EXCLUSIVE"

    @property
    def most_minutes(self) -> int | None:
        """Return its time limit; None if there is none."""
        return slurm.in_minutes(self.fields.get("MaxTime", ""))

    def allows(self, minutes: int) -> bool:
        """Return whether a job may have this time limit."""
        return self.most_minutes is None or minutes <= self.most_minutes

    @property
    def most_gpus(self) -> int:
        """Return the most GPUs of a node; 0 if Slurm counts none."""
        return max((group.gpus.total() for group in self.groups), default=0)

    def nodes_for(self, shape: Resources) -> int:
        """Return how many nodes have the GPUs that a job of this shape needs on each of its nodes."""
        return sum(group.nodes for group in self.groups if group.gpus.total() >= shape.gpus_per_node)

    def kinds_for(self, shape: Resources) -> list[str]:
        """Return the named kinds of GPUs that a job of this shape may have, the most frequent first."""
        gpus: Counter[str] = Counter()
        for group in self.groups:
            for kind, count in group.gpus.items():
                if kind and count >= shape.gpus_per_node:
                    gpus[kind] += group.nodes * count
        return [kind for kind, _ in gpus.most_common()]

    def admits(self, kind: str, name: str) -> bool:
        """Return whether it admits an account ("Accounts") or a QOS ("Qos") of this name."""
        admitted = self.fields.get(f"Allow{kind}", "ALL").split(",")
        denied = self.fields.get(f"Deny{kind}", "").split(",")
        return ("ALL" in admitted or name in admitted) and name not in denied


@dataclass(frozen=True)
class Association:
    """An account that a user may name, and the QOS that its jobs may have.

    Attributes:
        partition: the only one in which it counts; "" for all.
    """

    account: str
    is_default: bool
    partition: str
    qos: tuple[str, ...]
    default_qos: str

    @property
    def usual_qos(self) -> str:
        """Return the QOS of a job that names none."""
        if self.default_qos:
            return self.default_qos
        return self.qos[0] if len(self.qos) == 1 else USUAL_QOS


@dataclass(frozen=True)
class Cluster:
    """What a user may ask of a cluster.

    Attributes:
        why_no_accounts: why accounts and QOS are not known; "" if they are.
        most_minutes: the time limits of the QOS that have one.
    """

    partitions: tuple[Partition, ...]
    associations: tuple[Association, ...]
    why_no_accounts: str = ""
    most_minutes: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_gpus(self) -> bool:
        """Return whether Slurm counts GPUs."""
        return any(partition.most_gpus for partition in self.partitions)


def read_cluster() -> Cluster:
    """Ask Slurm: its controller twice, and accounting twice."""
    groups = _groups_by_partition()
    shown = slurm.ask("scontrol", "--oneliner", "show", "partition").stdout
    partitions = [
        Partition(fields, tuple(groups.get(fields["PartitionName"], ())))
        for fields in map(slurm.fields, shown.splitlines())
        if "PartitionName" in fields
    ]
    # The default one comes first.
    partitions.sort(key=lambda partition: not partition.is_default)
    columns = "DefaultAccount,Account,Partition,QOS,DefaultQOS"
    user = getpass.getuser()
    users = _sacctmgr("user", user, "withassoc", f"format={columns}")
    if users.returncode:
        return Cluster(tuple(partitions), (), why_no_accounts=users.stderr.strip().rpartition("\n")[2])
    associations = [_association(*line.split("|")) for line in users.stdout.splitlines()]
    associations.sort(key=lambda association: not association.is_default)
    most_minutes = {}
    for line in _sacctmgr("qos", "format=Name,MaxWall").stdout.splitlines():
        name, _, limit = line.partition("|")
        minutes = slurm.in_minutes(limit)
        if minutes:
            most_minutes[name] = minutes
    return Cluster(tuple(partitions), tuple(associations), most_minutes=most_minutes)


def _groups_by_partition() -> dict[str, list[NodeGroup]]:
    groups: dict[str, list[NodeGroup]] = {}
    shown = slurm.ask("sinfo", "--noheader", "--format=%R|%D|%G|%f").stdout
    for line in shown.splitlines():
        partition, nodes, gres, features = line.split("|")
        named = () if features == "(null)" else tuple(features.split(","))
        groups.setdefault(partition, []).append(NodeGroup(int(nodes), slurm.gpus_by_kind(gres), named))
    return groups


def _association(default: str, account: str, partition: str, qos: str, default_qos: str) -> Association:
    return Association(
        account=account,
        is_default=account == default,
        partition=partition,
        qos=tuple(filter(None, qos.split(","))),
        default_qos=default_qos,
    )


def _sacctmgr(*words: str) -> CompletedProcess[str]:
    return slurm.ask("sacctmgr", "--noheader", "--parsable2", "show", *words)
