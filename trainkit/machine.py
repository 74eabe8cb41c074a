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
from fractions import Fraction
from pathlib import Path

import torch

from trainkit.errors import UserError, first_line

PREVIOUS_VERSIONS = "https://pytorch.org/get-started/previous-versions"
TRIALS_PAY = 3e14  # operations: some seconds of an H100


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
        here, given = _open_to_us(), gpus_given()
    why = "".join(f" ({first_line(warning.message)[:200]})" for warning in told[:1])
    node, software = platform.node(), f"torch {torch.__version__} is built for {build()}"
    if here and torch.version.cuda and not _has_driver_library():
        raise UserError(
            f"PyTorch cannot use the {here} GPU(s) of {node}: there is no libcuda.so.1, the driver's part. "
            "Let it into your container (apptainer exec --nv), install the driver, or add --no-cuda."
        )
    if here:
        raise UserError(
            f"PyTorch cannot use the {here} GPU(s) of {node}{why}: {software}, and the node has {driver()}. "
            f"Install a PyTorch for this driver ({PREVIOUS_VERSIONS}), ask for a newer one, or add --no-cuda."
        )
    if given:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UserError(
            f"Slurm gave this job {given} GPU(s) on {node}, but PyTorch sees none{why}: {software}, the node "
            f"has {driver()}, CUDA_VISIBLE_DEVICES is {visible}. See that a container lets the GPUs in "
            "(apptainer exec --nv), or add --no-cuda."
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


def _has_driver_library() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def try_gpu(device: torch.device) -> None:
    """Make the GPU this process's own, and have it compute something.

    Raises:
        UserError: if it cannot: no kernels for it, held by somebody, full, or broken.
    """
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        raise UserError(f"GPU {device.index} of {platform.node()} {_trouble(device, str(error))}") from None


def _trouble(device: torch.device, told: str) -> str:
    """What PyTorch tells of a GPU that does not compute, and what to do."""
    if "no kernel image" in told:
        properties = torch.cuda.get_device_properties(device)
        return (
            f"is a {properties.name} (sm_{properties.major}{properties.minor}), and torch "
            f"{torch.__version__} has kernels for {', '.join(torch.cuda.get_arch_list())} only: install "
            f"another ({PREVIOUS_VERSIONS}), ask for another kind of GPU (--constraint), or add --no-cuda."
        )
    if "out of memory" in told:
        return "is full before the training starts: nvidia-smi shows who computes there; take another GPU."
    if "busy or unavailable" in told or "devices are busy" in told:
        return (
            "is held by another process in exclusive mode: nvidia-smi shows who computes there; ask Slurm "
            "for a GPU of your own, or your admin for `nvidia-smi --compute-mode=DEFAULT`."
        )
    if "invalid device ordinal" in told:
        return (
            "is not shown by CUDA, which shows a process one slice (MIG) at most: give each process its own "
            "by srun --gpus-per-task=1, or by CUDA_VISIBLE_DEVICES."
        )
    return f"does not compute ({told.strip().splitlines()[0]}): see nvidia-smi, and tell your admin."


def card(device: torch.device) -> str:
    """Which card of which host the GPU is, alike for slices (MIG) of one.

    Of an older PyTorch less: slices have names of their own, and before 2.5 there is none at all.
    """
    properties = torch.cuda.get_device_properties(device)
    if hasattr(properties, "pci_bus_id"):
        place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    else:
        place = getattr(properties, "uuid", None)
    return f"{cores()[0].strip()} {place}" if place else ""


def take_all_gpus(seed: int) -> None:
    """Have a process that computes on all its GPUs try each of them, and seed them.

    Raises:
        UserError: as `try_gpu`.
    """
    if torch.cuda.is_initialized():
        for index in reversed(range(torch.cuda.device_count())):  # the first one stays the current one
            try_gpu(torch.device("cuda", index))
        seed_gpus(seed)


def skip_trials(operations: float) -> None:
    """Have cuDNN guess its fastest algorithms, and not try them, if so many operations are a short training.

    The trials took 0.7 to 4 s on an H100, and made its steps 12 to 25 % faster where it was busy. NaN, where
    nobody knows how many operations there are: they are tried.
    """
    if operations < TRIALS_PAY:
        torch.backends.cudnn.benchmark = False


def seed_gpus(seed: int) -> None:
    """Have GPU i draw the random numbers of `seed` + i; torch.manual_seed makes all of them draw alike."""
    for index, generator in enumerate(torch.cuda.default_generators):  # none before CUDA's start
        generator.manual_seed(seed + index)


def git_commit() -> str:
    """The commit of this checkout, with "-dirty" if it was changed since; empty outside of git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


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
    share = sum(Fraction(1, users[core]) for core in own)
    torch.set_num_threads(max(1, min(torch.get_num_threads(), int(share))))
