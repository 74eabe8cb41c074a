"""The batches of an epoch: one global order, cut into equal shards for the ranks.

Epoch e has one permutation of the training set, made from (seed, e) and the same on every rank; an epoch
with more images than the data set has (--train-size) has several, one after the other.
Step k takes the k-th block of `batch_size` indices, and each rank a contiguous shard of that block.
So N ranks together see exactly the batches that one process sees.
"""

import multiprocessing
import os
import pickle
import random
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from tempfile import gettempdir
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from manygpus.config.options import Options, check_sizes
from manygpus.data.datasets import InMemoryDataset
from manygpus.devices import accelerator_of
from manygpus.distributed import process_group
from manygpus.errors import UserError, explain, first_line
from manygpus.launchers import DistEnv
from manygpus.signals import STOP_SIGNALS, obey_the_trainer

Batch = tuple[torch.Tensor, torch.Tensor]  # or what a collate_fn makes
Data = InMemoryDataset | Dataset  # any with a length and samples by number
LONGEST_TMPDIR_BYTES = 75
# Of what cannot be pickled, such as a lambda or an open file.
NO_PICKLE = (pickle.PicklingError, AttributeError, TypeError)


# github.com/pytorch/pytorch/issues/5040 and 14768
explain(
    r"Too many open files|unable to .*shared memory\(shm\).*",
    "loader processes hand over batches through /dev/shm and open files ({found}): lower --num-workers, "
    "raise `ulimit -n`, or give a container more (docker --shm-size=1g).",
)


class BatchTransform(Protocol):
    """A change of whole batches during training, such as augmentation; the same on all ranks.

    What is random in it is drawn for all steps of an epoch at once, so that N ranks, and a training that was
    stopped, change their batches as one process in one go does.
    """

    def draw(self, steps: int, generator: torch.Generator) -> Sequence[object]:
        """Return what is random, for each step of an epoch."""

    def __call__(self, inputs: torch.Tensor, drawn: object) -> torch.Tensor:
        """Return the inputs of a batch, changed as `drawn` for its step."""


class RandomShift:
    """Shifts all images of a batch by the same offset, at most one pixel down and right: a BatchTransform.

    Pixels that leave at one edge come in at the other: nearly always background.
    """

    def draw(self, steps: int, generator: torch.Generator) -> list[tuple[int, int]]:
        offsets = torch.randint(-1, 2, (steps, 2), generator=generator)
        return [tuple(offset) for offset in offsets.tolist()]

    def __call__(self, inputs: torch.Tensor, drawn: tuple[int, int]) -> torch.Tensor:
        return inputs.roll(drawn, dims=(2, 3)) if any(drawn) else inputs


def augmentation(options: Options) -> BatchTransform | None:
    """Return how `--recipe` changes training images: shifted in recipe fast, not at all in the others."""
    return RandomShift() if options.recipe == "fast" else None


def train_loader(
    dataset: Data,
    options: Options,
    dist_env: DistEnv,
    transform: BatchTransform | None = None,
    **dataloader_arguments: object,
) -> "Batches":
    """Return the training batches of this rank, in a new order every epoch; the last partial one is dropped.

    Args:
        transform: changes each batch.
        dataloader_arguments: arguments of torch's DataLoader, which reads a Dataset, such as a `collate_fn`.

    Raises:
        UserError: if the global batch does not divide evenly or exceeds the data set, a Dataset
            comes without --loader workers.
    """
    check_sizes(options, len(dataset), dist_env.world_size)
    samples_per_epoch = options.batch_size if options.dry_run else options.train_size or len(dataset)
    dataset = _first(dataset, samples_per_epoch)
    order = DistributedBatchSampler(
        len(dataset),
        options.batch_size,
        seed=options.seed,
        rank=dist_env.rank,
        world_size=dist_env.world_size,
        size=samples_per_epoch,
    )
    return _make_batches(dataset, order, options, dist_env.device, transform, **dataloader_arguments)


def hold_out(dataset: Data, n: int) -> tuple[Data, Data]:
    """Return a training set without `n` of its samples, and these: the same ones in every run.

    They are from all over the set, to validate on.

    Raises:
        UserError: if none is left to train on.
    """
    if n >= len(dataset):
        raise UserError(
            f"{n} samples to validate on leave none of the {len(dataset)} to train on: take fewer."
        )
    order = torch.randperm(len(dataset), generator=generator(0, 0))
    remaining = _subset(dataset, order[n:].sort().values)
    held_out = _subset(dataset, order[:n].sort().values)
    return remaining, held_out


def eval_loader(
    dataset: Data, options: Options, dist_env: DistEnv, **dataloader_arguments: object
) -> "Batches":
    """Return this rank's shard of the test set, every sample once on exactly one rank: no padding.

    Raises:
        UserError: if there are fewer samples than --test-size, or a Dataset comes without --loader workers.
    """
    if options.test_size and options.test_size > len(dataset):
        raise UserError(
            f"--test-size {options.test_size} is more than the {len(dataset)} test images: lower it."
        )
    batch_size = options.test_batch_size or accelerator_of(dist_env.device).eval_batch_size
    samples = options.test_size or len(dataset)
    if options.dry_run:
        samples = batch_size * dist_env.world_size
    dataset = _first(dataset, samples)
    order = UnpaddedEvalSampler(len(dataset), batch_size, rank=dist_env.rank, world_size=dist_env.world_size)
    return _make_batches(dataset, order, options, dist_env.device, transform=None, **dataloader_arguments)


class RankSampler(Sampler[list[int]]):
    """The indices of one rank, `step_size` per step, from step `first_step` on.

    A DataLoader iterates over it. `indices()` returns those of a whole epoch, int64 (n,).
    """

    step_size: int
    first_step = 0
    epoch = 0  # of a test, which has none

    def steps(self, device: torch.device | str = "cpu") -> Iterator[torch.Tensor]:
        """Yield the indices of each step, on `device`."""
        # The order of the whole epoch is copied at once: a copy per step would make a GPU wait.
        indices = self.indices().to(device)
        for start in range(self.first_step * self.step_size, len(indices), self.step_size):
            yield indices[start : start + self.step_size]

    def __iter__(self) -> Iterator[list[int]]:
        # Not tensors: a loader process would fetch each from this one, and a thread here would fail if the
        # loader process were killed meanwhile.
        return map(torch.Tensor.tolist, self.steps())


class DistributedBatchSampler(RankSampler):
    """This rank's shard of every batch of `epoch`: batch_size / world_size indices a step.

    `size` is the number of images per epoch (default: each of the `images` once).
    """

    def __init__(
        self, images: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, size: int = 0
    ) -> None:
        self.images, self.size, self.batch_size, self.seed = images, size or images, batch_size, seed
        self.rank, self.step_size = rank, batch_size // world_size
        self.epoch = 1

    def __len__(self) -> int:
        return self.size // self.batch_size

    def indices(self) -> torch.Tensor:
        random = generator(self.seed, self.epoch)
        # Pass by pass, as shorter epochs would go: no batch has many copies of an image.
        passes = [torch.randperm(self.images, generator=random) for _ in range(-(-self.size // self.images))]
        steps = torch.cat(passes)[: len(self) * self.batch_size].view(len(self), self.batch_size)
        start = self.rank * self.step_size
        return steps[:, start : start + self.step_size].flatten()


class UnpaddedEvalSampler(RankSampler):
    """This rank's contiguous shard of the test set, in order, in as many steps as every other rank's.

    So the ranks can communicate in each step. A rank with fewer samples than steps takes one per step.
    """

    def __init__(self, size: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.first, self.last = size * rank // world_size, size * (rank + 1) // world_size
        self.step_size, self.largest = batch_size, -(-size // world_size)

    def __len__(self) -> int:
        return min(-(-self.largest // self.step_size), self.last - self.first)

    def indices(self) -> torch.Tensor:
        return torch.arange(self.first, self.last)

    def steps(self, device: torch.device | str = "cpu") -> Iterator[torch.Tensor]:
        yield from self.indices().to(device).tensor_split(max(len(self), 1))[self.first_step : len(self)]


class WithSeeds(Sampler[tuple[str, list[int]]]):
    """The steps of `order`, each with what its random numbers come from.

    These are the same wherever the training began, and whichever process reads the samples.
    """

    def __init__(self, order: RankSampler, seed: int, rank: int) -> None:
        self.order, self.seed, self.rank = order, seed, rank

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[str, list[int]]]:
        for step, indices in enumerate(self.order, start=self.order.first_step):
            yield f"seed {self.seed}, rank {self.rank}, epoch {self.order.epoch}, step {step}", indices


class SeededByStep(Dataset):
    """The `samples` as a loader process reads them: step by step, with the random numbers of `WithSeeds`.

    PyTorch seeds such a process once, so in a training that resumes it would begin again with the numbers of
    the first epoch. The step's numbers are those of PyTorch, of Python's `random` and of NumPy.
    """

    def __init__(self, samples: Data) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, step: tuple[str, list[int]]) -> list:
        seed, indices = step
        random.seed(seed)
        np.random.seed(random.getrandbits(32))
        # That of the CPU, on which a loader process computes.
        torch.default_generator.manual_seed(random.getrandbits(32))
        several = getattr(self.samples, "__getitems__", None)  # as PyTorch asks
        return several(indices) if several else [self.samples[index] for index in indices]


def generator(seed: int, epoch: int) -> torch.Generator:
    """Return a random generator that is the same on every rank and different in every epoch.

    PyTorch's CPU generator reads only the low 32 bits of its seed, so both numbers are mixed into those.
    """
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)


class Batches:
    """Batches on `device`: (n, ...) inputs, prepared by the data set's `prepare`, and their (n, ...) targets.

    For MNIST: normalised float32 images (n, 1, 28, 28), channels_last, and int64 labels (n,).
    `len()` is the number of steps in an epoch; `set_epoch` sets the order of the next loop,
    and the step at which it begins: 0, unless an earlier process has done the first steps.
    """

    def __init__(
        self, order: RankSampler, device: torch.device, transform: BatchTransform | None = None
    ) -> None:
        self.order = order
        self.device = device
        self.transform = transform

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        self.order.epoch, self.order.first_step = epoch, first_step

    def _drawn(self) -> Sequence[object]:
        """Return what the transform has drawn for every step that remains; None for each without one."""
        first_step = self.order.first_step
        if self.transform is None:
            return [None] * (len(self) - first_step)
        drawn = self.transform.draw(len(self), generator(self.order.seed, self.order.epoch))
        return drawn[first_step:]

    def _transformed(self, inputs: torch.Tensor, drawn: object) -> torch.Tensor:
        return inputs if self.transform is None else self.transform(inputs, drawn)


class ResidentBatches(Batches):
    """The data set is kept on the device in its raw form (MNIST: 47 MB of bytes), and each batch is
    prepared there."""

    def __init__(
        self,
        dataset: InMemoryDataset,
        order: RankSampler,
        device: torch.device,
        transform: BatchTransform | None = None,
    ) -> None:
        super().__init__(order, device, transform)
        self.prepare = dataset.prepare
        self.inputs = dataset.inputs.to(device)
        self.targets = dataset.targets.to(device)

    def __iter__(self) -> Iterator[Batch]:
        for indices, drawn in zip(self.order.steps(self.device), self._drawn(), strict=True):
            inputs = self._transformed(self.inputs[indices], drawn)
            yield self.prepare(inputs), self.targets[indices]


class WorkerBatches(Batches):
    """The classic way: a DataLoader whose processes prepare one sample at a time.

    `seed` is that of their random numbers; without processes, samples draw from those of the training.
    Its loop raises a UserError if one of these processes has died.
    """

    def __init__(
        self,
        dataset: Data,
        order: RankSampler,
        device: torch.device,
        transform: BatchTransform | None = None,
        *,
        seed: int,
        num_workers: int = 0,
        **dataloader_arguments: object,
    ) -> None:
        super().__init__(order, device, transform)
        # The name of a socket has at most 107 bytes, and multiprocessing adds up to 32 to that of the folder.
        # With a longer one the training waits for its first batch for ever (github.com/riga/law/issues/184).
        if num_workers and len(os.fsencode(gettempdir())) > LONGEST_TMPDIR_BYTES:
            raise UserError(f"TMPDIR is too long for --loader workers ({gettempdir()}): export TMPDIR=/tmp.")
        batch_sampler = order
        if num_workers:
            dataset = SeededByStep(dataset)
            batch_sampler = WithSeeds(order, seed, process_group.rank())
        self.loader = DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=obey_the_trainer,
            pin_memory=accelerator_of(device).has_own_memory,
            **dataloader_arguments,
        )
        # Fork now, before the training: later a thread of the process group could be about to enter Python
        # at the fork, and in Python 3.11 the new process would then wait for it forever.
        if num_workers:
            order.first_step = len(order)  # no steps yet: this only starts the processes
            self._samples()
            order.first_step = 0

    def _samples(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Start a new pass of the loader; the first pass starts its processes."""
        # Slurm signals every process of a job, but the training process decides when to stop. The workers
        # inherit the blocked signals and never see them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            samples = iter(self.loader)
        except (OSError, RuntimeError, *NO_PICKLE) as error:
            sentence = self._why_not_started(error)
            if not sentence:
                raise
            sys.unraisablehook = lambda _: None  # what PyTorch has half made complains at its end
            raise UserError(sentence) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # PyTorch would raise a worker's death anywhere in the training, not in the loop below.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return samples

    def _why_not_started(self, error: Exception) -> str:
        """Return why no loader processes can be started; "" if it is not known."""
        if isinstance(error, OSError) or "new thread" in str(error):
            return (
                f"the processes of --loader workers cannot be started ({first_line(error)}): lower "
                "--num-workers, or ask your admin for more processes, open files or room in /dev/shm."
            )
        # Python 3.14 uses a fork server. Where it does not fork, the data set is sent by pickle.
        starts = (self.loader.multiprocessing_context or multiprocessing).get_start_method()
        if isinstance(error, NO_PICKLE) and starts != "fork":
            return (
                f"the data set cannot be sent to the processes of --loader workers ({first_line(error)}): "
                "define its functions at the top of a module, open its files in __getitem__, or give "
                "--num-workers 0."
            )
        return ""

    def __iter__(self) -> Iterator[Batch]:
        try:
            for batch, drawn in zip(self._samples(), self._drawn(), strict=True):
                batch = _to_device(batch, self.device)
                if self.transform is not None:
                    inputs, *others = batch
                    batch = (self.transform(inputs, drawn), *others)
                yield batch
        except (RuntimeError, ConnectionError, FileNotFoundError, EOFError) as error:
            # Samples are fetched from the process that made them, which may die meanwhile.
            died = "exited unexpectedly" in str(error) or not isinstance(error, RuntimeError)
            if not died or not self.loader.num_workers or "in DataLoader worker process" in str(error):
                raise
            raise UserError(
                f"a loader process was killed ({first_line(error) or type(error).__name__}): perhaps the "
                "memory was full, then lower --num-workers, or ask Slurm for more with --mem."
            ) from None


def _first(dataset: Data, n: int) -> Data:
    if isinstance(dataset, InMemoryDataset):
        return dataset.first(n)
    return Subset(dataset, range(min(n, len(dataset))))


def _subset(dataset: Data, indices: torch.Tensor) -> Data:
    if isinstance(dataset, InMemoryDataset):
        return replace(dataset, inputs=dataset.inputs[indices], targets=dataset.targets[indices])
    return Subset(dataset, indices.tolist())


def _to_device(batch: object, device: torch.device) -> object:
    """Move a batch, however it is nested, to the device."""
    if isinstance(batch, torch.Tensor):
        # Only images have a channels_last layout.
        layout = torch.channels_last if batch.ndim == 4 else torch.preserve_format
        return batch.to(device, non_blocking=True, memory_format=layout)
    if isinstance(batch, Mapping):
        return {name: _to_device(value, device) for name, value in batch.items()}
    if hasattr(batch, "to"):  # such as a PackedSequence, which is a tuple, too
        return batch.to(device)
    if isinstance(batch, (list, tuple)):
        return tuple(_to_device(part, device) for part in batch)
    return batch


def _make_batches(
    dataset: Data,
    order: RankSampler,
    options: Options,
    device: torch.device,
    transform: BatchTransform | None,
    **dataloader_arguments: object,
) -> Batches:
    if options.loader == "resident":
        if dataloader_arguments or not isinstance(dataset, InMemoryDataset):
            raise UserError(
                "--loader resident keeps tensors on the device, but these samples are read one by one: add "
                "--loader workers, and --num-workers for processes that read."
            )
        return ResidentBatches(dataset, order, device, transform)
    # A separate generator, so that an epoch's start draws none of dropout's numbers.
    defaults = {
        "num_workers": options.num_workers,
        "generator": generator(options.seed, process_group.rank()),
    }
    arguments = defaults | dataloader_arguments
    return WorkerBatches(dataset, order, device, transform, seed=options.seed, **arguments)
