"""Read a stream of files on several ranks, with several loader workers each. Two functions need a change.

Try: python exercises/19_shards/mine/stream.py
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch.utils.data import DataLoader, IterableDataset

ROWS = 6  # samples in each file


class Stream(IterableDataset):
    """The samples of many files. One worker of one rank reads each file, in a new order in every epoch."""

    def __init__(self, files: list[list[int]], rank: int, size: int) -> None:
        self.files = files
        self.rank = rank
        self.size = size
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            yield from file


def batches(stream: Stream, batch_size: int, workers: int) -> Iterable:
    """Return the batches of an epoch on this rank, as many as on every other rank."""
    return DataLoader(stream, batch_size, num_workers=workers)


def files(number: int) -> list[list[int]]:
    """Make files whose samples are their own numbers."""
    return [list(range(ROWS * file, ROWS * (file + 1))) for file in range(number)]


if __name__ == "__main__":
    samples = Counter()
    for rank in range(2):
        of_rank = [batch.tolist() for batch in batches(Stream(files(8), rank, 2), batch_size=4, workers=2)]
        print(f"rank {rank}: {len(of_rank)} batches, the first {of_rank[:3]}")
        samples.update(number for batch in of_rank for number in batch)
    counts = samples.values()
    print(f"{len(samples)} of {8 * ROWS} samples, each read {min(counts)} to {max(counts)} times")
