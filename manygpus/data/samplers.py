"""A sampler for a loop of your own that resumes within an epoch."""

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import DistributedSampler


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that skips the first `done` samples of an epoch, which are already trained on.

    Set `done` to the number of steps that the epoch has done, times the batch size of a rank (of all
    micro-batches in a step): to 0 for a new epoch. Its length, and so that of the loader, stays that of a
    whole epoch. One process without a group needs `num_replicas=1, rank=0`.

    Give the loader a generator of its own, and seed that before each epoch: without one, the loader uses up a
    random number of the training whenever a loop over it begins, and so once more in an epoch with a resume.
    """

    done: int = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.done, None)
