"""What the names of machines resolve to here: a node may have another name for itself than Slurm has."""

import ipaddress
import os
import socket
from typing import NamedTuple

from manygpus import project
from manygpus.launchers import node


class Problem(NamedTuple):
    """A name that leads ranks astray, and what to do about it."""

    what: str
    fix: str


def addresses(name: str) -> list[str]:
    """Return the addresses of a name; none if it cannot be resolved."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    unique = dict.fromkeys(socket_address[0] for *_, socket_address in answers)
    return list(unique)


def with_addresses(name: str) -> str:
    """Return a name and what it resolves to here, for people."""
    known = addresses(name)
    if known == [name]:
        return name
    return f"{name} is {', '.join(known) or 'unknown'}"


def problem(master: str, gloo: bool) -> Problem | None:
    """Return what is wrong here with the names of the first node, `master`, and of this one.

    With `gloo` the hostname counts, too: gloo gives other nodes what that resolves to, or 127.0.0.1
    (ProcessGroupGloo.cpp, createDefaultDevice), unless a variable names the network.
    """
    # By Slurm's own word all nodes are on this machine.
    if master in _loopback_addresses(master):
        return None
    if not addresses(master):
        return Problem(
            f"the master's name {master} cannot be resolved on {node()}",
            f"correct MASTER_ADDR, or have an admin give it an address (DNS, or /etc/hosts of {node()})",
        )
    if not _is_first_node() and _loopback_addresses(master):
        return Problem(
            f"the master's name means {node()} itself on {node()} ({with_addresses(master)})",
            "an admin has to correct /etc/hosts there, or DNS",
        )
    if gloo and not os.environ.get("GLOO_SOCKET_IFNAME"):
        hostname = socket.gethostname()
        if not addresses(hostname) or _loopback_addresses(hostname):
            known = with_addresses(hostname)
            return Problem(
                f"the hostname of {node()} means nothing to other nodes ({known}), and gloo tells them that",
                f"set SITE_NETWORK_INTERFACE in {project.site_name()} to the network between the nodes: `ip "
                "-brief address` on a node lists them",
            )
    return None


def _is_first_node() -> bool:
    """Return whether Slurm, or else torchrun, says that this is the first node; True if neither does."""
    number = os.environ.get("SLURM_NODEID") or os.environ.get("GROUP_RANK") or "0"
    return number == "0"


def _loopback_addresses(name: str) -> list[str]:
    """Return a name's addresses if all of them mean the machine that asks, as 127.0.1.1 does on any."""
    known = addresses(name)
    # An address of IPv6 may end with "%" and the name of an interface.
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in known):
        return known
    return []
