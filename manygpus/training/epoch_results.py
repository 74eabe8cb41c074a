"""The results of an epoch, as they pass between the loop, the record and the checkpoints."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class TrainResult(NamedTuple):
    """One training epoch: optimizer steps, seconds of the slowest rank, mean loss per sample."""

    steps: int
    seconds: float
    loss: float
    learning_rate: float  # of the first step


class EvalResult(NamedTuple):
    """One evaluation: samples of all ranks, seconds of the slowest, mean loss per sample, percent correct."""

    samples: int
    seconds: float
    loss: float
    accuracy: float  # NaN where the targets are not class numbers


NOT_EVALUATED = EvalResult(0, 0.0, math.nan, math.nan)


class Metric(NamedTuple):
    """A result of an evaluation besides loss and accuracy, such as Metric("recall", "cats", 0.5)."""

    metric: str
    of: str
    value: float  # NaN where it is not defined


@dataclass
class PartialEpoch:
    """The part of an epoch done before a checkpoint within it."""

    steps: int
    seconds: float
    learning_rate: float  # of the first step
    losses: torch.Tensor  # (steps,), each the mean over all ranks
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # the same for other numbers, by name
