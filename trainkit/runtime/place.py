"""Who this process is among all that train together, by the variables that its launcher sets."""

import os
import random
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """The place of this process among all processes of the run."""

    rank: int = 0  # over all processes
    local_rank: int = 0  # over those of this node
    size: int = 1  # the number of processes, or world size
    local_size: int = 1  # of these on this node
    nodes: int = 1
    launcher: str = "python"  # or one of LAUNCHERS
    device: "torch.device | None" = None  # before it is chosen


class Launcher(NamedTuple):
    """What starts processes, and the variables by which each of them knows its place."""

    name: str
    marks: tuple[str, ...]  # all of them are set in its processes
    rank: tuple[str, ...]  # and what else tells it to who sees only how the process was started
    local_rank: str
    size: str
    nodes: tuple[str, ...]  # the first that is set


_PYTORCH = "LOCAL_RANK", "WORLD_SIZE"
_OF_SLURM = ("SLURM_STEP_NUM_NODES",)
_NODES = ("GROUP_WORLD_SIZE", *_OF_SLURM)
# Set inside an srun step only: in the batch script SLURM_PROCID is set too, and always 0.
_STEP = "SLURM_STEP_NUM_TASKS"
LAUNCHERS = (  # the first that fits counts
    Launcher("torchrun", ("TORCHELASTIC_RUN_ID",), ("RANK",), *_PYTORCH, _NODES),
    # Its processes set RANK themselves (trainkit/jobs/local.py).
    Launcher("submitit", ("SUBMITIT_EXECUTOR",), ("RANK", "SUBMITIT_LOCAL_GLOBALID"), *_PYTORCH, _NODES),
    Launcher("srun", ("SLURM_STEP_ID",), ("RANK",), *_PYTORCH, _NODES),
    Launcher("env", (), ("RANK",), *_PYTORCH, _NODES),  # set by hand
    Launcher("srun", (_STEP, "SLURM_PROCID"), ("SLURM_PROCID",), "SLURM_LOCALID", _STEP, _OF_SLURM),
)


def read() -> Place:
    """Read the place of this process; it is the only one where no launcher tells another.

    Raises:
        ValueError: if the variables contradict each other; its text tells what to do.
    """
    launcher = launcher_of(os.environ)
    if not launcher:
        return Place()
    told = next(filter(os.environ.get, launcher.nodes), launcher.nodes[-1])
    size, nodes = _number(launcher.size, 1), _number(told, 1, 1)
    rank, local_rank = _number(launcher.rank[0], 0), _number(launcher.local_rank, 0)
    if rank >= size or (size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()):
        raise ValueError(
            f"rank {rank} of {size} cannot meet the others: start with torchrun, or give each process its "
            "own RANK, from 0 to WORLD_SIZE - 1, and all of them MASTER_ADDR and MASTER_PORT (the first "
            "node's name, and a free port)."
        )
    local_size = _number("LOCAL_WORLD_SIZE", 1, max(size // nodes, 1))
    return Place(rank, local_rank, size, local_size, nodes, launcher.name)


def launcher_of(env: Mapping[str, str]) -> Launcher | None:
    """Tell what started a process with these variables; None where it is a plain `python`."""
    for one in LAUNCHERS:
        if all(mark in env for mark in one.marks) and {one.rank[0], one.local_rank, one.size} & env.keys():
            return one
    return None


def rank_of(env: Mapping[str, str] = os.environ) -> str | None:
    """Find the rank in these variables, even where the others are missing; None if it is in none."""
    told = (env.get(name) for launcher in LAUNCHERS for name in launcher.rank)
    return next(filter(None, told), None)


def free_port() -> int:
    """Return a free port to meet at, below those that the system hands out by itself (32768 and up)."""
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
    if number < smallest:
        raise ValueError(
            f"{name} is {text!r}, and no whole number from {smallest} on: start the processes with torchrun "
            "or srun, which set it, or unset RANK, WORLD_SIZE and LOCAL_RANK for one process."
        )
    return number
