"""What an epoch amounts to: the numbers that travel between the loop, the log and the checkpoints."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Trained(NamedTuple):
    """One training epoch: optimizer steps, seconds of the slowest rank, mean loss per image."""

    steps: int
    seconds: float
    loss: float
    learning_rate: float  # of the first step


class Tested(NamedTuple):
    """One evaluation: seconds of the slowest rank, mean loss per image, percent correct."""

    seconds: float
    loss: float
    accuracy: float
    peak_memory_mb: float  # so far, of the fullest rank


@dataclass
class Part:
    """The beginning of an epoch, as a checkpoint within it keeps it."""

    steps: int
    seconds: float
    learning_rate: float  # of the first step
    losses: torch.Tensor  # (steps,), each the mean over all ranks
