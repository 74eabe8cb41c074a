"""What the names of machines resolve to here: a node may have another name for itself than Slurm has."""

import ipaddress
import os
import socket
from typing import NamedTuple

from trainkit.distributed.launchers import node


class Problem(NamedTuple):
    """A name that leads ranks astray, and what to do about it."""

    what: str
    fix: str


def addresses(name: str) -> list[str]:
    """Return the addresses of a name; none if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(address[0] for *_, address in found))


def told(name: str) -> str:
    """Return a name and what it resolves to here, for people."""
    known = addresses(name)
    return name if known == [name] else f"{name} is {', '.join(known) or 'unknown'}"


def problem(master: str, gloo: bool) -> Problem | None:
    """Return what is wrong here with the names of the first node, `master`, and of this one.

    With `gloo` the hostname counts, too: gloo gives other nodes what that resolves to, or 127.0.0.1
    (ProcessGroupGloo.cpp, createDefaultDevice), unless a variable names the network.
    """
    if master in _loopback(master):  # by Slurm's own word all nodes are on this machine
        return None
    if not addresses(master):
        fix = f"correct MASTER_ADDR, or have an admin give it an address (DNS, or /etc/hosts of {node()})"
        return Problem(f"the master's name {master} cannot be resolved on {node()}", fix)
    first = (os.environ.get("SLURM_NODEID") or os.environ.get("GROUP_RANK") or "0") == "0"
    if not first and _loopback(master):
        what = f"the master's name means {node()} itself on {node()} ({told(master)})"
        return Problem(what, "an admin has to correct /etc/hosts there, or DNS")
    name = socket.gethostname()
    if gloo and not os.environ.get("GLOO_SOCKET_IFNAME") and (not addresses(name) or _loopback(name)):
        return Problem(
            f"the hostname of {node()} means nothing to other nodes ({told(name)}), and gloo tells them that",
            "set SITE_NETWORK_INTERFACE in slurm/site.sh to the network between the nodes: `ip -brief "
            "address` on a node lists them",
        )
    return None


def _loopback(name: str) -> list[str]:
    """Return a name's addresses if all of them mean the machine that asks, as 127.0.1.1 does on any."""
    found = addresses(name)
    own = [one for one in found if ipaddress.ip_address(one.partition("%")[0]).is_loopback]
    return own if own == found else []
