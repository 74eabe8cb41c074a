"""Where the random numbers of a process continue: those of Python, NumPy, PyTorch, and its GPUs."""

import random

import numpy as np
import torch

from manygpus import devices
from manygpus.distributed import process_group


def rng_states() -> dict[str, object]:
    """Return the states of this process's generators, as numbers, texts and tensors."""
    name, keys, *position = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *position),
        "torch": devices.random_states(),
    }


def set_rng_states(states: dict[str, object]) -> bool:
    """Restore what `rng_states` returned; return False, and change nothing, if the GPUs were others."""
    if not devices.set_random_states(states["torch"]):
        return False
    random.setstate(states["python"])
    name, keys, *position = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    return True


def seed_anew(seed: int) -> None:
    """Seed this process's generators, each rank's with a number of its own."""
    rank_seed = (seed + process_group.rank()) % 2**32
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    torch.manual_seed(seed + process_group.rank())
    if process_group.count() == 1:  # DataParallel's GPUs all belong to one process
        devices.seed_gpus(seed)
