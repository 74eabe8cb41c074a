"""The options that all stages share, each declared once: name, default, type, help and what it shapes.

A script adds its own in a subclass of `Options`. The command line is made of these declarations, and so are
the options that a checkpoint compares (`shapes_training`) and the columns that a record takes from them
(`column`).
"""

import argparse
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from manygpus import job_folder, project
from manygpus.config.command_line import Parser, above_0, at_least, check_divides, given_path
from manygpus.config.known_datasets import DATASETS, DEFAULT_DATA_DIR
from manygpus.errors import UserError
from manygpus.record.columns import BASE_BATCH, COLUMNS, DEFAULT_WIDTH, LR_SCALES, Role, lr_factor

DEFAULT_RESULTS = project.folder() / "results"
DEFAULT_LR = {"classic": 1.0, "sgd": 0.02, "fast": 0.003}
LEARNING_RATES = ", ".join(f"{recipe} {lr}" for recipe, lr in DEFAULT_LR.items())
MOST_IMAGES = 100_000_000  # per epoch: their order takes about 2 GB on every rank


def _option(
    group: str,
    default: object,
    *,
    help: str,
    type: Callable[[str], object] | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    shapes_training: bool = False,
    column: str = "",
) -> Field:
    """Declare an option, by the words of argparse; without `type` and `choices` it is a switch.

    Args:
        group: its heading in `--help`.
        shapes_training: a checkpoint cannot be resumed with another value.
        column: the column of the record that holds its value.
    """
    if column and (column not in COLUMNS or COLUMNS[column].role > Role.REPEAT):
        raise ValueError(f"column {column!r} is not a setting of a run: see manygpus/record/columns.py.")
    if choices:
        argument = {"choices": choices}
    elif type:
        argument = {"type": type, "metavar": metavar}
    else:
        argument = {"action": "store_true"}
    if (choices or type) and default is not None:  # the others name it in their help, or are switches
        help += " (default: %(default)s)"
    argument |= {"help": help, "default": default}
    return field(
        default=default,
        metadata={
            "group": group,
            "argument": argument,
            "shapes_training": shapes_training,
            "column": column,
        },
    )


SCRIPT_GROUP = "this script"
option = partial(_option, SCRIPT_GROUP)  # declares an option of one script, in its subclass of `Options`


def float32_precision() -> Field:
    """Declare the `--precision` of a script that enters no autocast: it computes in float32, or in TF32."""
    return option(
        "fp32",
        choices=("fp32", "tf32"),
        help="the precision in which the layers compute",
        shapes_training=True,
        column="precision",
    )


@dataclass(frozen=True)
class Options:
    """The options of a run; `--help` explains each one.

    A script with options of its own declares a subclass, which may also change the declaration of one of
    these, and passes it to `parse_options`:

        @dataclass(frozen=True)
        class AccumulateOptions(Options):
            accumulate: int = option(4, type=at_least(1), metavar="K", help="micro-batches in a batch")
            not_used = {"width"}
    """

    # The names of the options that the script has no use for: its command line does not have them.
    not_used: ClassVar[set[str]] = set()

    epochs: int = _option(
        "training",
        14,
        type=at_least(1),
        metavar="N",
        help="passes over the training images, or over --train-size of them",
    )
    batch_size: int | None = _option(
        "training",
        None,
        type=at_least(1),
        metavar="N",
        help=f"global batch size: images per optimizer step, over all GPUs (default: {BASE_BATCH})",
        shapes_training=True,
        column="global_batch",
    )
    batch_size_per_gpu: int | None = _option(
        "training",
        None,
        type=at_least(1),
        metavar="N",
        help="instead of --batch-size: images per optimizer step on each device",
    )
    recipe: str = _option(
        "training",
        "classic",
        choices=tuple(DEFAULT_LR),
        help="classic: Adadelta, step decay; sgd: Nesterov momentum, step decay; "
        "fast: Adam, one-cycle, images shifted by up to a pixel",
        shapes_training=True,
        column="recipe",
    )
    lr: float | None = _option(
        "training",
        None,
        type=above_0(1e6),
        metavar="X",
        help=f"learning rate; with --lr-scale, the one for batch {BASE_BATCH} (default: {LEARNING_RATES})",
        shapes_training=True,
    )
    lr_scale: str = _option(
        "training",
        "none",
        choices=tuple(LR_SCALES),
        help=f"linear: --lr times batch size / {BASE_BATCH}; sqrt: --lr times the square root of that",
        shapes_training=True,
        column="lr_scale",
    )
    lr_warmup_images: int = _option(
        "training",
        0,
        type=at_least(0, MOST_IMAGES),
        metavar="N",
        help="classic and sgd: the learning rate rises from 0 over the first N images",
        shapes_training=True,
        column="lr_warmup_images",
    )
    gamma: float = _option(
        "training",
        0.7,
        type=above_0(1),
        metavar="X",
        help="classic and sgd: the learning rate is multiplied by X after every epoch",
        shapes_training=True,
        column="gamma",
    )
    width: int = _option(
        "training",
        DEFAULT_WIDTH,
        type=at_least(1, 4096),
        metavar="N",
        help="channels of the first convolution; the second has twice as many",
        shapes_training=True,
        column="width",
    )
    stop_at: float | None = _option(
        "training",
        None,
        type=above_0(100),
        metavar="PERCENT",
        help="end after the epoch that reaches this test accuracy",
    )
    patience: int | None = _option(
        "training",
        None,
        type=at_least(1),
        metavar="N",
        help="end when the test loss, or a script's own validation loss, has not improved for N epochs",
    )
    seed: int = _option(
        "training",
        1,
        type=at_least(0),
        metavar="N",
        help="fixes the initial weights, the order of the images, and dropout",
        shapes_training=True,
        column="seed",
    )

    dataset: str = _option(
        "data",
        "mnist",
        choices=tuple(DATASETS),
        help="synthetic: generated digits, not MNIST, for machines without it",
    )
    data_dir: Path = _option(
        "data",
        DEFAULT_DATA_DIR,
        type=given_path,
        metavar="DIR",
        help="where `make data` put MNIST",
    )
    train_size: int | None = _option(
        "data",
        None,
        type=at_least(1, MOST_IMAGES),
        metavar="N",
        help="images per epoch: the first N (default: all); an N beyond the data set repeats them",
        shapes_training=True,
    )
    test_size: int | None = _option(
        "data",
        None,
        type=at_least(1),
        metavar="N",
        help="evaluate only on the first N images (default: all)",
    )
    loader: str = _option(
        "data",
        "resident",
        choices=("resident", "workers"),
        help="resident: keep the data set on the device; workers: a DataLoader prepares image by image",
        column="loader",
    )
    num_workers: int = _option(
        "data",
        0,
        type=at_least(0, 256),
        metavar="N",
        help="loader processes per rank, for --loader workers",
        column="workers_per_loader",
    )
    test_batch_size: int | None = _option(
        "data",
        None,
        type=at_least(1),
        metavar="N",
        help="images per evaluation step on each rank, which changes only the speed (default: 250 on a CPU, "
        "2500 on GPUs)",
    )

    precision: str | None = _option(
        "machine",
        None,  # until training/precision.py knows the device
        choices=("fp32", "tf32", "bf16"),
        help="bf16: the layers compute in bfloat16; tf32: GPUs multiply with 10 bits of mantissa (default: "
        "fp32, or bf16 with --recipe fast on a device with units for it)",
        shapes_training=True,
        column="precision",
    )
    no_cuda: bool = _option(
        "machine",
        False,
        help="use the CPU even if there is a GPU",
    )
    timeout: int = _option(
        "machine",
        300,
        type=at_least(1),
        metavar="S",
        help="seconds a process waits for the others before it gives up",
    )
    debug: bool = _option(
        "machine",
        False,
        help="have each rank, PyTorch and NCCL log what they do, in the job's folder or in DIR/debug/ of "
        "--results-dir; this is slower",
        column="debug",
    )

    checkpoint_dir: Path | None = _option(
        "stop and resume",
        None,
        type=given_path,
        metavar="DIR",
        help="save the state of the training here after every epoch, and on USR2 or SIGTERM",
    )
    checkpoint_minutes: float = _option(
        "stop and resume",
        10,
        type=above_0(),
        metavar="X",
        help="minutes between two checkpoints within an epoch",
    )
    resume: str = _option(
        "stop and resume",
        "never",
        choices=("never", "auto"),
        help="auto: resume from the newest checkpoint in --checkpoint-dir, if there is one",
    )

    results_dir: Path = _option(
        "output",
        DEFAULT_RESULTS,
        type=given_path,
        metavar="DIR",
        help="the CSV goes to DIR/runs/",
    )
    save_model: bool = _option(
        "output",
        False,
        help="save the weights to DIR/models/<run_id>.pt",
    )
    dry_run: bool = _option(
        "output",
        False,
        help="run one training step and one test batch, and write nothing",
    )

    def declares(self, name: str) -> bool:
        """Return whether the script itself has declared this option."""
        return any(
            option.name == name and option.metadata["group"] == SCRIPT_GROUP for option in fields(self)
        )

    def _added(self) -> list[Field]:
        """List the options that the script has declared, and that are no options of all stages."""
        common_options = {option.name for option in fields(Options)}
        return [
            option
            for option in fields(self)
            if option.metadata["group"] == SCRIPT_GROUP and option.name not in common_options
        ]

    @property
    def scaled_lr(self) -> float:
        """Return the learning rate at this batch size, after --lr-scale."""
        return self.lr * lr_factor(self.lr_scale, self.batch_size)

    @property
    def debug_dir(self) -> Path | None:
        """Return the folder that --debug writes to; None without it."""
        return (job_folder.here() or self.results_dir / "debug") if self.debug else None

    def resolve_batch_size(self, count: int, what: str = "processes") -> "Options":
        """Return the options with the global batch size for `count` devices, or for one if there are none.

        With --batch-size-per-gpu the global size is unknown until then.

        Raises:
            UserError: if --batch-size does not divide evenly among them.
        """
        if self.batch_size_per_gpu:
            return replace(self, batch_size=self.batch_size_per_gpu * max(count, 1))
        check_divides(self.batch_size, max(count, 1), what)
        return self

    def shaping(self) -> dict[str, object]:
        """Return the options that shape the training: another value makes another training."""
        # The one-cycle schedule is stretched over all epochs, so their number shapes every step.
        also_shaping = {"epochs"} if self.recipe == "fast" else set()
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.metadata["shapes_training"] or option.name in also_shaping
        }

    def settings(self) -> str:
        """Format the script's own options that shape the training without a column: `hidden=256 tied`."""
        return settings_in_words(
            {
                option.name: getattr(self, option.name)
                for option in self._added()
                if option.metadata["shapes_training"] and not option.metadata["column"]
            }
        )

    def other_arguments(self) -> str:
        """Format the script's own options that no other column of the record has: `--how=eager --compile`.

        They change neither the result nor what is trained, but perhaps the speed.
        """
        other = {
            f"--{option.name.replace('_', '-')}": getattr(self, option.name)
            for option in self._added()
            if not option.metadata["shapes_training"]
            and not option.metadata["column"]
            and getattr(self, option.name) != option.default
        }
        return settings_in_words(other)

    def columns(self) -> dict[str, object]:
        """Return the columns of a record that are options."""
        recorded = [option for option in fields(self) if option.metadata["column"]]
        return {option.metadata["column"]: getattr(self, option.name) for option in recorded}


def settings_in_words(settings: dict[str, object]) -> str:
    """Format settings as `hidden=256 tied`, without those that are None or switched off."""
    words = []
    for name, value in settings.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words.append(f"{name}={value}")
    return " ".join(words)


OptionsOfScript = TypeVar("OptionsOfScript", bound=Options)


def parse_options(
    description: str,
    declared: type[OptionsOfScript] = Options,
    *,
    arguments: list[str] | None = None,
    known_only: bool = False,
) -> OptionsOfScript:
    """Read the command line; with `known_only`, unknown options are ignored.

    Args:
        description: the text that `--help` begins with, such as the script's docstring.
        declared: `Options`, or the script's own subclass of it.
        arguments: the words of the command line, if not those of this process.

    Raises:
        UserError: if an option or a value is unknown or makes no sense.
    """
    parser = Parser(description=description, formatter_class=argparse.HelpFormatter)
    groups: dict[str, argparse._ArgumentGroup] = {}
    values: dict[str, object] = {}
    for declaration in fields(declared):
        values[declaration.name] = declaration.default
        if declaration.name in declared.not_used:
            continue
        group = declaration.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        flag = f"--{declaration.name.replace('_', '-')}"
        groups[group].add_argument(flag, **declaration.metadata["argument"])
    known, unknown = parser.parse_known_args(arguments)
    if unknown and not known_only:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return declared(**_completed(values | vars(known)))


def _completed(values: dict[str, object]) -> dict[str, object]:
    """Add the defaults that depend on other options; raise a UserError if they contradict each other."""
    if values["batch_size"] and values["batch_size_per_gpu"]:
        raise UserError(
            "--batch-size counts all GPUs together and --batch-size-per-gpu each GPU: give only one."
        )
    if not values["batch_size_per_gpu"]:
        values["batch_size"] = values["batch_size"] or BASE_BATCH
    if values["lr"] is None:
        values["lr"] = DEFAULT_LR[values["recipe"]]
        if values["lr_scale"] != "none":
            raise UserError(
                f"--lr-scale {values['lr_scale']} needs --lr, the learning rate that is good at batch "
                f"{BASE_BATCH}: add it, such as --lr {values['lr']} for recipe {values['recipe']}."
            )
    if values["lr_warmup_images"] and values["recipe"] == "fast":
        raise UserError(
            "--lr-warmup-images is not for recipe fast, whose one-cycle schedule has its own warm-up: "
            "leave it out."
        )
    if values["num_workers"] and values["loader"] != "workers":
        raise UserError("--num-workers needs --loader workers: add that, or leave out --num-workers.")
    if values["resume"] == "auto" and not values["checkpoint_dir"]:
        raise UserError("--resume auto needs --checkpoint-dir: give the folder with the checkpoints.")
    if values["dry_run"]:
        values["epochs"], values["checkpoint_dir"] = 1, None
    return values


def check_sizes(options: Options, available: int | None, ranks: int = 1) -> None:
    """Check that the sizes fit the data and the processes.

    Args:
        available: the number of training images, if known.
        ranks: the number of processes that share every batch.

    Raises:
        UserError: if they do not.
    """
    if options.batch_size is None:
        raise UserError(
            "this script takes no --batch-size-per-gpu: give --batch-size, or have the script call "
            "opts.resolve_batch_size, as the stages do."
        )
    check_divides(options.batch_size, ranks, "processes")
    size = 0 if available == 0 else options.train_size or available
    if size is not None and options.batch_size > size:
        raise UserError(
            f"--batch-size {options.batch_size} is more than the {size} training images: lower it."
        )
    if size and options.lr_warmup_images > options.epochs * size and not options.dry_run:
        raise UserError(
            f"--lr-warmup-images {options.lr_warmup_images} is more than the {options.epochs * size} images "
            f"of all epochs: lower it, or raise --epochs {options.epochs}."
        )
