"""The columns of a run's record, each declared once: how to read it, what it says of a run, how to print it.

What a file must have, what must be equal in runs that are compared, how a configuration reads, and the
options of a proposed run all follow from `COLUMNS`. Also the words of options and records, each once.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

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
    # Another value is another configuration, whose speed may still be compared, with a doubt. An example is
    # an argument that belongs to the number of GPUs: it may differ although the training is the same.
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
        default: that option's default, and the value for a training that does not know its own; it goes
            without saying in a label. None: every training knows it.
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


OWN_LOOP = "own"  # the recipe of a training with another loop (training/recorder.py)
OWN_OPTIMIZER = "own optimizer"  # the recipe of a copy of a stage that makes its optimizer or schedule itself
UNKNOWN = "unknown"  # how nan of a learning rate or a gamma reads; such runs are pooled with each other
# In the order of the file. results/README.md explains them.
COLUMNS: dict[str, Column] = {
    "run_id": Column(str, Role.FACT),
    "resumed_from": Column(str, Role.FACT, default=""),
    "stage": Column(str, Role.LAYOUT),
    "launcher": Column(str, Role.FACT),
    "epoch": Column(whole(1), Role.MEASUREMENT),
    "warmup": Column(flag, Role.MEASUREMENT),
    "dataset": Column(str, Role.TASK, "dataset", option="--dataset", default="mnist"),
    "model": Column(str, Role.TASK, "model"),
    "loader": Column(
        str, Role.LOADING, "loader", "{} loader", "--loader", default="resident", unsaid="workers"
    ),
    "recipe": Column(str, Role.TRAINING, "recipe", "{}", "--recipe", default="classic", unsaid=""),
    "lr": Column(
        number(least=0, nan=True),
        Role.TRAINING,
        "learning rate",
        "lr {}",
        "--lr",
        default=UNKNOWN,
        follows=("recipe", "lr_scale", "global_batch"),
    ),
    "gamma": Column(
        number(least=0, most=1, nan=True),
        Role.TRAINING,
        "gamma",
        "gamma {}",
        "--gamma",
        default=UNKNOWN,
        follows=("recipe",),
    ),
    "lr_scale": Column(str, Role.TRAINING, "--lr-scale", "{} lr scale", "--lr-scale", default="none"),
    "lr_warmup_images": Column(
        whole(0), Role.TRAINING, "--lr-warmup-images", "lr warm-up {}", "--lr-warmup-images", default=0
    ),
    "width": Column(whole(1), Role.TRAINING, "width", "width {}", "--width", default=DEFAULT_WIDTH),
    # 0: not known.
    "parameters": Column(whole(0), Role.TRAINING, "weights", "{:,} weights", default=0, follows=("width",)),
    "settings": Column(str, Role.TRAINING, "settings", "{}", default=""),
    # What identifies a training (training/identity.py), in words of `name=value`; "": not known, or as the
    # recipe says.
    "optimizer": Column(str, Role.TRAINING, "optimizer", "{}", default=""),
    "network": Column(str, Role.TRAINING, "network", "{}", default="", follows=("parameters",)),
    "schedule": Column(str, Role.DOUBT, "schedule", "{}", default=""),
    "arguments": Column(str, Role.DOUBT, "arguments", "{}", default=""),
    "script": Column(str, Role.FACT, default=""),
    "world_size": Column(whole(1), Role.LAYOUT),
    "nodes": Column(whole(1), Role.LAYOUT),
    "devices": Column(whole(1), Role.LAYOUT),
    "device_name": Column(str, Role.TASK, "device"),
    "workers_per_loader": Column(
        whole(0), Role.LOADING, "loader workers", "{} loader workers", "--num-workers", default=0
    ),
    "threads_per_worker": Column(whole(1), Role.LOADING, "threads per worker", "threads {}"),
    "global_batch": Column(whole(1), Role.SIZE, "global batch", option="--batch-size"),
    "batch_per_device": Column(whole(1), Role.FACT),
    "accumulate": Column(whole(1), Role.SIZE, "micro-batches per step", "accumulate {}", default=1),
    "precision": Column(str, Role.COMPUTING, "precision", "{}", "--precision"),
    "debug": Column(flag, Role.COMPUTING, "--debug", "with --debug", "--debug", default=False),
    "steps": Column(whole(1), Role.MEASUREMENT),
    "images": Column(whole(1), Role.SIZE, "images per epoch", "{} images", "--train-size"),
    "train_seconds": Column(number(above=0), Role.MEASUREMENT),
    "images_per_s": Column(number(above=0), Role.MEASUREMENT),
    "test_images": Column(whole(0), Role.FACT, default=0),
    "eval_seconds": Column(number(least=0), Role.MEASUREMENT, default=0.0),
    "train_loss": Column(number(), Role.MEASUREMENT),
    "test_loss": Column(number(nan=True), Role.MEASUREMENT, default=math.nan),
    # A regression has none.
    "test_accuracy": Column(number(least=0, most=100, nan=True), Role.MEASUREMENT, default=math.nan),
    "best_epoch": Column(whole(0), Role.MEASUREMENT, default=0),  # so far, by a validation; or 0
    "learning_rate": Column(number(least=0), Role.MEASUREMENT),
    "peak_memory_mb": Column(number(least=0), Role.MEASUREMENT),
    "elapsed_s": Column(number(least=0), Role.MEASUREMENT),
    "recorded_at": Column(str, Role.FACT),
    "ended": Column(str, Role.FACT, default=""),
    "seed": Column(whole(0), Role.REPEAT, option="--seed", default=1),
    "job_id": Column(str, Role.FACT),
    "node_list": Column(str, Role.FACT),
    "torch_version": Column(str, Role.FACT),
    "cuda_version": Column(str, Role.FACT),
    "git_commit": Column(str, Role.FACT),
    "started_at": Column(str, Role.FACT),
    "schema_version": Column(whole(1), Role.FACT),
}
# Of the ranks' file: how long the rank worked by itself (compute_time.py), and waited for its batches.
RANK_COLUMNS: dict[str, Callable[[str], object]] = {
    "epoch": whole(1),
    "rank": whole(0),
    "host": str,
    "device": str,
    "device_name": str,
    "own_seconds": number(least=0, nan=True),
    "data_seconds": number(least=0, nan=True),
    "peak_memory_mb": number(least=0),
}
# Of the file of a training with its own metrics.
METRIC_COLUMNS: dict[str, Callable[[str], object]] = {
    "epoch": whole(1),
    "metric": str,
    "of": str,
    "value": number(nan=True),
}
# Of the file that a job of the doctor leaves: the seconds that a sum of `bytes` over all ranks takes.
ALL_REDUCE_COLUMNS: dict[str, Callable[[str], object]] = {
    "bytes": whole(1),
    "seconds": number(above=0),
    "ranks": whole(1),
    "nodes": whole(1),
    "backend": str,
    "device_name": str,
    "job": str,
    "started_at": str,
}


def with_role(*roles: Role) -> list[str]:
    """List the names of the columns with one of these roles, by role and then in the order of the file."""
    return [name for role in sorted(roles) for name, column in COLUMNS.items() if column.role == role]
