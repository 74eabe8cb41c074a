"""Devices, GPUs and the CPU: which rank has which, whether it computes, its memory, its time, its cores.

Also the commit that a rank runs. PyTorch calls AMD's GPUs "cuda", too. CUDA graphs: training/capture.py.
"""

import ctypes
import os
import platform
import re
import resource
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch

from trainkit.distributed.launchers import Place, launcher_of
from trainkit.errors import UserError, first_line

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}  # by which the ranks communicate
PREVIOUS_VERSIONS = "https://pytorch.org/get-started/previous-versions"


def is_gpu(device: torch.device) -> bool:
    """Return whether the device is a GPU."""
    return device.type == "cuda"


def gpus() -> list[torch.device]:
    """List the GPUs that this process sees, whether or not they compute."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def choose_device(here: Place, use_cuda: bool) -> torch.device:
    """Choose this process's GPU, and try it; choose the CPU with --no-cuda, or if there is no GPU.

    Raises:
        UserError: if PyTorch cannot use the GPUs, or the one chosen does not compute.
    """
    if use_cuda:
        # CUDA shows a process only the first of several slices of cards (MIG): name this rank's own.
        slices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if slices[0].startswith("MIG-") and len(slices) > here.local_rank:
            os.environ["CUDA_VISIBLE_DEVICES"] = slices[here.local_rank]
    visible = usable_gpus() if use_cuda else []
    if not visible:
        keep_freed_memory()
        if not launcher_of().binds_cores():
            # Bind it to its own cores, as srun does; this launcher gives it every core.
            cores = sorted(os.sched_getaffinity(0))
            share = len(cores) // here.local_size
            if own := cores[here.local_rank * share :][:share]:
                os.sched_setaffinity(0, own)
        return torch.device("cpu")
    # With as many GPUs as ranks, that of the local rank; else each rank sees its own, as with srun, or
    # process_group.py finds that two have the same. A launcher may not have told how many ranks there are.
    ranks = max(here.local_size, here.local_rank + 1)
    device = torch.device("cuda", here.local_rank if len(visible) >= ranks else 0)
    try_gpu(device)
    torch.backends.cudnn.benchmark = True  # as all steps have the same shapes
    return device


def usable_gpus() -> list[torch.device]:
    """List the GPUs that PyTorch can use. Training never falls back to the CPU silently.

    Raises:
        UserError: if it can use none, although the node has some, or Slurm gave some. The practice cluster's
            GPUs are virtual: there the CPU stands in.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return gpus()
        if os.environ.get("SLURM_CLUSTER_NAME") == "practice":
            return []
        # NVIDIA's GPUs have device files, which a job without GPUs may not open; others only PyTorch knows.
        files = list(Path("/dev").glob("nvidia[0-9]*"))
        count = sum(os.access(file, os.R_OK | os.W_OK) for file in files) if files else len(gpus())
        # A value that PyTorch does not accept as a GPU's number or name hides all GPUs, as intended.
        if not re.match(r"\s*(\d|GPU-|MIG-)", os.environ.get("CUDA_VISIBLE_DEVICES", "0")):
            count = 0
        count = count or gpus_given()
    if not count:
        return []
    why = "".join(f" ({first_line(warning.message)[:200]})" for warning in caught[:1])
    raise UserError(
        f"PyTorch cannot use the {count} GPU(s) of {platform.node()}{why}: torch {torch.__version__} is "
        f"built for {build()}, and the node has {driver()}. Let the GPUs into your container (apptainer "
        "exec --nv), leave CUDA_VISIBLE_DEVICES to Slurm, install a PyTorch for this driver "
        f"({PREVIOUS_VERSIONS}), or add --no-cuda."
    )


def gpus_given() -> int | None:
    """Count the GPUs of this node that Slurm gave to all its tasks together; None if it gave none."""
    text = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def try_gpu(device: torch.device) -> None:
    """Make the GPU this process's own, and have it compute something.

    Raises:
        UserError: if it cannot: PyTorch has no kernels for it, or it is in use, full, or broken.
    """
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        raise UserError(
            f"GPU {device.index} of {platform.node()} does not compute ({first_line(error)}): nvidia-smi "
            "shows whether another process uses or fills it; take another GPU, or, if there is no kernel "
            f"image for it, another PyTorch ({PREVIOUS_VERSIONS}), or add --no-cuda."
        ) from None


def take_all_gpus(seed: int) -> None:
    """Try and seed every GPU, for a process that computes on all of them.

    Raises:
        UserError: as `try_gpu`.
    """
    if torch.cuda.is_initialized():
        for gpu in reversed(gpus()):  # the first one stays the current one
            try_gpu(gpu)
        seed_gpus(seed)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "CPU: " and the processor's, from Linux's /proc/cpuinfo."""
    if is_gpu(device):
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"CPU: {line.split(':', 1)[1].strip()}"
    return f"CPU: {platform.machine()}"  # ARM processors have no name there


def build() -> str:
    """Return what this PyTorch computes on: "CUDA 13.2", "ROCm 6.4" or "the CPU only"."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU only"


def build_and_backend() -> str:
    """Return what this PyTorch was built for, such as "CUDA 13.2, NCCL 2.30.7"; with ROCm it is RCCL."""
    nccl = torch.distributed.is_nccl_available()
    return build() + (f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if nccl else "")


def driver() -> str:
    """Return NVIDIA's driver, as "driver 580.65.06", or "no NVIDIA driver", from the kernel module."""
    with suppress(OSError):
        version = Path("/proc/driver/nvidia/version").read_text()
        if found := re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", version):
            return f"driver {found[1]}"
    return "a driver of Windows" if Path("/dev/dxg").exists() else "no NVIDIA driver"


def cards() -> str:
    """Describe the GPUs that this process sees, such as "2 x NVIDIA H200, 140 GiB, driver 580.65.06"."""
    properties = map(torch.cuda.get_device_properties, gpus())
    kinds = Counter(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in properties)
    described = [f"{count} x {kind}" for kind, count in kinds.items()]
    return ", ".join(described if torch.version.hip else [*described, driver()])


def card(device: torch.device) -> str:
    """Return the host and card of the GPU, the same for all its slices (MIG); "" if PyTorch has none."""
    properties = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{cores()[0].strip()} {place}"


def devices_in_use(device: torch.device) -> list[torch.device]:
    """List all GPUs on which this process has used memory, or its device if none was counted, as of a CPU."""
    return [gpu for gpu in gpus() if is_gpu(device) and torch.cuda.max_memory_allocated(gpu)] or [device]


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak in megabytes (1e6 bytes): allocated on the GPU since `reset_peak_memory`, or resident
    on a CPU since the process started.
    """
    if is_gpu(device):
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def reset_peak_memory() -> None:
    """Reset the peak of every GPU. That of a CPU is the process's and cannot be reset."""
    for gpu in gpus() if torch.cuda.is_initialized() else ():
        torch.cuda.reset_peak_memory_stats(gpu)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its queue."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def moment(device: torch.device) -> "float | torch.cuda.Event":
    """Record a moment for `between`, in the GPU's own time if there is one, as the CPU runs ahead of it."""
    if not is_gpu(device):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(began: "float | torch.cuda.Event", ended: "float | torch.cuda.Event") -> float:
    """Return the seconds from one moment to the other; a GPU must have reached the later one."""
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000


def seed_gpus(seed: int) -> None:
    """Seed GPU i with `seed` + i; torch.manual_seed would make all of them draw the same numbers."""
    for index, generator in enumerate(torch.cuda.default_generators):  # none before CUDA's start
        generator.manual_seed(seed + index)


def random_states() -> list[torch.Tensor]:
    """Return the states of this process's generators: the CPU's, then those of its GPUs."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def set_random_states(states: list[torch.Tensor]) -> bool:
    """Restore what `random_states` returned; return False, and change nothing, if the GPUs were others."""
    if len(states) != len(random_states()):
        return False
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state_all(states[1:])
    return True


def keeping_random_numbers(device: torch.device) -> AbstractContextManager:
    """Restore the generators at the end of the block, as if nothing had been drawn in it."""
    return torch.random.fork_rng(devices=[device] if is_gpu(device) else [])


def has_tf32(device: torch.device) -> bool:
    """Return whether the device is a GPU with TF32."""
    nvidia = is_gpu(device) and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def git_commit() -> str:
    """Return the commit of the script's checkout, or else of this one, with "-dirty" if it was changed."""
    command = ["git", "describe", "--always", "--dirty"]
    for folder in (Path(sys.argv[0]).resolve().parent, Path(__file__).parent):
        with suppress(OSError, subprocess.TimeoutExpired):  # there is no git, or a disk that hangs
            done = subprocess.run(command, cwd=folder, capture_output=True, errors="replace", timeout=30)
            commit = done.stdout.strip().rpartition("\n")[2]  # of a git that also says other things
            if re.fullmatch(r"[\w.+-]{1,100}", commit):
                return commit
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
