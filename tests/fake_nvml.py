"""NVML's Python binding (pynvml) on a node with GPUs where there are none: it answers by a script.

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.Nvml([{}, {"power_w": [90, 650]}]))

A GPU is a dict with some of `GPU`, which has the units and stands for the rest, and perhaps with a uuid: one
that begins with MIG- makes it a slice of a card, found by this name only. A value is what NVML answers to
every call, or a list: one answer to each call, the last for good. The sampler asks for each once in a sample,
so that a list is what it sees from one sample to the next. An answer may be an error: NOT_SUPPORTED,
NO_PERMISSION, GPU_IS_LOST, UNKNOWN and whatever else follows NVML_ERROR_.

What the binding makes of a driver's answers, and how long a call takes, only a GPU shows.
"""

from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

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
OF_A_SLICE = ("name", "memory_mb", "memory_limit_mb", "pids")  # the rest is known of whole cards only
NUMBERS = {
    "nvmlDeviceGetName": ("name", 1),
    "nvmlDeviceGetPowerUsage": ("power_w", 1000),
    "nvmlDeviceGetEnforcedPowerLimit": ("power_limit_w", 1000),
    "nvmlDeviceGetTotalEnergyConsumption": ("energy_j", 1000),
    "nvmlDeviceGetClockInfo": ("clock_mhz", 1),
    "nvmlDeviceGetMaxClockInfo": ("clock_limit_mhz", 1),
    "nvmlDeviceGetTemperature": ("temperature_c", 1),
}


class Nvml(ModuleType):
    """Has pynvml's numbers and errors; `init` is an error of nvmlInit, and a handle is a place."""

    def __init__(self, gpus: list[dict[str, object]] = (), init: str | None = None) -> None:
        super().__init__("pynvml")
        real = {name: value for name, value in vars(pynvml).items() if not name.startswith("nvmlDevice")}
        vars(self).update(real)
        uuid = "GPU-{:08}-0000-0000-0000-000000000000".format
        self._gpus = [GPU | {"uuid": uuid(place)} | gpu for place, gpu in enumerate(gpus)]
        self._cards = [place for place, gpu in enumerate(self._gpus) if not gpu["uuid"].startswith("MIG-")]
        self._calls: Counter = Counter()
        self.nvmlInit = lambda: self._raise(init) if init else None
        self.nvmlDeviceGetCount = lambda: len(self._cards)
        self.nvmlDeviceGetHandleByIndex = lambda index: self._find(index, self._cards)
        self.nvmlDeviceGetHandleByUUID = lambda uuid: self._find(uuid, [gpu["uuid"] for gpu in self._gpus])
        self.nvmlDeviceGetIndex = self._cards.index
        for function, (name, units) in NUMBERS.items():
            setattr(self, function, self._number(name, units))

    def _find(self, name: object, names: list[object]) -> int:
        return names.index(name) if name in names else self._raise("NOT_FOUND")

    def _raise(self, error: str) -> None:
        raise self.NVMLError(getattr(self, f"NVML_ERROR_{error}"))

    def _answer(self, place: int, name: str) -> object:
        value = self._gpus[place][name]
        if place not in self._cards and name not in OF_A_SLICE:
            value = "NOT_SUPPORTED"
        self._calls[place, name] += 1
        if isinstance(value, list):
            value = value[min(self._calls[place, name], len(value)) - 1]
        if hasattr(self, f"NVML_ERROR_{value}"):
            self._raise(value)
        return value

    def _number(self, name: str, units: int) -> Callable[..., object]:
        return lambda place, *_: self._answer(place, name) * units

    def nvmlDeviceGetMemoryInfo(self, place: int) -> SimpleNamespace:  # noqa: N802  NVML's own names
        used, total = (self._answer(place, name) * 10**6 for name in ("memory_mb", "memory_limit_mb"))
        return SimpleNamespace(used=used, total=total)

    def nvmlDeviceGetUtilizationRates(self, place: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=self._answer(place, "utilisation"))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, place: int) -> int:  # noqa: N802
        names = self._answer(place, "throttled").split()
        return sum(getattr(self, f"nvmlClocksThrottleReason{name}") for name in names)

    def nvmlDeviceGetComputeRunningProcesses(self, place: int) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self._answer(place, "pids")]
