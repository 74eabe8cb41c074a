"""Compares the answers with the logs of starter/."""

import re
from pathlib import Path
from typing import NamedTuple

from manygpus.workshop.work import Answers, Workspace, Wrong

ANSWERS = """\
# Before you open the logs: is it an error that NCCL finds no plugin? yes or no
prediction = no

# a.txt
ranks_a = 24
nodes_a = 3
within_a = p2p        # p2p or shm
between_a = ib        # ib, socket or none
direct_a = yes        # yes or no
nvls_a = yes          # yes or no

# b.txt
ranks_b = 16
nodes_b = 2
within_b = p2p        # p2p or shm
between_b = socket    # ib, socket or none
cause_b = NCCL_IB_DISABLE

# c.txt
version_c = 2.12.10
set_c = NCCL_SOCKET_IFNAME=bond0

# d.txt
ranks_d = 3
nodes_d = 1
within_d = shm        # p2p or shm
between_d = none      # ib, socket or none

slow = b              # a, b, c or d
"""
HINTS = """\
## 1

`grep -n via` shows the ways in a log. Then look for the line that says how many ranks and nodes there are:
newer releases write `nRanks` and `nNodes`. If a log has no such line, look for the highest rank.

## 2

`Bootstrap` is how the ranks meet, not how they send gradients. `Using network ...` and `via NET/...` show
what carries the data between nodes. Lines with `set by environment to` show which variables somebody has set.

## 3

In `c`, NCCL spreads its channels over all interfaces of its list: `NET/Socket/3` is `[3]br-3d94...`. Each
`br-...` and `veth...` belongs to the containers of one node. Which interface can the other node reach?
`NCCL_SOCKET_IFNAME` chooses it.
"""
STARTS_WITH = "`prediction`"
TOLD_WHEN_DONE = [
    ("answers.txt", "= NCCL_IB_DISABLE", "= NCCL_IB_DISABLE=1", "Right. "),
    ("answers.txt", "slow = b", "slow = b.txt", "Right. "),
    ("answers.txt", "version_c = 2.12.10", "version_c = 2.12.10+cuda11.0", "Right. "),
]
WRONG = [
    ("answers.txt", "ranks_a = 24", "ranks_a = 8", "on one node"),
    ("answers.txt", "nodes_a = 3", "nodes_a = 2", "`nNodes`"),
    ("answers.txt", "within_a = p2p", "within_a = shm", "P2P"),
    ("answers.txt", "between_a = ib", "between_a = socket", "plugin"),
    ("answers.txt", "direct_a = yes", "direct_a = no", "GDRDMA"),
    ("answers.txt", "nvls_a = yes", "nvls_a = no", "multicast"),
    ("answers.txt", "ranks_b = 16", "ranks_b = 8", "in brackets"),
    ("answers.txt", "ranks_b = 16", "ranks_b = 15", "begin at 0"),
    ("answers.txt", "between_b = socket", "between_b = ib", "TCP"),
    ("answers.txt", "= NCCL_IB_DISABLE", "= libnccl-net.so", "brings its own"),
    ("answers.txt", "= NCCL_IB_DISABLE", "= NCCL_SOCKET_IFNAME", "set by environment"),
    ("answers.txt", "version_c = 2.12.10", "version_c = 1229", "last lines"),
    ("answers.txt", "set_c = NCCL_SOCKET_IFNAME=bond0", "set_c = bond0", "NAME=value"),
    ("answers.txt", "set_c = NCCL_SOCKET_IFNAME=bond0", "set_c = NCCL_IB_DISABLE=1", "over sockets already"),
    ("answers.txt", "set_c = NCCL_SOCKET_IFNAME=bond0", "set_c = GLOO_SOCKET_IFNAME=bond0", "gloo's"),
    ("answers.txt", "IFNAME=bond0", "IFNAME=br-1f3a07c1d5e2", "only inside its own node"),
    ("answers.txt", "IFNAME=bond0", "IFNAME=eth0", "no interface"),
    ("answers.txt", "IFNAME=bond0", "IFNAME=^br,veth", "lo"),
    ("answers.txt", "ranks_d = 3", "ranks_d = 4", "`# Rank`"),
    ("answers.txt", "within_d = shm", "within_d = p2p", "host's memory"),
    ("answers.txt", "between_d = none", "between_d = socket", "only one node"),
    ("answers.txt", "slow = b", "slow = a", "straight from the GPUs"),
    ("answers.txt", "slow = b", "slow = c", "does not train"),
    ("answers.txt", "slow = b", "slow = d", "one node"),
]


class Fact(NamedTuple):
    """The true answer, what to say to typical wrong ones, and what to say to all others."""

    true: str
    wrong: dict[str, str]
    otherwise: str


A_LINE = "a line of a.txt has `nRanks`, `nNodes` and `localRanks`."
FACTS = {
    "ranks_a": Fact("24", {"8": "that many are on one node (`localRanks`)."}, A_LINE),
    "nodes_a": Fact("3", {"8": "that many ranks are on one node (`localRanks`)."}, A_LINE),
    "within_a": Fact("p2p", {}, "rank 0 reaches rank 7, on its own node, `via P2P`."),
    "between_a": Fact(
        "ib",
        {"socket": "`NET/IBext_v8` is InfiniBand or RoCE, in a plugin. Sockets would be `NET/Socket`."},
        "rank 15 is on the second node. How does rank 0 reach it?",
    ),
    "direct_a": Fact("yes", {}, "that is what GDRDMA means: the card reads the GPU's memory itself."),
    "nvls_a": Fact("yes", {}, "read the line on `multicast`."),
    "ranks_b": Fact(
        "16",
        {
            "8": "the number in brackets behind the process counts the GPUs of one node.",
            "15": "15 is the highest rank, and ranks begin at 0.",
        },
        "which is the highest rank in a line with `via`?",
    ),
    "nodes_b": Fact("2", {}, "how many hosts write to this log?"),
    "within_b": Fact("p2p", {}, "rank 10 reaches rank 11, on its own node, `via P2P`."),
    "between_b": Fact(
        "socket",
        {
            "ib": "`ibs85f0` and `ib0` are interfaces of InfiniBand cards, but NCCL uses them with TCP. What "
            "does it say behind `Using network`?"
        },
        "rank 1 is on one node, rank 8 on the other. How does rank 1 reach rank 8?",
    ),
    "cause_b": Fact(
        "nccl_ib_disable",
        {
            "libnccl-net.so": "a plugin is for networks that NCCL does not know. For InfiniBand it brings "
            "its own code."
        },
        "which variable is `set by environment`?",
    ),
    "version_c": Fact("2.12.10", {}, "it is in one of the last lines."),
    "ranks_d": Fact("3", {}, "count the lines `# Rank`: this program lists them."),
    "nodes_d": Fact("1", {}, "all ranks are on one host."),
    "within_d": Fact("shm", {}, "SHM goes through the host's memory: these GPUs cannot reach each other."),
    "between_d": Fact(
        "none",
        dict.fromkeys(("ib", "socket"), "there is only one node. NCCL looks for a network nevertheless."),
        "there is only one node.",
    ),
    "slow": Fact(
        "b",
        {
            "a": "this job sends over InfiniBand or RoCE, straight from the GPUs.",
            "c": "this job does not train at all: it ends with an error.",
            "d": "this job has one node. The host's memory is slower than NVLink, but it is not the network.",
        },
        "it is one of a, b, c, d.",
    ),
}
ON_EVERY_MACHINE = ("lo", "docker0")  # which NCCL leaves out, unless NCCL_SOCKET_IFNAME is set
LOG_C = (Path(__file__).parent / "starter" / "c.txt").read_text()


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", "yes", "no")
    for name, fact in FACTS.items():
        _check_fact(answers, name, fact)
    _check_interface(answers)
    return (
        f"Right. No plugin is no error (you predicted `{prediction}`): NCCL knows InfiniBand and sockets "
        "itself. In `b`, the reporter had switched InfiniBand off because it had failed. Sockets worked, and "
        "were much slower, as NCCL's developers say there. Another report has numbers: 5 GB/s over "
        "sockets, where 25 were expected over InfiniBand (github.com/areal-project/AReaL/issues/639). "
        "Without such a variable, the same happens in a container that lacks libibverbs or the cards "
        "(`NET/IB : No device found`). So look for `via NET` before you ask for more GPUs."
    )


def _check_fact(answers: Answers, name: str, fact: Fact) -> None:
    # Also as the log and the folder have it: NCCL_IB_DISABLE=1, 2.12.10+cuda11.0, b.txt.
    answer = re.sub(r"=\d+$|\+cuda.*|\.txt$", "", answers[name].strip().lower().split(" ")[0])
    if answer != fact.true:
        raise Wrong(f"`{name}` is not {answers[name].strip()}: {fact.wrong.get(answer, fact.otherwise)}")


def _check_interface(answers: Answers) -> None:
    """Check `set_c` by NCCL's rules: prefixes, `=` for whole names, `^` for all others."""
    answer = answers["set_c"].strip().removeprefix("export ")
    name, _, value = answer.partition("=")
    if not value:
        raise Wrong(f"`set_c = {answer}`: write the variable and its value, NAME=value.")
    if name.startswith("GLOO"):
        raise Wrong(f"`set_c`: {name} is gloo's variable. This job communicates through NCCL.")
    if name.startswith("NCCL_IB"):
        raise Wrong(f"`set_c`: {name} is about InfiniBand, and this job runs over sockets already.")
    if name != "NCCL_SOCKET_IFNAME":
        raise Wrong(f"`set_c`: {name} does not choose the network interface.")
    there = re.findall(r"\[\d+\]([\w-]+):", LOG_C.splitlines()[0])
    chosen = _chosen(value, [*there, *ON_EVERY_MACHINE])
    if chosen == ["bond0"]:
        return
    if not chosen:
        raise Wrong(f"`set_c`: no interface of this node has a name that {value!r} matches.")
    if set(chosen) & set(ON_EVERY_MACHINE):
        raise Wrong(
            f"`set_c`: NCCL leaves out lo and docker0 by itself, but no longer when you set the variable: "
            f"{value!r} leaves {', '.join(chosen)}."
        )
    raise Wrong(
        f"`set_c`: {value!r} chooses {', '.join(chosen)}. A bridge or a veth of containers is known only "
        "inside its own node, and the other node cannot reach it."
    )


def _chosen(value: str, interfaces: list[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME selects."""
    names = value.lstrip("^=").split(",")
    whole = "=" in value[:2]

    def is_named(interface: str) -> bool:
        return any(interface == name if whole else interface.startswith(name) for name in names)

    return [interface for interface in interfaces if is_named(interface) != value.startswith("^")]
