"""The results of an epoch, passed between the loop, the record and the checkpoints; and the evaluation."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manygpus.data.loaders import Batches
from manygpus.distributed import process_group
from manygpus.network.optim import diverged
from manygpus.training import clock


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


def evaluate(
    model: nn.Module,
    batches: Batches,
    loss: Callable[..., torch.Tensor],
    autocast: AbstractContextManager | None = None,
) -> EvalResult:
    """Evaluate the model on every sample of `batches` once: sum over this rank's shard, then over the ranks.

    Args:
        loss: called as `loss(output, targets, reduction="sum")`, like those of torch.nn.functional.
        autocast: the torch.autocast of the training step; without one the network computes as it is.

    Returns:
        The loss is the mean per sample. The accuracy is NaN unless the targets (n,) are class numbers.

    Raises:
        UserError: if the loss is not a number: the last training step went wrong.
    """
    model.eval()
    device = batches.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    started = clock.start(device)
    network = _without_ddp(model)
    with torch.no_grad():  # not inference_mode, which DataParallel's threads do not inherit
        for inputs, targets in batches:
            with autocast or nullcontext():
                output = network(inputs)
                total = loss(output, targets, reduction="sum")
            classes = not targets.is_floating_point() and targets.ndim == 1 and output.ndim == 2
            correct = output.argmax(1).eq(targets).sum() if classes else math.nan * total
            sums += torch.stack([total, correct, torch.full_like(total, len(targets))])
    seconds = clock.stop(device, started)
    total, correct, samples = process_group.sum_in_place(sums).tolist()
    if not math.isfinite(total):
        raise diverged(f"the test loss is {total}")
    return EvalResult(int(samples), seconds, total / samples, 100 * correct / samples)


def _without_ddp(model: nn.Module) -> nn.Module:
    """Return the network inside DistributedDataParallel, with rank 0's buffers on every rank.

    Its own forward would make the ranks meet at every step to send buffers (of BatchNorm, say), and
    they may have different numbers of steps.
    """
    if not isinstance(model, DistributedDataParallel):
        return model
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    return model.module
