"""What a rank computes on: which device is its own, whether it computes, its memory, its clock, its numbers.

What differs between kinds of devices is in one class for each kind, in the list ACCELERATORS; the functions
below ask the class of the device that they are given. Another accelerator is one more class.
"""

import os
import platform
import re
import resource
import time
import warnings
from collections import Counter
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import ModuleType

import torch

from manygpus.errors import UserError, explain, first_line
from manygpus.launchers import DistEnv

PREVIOUS_VERSIONS = "https://pytorch.org/get-started/previous-versions"
GIBIBYTE = 2**30
CPUINFO = Path("/proc/cpuinfo")
# How Linux names units for bfloat16 there: two of x86, one of Arm.
BF16_OF_CPUS = {"amx_bf16", "avx512_bf16", "bf16"}


explain(
    "out of memory|ALLOC_FAILED",
    "the memory of this process's GPU is full: lower --batch-size, and check with nvidia-smi whether another "
    "process uses that GPU.",
)


class Accelerator:
    """A kind of device that PyTorch computes on, by the functions of its module, such as torch.cuda.

    PyTorch has the same functions for each accelerator (https://docs.pytorch.org/docs/stable/xpu.html lists
    those of torch.xpu, for Intel's GPUs), so a class for another one names its type, module and backend, and
    overrides what its module lacks. Not every accelerator can: PyTorch has no backend of a process group for
    Apple's GPUs (torch.mps), so they could have one process only.
    """

    type: str  # of torch.device
    module: ModuleType
    backend: str  # by which the ranks communicate
    # Whether batches are copied to it. From pinned memory it fetches them by itself, as the CPU goes on.
    has_own_memory = True
    runs_ahead = True  # whether the CPU queues work for it, and runs ahead of it
    captures_graphs = False  # whether its steps can be captured in a CUDA graph
    eval_batch_size = 2_500  # of a test, without --test-batch-size

    def is_available(self) -> bool:
        """Return whether PyTorch can use at least one."""
        return self.module.is_available()

    def is_initialized(self) -> bool:
        """Return whether this process uses it already. To ask it for more would take memory on it."""
        return self.module.is_initialized()

    def devices(self) -> list[torch.device]:
        """List those that this process sees, whether or not they compute."""
        return [torch.device(self.type, index) for index in range(self.module.device_count())]

    def show_own(self, local_rank: int) -> None:
        """Have this process see the device of its local rank, where it would see that of another rank."""

    def set_device(self, device: torch.device) -> None:
        """Make the device the one of this process."""
        self.module.set_device(device)

    def name(self, device: torch.device) -> str:
        """Return the name of the device, as a record has it."""
        return self.module.get_device_name(device)

    def version(self) -> str:
        """Return the release of what PyTorch computes with, for the column `cuda_version`; "" if none."""
        return ""

    def card(self, device: torch.device) -> str:
        """Return what is the same for all devices that share a card, on this host only; "" if unknown."""
        return ""

    def group_settings(self, device: torch.device) -> dict[str, object]:
        """Return the arguments of init_process_group that are this accelerator's own."""
        return {}

    def free_memory_share(self, device: torch.device) -> float:
        """Return the share of the device's memory, from 0 to 1, that no program has taken."""
        free, size = self.module.mem_get_info(device)
        return free / size

    def peak_memory_bytes(self, device: torch.device) -> int:
        """Return the most memory that was allocated on the device since `reset_peak_memory`."""
        return self.module.max_memory_allocated(device)

    def reset_peak_memory(self) -> None:
        """Reset the peak of every device that this process uses."""
        if self.is_initialized():
            for device in self.devices():
                self.module.reset_peak_memory_stats(device)

    def devices_in_use(self, device: torch.device) -> list[torch.device]:
        """List all devices on which this process has used memory, or `device` if none was counted."""
        return [each for each in self.devices() if self.module.max_memory_allocated(each)] or [device]

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has finished its queue."""
        self.module.synchronize(device)

    def moment(self, device: torch.device) -> "float | torch.Event":
        """Record a moment in the device's own time, as the CPU runs ahead of it."""
        event = self.module.Event(enable_timing=True)
        event.record(self.module.current_stream(device))
        return event

    def is_capturing(self) -> bool:
        """Return whether what this process queues is captured in a graph, and not run."""
        return False

    def seed(self, seed: int) -> None:
        """Seed device i with `seed` + i; torch.manual_seed would make all of them draw the same numbers."""
        for index, generator in enumerate(self.module.default_generators):  # there are none before its start
            generator.manual_seed(seed + index)

    def random_states(self) -> list[torch.Tensor]:
        """Return the states of the generators of the devices that this process uses."""
        return self.module.get_rng_state_all() if self.is_initialized() else []

    def set_random_states(self, states: list[torch.Tensor]) -> None:
        """Restore what `random_states` returned."""
        self.module.set_rng_state_all(states)

    def keeping_random_numbers(self, device: torch.device) -> AbstractContextManager:
        """Restore the generators of the CPU and of the device at the end of the block."""
        return torch.random.fork_rng(devices=[device], device_type=self.type)

    def supports_tf32(self, device: torch.device) -> bool:
        """Return whether the device multiplies float32 with fewer digits (TF32) if it is allowed to."""
        return False

    def supports_bf16(self) -> bool:
        """Return whether the device computes in bfloat16."""
        return self.module.is_bf16_supported()

    def has_bf16_units(self) -> bool:
        """Return whether the device computes in bfloat16 faster than in float32, as it has units for it."""
        return self.supports_bf16()


class Cuda(Accelerator):
    """NVIDIA's GPUs; and AMD's, which PyTorch for ROCm calls "cuda" as well, with the same functions.

    With ROCm, "nccl" is AMD's RCCL, and there is no TF32. Tried on NVIDIA's only.
    """

    type = "cuda"
    module = torch.cuda
    backend = "nccl"
    captures_graphs = True

    def show_own(self, local_rank: int) -> None:
        """Name this rank's slice (MIG): CUDA shows a process only the first of several slices of cards."""
        slices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if slices[0].startswith("MIG-") and len(slices) > local_rank:
            os.environ["CUDA_VISIBLE_DEVICES"] = slices[local_rank]

    def version(self) -> str:
        """Return the release of CUDA, "13.2", or of ROCm, "ROCm 6.4", that PyTorch was built for."""
        return build().removeprefix("CUDA ")

    def card(self, device: torch.device) -> str:
        """Return the host and the PCI address of the card; "" if this PyTorch does not have the address."""
        properties = torch.cuda.get_device_properties(device)
        if not hasattr(properties, "pci_bus_id"):
            return ""
        address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        return f"{boot_id().strip()} {address}"

    def group_settings(self, device: torch.device) -> dict[str, object]:
        """Return the device, which NCCL connects at once; and have NCCL give up without a dump.

        After --timeout PyTorch would hold the GPUs for another minute, to write it to the home folder.
        """
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        return {"device_id": device}

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def supports_tf32(self, device: torch.device) -> bool:
        """Return whether the GPU is NVIDIA's, and of compute capability 8.0 or newer."""
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)

    def supports_bf16(self) -> bool:
        """Return whether the GPU has units for bfloat16, and PyTorch does not only emulate it."""
        return torch.cuda.is_bf16_supported(including_emulation=False)


class Cpu(Accelerator):
    """The CPU, where there is no accelerator, or none is wanted."""

    type = "cpu"
    module = torch.cpu
    backend = "gloo"
    has_own_memory = False
    runs_ahead = False
    eval_batch_size = 250

    def is_available(self) -> bool:
        """Return True."""
        return True

    def is_initialized(self) -> bool:
        """Return True."""
        return True

    def devices(self) -> list[torch.device]:
        """Return the one device that all cores are."""
        return [torch.device("cpu")]

    def name(self, device: torch.device) -> str:
        """Return "CPU: " and the processor's name, from Linux's /proc/cpuinfo."""
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"CPU: {line.split(':', 1)[1].strip()}"
        return f"CPU: {platform.machine()}"  # ARM processors have no name there

    def free_memory_share(self, device: torch.device) -> float:
        """Return 1: the memory of a job is its own."""
        return 1.0

    def peak_memory_bytes(self, device: torch.device) -> int:
        """Return the peak of what was resident since the process started."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def reset_peak_memory(self) -> None:
        """Do nothing: the peak is the process's and cannot be reset."""

    def devices_in_use(self, device: torch.device) -> list[torch.device]:
        """Return the CPU."""
        return [device]

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: the CPU has finished what it was told."""

    def moment(self, device: torch.device) -> float:
        """Return the time of the process's clock, in seconds."""
        return time.perf_counter()

    def seed(self, seed: int) -> None:
        """Do nothing: torch.manual_seed is for the CPU."""

    def random_states(self) -> list[torch.Tensor]:
        """Return none: `random_states` below has the CPU's, which every process has."""
        return []

    def set_random_states(self, states: list[torch.Tensor]) -> None:
        """Do nothing, as `random_states`."""

    def keeping_random_numbers(self, device: torch.device) -> AbstractContextManager:
        """Restore the generator of the CPU at the end of the block."""
        return torch.random.fork_rng(devices=[])

    def supports_bf16(self) -> bool:
        """Return True: without units for it, bf16 works, but is slower."""
        return True

    def has_bf16_units(self) -> bool:
        """Return whether the kernel lists AMX or AVX-512 for bfloat16 (x86), or the same of Arm."""
        # Of the first core; a system without that file is no cluster's.
        words = CPUINFO.read_text().partition("\n\n")[0].split() if CPUINFO.exists() else []
        return not BF16_OF_CPUS.isdisjoint(words)


# The first one that is available is taken.
ACCELERATORS: list[Accelerator] = [Cuda(), Cpu()]


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the class of a device."""
    return next(accelerator for accelerator in ACCELERATORS if accelerator.type == device.type)


def is_gpu(device: torch.device) -> bool:
    """Return whether the device has a memory of its own."""
    return accelerator_of(device).has_own_memory


def gpus() -> list[torch.device]:
    """List the accelerators that this process sees, whether or not they compute."""
    return [device for accelerator in ACCELERATORS for device in accelerator.devices() if is_gpu(device)]


# --- which device a rank has --------------------------------------------------------------------------


def choose_device(dist_env: DistEnv, use_gpu: bool) -> torch.device:
    """Choose this process's GPU, and try it; choose the CPU with --no-cuda, or if there is no GPU.

    Raises:
        UserError: if PyTorch cannot use the GPUs, or the one chosen does not compute.
    """
    if not use_gpu:
        return torch.device("cpu")
    for accelerator in ACCELERATORS:
        accelerator.show_own(dist_env.local_rank)
    visible = usable_gpus()
    if not visible:
        return torch.device("cpu")
    # With as many GPUs as ranks, that of the local rank; else each rank sees its own, as with srun, or
    # process_group.py finds that two have the same. A launcher may not have told how many ranks there are.
    ranks = max(dist_env.local_world_size, dist_env.local_rank + 1)
    device = visible[dist_env.local_rank if len(visible) >= ranks else 0]
    try_gpu(device)
    return device


def usable_gpus() -> list[torch.device]:
    """List the accelerators of the first kind that PyTorch can use; none if there is only the CPU.

    Raises:
        UserError: if it can use none, although the node has some, or Slurm gave some: training never falls
            back to the CPU silently. The practice cluster's GPUs are virtual: there the CPU stands in.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for accelerator in ACCELERATORS:
            if accelerator.has_own_memory and accelerator.is_available():
                return accelerator.devices()
        if os.environ.get("SLURM_CLUSTER_NAME") == "practice":
            return []
        count = _gpus_missed()
    if not count:
        return []
    why = f" ({first_line(caught[0].message)[:200]})" if caught else ""
    raise UserError(
        f"PyTorch cannot use the {count} GPU(s) of {platform.node()}{why}: torch {torch.__version__} is "
        f"built for {build()}, and the node has {driver()}. Let the GPUs into your container (apptainer "
        "exec --nv), leave CUDA_VISIBLE_DEVICES to Slurm, install a PyTorch for this driver "
        f"({PREVIOUS_VERSIONS}), or add --no-cuda."
    )


def _gpus_missed() -> int:
    """Count the GPUs that this process should have, where PyTorch can use none; 0 if there are none."""
    # A value that PyTorch does not accept as a GPU's number or name hides all GPUs, as intended.
    if not re.match(r"\s*(\d|GPU-|MIG-)", os.environ.get("CUDA_VISIBLE_DEVICES", "0")):
        return gpus_given() or 0
    # NVIDIA's GPUs have device files, which a job without GPUs may not open; others only PyTorch knows.
    files = list(Path("/dev").glob("nvidia[0-9]*"))
    count = len(gpus())
    if files:
        count = sum(os.access(file, os.R_OK | os.W_OK) for file in files)
    return count or gpus_given() or 0


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
        accelerator_of(device).set_device(device)
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        raise UserError(
            f"GPU {device.index} of {platform.node()} does not compute ({first_line(error)}): nvidia-smi "
            "shows whether another process uses or fills it. Use a different GPU; if the error is about a "
            f"kernel image, install a different PyTorch ({PREVIOUS_VERSIONS}); or add --no-cuda."
        ) from None


def take_all_gpus(seed: int) -> None:
    """Try and seed every GPU, for a process that computes on all of them.

    Raises:
        UserError: as `try_gpu`.
    """
    for accelerator in ACCELERATORS:
        if accelerator.has_own_memory and accelerator.is_initialized():
            for device in reversed(accelerator.devices()):  # the first one stays the current one
                try_gpu(device)
            accelerator.seed(seed)


# --- what a device is ---------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "CPU: " and the processor's."""
    return accelerator_of(device).name(device)


def card(device: torch.device) -> str:
    """Return the host and card of the GPU, the same for all its slices (MIG); "" if PyTorch has none."""
    return accelerator_of(device).card(device)


def build() -> str:
    """Return what this PyTorch computes on: "CUDA 13.2", "ROCm 6.4" or "the CPU only"."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return "the CPU only"


def build_and_backend() -> str:
    """Return what this PyTorch was built for, such as "CUDA 13.2, NCCL 2.30.7"; with ROCm it is RCCL."""
    if not torch.distributed.is_nccl_available():
        return build()
    return f"{build()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def driver() -> str:
    """Return NVIDIA's driver, as "driver 580.65.06", or "no NVIDIA driver", from the kernel module."""
    with suppress(OSError):
        version = Path("/proc/driver/nvidia/version").read_text()
        release = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", version)
        if release:
            return f"driver {release[1]}"
    return "a driver of Windows" if Path("/dev/dxg").exists() else "no NVIDIA driver"


def cards() -> str:
    """Describe the GPUs that this process sees, such as "2 x NVIDIA H200, 140 GiB, driver 580.65.06"."""
    properties = map(torch.cuda.get_device_properties, Cuda().devices())
    kinds = Counter(f"{gpu.name}, {gpu.total_memory / GIBIBYTE:.0f} GiB" for gpu in properties)
    words = [f"{count} x {kind}" for kind, count in kinds.items()]
    if not torch.version.hip:
        words.append(driver())
    return ", ".join(words)


def boot_id() -> str:
    """Return the id of this host's boot, which no other host has."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()


# --- its memory, its clock, its random numbers --------------------------------------------------------


def devices_in_use(device: torch.device) -> list[torch.device]:
    """List all GPUs on which this process has used memory, or its device if none was counted, as of a CPU."""
    return accelerator_of(device).devices_in_use(device)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak in megabytes (1e6 bytes): allocated on the GPU since `reset_peak_memory`, or resident
    on a CPU since the process started.
    """
    return accelerator_of(device).peak_memory_bytes(device) / 1e6


def reset_peak_memory() -> None:
    """Reset the peak of every GPU. That of a CPU is the process's and cannot be reset."""
    for accelerator in ACCELERATORS:
        accelerator.reset_peak_memory()


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its queue."""
    accelerator_of(device).synchronize(device)


def moment(device: torch.device) -> "float | torch.Event":
    """Record a moment for `between`, in the GPU's own time if there is one, as the CPU runs ahead of it."""
    return accelerator_of(device).moment(device)


def between(began: "float | torch.Event", ended: "float | torch.Event") -> float:
    """Return the seconds from one moment to the other; a GPU must have reached the later one."""
    if isinstance(began, float):
        return ended - began
    milliseconds = began.elapsed_time(ended)
    return milliseconds / 1000


def seed_gpus(seed: int) -> None:
    """Seed the generators of all accelerators, each device with a number of its own."""
    for accelerator in ACCELERATORS:
        accelerator.seed(seed)


def random_states() -> list[torch.Tensor]:
    """Return the states of this process's generators: the CPU's, then those of its GPUs."""
    states = [torch.get_rng_state()]
    for accelerator in ACCELERATORS:
        states += accelerator.random_states()
    return states


def set_random_states(states: list[torch.Tensor]) -> bool:
    """Restore what `random_states` returned; return False, and change nothing, if the GPUs were others."""
    if len(states) != len(random_states()):
        return False
    torch.set_rng_state(states[0])
    device_states = states[1:]
    for accelerator in ACCELERATORS:
        count = len(accelerator.random_states())
        accelerator.set_random_states(device_states[:count])
        device_states = device_states[count:]
    return True


def keeping_random_numbers(device: torch.device) -> AbstractContextManager:
    """Restore the generators at the end of the block, as if nothing had been drawn in it."""
    return accelerator_of(device).keeping_random_numbers(device)
