"""What is the same in every stage. What a stage takes of it is here by name; README.md tells the rooms."""

from importlib import import_module

from trainkit.runtime import errors

errors.quiet_without_run()  # before PyTorch, whose loading it may interrupt

# Loaded by whoever names one: a login node takes none of them, and has no time for PyTorch.
_ROOMS = {"batches": "rank", "data": "rank", "options": "rank"}
_ROOMS |= {"process_group": "runtime"}
_MODULES = {
    "Net": "rank.model",
    "Recorder": "rank.recorder",
    "Run": "rank.run",
    "UserError": "runtime.errors",
    "choose_precision": "rank.precision",
    "evaluate": "rank.evaluation",
    "launch": "runtime.launching",
    "optimizer_and_schedule": "rank.recipes",
    "take_all_gpus": "runtime.device",
}


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"trainkit.{_ROOMS[name]}.{name}")
    if name in _MODULES:
        return getattr(import_module(f"trainkit.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
