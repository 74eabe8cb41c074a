"""The code that all stages share. What a stage imports is listed here; README.md describes the rooms."""

from importlib import import_module

from trainkit.runtime import errors

errors.quiet_without_run()  # before PyTorch, whose loading it may interrupt

# Imported on first use: a login node needs none of them, and PyTorch takes seconds to load.
_WHERE = {
    "Net": "rank.model",
    "Recorder": "rank.recorder",
    "Run": "rank.run",
    "UserError": "runtime.errors",
    "batches": "rank.batches",
    "choose_precision": "rank.precision",
    "data": "rank.data",
    "evaluate": "rank.epoch",
    "optimizer_and_schedule": "rank.recipes",
    "options": "rank.options",
    "process_group": "runtime.process_group",
    "take_all_gpus": "runtime.device",
}


def __getattr__(name: str) -> object:
    if name in _WHERE:
        module = import_module(f"trainkit.{_WHERE[name]}")
        return getattr(module, name, module)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
