"""The machine under a rank: its names, whether its GPUs can compute, how cores and memory are used."""

import ctypes
import os
import platform
import re
import resource
import subprocess
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from trainkit.runtime.errors import UserError, first_line

PREVIOUS_VERSIONS = "https://pytorch.org/get-started/previous-versions"


def device_name(device: torch.device) -> str:
    """The GPU's name, or "CPU: " and the processor's, from Linux's /proc/cpuinfo."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"CPU: {line.split(':', 1)[1].strip()}"
    return f"CPU: {platform.machine()}"  # ARM processors have no name there


def build() -> str:
    """What this PyTorch computes on: "CUDA 13.2", "ROCm 6.4" or "the CPU only"."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU only"


def driver() -> str:
    """NVIDIA's driver, as "driver 580.65.06", or "no NVIDIA driver", from what the kernel module tells."""
    with suppress(OSError):
        told = Path("/proc/driver/nvidia/version").read_text()
        if found := re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", told):
            return f"driver {found[1]}"
    return "a driver of Windows" if Path("/dev/dxg").exists() else "no NVIDIA driver"


def check_usable() -> None:
    """See that PyTorch can use the GPUs that are there, or that Slurm gave: nobody trains on the CPU unasked.

    Raises:
        UserError: if it cannot. The practice cluster's GPUs are virtual: there the CPU stands in.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if torch.cuda.is_available() or os.environ.get("SLURM_CLUSTER_NAME") == "practice":
            return
        count = _open_to_us() or gpus_given()
    if count:
        why = "".join(f" ({first_line(warning.message)[:200]})" for warning in told[:1])
        raise UserError(
            f"PyTorch cannot use the {count} GPU(s) of {platform.node()}{why}: torch {torch.__version__} is "
            f"built for {build()}, and the node has {driver()}. Let the GPUs into your container (apptainer "
            "exec --nv), leave CUDA_VISIBLE_DEVICES to Slurm, install a PyTorch for this driver "
            f"({PREVIOUS_VERSIONS}), or add --no-cuda."
        )


def gpus_given() -> int | None:
    """The GPUs of this node that Slurm gave to all its tasks together; None where Slurm gave none."""
    text = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else None


def _open_to_us() -> int:
    """GPUs that this process may use, whatever PyTorch was built for.

    NVIDIA's have device files, which a job that asked for none may not open; others only PyTorch knows. What
    PyTorch does not take for a number or name of a GPU hides all of them, and so it is meant.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible):
        return 0
    files = list(Path("/dev").glob("nvidia[0-9]*"))
    return sum(os.access(file, os.R_OK | os.W_OK) for file in files) if files else torch.cuda.device_count()


def try_gpu(device: torch.device) -> None:
    """Make the GPU this process's own, and have it compute something.

    Raises:
        UserError: if it cannot: no kernels for it, held by somebody, full, or broken.
    """
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        raise UserError(
            f"GPU {device.index} of {platform.node()} does not compute ({first_line(error)}): nvidia-smi "
            "shows whether somebody else holds or fills it; take another GPU, or, where there is no kernel "
            f"image for it, another PyTorch ({PREVIOUS_VERSIONS}), or add --no-cuda."
        ) from None


def card(device: torch.device) -> str:
    """Which card of which host the GPU is, alike for slices (MIG) of one; "" where PyTorch does not tell."""
    properties = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{cores()[0].strip()} {place}"


def take_all_gpus(seed: int) -> None:
    """Have a process that computes on all its GPUs try each of them, and seed them.

    Raises:
        UserError: as `try_gpu`.
    """
    if torch.cuda.is_initialized():
        for index in reversed(range(torch.cuda.device_count())):  # the first one stays the current one
            try_gpu(torch.device("cuda", index))
        seed_gpus(seed)


def seed_gpus(seed: int) -> None:
    """Have GPU i draw the random numbers of `seed` + i; torch.manual_seed makes all of them draw alike."""
    for index, generator in enumerate(torch.cuda.default_generators):  # none before CUDA's start
        generator.manual_seed(seed + index)


def git_commit() -> str:
    """The commit of this checkout, with "-dirty" if it was changed since; empty outside of git."""
    command, here = ["git", "describe", "--always", "--dirty"], Path(__file__).parent
    with suppress(OSError):  # there is no git
        return subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip()
    return ""


def devices_in_use(device: torch.device) -> list[torch.device]:
    """All GPUs on which this process has had memory, or its CPU."""
    if device.type != "cuda":
        return [device]
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [gpu for gpu in gpus if torch.cuda.max_memory_allocated(gpu)]


def peak_memory_mb(device: torch.device) -> float:
    """Megabytes (1e6 bytes) at the peak: allocated on the GPU since `reset_peak_memory`, or resident on a CPU
    since the process started.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def reset_peak_memory() -> None:
    """Begin the peak of every GPU anew. That of a CPU is the process's own, for good."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        torch.cuda.reset_peak_memory_stats(index)


def keep_freed_memory() -> None:
    """Stop glibc from giving the activations back to the kernel after every step.

    By default it returns large blocks at once, and the next step faults each of their pages in
    again: 9,000 faults in a step of 128 images, 73,000 in one of 1,024. Values from mallopt(3);
    other C libraries have no mallopt.
    """
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def pin_to_own_cores(local_rank: int, local_size: int) -> None:
    """Give each CPU worker its own cores, as srun does; torchrun and submitit give it every core."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // local_size
    if share:
        os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])


def cores() -> tuple[str, set[int]]:
    """This host, by the number of its boot, and the cores of it that this process may use."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(), os.sched_getaffinity(0)


def limit_threads(of_all_ranks: list[tuple[str, set[int]]]) -> None:
    """Lower the number of this rank's threads to its share of its cores, given the `cores` of every rank.

    Where threads share a core, each step waits for one that does not run. The CPUs that Slurm gives a rank
    need not be its own: on the practice cluster all nodes are one machine.
    """
    host, own = cores()
    users = Counter(core for other_host, others in of_all_ranks if other_host == host for core in others)
    share = sum(1 / users[core] for core in own)
    torch.set_num_threads(max(1, min(torch.get_num_threads(), int(share + 1e-6))))
