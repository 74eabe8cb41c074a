"""The command line that all stages share."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainkit.data import DATASETS, DEFAULT_DIR
from trainkit.errors import UserError

DEFAULT_RESULTS = Path(__file__).resolve().parents[1] / "results"
DEFAULT_LR = {"classic": 1.0, "fast": 0.003}


@dataclass(frozen=True)
class Options:
    """The options of a run; `--help` tells what each one means."""

    epochs: int
    batch_size: int
    test_batch_size: int
    lr: float
    gamma: float
    recipe: str
    seed: int
    dataset: str
    data_dir: Path
    train_size: int | None
    loader: str
    num_workers: int
    precision: str
    no_cuda: bool
    results_dir: Path
    save_model: bool
    log_interval: int
    dry_run: bool
    checkpoint_dir: Path | None
    checkpoint_minutes: float
    resume: str
    timeout: int


def parse(description: str, arguments: list[str] | None = None) -> Options:
    """Read the command line.

    Raises:
        UserError: for an option or a value that is not known or makes no sense.
    """
    parser = _Parser(description=description, formatter_class=_Help, allow_abbrev=False)
    training = parser.add_argument_group("training")
    training.add_argument(
        "--epochs", type=at_least(1), default=14, metavar="N", help="passes over the training images"
    )
    training.add_argument(
        "--batch-size",
        type=at_least(1),
        default=64,
        metavar="N",
        help="global batch size: images per optimizer step, all GPUs together",
    )
    training.add_argument(
        "--recipe",
        choices=DEFAULT_LR,
        default="classic",
        help="classic: Adadelta, step decay; fast: Adam, one-cycle, images shifted by up to a pixel",
    )
    training.add_argument(
        "--lr", type=_positive, metavar="X", help="learning rate (default: 1.0 for classic, 0.003 for fast)"
    )
    training.add_argument(
        "--gamma",
        type=_positive,
        default=0.7,
        metavar="X",
        help="classic recipe: factor on the learning rate per epoch",
    )
    training.add_argument(
        "--seed", type=at_least(0), default=1, metavar="N", help="fixes weights, order of images and dropout"
    )

    images = parser.add_argument_group("data")
    images.add_argument(
        "--dataset",
        choices=DATASETS,
        default="mnist",
        help="synthetic: generated digits, not MNIST, for machines without it",
    )
    images.add_argument(
        "--data-dir",
        type=Path,
        default=DEFAULT_DIR,
        metavar="DIR",
        help="where `python -m trainkit.data` put MNIST",
    )
    images.add_argument(
        "--train-size", type=at_least(1), metavar="N", help="train on the first N images only (default: all)"
    )
    images.add_argument(
        "--loader",
        choices=("resident", "workers"),
        default="resident",
        help="resident: data set kept on the device; workers: DataLoader, image by image",
    )
    images.add_argument(
        "--num-workers",
        type=at_least(0),
        default=0,
        metavar="N",
        help="loader processes of each process, for --loader workers",
    )
    images.add_argument(
        "--test-batch-size",
        type=at_least(1),
        default=250,
        metavar="N",
        help="images per evaluation step and process; changes the speed only",
    )

    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="bf16: layers compute in bfloat16; auto: the faster of the two on this device",
    )
    machine.add_argument("--no-cuda", action="store_true", help="use the CPU even where there is a GPU")
    machine.add_argument(
        "--timeout",
        type=at_least(1),
        default=300,
        metavar="S",
        help="seconds a process waits for the others before it gives up",
    )

    saving = parser.add_argument_group("stop and go on")
    saving.add_argument(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="save the state of the training here after every epoch, and on the signal USR2",
    )
    saving.add_argument(
        "--checkpoint-minutes",
        type=_positive,
        default=10,
        metavar="X",
        help="minutes between two checkpoints within an epoch",
    )
    saving.add_argument(
        "--resume",
        choices=("never", "auto"),
        default="never",
        help="auto: go on from the newest checkpoint in --checkpoint-dir, if there is one",
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--results-dir",
        type=Path,
        default=DEFAULT_RESULTS,
        metavar="DIR",
        help="the run's CSV goes to DIR/runs/",
    )
    output.add_argument(
        "--save-model", action="store_true", help="save the weights to DIR/models/<run_id>.pt at the end"
    )
    output.add_argument(
        "--log-interval",
        type=at_least(1),
        default=10,
        metavar="N",
        help="steps between two updates of the progress bar",
    )
    output.add_argument(
        "--dry-run", action="store_true", help="one training step, one test batch, nothing written"
    )

    values = vars(parser.parse_args(arguments))
    if values["lr"] is None:
        values["lr"] = DEFAULT_LR[values["recipe"]]
    if values["num_workers"] and values["loader"] == "resident":
        raise UserError("--num-workers needs --loader workers: add that, or leave it out.")
    if values["resume"] == "auto" and not values["checkpoint_dir"]:
        raise UserError("--resume auto needs --checkpoint-dir: give the folder with the checkpoints.")
    if values["dry_run"]:
        values["epochs"], values["checkpoint_dir"] = 1, None
    return Options(**values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message}. See --help.")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default is None or isinstance(action.default, bool):
            return action.help  # says its own default, or is a switch
        return super()._get_help_string(action)


def at_least(smallest: int) -> Callable[[str], int]:
    """An argparse type: a whole number of 32 bits, `smallest` or more."""

    def whole_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not smallest <= number < 2**31:
            size = "small" if number < smallest else "large"
            raise argparse.ArgumentTypeError(f"{number} is too {size}, it must be {smallest} to {2**31 - 1}")
        return number

    return whole_number


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return number
