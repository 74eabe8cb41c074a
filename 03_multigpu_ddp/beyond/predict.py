"""Classify the test set, or image files, with the weights that --save-model wrote.

Try: python predict.py ../../results/models/RUN_ID.pt
"""

import argparse
import csv
import os
from pathlib import Path

from trainkit import data, errors, process_group
from trainkit import Net, UserError
from trainkit.rank.batches import TEST_BATCH
from trainkit.rank.checkpoint import load_verified
from trainkit.rank.precision import set_precision
from trainkit.rank.staging import DEFAULT_DIR
from trainkit.runtime.command_line import Parser, at_least
from trainkit.runtime.device import has_tf32, is_gpu
from trainkit.runtime.files import check_regular, explained, replacing
from trainkit.schema import records

import numpy as np
import torch
from PIL import Image, ImageOps

SIZE = (28, 28)  # pixels
BRIGHT = 127  # the mean of an image's bytes; MNIST's have 33


def main() -> None:
    args = parse()
    if os.path.realpath(args.out) in map(os.path.realpath, (args.model, *args.images)):
        raise UserError(f"--out {args.out} would overwrite what is read: give another --out.")
    network, run = network_of(args.model), run_of(args.model)
    device = process_group.alone(not args.no_cuda).device
    network = network.to(device, memory_format=torch.channels_last).eval()  # eval: no dropout
    precision = args.precision or (run["precision"] if run else "fp32")
    if not args.precision and precision == "tf32" and not has_tf32(device):
        precision = "fp32"  # what it stands for where there is none
    set_precision(network, precision)
    known = "" if run else ", without a record of its run"
    errors.tell(f"network of width {network.conv1.out_channels}, {precision}, on {device.type}{known}")

    if args.images:
        pixels, labels = torch.stack([read_image(path, args.invert) for path in args.images]), None
        names = {"file": [records.no_formula(str(path)) for path in args.images]}
        if bright := (pixels.float().mean((1, 2, 3)) > BRIGHT).sum().item():
            how = (
                "leave out --invert"
                if args.invert
                else "add --invert if the digits are dark on a bright ground"
            )
            errors.tell(
                f"warning: {bright} of {len(pixels)} images are mostly bright, and MNIST is not: {how}."
            )
    else:
        _, test_set = data.load(run["dataset"] if run else "mnist", args.data_dir)
        if (args.test_size or 0) > len(test_set):
            raise UserError(
                f"--test-size {args.test_size}: there are {len(test_set)} test images only, lower it."
            )
        test_set = test_set.first(args.test_size or len(test_set))
        pixels, labels = test_set.inputs, test_set.targets
        names = {"index": range(len(labels)), "label": labels.tolist()}

    with torch.no_grad():
        parts = pixels.split(TEST_BATCH[is_gpu(device)])
        output = torch.cat([network(data.normalize(part.to(device))) for part in parts])
    digits, probabilities = output.argmax(1).cpu(), output.exp().cpu()
    write(args.out, names, digits, probabilities)
    if labels is None:
        for path, digit, chances in zip(args.images, digits, probabilities, strict=True):
            errors.tell(f"{path}: {digit} ({100 * chances[digit]:.1f} %)")
    else:
        correct = (digits == labels).sum().item()
        errors.tell(f"accuracy {100 * correct / len(labels):.2f} %: {correct} of {len(labels)} test images")
        if run and run["test_images"] == len(labels):
            errors.tell(f"at the end of the run, in {run['precision']}: {run['test_accuracy']:.2f} %")
    errors.tell(f"predictions: {args.out}")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__)
    # fmt: off
    parser.add_argument("model", type=Path, help="the weights, results/models/RUN_ID.pt")
    parser.add_argument("images", type=Path, nargs="*", help="files of a digit each (default: the test set)")
    parser.add_argument("--out", type=Path, default=Path("predictions.csv"), metavar="FILE", help="the table")
    parser.add_argument("--invert", action="store_true", help="the files have dark digits on a bright ground")
    parser.add_argument("--test-size", type=at_least(1), metavar="N", help="the first N test images only")
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DIR, metavar="DIR", help="where MNIST is")
    parser.add_argument(
        "--precision", choices=("fp32", "tf32", "bf16", "fp16"),
        help="what the layers compute in (default: as the run, by its record in results/runs)",
    )
    parser.add_argument("--no-cuda", action="store_true", help="use the CPU even if there is a GPU")
    # fmt: on
    return parser.parse_args()


def network_of(path: Path) -> Net:
    """Return the network with the weights of a file, on the CPU.

    Raises:
        UserError: if the file cannot be read, or has the weights of another network.
    """
    try:
        weights = load_verified(path)
        if not isinstance(weights, dict):
            raise ValueError("it holds no weights by their names")
    except Exception as error:  # PyTorch raises many kinds for a damaged file
        raise UserError(
            f"the weights {path} cannot be read ({errors.reason(error)}): give what --save-model has left."
        ) from None
    if {"version", "model", "optimizer"} <= weights.keys():
        raise UserError(
            f"{path} is a checkpoint: end its run with --resume auto --save-model, and give the weights that "
            "it leaves then in results/models."
        )
    found = {str(name): tuple(getattr(value, "shape", ())) for name, value in weights.items()}
    width = next(iter(found.get("conv1.weight", ())), 1)
    with torch.device("meta"):  # shapes without numbers
        expected = {name: tuple(value.shape) for name, value in Net(width).state_dict().items()}
    if found != expected:
        missing = [name for name in expected if found.get(name) != expected[name]]
        unknown = [name for name in found if name not in expected]
        raise UserError(
            f"{path} has the weights of another network than Net: {few(missing)} missing or of another "
            f"shape, {few(unknown)} not known. Have a copy of predict.py make that network in place of Net."
        )
    if broken := [name for name, value in weights.items() if not is_usable(value)]:
        raise UserError(f"{path}: {few(broken)} are not tensors of numbers: give what --save-model has left.")
    network = Net(width)
    network.load_state_dict(weights)
    return network


def is_usable(value: torch.Tensor) -> bool:
    """Return whether a weight has as many finite numbers, each in its place, as its shape says."""
    plain = value.layout == torch.strided and value.device.type == "cpu" and value.is_floating_point()
    whole = plain and value.nbytes <= value.untyped_storage().nbytes()
    return whole and bool(value.isfinite().all())


def run_of(path: Path) -> dict[str, object] | None:
    """Return the row of the epoch that these weights are of; None if the run's record is not next to them.

    Raises:
        RecordError: if it cannot be read.
    """
    record = path.absolute().parent.with_name("runs") / f"{path.stem}.csv"
    return records.ends_with(records.read(record)) if record.exists() else None


def read_image(path: Path, invert: bool) -> torch.Tensor:
    """Read the image as bytes (1, 28, 28), black where it is not square.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        check_regular(path)
        with Image.open(path, formats=("PNG", "JPEG")) as image:  # for others PIL may start a program
            if image.mode[0] in "IF":  # PIL would make white of most of it
                raise ValueError("it has more than 8 bits for each pixel")
            upright = ImageOps.exif_transpose(image).convert("RGBA")
            # Transparent pixels are paper.
            grey = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright).convert("L")
    except Exception as error:  # whatever PIL makes of a damaged file
        raise UserError(
            f"the image {path} cannot be read ({errors.reason(error)}): give PNG or JPEG files."
        ) from None
    grey = ImageOps.pad(ImageOps.invert(grey) if invert else grey, SIZE)
    return torch.from_numpy(np.array(grey))[None]


def few(names: list[str]) -> str:
    """Name the first of them."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def write(path: Path, names: dict[str, list], digits: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Write a row for each image: `names`, the digit, its probability, and those of all ten.

    Raises:
        UserError: if the file cannot be written; its old content is kept.
    """
    rows = zip(*names.values(), digits.tolist(), probabilities.tolist(), strict=True)
    unable = f"predictions cannot be written to {path}"
    with explained(unable, "give another --out."), replacing(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*names, "predicted", "probability", *(f"p{digit}" for digit in range(10))])
        for *name, digit, of_each in rows:
            table.writerow([*name, digit, *(f"{one:.6f}" for one in (of_each[digit], *of_each))])


if __name__ == "__main__":
    errors.run(main)
