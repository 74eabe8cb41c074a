"""The GPUs of a job on this node, as shown by NVML, the library behind nvidia-smi."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from trainkit.errors import first_line
from trainkit.record import samples

# Which of a clock's "throttle reasons" are heat, and which are power; GpuIdle is not throttling.
HEAT, POWER = ("SwThermalSlowdown", "HwThermalSlowdown"), ("SwPowerCap", "HwPowerBrakeSlowdown")
SM, CHIP = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
OF_THE_HOST = "pid:[4026531836]"  # the namespace of NVML's process numbers (Linux: proc_ns.h)


class Gpus:
    """The GPUs in CUDA_VISIBLE_DEVICES, or all that NVML shows. Each reading may fail separately.

    If no scheduler gave the job its GPUs, they are those on which a rank has been seen.

    Args:
        tell: is called with a sentence for each missing reading, in each sample.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._handles: dict[int, Any] = {}  # by the number in the rows
        self._given = bool({"SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"} & os.environ.keys())
        self._used: set[int] = set()
        why = "it lists none"
        try:
            import pynvml

            self._nvml: ModuleType = pynvml
            pynvml.nvmlInit()
            self._handles = _visible_gpus(pynvml)
        except Exception as error:  # NVML's, or of a module that is damaged, or not there
            why = first_line(error)
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        expected = chosen not in ("", "-1", "NoDevFiles")
        if chosen is None:
            expected = os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
        # Slurm's GPUs may also be virtual, without a driver.
        if not self._handles and expected and shutil.which("nvidia-smi"):
            tell(f"NVML shows no GPU of this job ({why}): see what nvidia-smi prints there")

    def sample(self, ranks: dict[int, int]) -> list[dict[str, object]]:
        """Return a row for each GPU. `ranks`: process -> its rank."""
        rows = [self._row(number, gpu, ranks) for number, gpu in self._handles.items()]
        if self._given or not _shares_process_numbers():
            return rows
        self._used |= {row["number"] for row in rows if row.get("ranks", "").strip("-?")}
        return [row for row in rows if row["number"] in self._used or "ranks" not in row]

    def _row(self, number: int, gpu: Any, ranks: dict[int, int]) -> dict[str, object]:
        nvml, row = self._nvml, {"what": samples.GPU, "number": number}
        missing: dict[str, list[str]] = {}
        for word, read in READINGS.items():
            try:
                row |= read(nvml, gpu)
            except Exception as error:  # NVML's, or of a module of another version
                missing.setdefault(first_line(error), []).append(word)
        for error, words in missing.items():
            self._tell(f"GPU {number}: NVML does not report {', '.join(words)} ({error})")
        if "ranks" in row:
            here = sorted({ranks[pid] for pid in row["ranks"] if pid in ranks})
            without = "-" if not row["ranks"] and _shares_process_numbers() else "?"
            row["ranks"] = "+".join(map(str, here)) or without
        return row


def _visible_gpus(nvml: ModuleType) -> dict[int, Any]:
    """Read CUDA_VISIBLE_DEVICES as CUDA does: the first word that names no GPU ends it.

    Slices of a card (MIG), whose words begin with MIG-, are numbered by their place.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = map(str, range(nvml.nvmlDeviceGetCount())) if chosen is None else chosen.split(",")
    found: dict[int, Any] = {}
    for place, word in enumerate(words):
        try:
            if word.isdecimal():
                found[int(word)] = nvml.nvmlDeviceGetHandleByIndex(int(word))
            else:
                gpu = nvml.nvmlDeviceGetHandleByUUID(word)
                found[place if word.startswith("MIG-") else nvml.nvmlDeviceGetIndex(gpu)] = gpu
        except nvml.NVMLError:
            if chosen is not None and not word.startswith("MIG-"):
                break  # else a card that is lost, or that this user may not see
    return found


def _memory(nvml: ModuleType, gpu: Any) -> dict[str, object]:
    """Read the memory. The driver's own counts as used; nvidia-smi leaves it out."""
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return {"memory_mb": memory.used / 1e6, "memory_limit_mb": memory.total / 1e6}


def _throttling(nvml: ModuleType, gpu: Any) -> dict[str, object]:
    """Read the reasons for a low clock, by names from before driver 535, which newer ones still accept."""
    bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)

    def bit(name: str) -> int:
        return getattr(nvml, f"nvmlClocksThrottleReason{name}")

    heat, power, idle = sum(map(bit, HEAT)), sum(map(bit, POWER)), bit("GpuIdle")
    why = [word for word, reasons in (("heat", heat), ("power", power)) if bits & reasons]
    # HwSlowdown also comes with heat or power; and an idle GPU need not be fast.
    known = heat | power | idle | (bit("HwSlowdown") if why else 0)
    if bits & ~known and (why or not bits & idle):
        why.append("other")
    return {"throttled": "+".join(why) or "-"}


def _shares_process_numbers() -> bool:
    """Return whether NVML's process numbers are ours: in a container they may be the host's, or none."""
    with suppress(OSError):
        return Path("/proc/self/ns/pid").readlink() == Path(OF_THE_HOST)
    return False


# The reading's name in a note -> how to read its cells.
READINGS: dict[str, Callable[[ModuleType, Any], dict[str, object]]] = {
    "the name": lambda nvml, gpu: {"name": nvml.nvmlDeviceGetName(gpu)},
    "memory": _memory,
    "processes": lambda nvml, gpu: {"ranks": [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]},
    "utilisation": lambda nvml, gpu: {"utilisation": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu},
    "power": lambda nvml, gpu: {"power_w": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000},
    "the power limit": lambda nvml, gpu: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000},
    "energy": lambda nvml, gpu: {"energy_j": nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000},
    "clock": lambda nvml, gpu: {"clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, SM)},
    "the highest clock": lambda nvml, gpu: {"clock_limit_mhz": nvml.nvmlDeviceGetMaxClockInfo(gpu, SM)},
    "throttling": _throttling,
    "temperature": lambda nvml, gpu: {"temperature_c": nvml.nvmlDeviceGetTemperature(gpu, CHIP)},
}
