"""Find, enter and end the processes of a cluster.

They all have the cluster's SLURM_CONF in their environment, or descend from one that has. The first of them,
init.py, adopts those whose parents end, so that nothing is ever out of reach.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from state import Cluster, ClusterError, folder, slurm_conf

NAMESPACES = ["--mount", "--uts", "--net", "--ipc"]
END_SECONDS = 20.0  # that the kernel may take to end a process on a busy machine


def first(name: str, of: str = "init") -> int | None:
    """Return the process number of the cluster's init.py, or of another that notes its own, if it runs."""
    file = folder(name) / f"{of}.pid"
    try:
        pid = int(file.read_text()) if file.is_file() else None
    except (OSError, ValueError):
        return None
    return pid if pid in _living(name) else None


def entrance(cluster: Cluster) -> list[str]:
    """Return the prefix of a command to run on the login host; raise a ClusterError if the host is gone."""
    pid = first(cluster.name)
    if not pid:
        raise ClusterError(f"{cluster.name} has crashed: take it down and up again.")
    return ["nsenter", f"--target={pid}", *NAMESPACES, "--"] if cluster.hosts else []


def kill(name: str) -> None:
    """End them all, init.py last, as it adopts the others; raise a ClusterError if one does not end."""
    deadline = time.monotonic() + END_SECONDS
    init = first(name)
    living = _living(name)
    while living:
        adopted = living - {init}
        for pid in adopted or {init}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ClusterError(f"these processes of {name} do not end: {sorted(living)}")
        time.sleep(0.01)
        living = _living(name)


def _living(name: str) -> set[int]:
    """Return the numbers of the cluster's processes that have not ended yet."""
    mark = f"SLURM_CONF={slurm_conf(name)}".encode()
    parents = {}
    marked = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the name in brackets, which may contain anything: state, parent, ... (proc(5))
            stat = (process / "stat").read_text(errors="replace")
            state, parent, *_ = stat.rpartition(")")[2].split()
            if state in ("Z", "X"):  # a zombie, or dead
                continue
            parents[int(process.name)] = int(parent)
            if mark in (process / "environ").read_bytes().split(b"\0"):
                marked.add(int(process.name))
        except OSError:  # it has ended, or is another user's
            continue
    return {pid for pid in parents if not marked.isdisjoint(_with_ancestors(pid, parents))}


def _with_ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    """Return the process and its ancestors."""
    line = [pid]
    while line[-1] in parents:
        line.append(parents[line[-1]])
    return line
