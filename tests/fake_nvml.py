"""NVML's Python binding (pynvml) on a node with GPUs where there are none: it answers by a script.

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.Nvml([{}, {"power_w": [90, 650]}]))

A GPU is a dict with some of `GPU`, which has the units and stands for the rest, and perhaps with a uuid: one
that begins with MIG- makes it a slice of a card, found by this name only. A value is what NVML answers to
every call, or a list: one answer to each call, the last for good. The monitor asks for each once in a sample,
so that a list is what it sees from one sample to the next. An answer may be an error: NOT_SUPPORTED,
NO_PERMISSION, GPU_IS_LOST, UNKNOWN and whatever else follows NVML_ERROR_.

What the binding makes of a driver's answers, and how long a call takes, only a GPU shows.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import NamedTuple, NoReturn

import pynvml

# One that idles.
GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "utilisation": 0,  # %
    "memory_mb": 500,
    "memory_limit_mb": 85_000,
    "power_w": 70,
    "power_limit_w": 700,
    "energy_j": 0,  # what the counter stands at
    "clock_mhz": 345,
    "clock_limit_mhz": 1980,
    "throttled": "GpuIdle",  # names of nvmlClocksThrottleReason..., such as "SwPowerCap HwSlowdown"
    "temperature_c": 30,
    "pids": (),  # such as (1234, 1235)
}
# The rest is known of whole cards only.
KNOWN_OF_A_SLICE = ("name", "memory_mb", "memory_limit_mb", "pids")
BYTES_PER_MB = 10**6


class Reading(NamedTuple):
    """What a function of NVML answers: a value of `GPU`, times what it counts in."""

    value: str
    per_unit: int


READINGS = {
    "nvmlDeviceGetName": Reading("name", per_unit=1),
    "nvmlDeviceGetPowerUsage": Reading("power_w", per_unit=1000),
    "nvmlDeviceGetEnforcedPowerLimit": Reading("power_limit_w", per_unit=1000),
    "nvmlDeviceGetTotalEnergyConsumption": Reading("energy_j", per_unit=1000),
    "nvmlDeviceGetClockInfo": Reading("clock_mhz", per_unit=1),
    "nvmlDeviceGetMaxClockInfo": Reading("clock_limit_mhz", per_unit=1),
    "nvmlDeviceGetTemperature": Reading("temperature_c", per_unit=1),
}


class Nvml(ModuleType):
    """Has pynvml's numbers and errors; `init` is an error of nvmlInit, and a handle is an index of `gpus`."""

    def __init__(self, gpus: Sequence[dict[str, object]] = (), init: str | None = None) -> None:
        super().__init__("pynvml")
        for name, value in vars(pynvml).items():
            if not name.startswith("nvmlDevice"):
                setattr(self, name, value)
        self._gpus = []
        for index, gpu in enumerate(gpus):
            uuid = f"GPU-{index:08}-0000-0000-0000-000000000000"
            self._gpus.append(GPU | {"uuid": uuid} | gpu)
        self._uuids = [gpu["uuid"] for gpu in self._gpus]
        self._cards = [index for index, uuid in enumerate(self._uuids) if not uuid.startswith("MIG-")]
        self._calls: Counter = Counter()
        self.nvmlInit = lambda: self._raise(init) if init else None
        for function, reading in READINGS.items():
            setattr(self, function, self._answers(reading))

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802  NVML's own names
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return self._cards.index(index) if index in self._cards else self._raise("NOT_FOUND")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return self._uuids.index(uuid) if uuid in self._uuids else self._raise("NOT_FOUND")

    def nvmlDeviceGetIndex(self, gpu: int) -> int:  # noqa: N802
        return self._cards.index(gpu)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:  # noqa: N802
        used_mb = self._answer(gpu, "memory_mb")
        total_mb = self._answer(gpu, "memory_limit_mb")
        return SimpleNamespace(used=used_mb * BYTES_PER_MB, total=total_mb * BYTES_PER_MB)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=self._answer(gpu, "utilisation"))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:  # noqa: N802
        names = self._answer(gpu, "throttled").split()
        return sum(getattr(self, f"nvmlClocksThrottleReason{name}") for name in names)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self._answer(gpu, "pids")]

    def _answers(self, reading: Reading) -> Callable[..., object]:
        """Return the function of NVML that answers with a reading; it may get more than the GPU."""
        return lambda gpu, *_: self._answer(gpu, reading.value) * reading.per_unit

    def _answer(self, gpu: int, name: str) -> object:
        """Return the next answer for a value of a GPU, or raise it if it is an error."""
        answer = self._gpus[gpu][name]
        if gpu not in self._cards and name not in KNOWN_OF_A_SLICE:
            answer = "NOT_SUPPORTED"
        self._calls[gpu, name] += 1
        if isinstance(answer, list):
            call = min(self._calls[gpu, name], len(answer))
            answer = answer[call - 1]
        if hasattr(self, f"NVML_ERROR_{answer}"):
            self._raise(answer)
        return answer

    def _raise(self, error: str) -> NoReturn:
        raise self.NVMLError(getattr(self, f"NVML_ERROR_{error}"))
