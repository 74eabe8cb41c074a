"""Whether the ranks of a job have met, seen from outside: the TCP connections of processes, by /proc.

Ranks that train together hold some while they do: to the store of the process group, and those of gloo or
NCCL between them, also where the gradients go another way.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

RANK, HOST, NOBODY, UNKNOWN = "rank", "host", "-", ""  # with whom a rank has had a connection
ESTABLISHED = "01"  # Linux: include/net/tcp_states.h
IPV4_IN_IPV6 = "0000000000000000FFFF0000"  # what an address of IPv4 begins with in tcp6
MPI = b"/libmpi"  # with it ranks of one node may meet through memory only

Connection = tuple[str, str]  # this end and the other, each an address and a port


class Meetings:
    """With whom the ranks of this node have had a connection so far."""

    def __init__(self) -> None:
        self._met: dict[int, str] = {}

    def look(self, families: Mapping[int, list[int]], others: Iterable[int]) -> dict[int, str]:
        """Return for each rank the word of the closest one that it has had a connection with.

        `HOST` is another host, or a process that is not the job's: there may be a rank.

        Args:
            families: the numbers of a rank's processes, by rank.
            others: those of the job's other processes.
        """
        if all(self._met.get(rank) == RANK for rank in families):
            return self._met
        tables = _Tables()
        of_ranks = {rank: _connections(pids, tables) for rank, pids in families.items()}
        owner = dict.fromkeys(_connections(others, tables) or (), -1)
        for rank, connections in of_ranks.items():
            owner |= dict.fromkeys(connections or (), rank)
        for rank, connections in of_ranks.items():
            if self._met.get(rank) != RANK:
                self._met[rank] = self._word(rank, connections, owner)
                if self._met[rank] == NOBODY and any(map(_uses_mpi, families[rank])):
                    self._met[rank] = UNKNOWN
        return self._met

    def _word(self, rank: int, connections: set[Connection] | None, owner: Mapping[Connection, int]) -> str:
        if connections is None:
            return UNKNOWN
        at_the_other_end = {owner.get((there, here)) for here, there in connections}
        if any(one not in (None, -1, rank) for one in at_the_other_end):
            return RANK
        return HOST if None in at_the_other_end else self._met.get(rank, NOBODY)


class _Tables:
    """The established connections by the inodes of their sockets, as the kernel lists them.

    There is one list for all processes of a network namespace, which has those of all users.
    """

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[str, Connection]] = {}

    def of(self, process: Path) -> dict[str, Connection]:
        """Return those of the namespace that a process is in."""
        namespace = str((process / "ns" / "net").readlink())
        if namespace not in self._by_namespace:
            network = process / "net"
            self._by_namespace[namespace] = _read_table(network / "tcp") | _read_table(network / "tcp6")
        return self._by_namespace[namespace]


def _connections(pids: Iterable[int], tables: _Tables) -> set[Connection] | None:
    """Return the TCP connections of processes; None if those of one may not be seen."""
    found: set[Connection] = set()
    for pid in pids:
        process = Path(psutil.PROCFS_PATH, str(pid))
        try:
            sockets = _sockets(process)
            if sockets:
                table = tables.of(process)
                found |= {table[inode] for inode in sockets & table.keys()}
        except PermissionError:
            return None
        except OSError:  # it has ended
            continue
    return found


def _sockets(process: Path) -> set[str]:
    """Return the inodes of a process's sockets."""
    inodes = set()
    for file in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed
            kind, _, inode = str(file.readlink()).partition(":")
            if kind == "socket":
                inodes.add(inode.strip("[]"))
    return inodes


def _read_table(table: Path) -> dict[str, Connection]:
    """Return the established connections in a table of the kernel (man 5 proc), by their sockets' inodes."""
    found = {}
    with suppress(FileNotFoundError):  # a kernel without IPv6
        for line in table.read_text().splitlines()[1:]:
            _, here, there, state, *_, inode = line.split()[:10]
            if state == ESTABLISHED:
                found[inode] = here.removeprefix(IPV4_IN_IPV6), there.removeprefix(IPV4_IN_IPV6)
    return found


def _uses_mpi(pid: int) -> bool:
    with suppress(OSError):
        return MPI in Path(psutil.PROCFS_PATH, str(pid), "maps").read_bytes()
    return False
