"""Who is this process? Fill in the gaps."""

import os
from collections.abc import Mapping

# The variables that hold the rank, the local rank and the world size.
TORCHRUN = "?", "?", "?"
SRUN = "?", "?", "?"


def who_am_i(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return rank, local rank and world size, from the variables of torchrun or srun."""
    if "RANK" in environment:  # torchrun; inside a Slurm job, srun's variables are set as well
        names = TORCHRUN
    elif "?" in environment:  # a step of srun
        names = SRUN
    else:
        return 0, 0, 1
    rank, local_rank, world_size = [int(environment[name]) for name in names]
    return rank, local_rank, world_size


def gpu(rank: int, local_rank: int, world_size: int) -> int:
    """Return the N of `cuda:N`, the GPU that this process uses. Each node counts its own GPUs, from 0."""
    return "?"


if __name__ == "__main__":
    rank, local_rank, world_size = who_am_i(os.environ)
    print(f"rank {rank} of {world_size}, local rank {local_rank}: cuda:{gpu(rank, local_rank, world_size)}")
