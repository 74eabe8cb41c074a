"""The columns of a run's record, each declared once: how to read it, what it says of a run, how to print it.

What a file must have, what must be equal in runs that are compared, and how a configuration reads all
follow from `COLUMNS`. Also the words of options and records, each once.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

# The stages of the tutorial, in its order, and how they read. Any other name is a user's own training.
SINGLE = "single"
DP = "dp"
DDP = "ddp"
TUTORIAL_STAGES = {SINGLE: "single", DP: "DataParallel", DDP: "DDP"}
# The width of the course's network: the default of --width, and the value in files without the column.
DEFAULT_WIDTH = 32
# Images in a step: the default --batch-size, and the batch that --lr is for if a rule scales it.
BASE_BATCH = 64
# The rules of --lr-scale: the power of the batch size with which the learning rate grows.
LR_SCALES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


def lr_factor(rule: str, batch: int) -> float:
    """Return the factor on the learning rate by the rule of --lr-scale; 1 for an unknown rule."""
    return (batch / BASE_BATCH) ** LR_SCALES.get(rule, 0)


class Role(IntEnum):
    """What a column says of a run, in the order in which settings are printed and sorted.

    The first five are settings. A speedup says something about the number of workers only if all settings
    are equal in both runs.
    """

    # Another value also makes another table.
    TASK = 1
    LOADING = 2
    TRAINING = 3
    COMPUTING = 4
    SIZE = 5
    # Another value is another configuration, whose speed may still be compared, with a doubt. An example is
    # an argument that belongs to the number of GPUs: it may differ although the training is the same.
    DOUBT = 6
    # What a speedup compares: another value is another configuration.
    LAYOUT = 7
    # Differs between runs of one configuration.
    REPEAT = 8
    MEASUREMENT = 9
    # Where and with what the training ran.
    FACT = 10


@dataclass(frozen=True)
class Column:
    """One column of a record.

    Args:
        read: turns a cell into a value; a ValueError for what no run writes.
        role: what it says of a run.
        words: its name in a sentence.
        label: how a value reads in a label.
        default: the default of the option that sets it, and the value for a training that does not know its
            own, or whose file is older than the column; it goes without saying in a label. None: every
            training knows it, and every file has it.
        unlabelled: the value that goes without saying in a label, if that is not the default.
        determined_by: the columns that determine it. A label leaves it out if they do, and if the first of
            them differs between two runs, that explains why this one differs.
    """

    read: Callable[[str], object]
    role: Role
    words: str = ""
    label: str = ""
    default: object = None
    unlabelled: object = None
    determined_by: tuple[str, ...] = ()

    def in_words(self, value: object) -> str:
        """Return the value as it reads in a label, or "" if it goes without saying."""
        silent = self.default if self.unlabelled is None else self.unlabelled
        if value == silent:
            return ""
        return self.label.format(value)


def whole(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` on."""

    def read(cell: str) -> int:
        with suppress(ValueError):
            if int(cell) >= least:
                return int(cell)
        raise ValueError(f"{cell[:30]!r} is not a whole number from {least} on")

    return read


def number(
    least: float = -math.inf, most: float = math.inf, above: float = -math.inf, nan: bool = False
) -> Callable[[str], float]:
    """Return a reader of finite numbers of `least` to `most`, or `above` a bound; with `nan` also of nan."""

    def read(cell: str) -> float:
        if nan and cell == "nan":
            return math.nan
        with suppress(ValueError):
            value = float(cell)
            if least <= value <= most and value > above and math.isfinite(value):
                return value
        raise ValueError(f"{cell[:30]!r} is not a number that it may have")

    return read


def flag(cell: str) -> bool:
    """Read 0 or 1."""
    if cell not in ("0", "1"):
        raise ValueError(f"{cell[:30]!r} is neither 0 nor 1")
    return cell == "1"


# The recipe of a training with another loop (training/recorder.py).
OWN_LOOP = "own"
# The recipe of a copy of a stage that makes its optimizer or its schedule itself.
OWN_OPTIMIZER = "own optimizer"
# How nan of a learning rate or a gamma reads in a comparison, where such runs are pooled with each other.
UNKNOWN = "unknown"
# In the order of the file. results/README.md explains them.
COLUMNS: dict[str, Column] = {
    "run_id": Column(str, Role.FACT),
    "resumed_from": Column(str, Role.FACT, default=""),
    "stage": Column(str, Role.LAYOUT),
    "launcher": Column(str, Role.FACT),
    "epoch": Column(whole(1), Role.MEASUREMENT),
    "warmup": Column(flag, Role.MEASUREMENT),
    "dataset": Column(str, Role.TASK, words="dataset", default="mnist"),
    "model": Column(str, Role.TASK, words="model"),
    # The number of loader workers says that there are some.
    "loader": Column(
        str,
        Role.LOADING,
        words="loader",
        label="{} loader",
        default="resident",
        unlabelled="workers",
    ),
    # Where recipes differ, each is named.
    "recipe": Column(
        str,
        Role.TRAINING,
        words="recipe",
        label="{}",
        default="classic",
        unlabelled="",
    ),
    "lr": Column(
        number(least=0, nan=True),
        Role.TRAINING,
        words="learning rate",
        label="lr {}",
        default=math.nan,
        unlabelled=UNKNOWN,
        determined_by=("recipe", "lr_scale", "global_batch"),
    ),
    "gamma": Column(
        number(least=0, most=1, nan=True),
        Role.TRAINING,
        words="gamma",
        label="gamma {}",
        default=math.nan,
        unlabelled=UNKNOWN,
        determined_by=("recipe",),
    ),
    "lr_scale": Column(str, Role.TRAINING, words="--lr-scale", label="{} lr scale", default="none"),
    "lr_warmup_images": Column(
        whole(0),
        Role.TRAINING,
        words="--lr-warmup-images",
        label="lr warm-up {}",
        default=0,
    ),
    "width": Column(whole(1), Role.TRAINING, words="width", label="width {}", default=DEFAULT_WIDTH),
    # 0 if it is not known.
    "parameters": Column(
        whole(0),
        Role.TRAINING,
        words="weights",
        label="{:,} weights",
        default=0,
        determined_by=("width",),
    ),
    "settings": Column(str, Role.TRAINING, words="settings", label="{}", default=""),
    # What identifies a training (network/training_identity.py), in words of `name=value`. It is "" if that
    # is not known, or as the recipe says.
    "optimizer": Column(str, Role.TRAINING, words="optimizer", label="{}", default=""),
    "network": Column(
        str, Role.TRAINING, words="network", label="{}", default="", determined_by=("parameters",)
    ),
    "schedule": Column(str, Role.DOUBT, words="schedule", label="{}", default=""),
    "arguments": Column(str, Role.DOUBT, words="arguments", label="{}", default=""),
    "script": Column(str, Role.FACT, default=""),
    "world_size": Column(whole(1), Role.LAYOUT),
    "nodes": Column(whole(1), Role.LAYOUT),
    "devices": Column(whole(1), Role.LAYOUT),
    "device_name": Column(str, Role.TASK, words="device"),
    "workers_per_loader": Column(
        whole(0),
        Role.LOADING,
        words="loader workers",
        label="{} loader workers",
        default=0,
    ),
    "threads_per_worker": Column(whole(1), Role.LOADING, words="threads per worker", label="threads {}"),
    "global_batch": Column(whole(1), Role.SIZE, words="global batch"),
    "batch_per_device": Column(whole(1), Role.FACT),
    "accumulate": Column(
        whole(1), Role.SIZE, words="micro-batches per step", label="accumulate {}", default=1
    ),
    "precision": Column(str, Role.COMPUTING, words="precision", label="{}"),
    "debug": Column(flag, Role.COMPUTING, words="--debug", label="with --debug", default=False),
    "steps": Column(whole(1), Role.MEASUREMENT),
    "images": Column(whole(1), Role.SIZE, words="images per epoch", label="{} images"),
    "train_seconds": Column(number(above=0), Role.MEASUREMENT),
    "images_per_s": Column(number(above=0), Role.MEASUREMENT),
    "test_images": Column(whole(0), Role.FACT, default=0),
    "eval_seconds": Column(number(least=0), Role.MEASUREMENT, default=0.0),
    "train_loss": Column(number(), Role.MEASUREMENT),
    "test_loss": Column(number(nan=True), Role.MEASUREMENT, default=math.nan),
    # A regression has none.
    "test_accuracy": Column(number(least=0, most=100, nan=True), Role.MEASUREMENT, default=math.nan),
    # So far, by a validation; 0 without one.
    "best_epoch": Column(whole(0), Role.MEASUREMENT, default=0),
    "learning_rate": Column(number(least=0), Role.MEASUREMENT),
    "peak_memory_mb": Column(number(least=0), Role.MEASUREMENT),
    "elapsed_s": Column(number(least=0), Role.MEASUREMENT),
    "recorded_at": Column(str, Role.FACT),
    "ended": Column(str, Role.FACT, default=""),
    "seed": Column(whole(0), Role.REPEAT, default=1),
    "job_id": Column(str, Role.FACT),
    "node_list": Column(str, Role.FACT),
    "torch_version": Column(str, Role.FACT),
    "cuda_version": Column(str, Role.FACT),
    "git_commit": Column(str, Role.FACT),
    # Of a job that runs a copy of its code (frozen_code.py); 0 and "" of others.
    "changed_files": Column(whole(0), Role.FACT, default=0),
    "frozen_code": Column(str, Role.FACT, default=""),
    "started_at": Column(str, Role.FACT),
    "schema_version": Column(whole(1), Role.FACT),
}
# Of the ranks' file. `own_seconds` is how long the rank worked by itself (training/compute_time.py), and
# `data_seconds` how long it waited for its batches.
RANK_COLUMNS: dict[str, Column] = {
    "epoch": Column(whole(1), Role.MEASUREMENT),
    "rank": Column(whole(0), Role.MEASUREMENT),
    "host": Column(str, Role.FACT),
    "device": Column(str, Role.FACT),
    "device_name": Column(str, Role.FACT),
    "own_seconds": Column(number(least=0, nan=True), Role.MEASUREMENT),
    "data_seconds": Column(number(least=0, nan=True), Role.MEASUREMENT),
    "peak_memory_mb": Column(number(least=0), Role.MEASUREMENT),
}
# Of the file of a training with its own metrics.
METRIC_COLUMNS: dict[str, Column] = {
    "epoch": Column(whole(1), Role.MEASUREMENT),
    "metric": Column(str, Role.MEASUREMENT),
    "of": Column(str, Role.MEASUREMENT),
    "value": Column(number(nan=True), Role.MEASUREMENT),
}
# Of the file that a job of the doctor leaves: the seconds that a sum of `bytes` over all ranks takes.
ALL_REDUCE_COLUMNS: dict[str, Column] = {
    "bytes": Column(whole(1), Role.MEASUREMENT),
    "seconds": Column(number(above=0), Role.MEASUREMENT),
    "ranks": Column(whole(1), Role.LAYOUT),
    "nodes": Column(whole(1), Role.LAYOUT),
    "backend": Column(str, Role.FACT),
    "device_name": Column(str, Role.FACT),
    "job": Column(str, Role.FACT),
    "started_at": Column(str, Role.FACT),
}


def with_role(*roles: Role) -> list[str]:
    """List the names of the columns with one of these roles, by role and then in the order of the file."""
    names = [name for name, column in COLUMNS.items() if column.role in roles]
    return sorted(names, key=lambda name: COLUMNS[name].role)
