"""The batches of an epoch: one global order, cut into equal shares for the ranks.

Epoch e has one permutation of the training set, made from (seed, e) and the same on every rank; an epoch
with more images than the data set has (--train-size) has several, one after the other.
Step k takes the k-th block of `batch_size` indices, and each rank a contiguous share of that block.
So N ranks together see exactly the batches that one process sees.
"""

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from trainkit.config.options import Options, check_sizes
from trainkit.data.datasets import Split
from trainkit.devices import accelerator_of
from trainkit.distributed import process_group
from trainkit.errors import UserError, first_line
from trainkit.signals import STOP_SIGNALS

Batch = tuple[torch.Tensor, torch.Tensor]  # or what a collate_fn makes
Data = Split | Dataset  # any with a length and samples by number
# Images per evaluation step without --test-batch-size: between small steps a GPU would wait.
LONGEST_TMPDIR_BYTES = 75


def training(
    split: Data, options: Options, device: torch.device, rank: int = 0, world_size: int = 1, **loader: object
) -> "Batches":
    """Return the training batches of this rank, in a new order every epoch; the last partial one is dropped.

    A Dataset is read by torch's DataLoader, which gets the arguments in `loader`, such as a `collate_fn`.

    Raises:
        UserError: if the global batch does not divide among the ranks or exceeds the data set, a Dataset
            comes without --loader workers.
    """
    check_sizes(options, len(split), world_size)
    size = options.batch_size if options.dry_run else options.train_size or len(split)
    split = _first(split, size)
    order = DistributedBatchSampler(len(split), options.batch_size, options.seed, rank, world_size, size)
    return _make_batches(split, order, options, device, **loader)


def without(split: Data, n: int) -> tuple[Data, Data]:
    """Return a training set without `n` of its samples, and these: the same ones in every run.

    They are from all over the set, to validate on.

    Raises:
        UserError: if none is left to train on.
    """
    if n >= len(split):
        raise UserError(f"{n} samples to validate on leave none of the {len(split)} to train on: take fewer.")
    order = torch.randperm(len(split), generator=generator(0, 0))
    parts = [part.sort().values for part in (order[n:], order[:n])]
    if isinstance(split, Split):
        return tuple(replace(split, inputs=split.inputs[own], targets=split.targets[own]) for own in parts)
    return tuple(Subset(split, own.tolist()) for own in parts)


def testing(
    split: Data, options: Options, device: torch.device, rank: int = 0, world_size: int = 1, **loader: object
) -> "Batches":
    """Return this rank's share of the test set, every sample once on exactly one rank: no padding.

    Raises:
        UserError: if there are fewer samples than --test-size, or a Dataset comes without --loader workers.
    """
    if (size := options.test_size or 1) > len(split):
        raise UserError(f"--test-size {size} is more than the {len(split)} test images: lower it.")
    batch = options.test_batch_size or accelerator_of(device).eval_batch_size
    split = _first(split, batch * world_size if options.dry_run else options.test_size or len(split))
    order = UnpaddedTestSampler(len(split), batch, rank, world_size)
    return _make_batches(split, order, options, device, **loader)


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
    """This rank's share of every batch of `epoch`: batch_size / world_size indices a step.

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


class UnpaddedTestSampler(RankSampler):
    """This rank's contiguous share of the test set, in order, in as many steps as every other rank's.

    So the ranks can exchange data in each step. A rank with fewer samples than steps takes one per step.
    """

    __test__ = False  # its name looks like a test case to pytest

    def __init__(self, size: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.first, self.last = size * rank // world_size, size * (rank + 1) // world_size
        self.step_size, self.largest = batch_size, -(-size // world_size)

    def __len__(self) -> int:
        return min(-(-self.largest // self.step_size), self.last - self.first)

    def indices(self) -> torch.Tensor:
        return torch.arange(self.first, self.last)

    def steps(self, device: torch.device | str = "cpu") -> Iterator[torch.Tensor]:
        yield from self.indices().to(device).tensor_split(max(len(self), 1))[self.first_step : len(self)]


class WithNumbers(Sampler[tuple[str, list[int]]]):
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


class OfTheStep(Dataset):
    """The `samples` as a loader process reads them: step by step, with the random numbers of `WithNumbers`.

    PyTorch seeds such a process once, so in a training that goes on it would begin again with the numbers of
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
    """Batches on `device`: (n, ...) inputs, prepared by `split.prepare`, and their (n, ...) targets.

    For MNIST: normalised float32 images (n, 1, 28, 28), channels_last, and int64 labels (n,).
    `len()` is the number of steps in an epoch; `set_epoch` sets the order of the next loop,
    and the step at which it begins: 0, unless an earlier process has done the first steps.
    """

    def __init__(self, split: Split, order: RankSampler, device: torch.device, shift: bool) -> None:
        self.split, self.order, self.device, self.shift = split, order, device, shift

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        self.order.epoch, self.order.first_step = epoch, first_step

    def _offsets(self) -> list[tuple[int, int]]:
        """Return for every step the shift of its images, down and right: at most one pixel."""
        first = self.order.first_step
        if not self.shift:
            return [(0, 0)] * (len(self) - first)
        random = generator(self.order.seed, self.order.epoch)
        pairs = torch.randint(-1, 2, (len(self), 2), generator=random)[first:]
        return [tuple(pair) for pair in pairs.tolist()]


class ResidentBatches(Batches):
    """The data set is kept on the device in its raw form (MNIST: 47 MB of bytes), and each batch is
    prepared there."""

    def __init__(self, split: Split, order: RankSampler, device: torch.device, shift: bool) -> None:
        super().__init__(split, order, device, shift)
        self.inputs, self.targets = split.inputs.to(device), split.targets.to(device)

    def __iter__(self) -> Iterator[Batch]:
        for indices, offset in zip(self.order.steps(self.device), self._offsets(), strict=True):
            inputs = _shifted(self.inputs[indices], offset)
            yield self.split.prepare(inputs), self.targets[indices]


class WorkerBatches(Batches):
    """The classic way: a DataLoader whose processes prepare one sample at a time.

    `seed` is that of their random numbers; without processes, samples draw from those of the training.
    Its loop raises a UserError if one of these processes has died.
    """

    def __init__(
        self,
        split: Data,
        order: RankSampler,
        device: torch.device,
        shift: bool,
        seed: int,
        **loader: object,
    ) -> None:
        super().__init__(split, order, device, shift)
        num_workers = loader["num_workers"]
        # The name of a socket has at most 107 bytes, and multiprocessing adds up to 32 to that of the folder.
        # With a longer one the training waits for its first batch for ever (github.com/riga/law/issues/184).
        if num_workers and len(os.fsencode(gettempdir())) > LONGEST_TMPDIR_BYTES:
            raise UserError(f"TMPDIR is too long for --loader workers ({gettempdir()}): export TMPDIR=/tmp.")
        in_workers = OfTheStep(split), WithNumbers(order, seed, process_group.rank())
        samples, steps = in_workers if num_workers else (split, order)
        self.loader = DataLoader(
            samples,
            batch_sampler=steps,
            persistent_workers=num_workers > 0,
            worker_init_fn=_obey_the_parent,
            pin_memory=accelerator_of(device).has_own_memory,
            **loader,
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
        except (OSError, RuntimeError) as error:
            if not isinstance(error, OSError) and "new thread" not in str(error):
                raise
            sys.unraisablehook = lambda _: None  # what PyTorch has half made complains at its end
            raise UserError(
                f"the processes of --loader workers cannot be started ({first_line(error)}): lower "
                "--num-workers, or ask your admin for more processes, open files or room in /dev/shm."
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # PyTorch would raise a worker's death anywhere in the training, not in the loop below.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return samples

    def __iter__(self) -> Iterator[Batch]:
        try:
            for batch, offset in zip(self._samples(), self._offsets(), strict=True):
                batch = _on(self.device, batch)
                yield (_shifted(batch[0], offset), *batch[1:]) if any(offset) else batch
        except (RuntimeError, ConnectionError, FileNotFoundError, EOFError) as error:
            # Samples are fetched from the process that made them, which may die meanwhile.
            died = "exited unexpectedly" in str(error) or not isinstance(error, RuntimeError)
            if not died or not self.loader.num_workers or "in DataLoader worker process" in str(error):
                raise
            raise UserError(
                f"a loader process was killed ({first_line(error) or type(error).__name__}): perhaps the "
                "memory was full, then lower --num-workers, or ask Slurm for more with --mem."
            ) from None


def _obey_the_parent(worker: int) -> None:
    """In a loader process, exit on the parent's SIGTERM, sent at the end, though the signal is blocked."""
    parent = multiprocessing.parent_process().pid
    if not Path(f"/proc/{parent}").exists():  # it was killed while this one started
        os._exit(0)

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    try:
        threading.Thread(target=wait, daemon=True).start()
    except RuntimeError:  # no more threads may be started
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _first(split: Data, n: int) -> Data:
    return split.first(n) if isinstance(split, Split) else Subset(split, range(min(n, len(split))))


def _on(device: torch.device, batch: object) -> object:
    """Move a batch, however it is nested, to the device."""
    if isinstance(batch, torch.Tensor):
        # Only images have a channels_last layout.
        layout = torch.channels_last if batch.ndim == 4 else torch.preserve_format
        return batch.to(device, non_blocking=True, memory_format=layout)
    if isinstance(batch, Mapping):
        return {name: _on(device, one) for name, one in batch.items()}
    if hasattr(batch, "to"):  # such as a PackedSequence, which is a tuple, too
        return batch.to(device)
    return tuple(_on(device, one) for one in batch) if isinstance(batch, (list, tuple)) else batch


def _shifted(images: torch.Tensor, offset: tuple[int, int]) -> torch.Tensor:
    # Pixels that leave at one edge come in at the other: nearly always background.
    return images.roll(offset, dims=(2, 3)) if any(offset) else images


def _make_batches(
    split: Data, order: RankSampler, options: Options, device: torch.device, **loader: object
) -> Batches:
    images = isinstance(split, Split) and split.inputs.ndim == 4
    shift = options.recipe == "fast" and isinstance(order, DistributedBatchSampler) and images
    if options.loader == "resident":
        if loader or not isinstance(split, Split):
            raise UserError(
                "--loader resident keeps tensors on the device, but these samples are read one by one: add "
                "--loader workers, and --num-workers for processes that read."
            )
        made = ResidentBatches(split, order, device, shift)
    else:
        # A separate generator, so that an epoch's start draws none of dropout's numbers.
        own = generator(options.seed, process_group.rank())
        loader = {"num_workers": options.num_workers, "generator": own} | loader
        made = WorkerBatches(split, order, device, shift, options.seed, **loader)
    return made
