"""The machine of a rank: the commit it runs, and the use of its cores and memory."""

import ctypes
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch


def git_commit() -> str:
    """Return the commit of the script's checkout, or else of this one, with "-dirty" if it was changed."""
    command = ["git", "describe", "--always", "--dirty"]
    for folder in (Path(sys.argv[0]).resolve().parent, Path(__file__).parent):
        with suppress(OSError):  # there is no git
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if told := done.stdout.strip():
                return told
    return ""


def keep_freed_memory() -> None:
    """Stop glibc from returning the activations to the kernel after every step.

    By default it returns large blocks at once, and the next step faults each of their pages in
    again: 9,000 faults in a step of 128 images, 73,000 in one of 1,024. Values from mallopt(3);
    other C libraries have no mallopt.
    """
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def cores() -> tuple[str, set[int]]:
    """Return the id of this host's boot, and the cores that this process may use."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(), os.sched_getaffinity(0)


def limit_threads(of_all_ranks: list[tuple[str, set[int]]]) -> None:
    """Limit this rank's threads to its share of its cores, given the `cores` of every rank.

    If threads share a core, each step waits for one that is not running. The CPUs that Slurm gives a rank
    may be shared: on the practice cluster all nodes are one machine.
    """
    host, own = cores()
    users = Counter(core for other_host, others in of_all_ranks if other_host == host for core in others)
    share = sum(1 / users[core] for core in own)
    torch.set_num_threads(max(1, min(torch.get_num_threads(), int(share + 1e-6))))
