"""Why ranks cannot meet: what a process can see of the cause from where it is, and what to do about it.

PyTorch says little more than that a time is over, and of most ranks nothing else can be said: they wait for
the one that knows (github.com/pytorch/pytorch/issues/129367).
"""

import os
import re
import socket
from collections.abc import Iterable

import psutil

from trainkit import job_folder
from trainkit.distributed import names
from trainkit.distributed.launchers import node
from trainkit.distributed.names import Problem

PROBE_SECONDS = 5
ANOTHER_PORT = "start again with another MASTER_PORT; a job that is submitted again has another by itself"
DOCTOR = "`python slurm/doctor.py --job` tests the network between the nodes"


def no_store(master: str, port: int, opens_it: bool, error: Exception) -> Problem:
    """Return why a process could not reach the store at this address.

    Args:
        master: the name of the machine.
        port: the store's.
        opens_it: whether this process had to open the store, as rank 0 does.
        error: what PyTorch has raised.
    """
    # github.com/pytorch/pytorch/issues/116974: another job on the same node. libuv begins the words with a
    # small letter (issue 191560).
    if "address already in use" in str(error).lower():
        return Problem(f"another program on {node()} has port {port}", ANOTHER_PORT)
    # github.com/hpcaitech/ColossalAI/issues/2841: a hostname that means nothing.
    of_names = names.problem(master, gloo=False)
    if of_names:
        return of_names
    # github.com/pytorch/pytorch/issues/73656: the address that rank 0 was given is not its machine's.
    if opens_it and not any(map(_is_own, names.addresses(master))):
        what = f"rank 0 runs on {node()}, and MASTER_ADDR is another machine ({names.with_addresses(master)})"
        return Problem(what, "set it to the node that rank 0 runs on")
    seen = _seen_by_connecting(master, port)
    if seen:
        return seen
    # It answers now. But PyTorch has asked whether it is a store only if it could connect.
    if re.search("timed out after .* trying to connect|failed to connect to any", str(error)):
        return Problem(f"it answers {node()} only now", "give more --timeout")
    return Problem("what answers there is no store of PyTorch: another program has the port", ANOTHER_PORT)


def _seen_by_connecting(master: str, port: int) -> Problem | None:
    """Connect once more, and return what that says; None if it succeeds.

    PyTorch's text is the same whether nobody listens or no packet comes through
    (github.com/pytorch/pytorch/issues/105782).
    """
    try:
        socket.create_connection((master, port), timeout=PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return Problem(
            f"nobody listens there; as far as {node()} can tell, {_whereabouts(0)}",
            "see whether it has reported an error, and whether it runs on that machine",
        )
    except OSError as silence:
        return Problem(
            f"{node()} gets no answer from that machine ({names.with_addresses(master)}: {silence})",
            "ask your admin whether a firewall is between the nodes, and which ports and which network are "
            f"open (MASTER_PORT and MASTER_ADDR in slurm/site.sh); {DOCTOR}",
        )
    return None


def missing(ranks: Iterable[int]) -> Problem:
    """Return what to say of ranks that did not come to the store while the others waited there.

    PyTorch tells how many came, and on rank 0 only: github.com/pytorch/pytorch/pull/111805.
    """
    whereabouts = ", ".join(map(_whereabouts, ranks))
    return Problem(
        f"not all came; as far as {node()} can tell, {whereabouts}",
        "see whether one has reported an error; if one was only slow, give more --timeout",
    )


def foreign(own: str, other: str) -> Problem:
    """Return what to say of a store whose rank 0 belongs to the training `other`, and not to `own`.

    Rank 0 of `own` could not open the port, and the others would wait in the wrong store
    (github.com/pytorch/pytorch/issues/129367).
    """
    return Problem(f"the store there is of another training ({other}; this one: {own})", ANOTHER_PORT)


def not_connected(gloo: bool, nodes: int) -> Problem | None:
    """Return why ranks that have met in the store could not connect to each other; None if it is unknown."""
    variable = "GLOO_SOCKET_IFNAME" if gloo else "NCCL_SOCKET_IFNAME"
    asked = os.environ.get(variable, "")
    own = _interfaces()
    if _lacks(asked, own, gloo):
        what = f"{node()} has no network interface {asked} with an address (it has {', '.join(own)})"
        return Problem(what, f"correct SITE_NETWORK_INTERFACE in slurm/site.sh, or {variable}")
    return names.problem(os.environ["MASTER_ADDR"], gloo) if nodes > 1 else None


def _lacks(asked: str, own: list[str], gloo: bool) -> bool:
    """Return whether a machine with these network interfaces lacks what was asked for.

    gloo wants each name as it is (github.com/horovod/horovod/issues/1341), also one that begins with "^"
    (github.com/aws-samples/aws-do-eks/pull/51). NCCL takes the interfaces that begin like a name of the list,
    or are it ("="), or all but those ("^"); what it says where there is none depends on its release
    (github.com/NVIDIA/nccl/issues/1837).
    """
    if not asked:
        return False
    if gloo:
        return not {*asked.split(",")} <= {*own}
    if asked.startswith("^"):
        return False
    exact = asked.startswith("=")
    wanted = [name.partition(":")[0] for name in asked.removeprefix("=").split(",")]
    if exact:
        return not {*wanted} & {*own}
    return not any(name.startswith(tuple(wanted)) for name in own)


def _interfaces() -> list[str]:
    """Return the network interfaces of this machine that have an address of IP."""
    of_ip = {socket.AF_INET, socket.AF_INET6}
    interfaces = psutil.net_if_addrs().items()
    return [name for name, addresses in interfaces if of_ip & {one.family for one in addresses}]


def _is_own(address: str) -> bool:
    """Return whether this machine has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _whereabouts(rank: int) -> str:
    """Return what the rank's note in the folder of its job says."""
    folder = job_folder.here()
    if folder is None:
        return f"rank {rank} is missing"
    note = job_folder.notes(folder, *job_folder.STATES).get(rank)
    if note is None:
        return f"rank {rank} has not started"
    if note.suffix == ".started":
        return f"rank {rank} started on {job_folder.read(note)}, and is missing"
    return f"rank {rank} has ended"
