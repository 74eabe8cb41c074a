"""The GPUs of a job on this node, as shown by NVML, the library behind nvidia-smi."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from manygpus.errors import first_line
from manygpus.monitor import samples

# Which of a clock's "throttle reasons" are heat, and which are power.
HEAT_REASONS = ("SwThermalSlowdown", "HwThermalSlowdown")
POWER_REASONS = ("SwPowerCap", "HwPowerBrakeSlowdown")
# An idle GPU need not be fast: this reason is no throttling.
IDLE_REASON = "GpuIdle"
# It comes with heat or power, and then says no more than those.
HARDWARE_REASON = "HwSlowdown"
# NVML_CLOCK_SM and NVML_TEMPERATURE_GPU.
SM_CLOCK = 1
CHIP_SENSOR = 0
# The namespace of NVML's process numbers, which is the host's (Linux: proc_ns.h).
PROCESSES_OF_THE_HOST = "pid:[4026531836]"
# Values of CUDA_VISIBLE_DEVICES that hide all GPUs; the last is Slurm's.
NO_GPUS = ("", "-1", "NoDevFiles")

Gpu = Any  # a handle of NVML


class Gpus:
    """The GPUs in CUDA_VISIBLE_DEVICES, or all that NVML shows. Each reading may fail separately.

    If no scheduler gave the job its GPUs, they are those on which a rank has been seen.

    Args:
        tell: the function that is called with a sentence for each missing reading, in each sample.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._gpus: dict[int, Gpu] = {}  # by their numbers in the rows
        self._are_given = bool({"SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"} & os.environ.keys())
        self._used: set[int] = set()
        problem = "it lists none"
        try:
            import pynvml

            self._nvml: ModuleType = pynvml
            pynvml.nvmlInit()
            self._gpus = _visible_gpus(pynvml)
        except Exception as error:  # NVML's, or of a module that is damaged, or not there
            problem = first_line(error)
        # Slurm's GPUs may also be virtual, without a driver.
        has_driver = shutil.which("nvidia-smi") is not None
        if not self._gpus and _expects_gpus() and has_driver:
            tell(f"NVML shows no GPU of this job ({problem}): see what nvidia-smi prints there")

    def sample(self, ranks: dict[int, int]) -> list[samples.Row]:
        """Return a row for each GPU.

        Args:
            ranks: the rank that each process belongs to, by the number of the process.
        """
        rows = [self._row(number, gpu, ranks) for number, gpu in self._gpus.items()]
        if self._are_given or not _sees_processes_of_the_host():
            return rows
        for row in rows:
            has_rank = row.get("ranks", "-") not in ("-", "?")
            if has_rank:
                self._used.add(row["number"])
        # Where the processes cannot be read, nobody knows whether there is a rank.
        return [row for row in rows if row["number"] in self._used or "ranks" not in row]

    def _row(self, number: int, gpu: Gpu, ranks: dict[int, int]) -> samples.Row:
        row: samples.Row = {"what": samples.GPU, "number": number}
        missing: dict[str, list[str]] = {}
        for name, read in READINGS.items():
            try:
                row |= read(self._nvml, gpu)
            except Exception as error:  # NVML's, or of a module of another version
                missing.setdefault(first_line(error), []).append(name)
        for error, names in missing.items():
            self._tell(f"GPU {number}: NVML does not report {', '.join(names)} ({error})")
        if "ranks" in row:
            row["ranks"] = _name_ranks(row["ranks"], ranks)
        return row


def _expects_gpus() -> bool:
    """Return whether this job should see a GPU, if there is a driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
    return chosen not in NO_GPUS


def _visible_gpus(nvml: ModuleType) -> dict[int, Gpu]:
    """Return the GPUs that CUDA would show, by their numbers."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return _all_gpus(nvml)
    return _chosen_gpus(nvml, chosen.split(","))


def _all_gpus(nvml: ModuleType) -> dict[int, Gpu]:
    gpus: dict[int, Gpu] = {}
    for number in range(nvml.nvmlDeviceGetCount()):
        # A card may be lost, or this user may not see it.
        with suppress(nvml.NVMLError):
            gpus[number] = nvml.nvmlDeviceGetHandleByIndex(number)
    return gpus


def _chosen_gpus(nvml: ModuleType, names: list[str]) -> dict[int, Gpu]:
    """Read CUDA_VISIBLE_DEVICES as CUDA does: the first name of no GPU ends it.

    Slices of a card (MIG), whose names begin with MIG-, are numbered by their order; one that NVML does not
    know is left out alone.
    """
    gpus: dict[int, Gpu] = {}
    for order, name in enumerate(names):
        is_slice = name.startswith("MIG-")
        try:
            if name.isdecimal():
                gpus[int(name)] = nvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                gpu = nvml.nvmlDeviceGetHandleByUUID(name)
                number = order if is_slice else nvml.nvmlDeviceGetIndex(gpu)
                gpus[number] = gpu
        except nvml.NVMLError:
            if not is_slice:
                break
    return gpus


def _name_ranks(pids: list[int], ranks: dict[int, int]) -> str:
    """Return the ranks of the processes on a GPU, as the column `ranks` has them."""
    on_this_gpu = sorted({ranks[pid] for pid in pids if pid in ranks})
    if on_this_gpu:
        return "+".join(map(str, on_this_gpu))
    is_empty = not pids and _sees_processes_of_the_host()
    return "-" if is_empty else "?"


def _sees_processes_of_the_host() -> bool:
    """Return whether NVML's process numbers are ours: in a container they may be the host's, or none."""
    with suppress(OSError):
        return Path("/proc/self/ns/pid").readlink() == Path(PROCESSES_OF_THE_HOST)
    return False


# --- readings ---------------------------------------------------------------------------------------


def _read_name(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    return {"name": nvml.nvmlDeviceGetName(gpu)}


def _read_memory(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    """Read the memory. The driver's own counts as used; nvidia-smi leaves it out."""
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return {"memory_mb": memory.used / 1e6, "memory_limit_mb": memory.total / 1e6}


def _read_processes(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    """Read the numbers of the processes, which `Gpus` turns into ranks."""
    return {"ranks": [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]}


def _read_utilisation(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    return {"utilisation": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu}


def _read_power(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    return {"power_w": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000}


def _read_power_limit(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    return {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000}


def _read_energy(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    return {"energy_j": nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000}


def _read_clock(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    return {"clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, SM_CLOCK)}


def _read_highest_clock(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    return {"clock_limit_mhz": nvml.nvmlDeviceGetMaxClockInfo(gpu, SM_CLOCK)}


def _read_throttling(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    """Read the reasons for a low clock, by names from before driver 535, which newer ones still accept."""
    active = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)

    def bits(*reasons: str) -> int:
        return sum(getattr(nvml, f"nvmlClocksThrottleReason{reason}") for reason in reasons)

    causes: list[str] = []
    if active & bits(*HEAT_REASONS):
        causes.append("heat")
    if active & bits(*POWER_REASONS):
        causes.append("power")
    explained = bits(*HEAT_REASONS, *POWER_REASONS, IDLE_REASON)
    if causes:
        explained |= bits(HARDWARE_REASON)
    is_idle = bool(active & bits(IDLE_REASON))
    if active & ~explained and (causes or not is_idle):
        causes.append("other")
    return {"throttled": "+".join(causes) or "-"}


def _read_temperature(nvml: ModuleType, gpu: Gpu) -> samples.Row:
    return {"temperature_c": nvml.nvmlDeviceGetTemperature(gpu, CHIP_SENSOR)}


# What a note calls a reading -> how to read its cells.
READINGS: dict[str, Callable[[ModuleType, Gpu], samples.Row]] = {
    "the name": _read_name,
    "memory": _read_memory,
    "processes": _read_processes,
    "utilisation": _read_utilisation,
    "power": _read_power,
    "the power limit": _read_power_limit,
    "energy": _read_energy,
    "clock": _read_clock,
    "the highest clock": _read_highest_clock,
    "throttling": _read_throttling,
    "temperature": _read_temperature,
}
