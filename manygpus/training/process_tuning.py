"""Settings of this process that make training faster and change no result; a stage calls them by name."""

import ctypes
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from manygpus.devices import accelerator_of, boot_id
from manygpus.distributed import process_group
from manygpus.launchers import DistEnv, launcher_of

# Parameters of glibc's mallopt(3), from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
LARGEST_INT = 2**31 - 1  # of C, here in bytes: more than a process ever frees at once
ROUNDING_ERROR = 1e-6  # of a sum of shares, such as three thirds of a core


class Cores(NamedTuple):
    """The cores that a process may use, and the host that they are on."""

    host: str  # the id of its boot: on the practice cluster all nodes are one host
    cores: set[int]


def tune_process(dist_env: DistEnv) -> None:
    """Fit this process to its device, and to the other ranks of its host. Every rank has to call it.

    It changes four settings, of this process only:

    - On the CPU, the cores it may run on, if its launcher gives every core to every rank, as torchrun does:
      each rank gets an equal share of its own. Else the system moves the ranks to and fro between them.
    - On the CPU, that glibc returns freed memory to the kernel: it no longer does. Else the pages of the
      activations are faulted in again in every step.
    - On a GPU, that cuDNN tries its algorithms for a convolution, and keeps the fastest
      (torch.backends.cudnn.benchmark), as all steps have the same shapes.
    - On both, the number of PyTorch's threads: no more than this rank's share of its cores. If threads share
      a core, each step waits for one that is not running.
    """
    if accelerator_of(dist_env.device).has_own_memory:
        torch.backends.cudnn.benchmark = True
    else:
        keep_freed_memory()
        if not launcher_of().binds_cores():
            take_own_cores(dist_env.local_rank, dist_env.local_world_size)
    limit_threads(process_group.gather(own_cores()))


def own_cores() -> Cores:
    """Return the cores that this process may use."""
    return Cores(boot_id(), os.sched_getaffinity(0))


def take_own_cores(local_rank: int, local_world_size: int) -> None:
    """Bind this process to its share of the cores of this node's ranks; to none if there are too few.

    Also the threads that it has already, such as those of its process group.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // local_world_size
    rank_cores = cores[local_rank * share :][:share]
    if rank_cores:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(int(thread.name), rank_cores)


def keep_freed_memory() -> None:
    """Stop glibc from returning the activations to the kernel after every step.

    By default it returns large blocks at once, and the next step faults each of their pages in
    again: 9,000 faults in a step of 128 images, 73,000 in one of 1,024. Other C libraries have no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)


def limit_threads(cores_by_rank: Sequence[Cores]) -> None:
    """Limit this rank's threads to its share of its cores, given the cores of every rank.

    The CPUs that Slurm gives a rank may be shared: on the practice cluster all nodes are one machine.
    """
    this_rank = own_cores()
    ranks_on_core = Counter()
    for rank in cores_by_rank:
        if rank.host == this_rank.host:
            ranks_on_core.update(rank.cores)
    share = sum(1 / ranks_on_core[core] for core in this_rank.cores)
    threads = min(torch.get_num_threads(), int(share + ROUNDING_ERROR))
    torch.set_num_threads(max(1, threads))
