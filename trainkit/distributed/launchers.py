"""Which rank this process is, by the environment variables that its launcher sets."""

import os
import random
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """The place of this process among all processes of the run."""

    rank: int = 0  # over all processes
    local_rank: int = 0  # over those of this node
    size: int = 1  # the number of processes, or world size
    local_size: int = 1  # the number of them on this node
    nodes: int = 1
    launcher: str = "python"  # or one of LAUNCHERS
    device: "torch.device | None" = None  # before it is chosen


# The launchers that set RANK, LOCAL_RANK and WORLD_SIZE, and the variable that identifies each; the first
# that is set counts. submitit's processes set the three themselves (trainkit/jobs/training.py).
LAUNCHERS = {"torchrun": "TORCHELASTIC_RUN_ID", "submitit": "SUBMITIT_EXECUTOR", "srun": "SLURM_STEP_ID"}
OF_PYTORCH = "RANK", "LOCAL_RANK", "WORLD_SIZE"
# Inside an srun step. The batch script has the first two as well, and there they are 0.
OF_STEP = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"
STARTED_BY = "TRAINKIT_STARTED_BY"  # set by slurm/job_env.sh, within the site's container
NODES = "GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES"
# What torchrun and mpirun set for their processes, and these leave to others; as in slurm/job_env.sh.
LEFT_BY_LAUNCHERS = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|(TORCHELASTIC|PET|OMPI_COMM|PMI)_.*"
    "|PMIX_(RANK|NAMESPACE)"
)
# Also the variables with the rank, for code that sees only a process's environment.
RANKS = "RANK", "SUBMITIT_LOCAL_GLOBALID", "SLURM_PROCID"


def read() -> Place:
    """Return the place of this process; without a launcher's variables it is the only one.

    Raises:
        ValueError: if the variables contradict each other; its text says what to do.
    """
    launcher = launcher_of(os.environ)
    if (processes := _started_by_mpirun()) > 1:
        raise ValueError(
            f"mpirun has started {processes} processes, and each would train by itself: use torchrun "
            f"--nproc-per-node={processes}, or srun as the job scripts of 03_multigpu_ddp do, or leave "
            "out mpirun for one process."
        )
    if launcher == "python" and os.environ.get(STARTED_BY) == "srun":
        raise ValueError(
            "srun has started this process, but the container does not pass on the variables of Slurm, such "
            "as SLURM_PROCID: correct SITE_CONTAINER or SITE_SRUN_ARGS in slurm/site.sh."
        )
    if launcher == "python":
        return Place()
    of_rank, of_local_rank, of_size = OF_PYTORCH if {*OF_PYTORCH} & os.environ.keys() else OF_STEP
    size, nodes = _number(of_size, 1), _number(next(filter(os.environ.get, NODES), NODES[-1]), 1, 1)
    rank, local_rank = _number(of_rank, 0), _number(of_local_rank, 0)
    if rank >= size or nodes > size or (size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()):
        raise ValueError(
            f"rank {rank} of {size} on {nodes} node(s) cannot meet the others: start with torchrun, or give "
            "each process its own RANK, from 0 to WORLD_SIZE - 1, and all of them MASTER_ADDR and "
            "MASTER_PORT (the first node's name, and a free port)."
        )
    local_size = _number("LOCAL_WORLD_SIZE", 1, size_here(size, nodes))
    return Place(rank, local_rank, size, local_size, nodes, launcher)


def size_here(size: int, nodes: int) -> int:
    """Return how many of the `size` processes are on this node: as srun tells, or the same number on each.

    SLURM_STEP_TASKS_PER_NODE, such as "2(x3),1", is of the step that this process is in. If that has another
    number of processes, something else has started these.
    """
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    of_nodes = [int(tasks) for tasks, times in entries for _ in range(int(times or 1))]
    node = os.environ.get("SLURM_NODEID", "")
    if sum(of_nodes) == size and node.isdecimal() and int(node) < len(of_nodes):
        return of_nodes[int(node)]
    return max(size // nodes, 1)


def launcher_of(env: Mapping[str, str]) -> str:
    """Return what started a process with these variables: one of LAUNCHERS, "env" by hand, or "python"."""
    if {*OF_PYTORCH} & env.keys():
        return next((name for name, mark in LAUNCHERS.items() if mark in env), "env")
    return "srun" if {OF_STEP[0], OF_STEP[2]} <= env.keys() else "python"


def _started_by_mpirun() -> int:
    """Return how many processes mpirun has started, of which this is one; 0 if each has its RANK.

    OMPI_COMM_WORLD_SIZE is Open MPI's. PMI_SIZE is that of MPICH, Intel MPI and others, but also of srun with
    some of its --mpi.
    """
    if {*OF_PYTORCH} & os.environ.keys():
        return 0
    size = os.environ.get("OMPI_COMM_WORLD_SIZE")
    if size is None and os.environ.get("PMI_SIZE") != os.environ.get(OF_STEP[2]):
        size = os.environ.get("PMI_SIZE")
    return int(size) if size and size.isdecimal() else 0


def rank_of(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the rank from these variables, even if the others are missing; None if none has it."""
    return next(filter(None, map(env.get, RANKS)), None)


def job_id() -> str:
    """Return the number of the Slurm job that this process runs in, on one of its nodes; "" if in none.

    The shell of salloc has the number, too, and is on the login node.
    """
    return os.environ.get("SLURM_JOB_ID", "") if "SLURM_PROCID" in os.environ else ""


def node_list() -> str:
    """Return the nodes of all processes, in Slurm's words, if srun has started them; else this one's."""
    return (job_id() and os.environ.get("SLURM_STEP_NODELIST")) or node()


def node() -> str:
    """Return this node's name in Slurm, or else this machine's."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def free_port() -> int:
    """Return a free port to meet at, below those that the system assigns itself (32768 and up)."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def _number(name: str, smallest: int, default: int | None = None) -> int:
    text = os.environ.get(name, default)
    try:
        number = int(text)
    except (TypeError, ValueError):
        number = smallest - 1
    if not smallest <= number < 2**31:
        raise ValueError(
            f"{name} is {text!r}, not a whole number from {smallest} on: start the processes with torchrun "
            "or srun, which set it, or unset RANK, WORLD_SIZE and LOCAL_RANK for one process."
        )
    return number
