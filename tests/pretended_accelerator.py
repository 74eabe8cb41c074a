"""An accelerator of another kind, for which the CPU stands in: the class that a real one would have.

`Module` is what PyTorch would bring, as torch.xpu is. It counts how often the kit calls its functions.
"""

import atexit
import json
import os
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import torch

from manygpus import devices

MEMORY_BYTES = 5_000_000


class Event:
    """A moment of the accelerator's own clock, which counts milliseconds."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: None) -> None:
        self.milliseconds = time.perf_counter() * 1000

    def elapsed_time(self, end: "Event") -> float:
        return end.milliseconds - self.milliseconds


class Module(SimpleNamespace):
    """The functions of torch.cuda and torch.xpu, for one device."""

    def __init__(self) -> None:
        self.calls = Counter()
        generator = torch.Generator()
        functions = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "set_device": lambda device: None,
            "get_device_name": lambda device: "Pretended 1",
            "current_stream": lambda device: None,
            "Event": Event,
            "synchronize": lambda device: None,
            "max_memory_allocated": lambda device: MEMORY_BYTES,
            "reset_peak_memory_stats": lambda device: None,
            "get_rng_state_all": lambda: [generator.get_state()],
            "set_rng_state_all": lambda states: [generator.set_state(state) for state in states],
        }
        counted = {name: self.counted(name, function) for name, function in functions.items()}
        super().__init__(default_generators=(generator,), **counted)

    def counted(self, name: str, function: object) -> object:
        """Return the function, which also counts."""

        def call(*arguments: object, **options: object) -> object:
            self.calls[name] += 1
            return function(*arguments, **options)

        return call


class Pretended(devices.Accelerator):
    """All that a new accelerator needs where its module has the usual functions."""

    type = "cpu"  # a type of its own would need tensors of its own
    module = Module()
    backend = "gloo"

    def keeping_random_numbers(self, device: torch.device) -> AbstractContextManager:
        """Restore the generator of the CPU only: torch.cpu, which PyTorch asks by the type, has no other."""
        return torch.random.fork_rng(devices=[])


def register(counts: str) -> None:
    """Have the kit prefer it in this process, whose calls are written to `counts`-RANK at its end."""
    devices.ACCELERATORS.insert(0, Pretended())
    path = Path(f"{counts}-{os.environ['RANK']}")
    atexit.register(lambda: path.write_text(json.dumps(Pretended.module.calls)))
