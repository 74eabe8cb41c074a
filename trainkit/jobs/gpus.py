"""The GPUs of a job on this node, as NVML shows them: the library that nvidia-smi asks, too."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from trainkit import samples

# What of a clock's "event reasons" is heat, and what is power; GpuIdle is no throttling.
HEAT, POWER = ("SwThermalSlowdown", "HwThermalSlowdown"), ("SwPowerCap", "HwPowerBrakeSlowdown")
# Fields of NVML that count bytes over PCIe, out and in (names for them came with nvidia-ml-py 12.560). Older
# drivers have a function instead that takes 20 ms for each way of each GPU.
PCIE = (197, 198)
ALL_LINKS = 2**32 - 1
DEV, MAJOR = Path("/dev"), 195  # that of NVIDIA's device nodes
ANOTHER_BINDING = (AttributeError, TypeError)  # an older one lacks some, and takes other arguments
OF_THE_HOST = "pid:[4026531836]"  # the namespace of the process numbers that NVML tells (Linux: proc_ns.h)


class Gpus:
    """The GPUs that CUDA_VISIBLE_DEVICES names, or all that NVML shows. Any reading may fail alone.

    Where nobody has given the job its GPUs, they are those on which a rank has been seen.

    Args:
        tell: is given one sentence for each kind of reading that there is not.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._told = tell, set()
        self._counted: dict[int, tuple[float, dict[int, float]]] = {}
        self._places: dict[int, int | str] = {}  # number in the rows -> that of NVML, or a slice's uuid
        self._given = bool({"SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"} & os.environ.keys())
        self._used: set[int] = set()
        self._only_cpu = False
        why = "it shows none"
        try:
            import pynvml

            self._nvml: ModuleType = pynvml
            pynvml.nvmlInit()
            self._places = _places(pynvml)
        except ImportError:
            why = "there is no nvidia-ml-py in this environment"
        except pynvml.NVMLError as error:
            why = str(error)
        if not self._places and _expected():
            if _nodes() or shutil.which("nvidia-smi"):
                tell(f"no GPU of this job can be seen through NVML ({why}): see what nvidia-smi says there")
            elif (DEV / "kfd").exists():
                tell("AMD's GPUs are not sampled")

    def sample(self, ranks: dict[int, int]) -> list[dict[str, object]]:
        """A row for each GPU. `ranks`: process -> its rank."""
        rows = [self._row(number, place, ranks) for number, place in self._places.items()]
        rows = [row for row in rows if self._given or self._is_used(row)]
        self._only_cpu = not rows and (bool(ranks) or self._only_cpu)
        return rows

    def end(self) -> None:
        """Tell of a job that trained beside GPUs, when it has ended: before it trains, it uses none."""
        if self._places and self._only_cpu:
            self._tell(f"a rank on one of its {len(self._places)} GPU(s): the training was on the CPU")

    def _is_used(self, row: dict[str, object]) -> bool:
        """Whether a rank has been seen on it, or nobody can tell."""
        told = row.get("ranks", "")
        if told.strip("-?"):
            self._used.add(row["number"])
        return row["number"] in self._used or not told or told == "?" and not _tells_ours()

    def _row(self, number: int, place: int | str, ranks: dict[int, int]) -> dict[str, object]:
        nvml, row = self._nvml, {"what": samples.GPU, "number": number}
        missing: dict[str, list[str]] = {}
        try:
            gpu = _handle(nvml, place)
        except (nvml.NVMLError, *ANOTHER_BINDING) as error:
            self._miss(number, place, str(error), list(READINGS))
            return row
        for word, read in READINGS.items():
            try:
                row |= read(nvml, gpu)
            except (nvml.NVMLError, *ANOTHER_BINDING) as error:
                missing.setdefault(str(error), []).append(word)
        for error, words in missing.items():
            self._miss(number, place, error, words)
        if "ranks" in row:
            row["ranks"] = _ranks(row["ranks"], ranks)
        with suppress(nvml.NVMLError, *ANOTHER_BINDING):  # told to nobody: most GPUs have no NVLink
            row["link_mb_s"] = self._link_mb_s(number, _links(nvml, gpu))
        return row

    def _miss(self, number: int, place: int | str, error: str, words: list[str]) -> None:
        which, kind, told = f"GPU {number}", (error, *words), f"NVML does not tell {', '.join(words)}"
        if len(words) == len(READINGS):  # each such GPU is news
            kind, told = (error, number), "NVML tells nothing about it: tell your admin"
        elif isinstance(place, str):
            which, told = f"{which}, a slice (MIG)", f"{told}, which are the whole card's"
        if kind not in self._told:
            self._told.add(kind)
            self._tell(f"{which}: {told} ({error})")

    def _link_mb_s(self, number: int, counters: dict[int, float]) -> float | None:
        """Since the sample before; None if nothing is counted, or a counter has begun anew."""
        now = time.monotonic()
        then, before = self._counted.get(number, (now, {}))
        self._counted[number] = now, counters
        moved = [counters[field] - before[field] for field in counters.keys() & before.keys()]
        return sum(moved) / (now - then) if moved and min(moved) >= 0 else None


def _places(nvml: ModuleType) -> dict[int, int | str]:
    """As CUDA reads CUDA_VISIBLE_DEVICES: the first word that names none ends it; half a uuid will do."""
    indices = range(nvml.nvmlDeviceGetCount())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {index: index for index in indices}
    places: dict[int, int | str] = {}
    for order, word in enumerate(visible.split(",")):
        if word.startswith("MIG-"):
            places[order] = word
            continue
        named = [index for index in indices if word in (str(index), _uuid(nvml, index)[: len(word)])]
        if not word or not named:
            break
        places[named[0]] = named[0]
    return places


def _uuid(nvml: ModuleType, index: int) -> str:
    with suppress(nvml.NVMLError, *ANOTHER_BINDING):
        return nvml.nvmlDeviceGetUUID(_handle(nvml, index))
    return ""


def _handle(nvml: ModuleType, place: int | str) -> Any:
    by_uuid = isinstance(place, str)
    return nvml.nvmlDeviceGetHandleByUUID(place) if by_uuid else nvml.nvmlDeviceGetHandleByIndex(place)


def _expected() -> bool:
    """Slurm has given GPUs, or they are chosen or simply there, and nobody has hidden them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return chosen not in ("", "-1", "NoDevFiles")
    return _nodes() or (DEV / "kfd").exists() or os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"


def _nodes() -> bool:
    """Whether NVIDIA's device nodes are there, and not only their names."""
    for path in DEV.glob("nvidia[0-9]*"):
        with suppress(OSError):
            if os.major(path.stat().st_rdev) == MAJOR:
                return True
    return False


def _memory(nvml: ModuleType, gpu: Any) -> dict[str, object]:
    """What the driver keeps for itself counts as used; nvidia-smi leaves it out."""
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return {"memory_mb": memory.used / 1e6, "memory_limit_mb": memory.total / 1e6}


def _throttling(nvml: ModuleType, gpu: Any) -> dict[str, object]:
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except (nvml.NVMLError_FunctionNotFound, AttributeError):  # drivers, and bindings, before 535
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    prefix = "nvmlClocksEventReason"
    if not hasattr(nvml, f"{prefix}GpuIdle"):
        prefix = "nvmlClocksThrottleReason"
    bit = {name: getattr(nvml, f"{prefix}{name}") for name in (*HEAT, *POWER, "HwSlowdown")}
    idle = getattr(nvml, f"{prefix}GpuIdle")
    why = [
        word for word, names in (("heat", HEAT), ("power", POWER)) if any(bits & bit[name] for name in names)
    ]
    other = bits & ~(idle | sum(bit.values())) or bits & bit["HwSlowdown"] and not why
    if other and (why or not bits & idle):  # one that idles need not be fast
        why.append("other")
    return {"throttled": "+".join(why) or "-"}


def _processes(nvml: ModuleType, gpu: Any) -> dict[str, object]:
    return {"ranks": [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]}


def _ranks(pids: list[int], ranks: dict[int, int]) -> str:
    here = sorted({ranks[pid] for pid in pids if pid in ranks})
    if here:
        return "+".join(map(str, here))
    return "-" if not pids and _tells_ours() else "?"


def _tells_ours() -> bool:
    """In a container NVML may tell the host's numbers of processes, or none."""
    with suppress(OSError):
        return Path("/proc/self/ns/pid").readlink() == Path(OF_THE_HOST)
    return False


def _links(nvml: ModuleType, gpu: Any) -> dict[int, float]:
    """Field -> MB so far, over PCIe and NVLink, out and in."""
    nvlink = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    units = dict.fromkeys(PCIE, 1e-6) | dict.fromkeys(nvlink, 1024e-6)  # bytes, and KiB
    fields = nvml.nvmlDeviceGetFieldValues(gpu, [*PCIE, *((field, ALL_LINKS) for field in nvlink)])
    return {
        field.fieldId: field.value.ullVal * units[field.fieldId]
        for field in fields
        if field.nvmlReturn == nvml.NVML_SUCCESS
    }


# What a note calls it -> how to read its cells.
READINGS: dict[str, Callable[[ModuleType, Any], dict[str, object]]] = {
    "its name": lambda nvml, gpu: {"name": nvml.nvmlDeviceGetName(gpu)},
    "memory": _memory,
    "processes": _processes,
    "utilisation": lambda nvml, gpu: {"utilisation": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu},
    "power": lambda nvml, gpu: {"power_w": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000},
    "its limit": lambda nvml, gpu: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000},
    "energy": lambda nvml, gpu: {"energy_j": nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000},
    "clock": lambda nvml, gpu: {"clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)},
    "its highest": lambda nvml, gpu: {
        "clock_limit_mhz": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
    },
    "throttling": _throttling,
    "temperature": lambda nvml, gpu: {
        "temperature_c": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
    },
}
