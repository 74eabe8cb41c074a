"""Generate a table for tabular.py: machines in use, with numbers, categories, and the state of each.

The states are drawn at random, so two machines with the same row may be in different states. Even the best
classifier is therefore often wrong. It can only know how likely each state is.
"""

import torch

from manygpus import InMemoryDataset

CLASSES = ("fine", "worn", "failing")  # about 67, 30 and 3 % of the rows
NUMBERS = 8  # columns with readings of sensors
CATEGORIES = (12, 8, 5, 3)  # columns with categories: how many sites, models, makers and shifts


def load() -> tuple[InMemoryDataset, InMemoryDataset]:
    """Return a table of 20,000 rows to train on and one of 5,000 for the test, the same in every call.

    Inputs are float32 (n, 12): the numbers, then the category of each column, counted from 0. They are one
    tensor, because an `InMemoryDataset` holds one. Targets are int64 (n,).
    """
    numbers, categories, labels = _rows(20_000, seed=1)
    test_numbers, test_categories, test_labels = _rows(5_000, seed=2)
    # Both are scaled by the training rows, because the training must know nothing about the test rows.
    std, mean = torch.std_mean(numbers, dim=0)
    train = _split((numbers - mean) / std, categories, labels)
    test = _split((test_numbers - mean) / std, test_categories, test_labels)
    return train, test


def balanced_weights(labels: torch.Tensor) -> torch.Tensor:
    """Return a weight for each class, float32: larger for rare classes, and 1 on average over the labels."""
    counts = labels.bincount(minlength=len(CLASSES))
    return len(labels) / (len(CLASSES) * counts.clamp(min=1))


def _rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers (count, 8), categories int64 (count, 4) and labels int64 (count,)."""
    law = torch.Generator().manual_seed(0)  # the rules are the same for all rows
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, NUMBERS, generator=random)
    categories = [torch.randint(size, (count,), generator=random) for size in CATEGORIES]
    scores = hidden @ torch.randn(NUMBERS, len(CLASSES), generator=law)
    for size, column in zip(CATEGORIES, categories, strict=True):
        scores += torch.randn(size, len(CLASSES), generator=law)[column] * 0.8
    # Effects that no sum over the columns has: two readings together, and a reading that depends on the site.
    scores[:, 2] += 1.5 * hidden[:, 0] * hidden[:, 1]
    scores[:, 1] += 1.5 * hidden[:, 2] * torch.randn(CATEGORIES[0], generator=law)[categories[0]]
    scores += torch.tensor([3.0, 0.0, -4.3])
    labels = scores.softmax(1).multinomial(1, generator=random)[:, 0]
    numbers = hidden.clone()
    numbers[:, 4:] = numbers[:, 4:].mul(0.5).exp()  # skewed, as counts and prices usually are
    return numbers, torch.stack(categories, dim=1), labels


def _split(numbers: torch.Tensor, categories: torch.Tensor, labels: torch.Tensor) -> InMemoryDataset:
    return InMemoryDataset("machines", torch.cat([numbers, categories.float()], dim=1), labels)
