"""The columns of a run's record, each declared once: how to read it, what it says of a run, how to print it.

What a file must have, what must be equal in runs that are compared, how a configuration reads, and the
options of a proposed run all follow from `COLUMNS`. Also the words of options and records, each once.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

ABOVE_0, MOST = 1e-9, 1e15  # of seconds, speeds and counts, so that sums and ratios of them are finite
FLOAT32 = 3.5e38  # the largest one, rounded up
# What no machine has: workers, seconds (30 years), samples per second, and MB of a device.
WORKERS, LONGEST, FASTEST, LARGEST = 10**6, 1e9, 1e12, 1e9
# The stages of the tutorial, in its order, and how they read. Any other name is a user's own training.
SINGLE, DP, DDP = "single", "dp", "ddp"
TUTORIAL_STAGES = {SINGLE: "single", DP: "DataParallel", DDP: "DDP"}
STAGE_FOLDERS = {SINGLE: "01_singlegpu", DP: "02_multigpu_dp", DDP: "03_multigpu_ddp"}
TUTORIAL_MODEL = "Net"
DEFAULT_WIDTH = 32
BASE_BATCH = 64  # the default --batch-size, and the one that --lr is for if a rule scales it
# The rules of --lr-scale: the power of the batch size with which the learning rate grows.
LR_SCALES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


def lr_factor(rule: str, batch: int) -> float:
    """Return the factor on the learning rate by the rule of --lr-scale; 1 for an unknown rule."""
    return (batch / BASE_BATCH) ** LR_SCALES.get(rule, 0)


class Role(IntEnum):
    """What a column says of a run, in the order in which settings are printed and sorted."""

    # Settings: a speedup says something about the number of workers only if all of these are equal.
    TASK = 1  # another value also makes another table
    LOADING = 2
    TRAINING = 3
    COMPUTING = 4
    SIZE = 5
    # Another value is another configuration, whose speed may still be compared, with a doubt: it may say how
    # the same training is made on other devices.
    DOUBT = 6
    LAYOUT = 7  # what a speedup compares: another value is another configuration
    REPEAT = 8  # differs between runs of one configuration
    MEASUREMENT = 9
    FACT = 10  # where and with what it ran


@dataclass(frozen=True)
class Column:
    """One column of a record.

    Args:
        read: turns a cell into a value; a ValueError for what no run writes.
        role: what it says of a run.
        words: its name in a sentence.
        label: how a value reads in a label.
        option: the option of the stages that sets it.
        default: that option's default.
        unsaid: the value that a label leaves out, if it is not the default.
        follows: the columns that determine it: if the first differs, this one need not be named.
    """

    read: Callable[[str], object]
    role: Role
    words: str = ""
    label: str = ""
    option: str = ""
    default: object = None
    unsaid: object = None
    follows: tuple[str, ...] = ()

    def in_words(self, value: object) -> str:
        """Return the value as it reads in a label, or "" if it goes without saying."""
        usual = self.default if self.unsaid is None else self.unsaid
        return "" if value == usual else self.label.format(value)


def text(longest: int = 200) -> Callable[[str], str]:
    """Return a reader of printable text of up to `longest` characters."""

    def read(cell: str) -> str:
        if len(cell) > longest or not cell.isprintable():
            raise ValueError(f"{cell[:30]!r} has more than {longest} characters, or unprintable ones")
        return cell

    return read


def number(kind: type, least: float, most: float = MOST, nan: bool = False) -> Callable[[str], float]:
    """Return a reader of numbers of `kind` within these bounds; with `nan` it also accepts nan."""

    def read(cell: str) -> float:
        if nan and cell == "nan":
            return math.nan
        with suppress(ValueError):
            if least <= kind(cell) <= most:
                return kind(cell)
        raise ValueError(f"{cell[:30]!r} is not a number of {least:g} to {most:g}, as {kind.__name__}")

    return read


def flag(cell: str) -> bool:
    """Read 0 or 1."""
    return bool(number(int, 0, 1)(cell))


OWN_LOOP = "own"  # the recipe of a training with another loop (rank/recorder.py)
OWN_OPTIMIZER = "own optimizer"  # the recipe of a copy of a stage that makes its optimizer or schedule itself
UNKNOWN = "unknown"  # how nan of a learning rate or a gamma reads; such runs are pooled with each other
# In the order of the file. results/README.md explains them.
# fmt: off
COLUMNS: dict[str, Column] = {
    "run_id": Column(text(), Role.FACT),
    "resumed_from": Column(text(), Role.FACT),
    "stage": Column(text(), Role.LAYOUT),
    "launcher": Column(text(), Role.FACT),
    "epoch": Column(number(int, 1, 10**6), Role.MEASUREMENT),
    "warmup": Column(flag, Role.MEASUREMENT),
    "dataset": Column(text(), Role.TASK, "dataset", option="--dataset", default="mnist"),
    "model": Column(text(), Role.TASK, "model"),
    "loader": Column(text(), Role.LOADING, "loader", "{} loader", "--loader", "resident", unsaid="workers"),
    "recipe": Column(text(), Role.TRAINING, "recipe", "{}", "--recipe", "classic", unsaid=""),
    "lr": Column(
        number(float, 0, FLOAT32, nan=True), Role.TRAINING, "learning rate", "lr {}", "--lr", UNKNOWN,
        follows=("recipe", "lr_scale", "global_batch"),
    ),
    "gamma": Column(
        number(float, 0, 1, nan=True), Role.TRAINING, "gamma", "gamma {}", "--gamma", UNKNOWN,
        follows=("recipe",),
    ),
    "lr_scale": Column(
        text(), Role.TRAINING, "--lr-scale", "{} lr scale", "--lr-scale", "none"
    ),
    "lr_warmup_images": Column(
        number(int, 0), Role.TRAINING, "--lr-warmup-images", "lr warm-up {}", "--lr-warmup-images", 0,
    ),
    "width": Column(
        number(int, 1), Role.TRAINING, "width", "width {}", "--width", DEFAULT_WIDTH
    ),
    "parameters": Column(  # 0: not known
        number(int, 0), Role.TRAINING, "weights", "{:,} weights", unsaid=0, follows=("width",)
    ),
    "settings": Column(text(longest=2_000), Role.TRAINING, "settings", "{}", default=""),
    # What identifies a training (rank/identity.py), in words of `name=value`; "": not known, or as the recipe
    # says.
    "optimizer": Column(text(longest=2_000), Role.TRAINING, "optimizer", "{}", default=""),
    "network": Column(
        text(longest=2_000), Role.TRAINING, "network", "{}", default="", follows=("parameters",)
    ),
    "schedule": Column(text(longest=2_000), Role.DOUBT, "schedule", "{}", default=""),
    "arguments": Column(text(longest=2_000), Role.DOUBT, "arguments", "{}", default=""),
    "script": Column(text(), Role.FACT),
    "world_size": Column(number(int, 1, WORKERS), Role.LAYOUT),
    "nodes": Column(number(int, 1, WORKERS), Role.LAYOUT),
    "devices": Column(number(int, 1, WORKERS), Role.LAYOUT),
    "device_name": Column(text(), Role.TASK, "device"),
    "workers_per_loader": Column(
        number(int, 0, WORKERS), Role.LOADING, "loader workers", "{} loader workers", "--num-workers", 0
    ),
    "threads_per_worker": Column(number(int, 1, WORKERS), Role.LOADING, "threads per worker", "threads {}"),
    "global_batch": Column(number(int, 1), Role.SIZE, "global batch", option="--batch-size"),
    "batch_per_device": Column(number(int, 1), Role.FACT),
    "accumulate": Column(number(int, 1), Role.SIZE, "micro-batches per step", "accumulate {}", default=1),
    "precision": Column(text(), Role.COMPUTING, "precision", "{}", "--precision"),
    "debug": Column(flag, Role.COMPUTING, "--debug", "with --debug", "--debug", False),
    "steps": Column(number(int, 1), Role.MEASUREMENT),
    "images": Column(number(int, 1), Role.SIZE, "images per epoch", "{} images", "--train-size"),
    "train_seconds": Column(number(float, ABOVE_0, LONGEST), Role.MEASUREMENT),
    "images_per_s": Column(number(float, ABOVE_0, FASTEST), Role.MEASUREMENT),
    "test_images": Column(number(int, 0), Role.FACT),
    "eval_seconds": Column(number(float, 0, LONGEST), Role.MEASUREMENT),
    "train_loss": Column(number(float, -FLOAT32, FLOAT32), Role.MEASUREMENT),
    "test_loss": Column(number(float, -FLOAT32, FLOAT32, nan=True), Role.MEASUREMENT),
    "test_accuracy": Column(number(float, 0, 100, nan=True), Role.MEASUREMENT),  # a regression has none
    "best_epoch": Column(number(int, 0), Role.MEASUREMENT),  # so far, by a validation; or 0
    "learning_rate": Column(number(float, 0, FLOAT32), Role.MEASUREMENT),
    "peak_memory_mb": Column(number(float, 0, LARGEST), Role.MEASUREMENT),
    "elapsed_s": Column(number(float, 0, LONGEST), Role.MEASUREMENT),
    "recorded_at": Column(text(), Role.FACT),
    "ended": Column(text(), Role.FACT),
    "seed": Column(number(int, 0), Role.REPEAT, option="--seed"),
    "job_id": Column(text(), Role.FACT),
    "node_list": Column(text(longest=20_000), Role.FACT),
    "torch_version": Column(text(), Role.FACT),
    "cuda_version": Column(text(), Role.FACT),
    "git_commit": Column(text(), Role.FACT),
    "started_at": Column(text(), Role.FACT),
    "schema_version": Column(number(int, 1), Role.FACT),
}
# fmt: on


def with_role(*roles: Role) -> list[str]:
    """List the names of the columns with one of these roles, by role and then in the order of the file."""
    return [name for role in sorted(roles) for name, column in COLUMNS.items() if column.role == role]
