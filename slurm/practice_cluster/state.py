"""What is known about one practice cluster, and where its files are."""

import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path


class ClusterError(Exception):
    """A mistake that the user can correct; its text says what is wrong and what to do."""


@dataclass
class Cluster:
    """A practice cluster, with the options of `up`.

    `slurm`: the release by its name, one of `software.NAMES`; `version`: what that is, such as 24.11.5.
    `hosts`: every node is a separate host; otherwise all nodes share this machine's name and network.
    `cpus`, `memory` (MB) and `gpus` are per node, and `gpu_kind` may be empty. `conf` is a folder with more
    of the configuration; empty: there is none. `mbit` is how fast a node sends (Mbit/s); 0: as
    fast as the machine can. The ports from `first_port` on are its own.
    """

    name: str
    slurm: str
    version: str
    nodes: int
    gpus: int
    gpu_kind: str
    conf: str
    cpus: int
    memory: int
    hosts: bool
    mbit: int
    accounting: bool
    first_port: int

    @classmethod
    def load(cls, name: str) -> "Cluster":
        """Read what `save` wrote; raise a ClusterError if the file holds anything else."""
        file = folder(name) / "cluster.json"
        types = {field.name: field.type for field in fields(cls)}
        fits = False
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            facts = json.loads(file.read_text()) if file.is_file() else None
            fits = {fact: type(value) for fact, value in facts.items()} == types
        if not fits:
            raise ClusterError(f"{file} is damaged: take {name} down, and up again.")
        return cls(**facts)

    def save(self) -> None:
        (self.folder / "cluster.json").write_text(json.dumps(asdict(self)))

    @property
    def folder(self) -> Path:
        return folder(self.name)

    @property
    def node_names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    @property
    def login_address(self) -> str:
        return "10.10.10.1" if self.hosts else "127.0.0.1"

    def node_address(self, node: str) -> str:
        return f"10.10.10.{100 + self.node_names.index(node)}" if self.hosts else "127.0.0.1"


def folder(name: str) -> Path:
    """Return the folder of a cluster's files, a short one: a socket's path has at most 107 characters."""
    return Path(f"/tmp/practice-cluster-{os.getuid()}-{name}")


def check_folder(name: str) -> None:
    """Raise a ClusterError if another user may have put something into the cluster's folder.

    Any user may write to /tmp, and can guess the name.
    """
    try:
        status = folder(name).lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        fault = "no folder of its own"
    elif status.st_uid != os.getuid():
        fault = "another user's"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        fault = "open to other users"
    else:
        return
    raise ClusterError(f"{folder(name)} is {fault}: choose a different --name, or remove it.")


def slurm_conf(name: str) -> Path:
    return folder(name) / "slurm.conf"
