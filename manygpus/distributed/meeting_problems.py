"""Why ranks cannot meet: what a process can see of the cause from where it is, and what to do about it.

PyTorch says little more than that a time is over, and of most ranks nothing else can be said: they wait for
the one that knows (github.com/pytorch/pytorch/issues/129367).
"""

import os
import re
import socket
from collections.abc import Iterable, Sequence

from manygpus import job_folder, project
from manygpus.distributed import host_names
from manygpus.distributed.host_names import Problem
from manygpus.launchers import node

# A machine of the same cluster answers at once, if it does.
PROBE_TIMEOUT_SECONDS = 5
DIFFERENT_PORT = "start again with a different MASTER_PORT; a job that is submitted again gets one by itself"
DOCTOR = "`manygpus doctor --job` tests the network between the nodes"


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
        return Problem(f"another program on {node()} has port {port}", DIFFERENT_PORT)
    # github.com/hpcaitech/ColossalAI/issues/2841: a hostname that means nothing.
    problem_of_names = host_names.problem(master, gloo=False)
    if problem_of_names:
        return problem_of_names
    # github.com/pytorch/pytorch/issues/73656: the address that rank 0 was given is not its machine's.
    if opens_it and not any(_is_of_this_machine(address) for address in host_names.addresses(master)):
        other_machine = host_names.with_addresses(master)
        wrong_address = f"rank 0 runs on {node()}, and MASTER_ADDR is another machine ({other_machine})"
        return Problem(wrong_address, "set it to the node that rank 0 runs on")
    problem_of_connecting = _try_to_connect(master, port)
    if problem_of_connecting:
        return problem_of_connecting
    # It answers now. But PyTorch has asked whether it is a store only if it could connect.
    if re.search("timed out after .* trying to connect|failed to connect to any", str(error)):
        return Problem(f"it answers {node()} only now", "give more --timeout")
    return Problem("what answers there is no store of PyTorch: another program has the port", DIFFERENT_PORT)


def _try_to_connect(master: str, port: int) -> Problem | None:
    """Connect once more, and return what is in the way; None if it succeeds.

    PyTorch's text is the same whether nobody listens or no packet comes through
    (github.com/pytorch/pytorch/issues/105782).
    """
    try:
        socket.create_connection((master, port), timeout=PROBE_TIMEOUT_SECONDS).close()
    except ConnectionRefusedError:
        return Problem(
            f"nobody listens there; as far as {node()} can tell, {_whereabouts(0)}",
            "see whether it has reported an error, and whether it runs on that machine",
        )
    except OSError as silence:
        return Problem(
            f"{node()} gets no answer from that machine ({host_names.with_addresses(master)}: {silence})",
            "ask your admin whether a firewall is between the nodes, and which ports and which network are "
            f"open (MASTER_PORT and MASTER_ADDR in {project.site_name()}); {DOCTOR}",
        )
    return None


def missing(ranks: Iterable[int]) -> Problem:
    """Return what to say of ranks that did not come to the store while the others waited there.

    PyTorch tells how many came, and on rank 0 only: github.com/pytorch/pytorch/pull/111805.
    """
    whereabouts = ", ".join(_whereabouts(rank) for rank in ranks)
    return Problem(
        f"not all came; as far as {node()} can tell, {whereabouts}",
        "see whether one has reported an error; if one was only slow, give more --timeout",
    )


def foreign(training: str, other: str) -> Problem:
    """Return what to say of a store whose rank 0 belongs to the training `other`, and not to `training`.

    Rank 0 of `training` could not open the port, and the others would wait in the wrong store
    (github.com/pytorch/pytorch/issues/129367).
    """
    return Problem(
        f"the store there belongs to a different training ({other}; this one: {training})", DIFFERENT_PORT
    )


def not_connected(gloo: bool, nodes: int) -> Problem | None:
    """Return why ranks that have met in the store could not connect to each other; None if it is unknown."""
    variable = "GLOO_SOCKET_IFNAME" if gloo else "NCCL_SOCKET_IFNAME"
    wanted = os.environ.get(variable, "")
    interfaces = _interfaces()
    lacks = _gloo_lacks(wanted, interfaces) if gloo else _nccl_lacks(wanted, interfaces)
    if wanted and lacks:
        has = ", ".join(interfaces)
        return Problem(
            f"{node()} has no network interface {wanted} with an address (it has {has})",
            f"correct SITE_NETWORK_INTERFACE in {project.site_name()}, or {variable}",
        )
    if nodes > 1:
        return host_names.problem(os.environ["MASTER_ADDR"], gloo)
    return None


def _gloo_lacks(wanted: str, interfaces: Sequence[str]) -> bool:
    """Return whether one of the wanted names, separated by commas, is none of the interfaces.

    gloo wants each name as it is (github.com/horovod/horovod/issues/1341), also one that begins with "^"
    (github.com/aws-samples/aws-do-eks/pull/51).
    """
    return any(name not in interfaces for name in wanted.split(","))


def _nccl_lacks(wanted: str, interfaces: Sequence[str]) -> bool:
    """Return whether no interface fits one of the wanted names, separated by commas.

    NCCL takes the interfaces that begin like one of the names, or are it ("="), or all but those ("^"); what
    it says where there is none depends on its release (github.com/NVIDIA/nccl/issues/1837).
    """
    if wanted.startswith("^"):
        return False
    prefixes = tuple(name.partition(":")[0] for name in wanted.removeprefix("=").split(","))
    if wanted.startswith("="):
        return not any(name in prefixes for name in interfaces)
    return not any(name.startswith(prefixes) for name in interfaces)


def _interfaces() -> list[str]:
    """Return the network interfaces of this machine that have an address of IP."""
    import psutil  # the doctor tries ranks in environments without it

    families_of_ip = {socket.AF_INET, socket.AF_INET6}
    interfaces = []
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family in families_of_ip for address in addresses):
            interfaces.append(name)
    return interfaces


def _is_of_this_machine(address: str) -> bool:
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
