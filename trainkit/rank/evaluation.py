"""Evaluation on the test set: every sample is counted once over all ranks."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.rank.batches import Batches
from trainkit.rank.epoch import Tested, diverged
from trainkit.runtime import clock, process_group


def evaluate(model: nn.Module, batches: Batches, loss: Callable[..., torch.Tensor]) -> Tested:
    """Evaluate the model on every test sample once: sum over this rank's share, then over the ranks.

    Args:
        loss: called as `loss(output, targets, reduction="sum")`, like those of torch.nn.functional.

    Returns:
        The loss is the mean per sample. The accuracy is NaN where the targets are not class numbers.

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
            output = network(inputs)
            total = loss(output, targets, reduction="sum")
            correct = math.nan * total if targets.is_floating_point() else output.argmax(1).eq(targets).sum()
            sums += torch.stack([total, correct, torch.full_like(total, len(targets))])
    seconds = clock.stop(device, started)
    total, correct, samples = process_group.sum_in_place(sums).tolist()
    if not math.isfinite(total):
        raise diverged(f"the test loss is {total}")
    again = partial(evaluate, model, loss=loss)
    return Tested(int(samples), seconds, total / samples, 100 * correct / samples, again)


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
