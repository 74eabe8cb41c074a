"""Whether the ranks of a job have met, seen from outside: the TCP connections of processes, by /proc.

Ranks that train together hold some while they do: to the store of the process group, and those of gloo or
NCCL between them, also where the gradients go another way.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

# With whom a rank has had a connection, as the column `met` says it.
RANK = "rank"
HOST = "host"
NOBODY = "-"
UNKNOWN = ""
ESTABLISHED = "01"  # Linux: include/net/tcp_states.h
IPV4_IN_IPV6_PREFIX = "0000000000000000FFFF0000"  # of an address of IPv4 in tcp6
MPI_LIBRARY = b"/libmpi"  # with it ranks of one node may meet through memory only
NO_RANK = -1  # owns the connections of the job's processes that are no rank's


class Connection(NamedTuple):
    """A TCP connection as one of its ends sees it: the addresses and ports of both."""

    local: str
    remote: str

    @property
    def from_the_other_end(self) -> "Connection":
        return Connection(local=self.remote, remote=self.local)


class Meetings:
    """With whom the ranks of this node have had a connection so far."""

    def __init__(self) -> None:
        self._met: dict[int, str] = {}

    def look(self, families: Mapping[int, list[int]], others: Iterable[int]) -> dict[int, str]:
        """Return for each rank the closest one that it has had a connection with.

        `HOST` is another host, or a process that is not the job's: there may be a rank.

        Args:
            families: the numbers of a rank's processes, by rank.
            others: the numbers of the job's other processes.
        """
        if all(self._met.get(rank) == RANK for rank in families):
            return self._met
        tables = _Tables()
        connections = {rank: _connections(pids, tables) for rank, pids in families.items()}
        owners = dict.fromkeys(_connections(others, tables) or (), NO_RANK)
        for rank, rank_connections in connections.items():
            owners |= dict.fromkeys(rank_connections or (), rank)
        for rank, rank_connections in connections.items():
            if self._met.get(rank) != RANK:
                self._met[rank] = self._closest(rank, rank_connections, owners)
                if self._met[rank] == NOBODY and any(map(_uses_mpi, families[rank])):
                    self._met[rank] = UNKNOWN
        return self._met

    def _closest(
        self, rank: int, connections: set[Connection] | None, owners: Mapping[Connection, int]
    ) -> str:
        if connections is None:
            return UNKNOWN
        partners = {owners.get(connection.from_the_other_end) for connection in connections}
        other_ranks = partners - {None, NO_RANK, rank}
        if other_ranks:
            return RANK
        if None in partners:
            return HOST
        return self._met.get(rank, NOBODY)


class _Tables:
    """The established connections by the inodes of their sockets, as the kernel lists them.

    There is one list for all processes of a network namespace, which has those of all users.
    """

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[str, Connection]] = {}

    def of(self, process: Path) -> dict[str, Connection]:
        """Return the connections of the namespace that a process is in."""
        namespace = str((process / "ns" / "net").readlink())
        if namespace not in self._by_namespace:
            network = process / "net"
            self._by_namespace[namespace] = _read_table(network / "tcp") | _read_table(network / "tcp6")
        return self._by_namespace[namespace]


def _connections(pids: Iterable[int], tables: _Tables) -> set[Connection] | None:
    """Return the TCP connections of processes; None if those of one may not be seen."""
    connections: set[Connection] = set()
    for pid in pids:
        process = Path(psutil.PROCFS_PATH, str(pid))
        try:
            inodes = _socket_inodes(process)
            if inodes:
                table = tables.of(process)
                connections |= {table[inode] for inode in inodes & table.keys()}
        except PermissionError:
            return None
        except OSError:
            # It has ended.
            continue
    return connections


def _socket_inodes(process: Path) -> set[str]:
    """Return the inodes of a process's sockets."""
    inodes: set[str] = set()
    for file in (process / "fd").iterdir():
        # It may have been closed.
        with suppress(FileNotFoundError):
            kind, _, inode = str(file.readlink()).partition(":")
            if kind == "socket":
                inodes.add(inode.strip("[]"))
    return inodes


def _read_table(table: Path) -> dict[str, Connection]:
    """Return the established connections in a table of the kernel (man 5 proc), by their sockets' inodes."""
    connections: dict[str, Connection] = {}
    # A kernel may be without IPv6.
    with suppress(FileNotFoundError):
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, *_, inode = line.split()[:10]
            if state == ESTABLISHED:
                connections[inode] = Connection(
                    local=local.removeprefix(IPV4_IN_IPV6_PREFIX),
                    remote=remote.removeprefix(IPV4_IN_IPV6_PREFIX),
                )
    return connections


def _uses_mpi(pid: int) -> bool:
    with suppress(OSError):
        return MPI_LIBRARY in Path(psutil.PROCFS_PATH, str(pid), "maps").read_bytes()
    return False
