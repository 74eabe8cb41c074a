"""Data sets in memory: MNIST, generated digits, or your own.

`python -m manygpus.data.datasets` puts MNIST on disk first (manygpus/data/staging.py).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manygpus.config.known_datasets import DATASETS
from manygpus.data import staging, synthetic
from manygpus.errors import UserError

MEAN, STD = 0.1307, 0.3081  # of all pixels of the MNIST training images, scaled to 0..1

Part = tuple[torch.Tensor, torch.Tensor]  # images and labels


@dataclass(frozen=True)
class InMemoryDataset:
    """One part of a data set, for training or for testing; row i of `inputs` belongs to `targets[i]`.

    `name` is the data set's name in the record. `prepare` turns a batch of inputs, on the device, into
    what the model takes. `prepare_one` does so for one input, on the CPU, as a DataLoader's worker
    does; without it such a worker calls `prepare` on a batch of one.
    """

    name: str
    inputs: torch.Tensor
    targets: torch.Tensor
    prepare: Callable[[torch.Tensor], torch.Tensor] = torch.as_tensor  # unchanged
    prepare_one: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise UserError(f"{self.name} has {len(self.inputs)} inputs and {len(self.targets)} targets.")

    def __len__(self) -> int:
        return len(self.targets)

    def first(self, n: int) -> "InMemoryDataset":
        """Return the first `n` samples."""
        return replace(self, inputs=self.inputs[:n], targets=self.targets[:n])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sample, prepared by itself, and its target, for a DataLoader's worker."""
        if self.prepare_one:
            return self.prepare_one(self.inputs[index]), self.targets[index]
        return self.prepare(self.inputs[index : index + 1])[0], self.targets[index]


def load_dataset(dataset: str, data_dir: Path) -> tuple[InMemoryDataset, InMemoryDataset]:
    """Return the training split and the test split (10,000 images) of one of `DATASETS`.

    Images are uint8 (n, 1, 28, 28), labels int64 (n,).

    Raises:
        UserError: if MNIST is missing, unreadable or damaged.
    """
    # The checksums take 0.15 s: a file may have changed since it was staged.
    files = staging.check(dataset, data_dir, read=True)
    train_set, test_set = (
        InMemoryDataset(dataset, inputs, targets, prepare=normalize, prepare_one=normalize_one)
        for inputs, targets in READERS[dataset](files)
    )
    return train_set, test_set


def _read_mnist(files: dict[str, bytearray]) -> tuple[Part, Part]:
    return _tensors(files, "train"), _tensors(files, "t10k")


def _generate_digits(files: dict[str, bytearray]) -> tuple[Part, Part]:
    train_images = DATASETS["synthetic"].train_images
    return synthetic.digits(train_images, seed=1), synthetic.digits(10_000, seed=2)


# Data set -> its images and labels, to train on and to test on, from the files that `staging.check` has read.
READERS = {"mnist": _read_mnist, "synthetic": _generate_digits}


def _tensors(files: dict[str, bytearray], part: str) -> Part:
    # After a header of 16 (images) or 8 bytes (labels) there is one byte per pixel or label. Read
    # here rather than by torchvision, whose import takes longer than reading all of MNIST.
    pixels = torch.frombuffer(files[f"{part}-images-idx3-ubyte"], dtype=torch.uint8, offset=16)
    labels = torch.frombuffer(files[f"{part}-labels-idx1-ubyte"], dtype=torch.uint8, offset=8)
    return pixels.view(-1, 1, 28, 28), labels.long()


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Turn bytes (n, 1, 28, 28) into float32 with mean 0 and standard deviation 1, channels_last."""
    images = images.to(torch.float32, memory_format=torch.channels_last)
    return images.sub_(255 * MEAN).div_(255 * STD)


def normalize_one(image: torch.Tensor) -> torch.Tensor:
    """Do what torchvision's MNIST does for an image, bytes (1, 28, 28): to PIL, ToTensor, Normalize."""
    return _torchvision_transform()(image)


@functools.cache
def _torchvision_transform() -> Callable[[torch.Tensor], torch.Tensor]:
    # Imported only when used: torchvision takes longer to import than MNIST to load.
    from torchvision import transforms as t

    return t.Compose([t.ToPILImage(), t.ToTensor(), t.Normalize((MEAN,), (STD,))])


if __name__ == "__main__":
    staging.main()
