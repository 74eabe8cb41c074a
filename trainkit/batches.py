"""The batches of an epoch: one global order, cut into equal shares for the ranks.

Epoch e has one permutation of the training set, made from (seed, e) and the same on every rank.
Step k takes the k-th run of `batch_size` indices of it, and each rank a contiguous share of that.
So N ranks together see exactly the batches that one process sees.
"""

import signal
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
    check_divides(batch, world_size, "processes")
    available, size = len(split.labels), options.train_size or len(split.labels)
    if size > available:
        raise UserError(f"--train-size {size} is more than the {available} training images: lower it.")
    if batch > size:
        raise UserError(f"--batch-size {batch} is more than the {size} training images: lower it.")
    size = batch if options.dry_run else size
    order = GlobalOrder(size, batch, options.seed, rank, world_size)
    return _make(Split(split.images[:size], split.labels[:size]), order, options, device)


def testing(
    split: Split, options: Options, device: torch.device, rank: int = 0, world_size: int = 1
) -> "Batches":
    """This rank's share of the test set, every image once on exactly one rank: no padding."""
    if options.dry_run:
        split = Split(*(part[: options.test_batch_size * world_size] for part in split))
    share = TestShare(len(split.labels), options.test_batch_size, rank, world_size)
    return _make(split, share, options, device)


def check_divides(batch_size: int, parts: int, what: str) -> None:
    """Raise a UserError with the nearest sizes that would do if `batch_size` is not a multiple of `parts`."""
    if batch_size % parts:
        below, above = batch_size // parts * parts, -(-batch_size // parts) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"--batch-size {batch_size} does not divide among {parts} {what}: the nearest is {nearest}."
        )


class Share(Sampler[torch.Tensor]):
    """The indices that one rank takes, in steps of `step_size`, from step `first_step` on."""

    step_size: int
    first_step = 0

    def indices(self) -> torch.Tensor:
        """All indices of an epoch, int64 (n,)."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.indices().split(self.step_size)[self.first_step :])


class GlobalOrder(Share):
    """This rank's share of every batch of `epoch`: batch_size / world_size indices a step."""

    def __init__(self, size: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.step_size = rank, batch_size // world_size
        self.epoch = 1

    def __len__(self) -> int:
        return self.size // self.batch_size

    def indices(self) -> torch.Tensor:
        order = torch.randperm(self.size, generator=generator(self.seed, self.epoch))
        steps = order[: len(self) * self.batch_size].view(len(self), self.batch_size)
        start = self.rank * self.step_size
        return steps[:, start : start + self.step_size].flatten()


class TestShare(Share):
    """This rank's contiguous share of the test set, in order; the last step may be smaller."""

    __test__ = False  # not a test case, whatever its name

    def __init__(self, size: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.first, self.last = size * rank // world_size, size * (rank + 1) // world_size
        self.step_size = batch_size

    def __len__(self) -> int:
        return -(-(self.last - self.first) // self.step_size)

    def indices(self) -> torch.Tensor:
        return torch.arange(self.first, self.last)


def generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers that are the same on every rank and different in every epoch.

    PyTorch's CPU generator reads the low 32 bits of its seed only, so both numbers are mixed into those.
    """
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)


class Batches:
    """Batches on `device`: normalised float32 images (n, 1, 28, 28), channels_last, and int64 labels (n,).

    `len()` is the number of steps of an epoch; `set_epoch` picks the order that the next loop follows,
    and the step at which it begins: 0, unless an earlier process has done the steps before.
    """

    def __init__(self, share: Share, device: torch.device, shift: bool) -> None:
        self.share, self.device, self.shift = share, device, shift

    def __len__(self) -> int:
        return len(self.share)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        self.share.epoch, self.share.first_step = epoch, first_step

    def __iter__(self) -> Iterator[Batch]:
        raise NotImplementedError

    def _offsets(self) -> list[tuple[int, int]]:
        """For every step the pixels, down and right, by which its images are shifted: at most one."""
        first = self.share.first_step
        if not self.shift:
            return [(0, 0)] * (len(self) - first)
        random = generator(self.share.seed, self.share.epoch)
        pairs = torch.randint(-1, 2, (len(self), 2), generator=random)[first:]
        return [tuple(pair) for pair in pairs.tolist()]


class ResidentBatches(Batches):
    """The data set lives on the device as bytes (MNIST: 47 MB); each batch is normalised there."""

    def __init__(self, split: Split, share: Share, device: torch.device, shift: bool) -> None:
        super().__init__(share, device, shift)
        self.images, self.labels = split.images.to(device), split.labels.to(device)

    def __iter__(self) -> Iterator[Batch]:
        # The order of the whole epoch goes to the device at once: a copy per step would make it wait.
        steps = self.share.indices().to(self.device).split(self.share.step_size)[self.share.first_step :]
        for indices, offset in zip(steps, self._offsets(), strict=True):
            images = _shifted(self.images[indices], offset)
            images = images.to(torch.float32, memory_format=torch.channels_last)
            yield images.sub_(255 * MEAN).div_(255 * STD), self.labels[indices]


class WorkerBatches(Batches):
    """The classic way: a DataLoader whose processes decode and normalise one image at a time."""

    def __init__(
        self, split: Split, share: Share, device: torch.device, shift: bool, num_workers: int
    ) -> None:
        super().__init__(share, device, shift)
        self.loader = DataLoader(
            OneByOne(split),
            batch_sampler=share,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=_ignore_the_stop_signal,
            generator=torch.Generator(),  # its own: beginning an epoch draws nothing from dropout's
            pin_memory=device.type == "cuda",
        )

    def __iter__(self) -> Iterator[Batch]:
        for (images, labels), offset in zip(self.loader, self._offsets(), strict=True):
            images = images.to(self.device, non_blocking=True, memory_format=torch.channels_last)
            yield _shifted(images, offset), labels.to(self.device, non_blocking=True)


class OneByOne(Dataset):
    """What torchvision's MNIST does for each image: to PIL, ToTensor, Normalize."""

    def __init__(self, split: Split) -> None:
        # Imported by those who use it: torchvision takes longer to import than MNIST to load.
        from torchvision import transforms as t

        self.images, self.labels = split.images, split.labels.tolist()
        self.transform = t.Compose([t.ToPILImage(), t.ToTensor(), t.Normalize((MEAN,), (STD,))])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


def _ignore_the_stop_signal(worker: int) -> None:
    """Slurm signals every process of a job, and the one that trains decides when to stop."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _shifted(images: torch.Tensor, offset: tuple[int, int]) -> torch.Tensor:
    # What leaves at one edge comes in at the other: nearly always background.
    return images.roll(offset, dims=(2, 3)) if any(offset) else images


def _make(split: Split, share: Share, options: Options, device: torch.device) -> Batches:
    shift = options.recipe == "fast" and isinstance(share, GlobalOrder)
    if options.loader == "resident":
        return ResidentBatches(split, share, device, shift)
    return WorkerBatches(split, share, device, shift, options.num_workers)
