"""The batches of an epoch: one global order, cut into equal shares for the ranks.

Epoch e has one permutation of the training set, made from (seed, e) and the same on every rank.
Step k takes the k-th run of `batch_size` indices of it, and each rank a contiguous share of that.
So N ranks together see exactly the batches that one process sees.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainkit.data import Split
from trainkit.errors import UserError
from trainkit.options import Options

MEAN, STD = 0.1307, 0.3081  # of all pixels of the MNIST training images, scaled to 0..1

Batch = tuple[torch.Tensor, torch.Tensor]


def training(
    split: Split, options: Options, device: torch.device, rank: int = 0, world_size: int = 1
) -> "Batches":
    """The training batches of this rank, in a new order every epoch; the last partial one is dropped.

    Raises:
        UserError: if the global batch does not divide among the ranks or exceeds the data set.
    """
    batch = options.batch_size
    size = batch if options.dry_run else options.train_size
    images, labels = split.images[:size], split.labels[:size]
    check_divides(batch, world_size, "processes")
    if batch > len(labels):
        raise UserError(f"--batch-size {batch} is more than the {len(labels)} training images: lower it.")
    sampler = GlobalOrder(len(labels), batch, options.seed, rank, world_size)
    return _make(Split(images, labels), sampler, options, device)


def testing(
    split: Split, options: Options, device: torch.device, rank: int = 0, world_size: int = 1
) -> "Batches":
    """This rank's share of the test set, every image once on exactly one rank: no padding."""
    if options.dry_run:
        split = Split(*(part[: options.test_batch_size * world_size] for part in split))
    sampler = TestShare(len(split.labels), options.test_batch_size, rank, world_size)
    return _make(split, sampler, options, device)


def check_divides(batch_size: int, parts: int, what: str) -> None:
    """Raise a UserError with the nearest sizes that would do if `batch_size` is not a multiple of `parts`."""
    if batch_size % parts:
        below, above = batch_size // parts * parts, -(-batch_size // parts) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"--batch-size {batch_size} does not divide among {parts} {what}: the nearest is {nearest}."
        )


class GlobalOrder(Sampler[torch.Tensor]):
    """Yields this rank's indices, int64 (batch_size / world_size,), for every step of `epoch`."""

    def __init__(self, size: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 1

    def __len__(self) -> int:
        return self.size // self.batch_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(self.size, generator=generator(self.seed, self.epoch))
        share = self.batch_size // self.world_size
        for start in range(self.rank * share, len(self) * self.batch_size, self.batch_size):
            yield order[start : start + share]


class TestShare(Sampler[torch.Tensor]):
    """Yields the indices of this rank's contiguous share of the test set, in order."""

    __test__ = False  # not a test case, whatever its name

    def __init__(self, size: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.indices = torch.arange(size * rank // world_size, size * (rank + 1) // world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.indices.split(self.batch_size))


def generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers that are the same on every rank and different in every epoch.

    PyTorch's CPU generator reads the low 32 bits of its seed only, so both numbers are mixed into those.
    """
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)


class Batches:
    """Batches on `device`: normalised float images (n, 1, 28, 28) in channels_last order, int64 labels (n,).

    `len()` is the number of steps of an epoch; `set_epoch` picks the order that the next loop follows.
    """

    def __init__(self, sampler: GlobalOrder | TestShare, device: torch.device, shift: bool) -> None:
        self.sampler, self.device, self.shift = sampler, device, shift

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        if not self.shift:
            yield from self._load()
            return
        # One random shift of at most a pixel for the whole batch; digits have a border of four.
        random = generator(self.sampler.seed, self.sampler.epoch)
        shifts = torch.randint(-1, 2, (len(self), 2), generator=random).tolist()
        for (images, labels), offset in zip(self._load(), shifts, strict=True):
            yield images.roll(offset, dims=(2, 3)), labels

    def _load(self) -> Iterator[Batch]:
        raise NotImplementedError


class ResidentBatches(Batches):
    """The data set lives on the device as bytes (MNIST: 47 MB); each batch is normalised there."""

    def __init__(
        self, split: Split, sampler: GlobalOrder | TestShare, device: torch.device, shift: bool
    ) -> None:
        super().__init__(sampler, device, shift)
        self.images, self.labels = split.images.to(device), split.labels.to(device)

    def _load(self) -> Iterator[Batch]:
        for indices in self.sampler:
            indices = indices.to(self.device, non_blocking=True)
            images = self.images[indices].float().sub_(255 * MEAN).div_(255 * STD)
            yield images.contiguous(memory_format=torch.channels_last), self.labels[indices]


class WorkerBatches(Batches):
    """The classic way: a DataLoader whose processes decode and normalise one image at a time."""

    def __init__(
        self,
        split: Split,
        sampler: GlobalOrder | TestShare,
        device: torch.device,
        shift: bool,
        num_workers: int,
    ) -> None:
        super().__init__(sampler, device, shift)
        self.loader = DataLoader(
            OneByOne(split),
            batch_sampler=sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=device.type == "cuda",
        )

    def _load(self) -> Iterator[Batch]:
        for images, labels in self.loader:
            images = images.to(self.device, non_blocking=True, memory_format=torch.channels_last)
            yield images, labels.to(self.device, non_blocking=True)


class OneByOne(Dataset):
    """What torchvision's MNIST does for each image: to PIL, ToTensor, Normalize."""

    def __init__(self, split: Split) -> None:
        # Imported by those who use it: torchvision takes longer to import than MNIST to load.
        from PIL import Image
        from torchvision import transforms

        to_tensor, normalize = transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))
        self.transform = lambda pixels: normalize(to_tensor(Image.fromarray(pixels)))
        self.images, self.labels = split.images.squeeze(1).numpy(), split.labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


def _make(split: Split, sampler: GlobalOrder | TestShare, options: Options, device: torch.device) -> Batches:
    shift = options.recipe == "fast" and isinstance(sampler, GlobalOrder)
    if options.loader == "resident":
        return ResidentBatches(split, sampler, device, shift)
    return WorkerBatches(split, sampler, device, shift, options.num_workers)
