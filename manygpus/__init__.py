"""From one GPU to many: the names that a training script imports.

`from manygpus import Run` loads the modules that Run needs, and `import manygpus` loads nothing: the commands
of a login node do without PyTorch. README.md describes the subpackages.
"""

import sys
from importlib import import_module

# A job's Python may be older if activate_environment chooses none: RHEL 9 has 3.9. Later imports would fail
# with errors that do not say so.
if sys.version_info < (3, 10):  # noqa: UP036
    version = sys.version.split()[0]
    problem = f"the kit needs Python 3.10 or newer, and {sys.executable} is {version}"
    if sys.argv[0] == "-m":  # `python -m manygpus`, which would add where Python looks for modules
        sys.exit(f"error: {problem}")
    raise ImportError(problem)

# Module -> its names; __init__.pyi says the same to editors and type checkers.
_NAMES_OF = {
    "checkpoint.checkpointer": ("Checkpointer",),
    "checkpoint.sharded": ("Sharded",),
    "config.command_line": ("above_0", "at_least", "check_divides"),
    "config.known_datasets": ("DEFAULT_DATA_DIR",),
    "config.options": ("Options", "float32_precision", "option", "parse_options"),
    "data.datasets": ("InMemoryDataset", "load_dataset", "normalize"),
    "data.loaders": ("augmentation", "eval_loader", "hold_out", "train_loader"),
    "data.samplers": ("ResumableSampler",),
    "devices": ("take_all_gpus",),
    "distributed.process_group": ("destroy_distributed", "init_distributed", "init_single_process"),
    "errors": ("UserError", "entrypoint"),
    "launchers": ("DistEnv",),
    "network.model": ("Net",),
    "network.optim": ("build_optimizer",),
    "record.loggers": ("Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"),
    "signals": ("obey_the_trainer",),
    "training.best_weights": ("BestWeights",),
    "training.early_stopping": ("EarlyStopping",),
    "training.epoch_results": ("Metric",),
    "training.evaluation": ("evaluate",),
    "training.precision": ("resolve_precision",),
    "training.process_tuning": ("tune_process",),
    "training.recorder": ("Recorder",),
    "training.run": ("Run",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Load a name at its first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
