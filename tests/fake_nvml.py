"""A node with GPUs where there are none: NVML answers by a script, below the real binding (nvidia-ml-py).

    environment = fake_nvml.install(tmp_path, gpus=[{}, {"power_w": [90, 650]}, {"name": "NVIDIA A100"}])
    subprocess.run([sys.executable, ...], env=ENVIRONMENT | environment | {"CUDA_VISIBLE_DEVICES": "0,1,2"})

`install` writes nvml.json, the script, and pynvml.py, which is found before the real one, loads that, and
gives it a `Library` for libnvidia-ml.so.1. Nothing else notices, PyTorch neither.

A GPU is a dict with some of `GPU`, which has the units and stands for the rest, and perhaps with a uuid: one
that begins with MIG- makes it a slice of a card, found by this name only. A value is what NVML answers to
every call, or a list: one answer to each call, the last for good. The sampler asks for each once in a sample,
so that a list is what it sees from one sample to the next. An answer may be an error: NOT_SUPPORTED,
NO_PERMISSION, GPU_IS_LOST, UNKNOWN and whatever else follows NVML_ERROR_.

Beside gpus: `init`, an error of nvmlInit, or "no library", or "no package"; `without`, names of functions
that the driver lacks, as an older one does; `binding`, names of the binding, with what they are instead,
or None: it lacks them. `write` changes the script under a program that runs.

How long a call takes, and what a driver answers in trouble, only a GPU shows.
"""

import ctypes
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

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
    "throttled": "GpuIdle",  # names of nvmlClocksEventReason..., such as "SwPowerCap HwSlowdown"
    "temperature_c": 30,
    "pids": "",  # such as "1234 1235"
    "pcie_mb": 0,  # counters, both ways
    "nvlink_mb": "NOT_SUPPORTED",
}
OF_A_SLICE = ("name", "memory_mb", "memory_limit_mb", "pids")  # the rest is known of whole cards only


def install(folder: Path, **script: object) -> dict[str, str]:
    """The environment in which NVML answers as `script` says; `folder` takes its files."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, **script)
    program = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import fake_nvml"
    (folder / "pynvml.py").write_text(f"{program}; fake_nvml.load(__file__)\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "FAKE_NVML": str(folder / "nvml.json")}


def write(folder: Path, **script: object) -> None:
    """Give the programs that have the environment of `install` another script."""
    new = folder / "nvml.json.new"
    new.write_text(json.dumps(script))
    new.replace(folder / "nvml.json")


def lost(gpu: dict[str, object], after: int = 0) -> dict[str, object]:
    """A GPU that answers so many times and then has fallen off the bus."""
    return gpu | {name: [gpu.get(name, GPU[name])] * after + ["GPU_IS_LOST"] for name in GPU}


def load(stand_in: str) -> None:
    """Load the real pynvml instead of the file `stand_in`, with a `Library` below it."""
    library = Library(Path(os.environ["FAKE_NVML"]))
    if library.script().get("init") == "no package":
        raise ModuleNotFoundError("No module named 'pynvml'", name="pynvml")
    here = Path(stand_in).resolve().parent
    spec = PathFinder.find_spec("pynvml", [path for path in sys.path if Path(path).resolve() != here])
    binding = sys.modules["pynvml"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(binding)
    library.nvml, binding.CDLL = SimpleNamespace(**vars(binding)), library.opened
    for name, other in library.script().get("binding", {}).items():
        setattr(binding, name, other)
        if other is None:
            delattr(binding, name)


class _Error(Exception):
    """What follows NVML_ERROR_."""


class Library:
    """In place of libnvidia-ml.so.1: functions that fill what the binding gives them."""

    nvml: SimpleNamespace  # the binding, for its numbers

    def __init__(self, path: Path) -> None:
        self._path, self._written, self._script = path, 0, {}
        self._calls: Counter = Counter()

    def script(self) -> dict[str, object]:
        written = self._path.stat().st_mtime_ns
        if written != self._written:
            self._written, self._script = written, json.loads(self._path.read_text())
        return self._script

    def gpus(self) -> list[dict[str, object]]:
        uuid = "GPU-{:08}-0000-0000-0000-000000000000".format
        return [GPU | {"uuid": uuid(place)} | gpu for place, gpu in enumerate(self.script().get("gpus", []))]

    def cards(self) -> list[int]:
        """The places of those that are no slices."""
        return [place for place, gpu in enumerate(self.gpus()) if not gpu["uuid"].startswith("MIG-")]

    def opened(self, name: str) -> "Library":
        if self.script().get("init") == "no library":
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return self

    def __getattr__(self, name: str) -> Callable[..., int | bytes]:
        if name not in FUNCTIONS or name in self.script().get("without", []):
            raise AttributeError(name)

        def function(*arguments: object) -> int | bytes:
            try:
                return FUNCTIONS[name](self, *arguments) or self.nvml.NVML_SUCCESS
            except _Error as error:
                return getattr(self.nvml, f"NVML_ERROR_{error}")

        return function

    def answer(self, handle: object, name: str, same: bool = False) -> object:
        """The next answer of a GPU, or the `same` as before."""
        place = _place(handle).value - 1
        value = self.gpus()[place][name]
        if place not in self.cards() and name not in OF_A_SLICE:
            value = "NOT_SUPPORTED"
        self._calls[place, name] += not same
        if isinstance(value, list):
            value = value[min(self._calls[place, name], len(value)) - 1]
        if hasattr(self.nvml, f"NVML_ERROR_{value}"):
            raise _Error(value)
        return value


def _place(handle: object) -> ctypes.c_void_p:
    """The handle's own memory, which holds the place of the GPU in the script, from 1 on."""
    return ctypes.c_void_p.from_buffer(handle)


def _init(library: Library, flags: int) -> None:
    if error := library.script().get("init"):
        raise _Error(error)


def _count(library: Library, count: object) -> None:
    count._obj.value = len(library.cards())


def _by_index(library: Library, index: ctypes.c_uint, handle: object) -> None:
    if index.value >= len(library.cards()):
        raise _Error("INVALID_ARGUMENT")
    _place(handle._obj).value = library.cards()[index.value] + 1


def _by_uuid(library: Library, uuid: ctypes.c_char_p, handle: object) -> None:
    uuids = [gpu["uuid"].encode() for gpu in library.gpus()]
    if uuid.value not in uuids:
        raise _Error("NOT_FOUND")
    _place(handle._obj).value = uuids.index(uuid.value) + 1


def _uuid(library: Library, handle: object, text: object, size: object) -> None:
    text.value = library.gpus()[_place(handle).value - 1]["uuid"].encode()


def _name(library: Library, handle: object, text: object, size: object) -> None:
    text.value = library.answer(handle, "name").encode()


def _memory(library: Library, handle: object, memory: object) -> None:
    memory._obj.used = int(library.answer(handle, "memory_mb") * 1e6)
    memory._obj.total = int(library.answer(handle, "memory_limit_mb") * 1e6)


def _utilisation(library: Library, handle: object, rates: object) -> None:
    rates._obj.gpu = library.answer(handle, "utilisation")


def _throttled(library: Library, handle: object, reasons: object) -> None:
    names = library.answer(handle, "throttled").split()
    reasons._obj.value = sum(getattr(library.nvml, f"nvmlClocksEventReason{name}") for name in names)


def _pids(library: Library, handle: object, count: object, processes: object) -> None:
    """The binding asks twice: how many there are, and then for them."""
    pids = str(library.answer(handle, "pids", same=processes is not None)).split()
    count._obj.value = len(pids)
    if pids and processes is None:
        raise _Error("INSUFFICIENT_SIZE")
    for process, pid in zip(processes or [], pids, strict=False):
        process.pid = int(pid)


def _fields(library: Library, handle: object, count: object, fields: object) -> None:
    """Bytes of PCIe and KiB of NVLink, a half each way."""
    nvml = library.nvml
    known = {
        197: ("pcie_mb", 1e6),  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES, of nvidia-ml-py 12.560 and later
        198: ("pcie_mb", 1e6),
        nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: ("nvlink_mb", 1e6 / 1024),
        nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: ("nvlink_mb", 1e6 / 1024),
    }
    asked = set()
    for field in fields._obj:
        try:
            name, units = known[field.fieldId]
            field.value.ullVal = int(library.answer(handle, name, same=name in asked) * units / 2)
        except _Error as error:
            field.nvmlReturn = getattr(nvml, f"NVML_ERROR_{error}")
        asked.add(name)


def _number(name: str, units: int = 1) -> Callable[..., None]:
    """A function of NVML that answers with a number in its last argument."""

    def function(library: Library, handle: object, *arguments: object) -> None:
        arguments[-1]._obj.value = int(library.answer(handle, name) * units)

    return function


FUNCTIONS = {
    "nvmlInitWithFlags": _init,
    "nvmlErrorString": lambda library, code: b"an error",  # the binding knows the usual ones itself
    "nvmlDeviceGetCount_v2": _count,
    "nvmlDeviceGetHandleByIndex_v2": _by_index,
    "nvmlDeviceGetHandleByUUID": _by_uuid,
    "nvmlDeviceGetUUID": _uuid,
    "nvmlDeviceGetName": _name,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetUtilizationRates": _utilisation,
    "nvmlDeviceGetPowerUsage": _number("power_w", 1000),
    "nvmlDeviceGetEnforcedPowerLimit": _number("power_limit_w", 1000),
    "nvmlDeviceGetTotalEnergyConsumption": _number("energy_j", 1000),
    "nvmlDeviceGetClockInfo": _number("clock_mhz"),
    "nvmlDeviceGetMaxClockInfo": _number("clock_limit_mhz"),
    "nvmlDeviceGetTemperature": _number("temperature_c"),
    "nvmlDeviceGetCurrentClocksEventReasons": _throttled,
    "nvmlDeviceGetCurrentClocksThrottleReasons": _throttled,
    "nvmlDeviceGetComputeRunningProcesses_v3": _pids,
    "nvmlDeviceGetFieldValues": _fields,
}
