"""The evaluation of a network on every sample of a data set, once, over all ranks."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manygpus.data.loaders import Batches
from manygpus.distributed import process_group
from manygpus.errors import diverged
from manygpus.training import clock
from manygpus.training.epoch_results import EvalResult


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
