"""The two recipes: optimizer and learning rate schedule, both stepped after every batch."""

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from trainkit.options import Options


def optimizer_and_schedule(
    options: Options, model: torch.nn.Module, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """The optimizer for `model` and its learning rate schedule, as `--recipe` says."""
    if options.recipe == "classic":
        # foreach: one kernel for all tensors in place of one for each.
        optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr, foreach=True)
        return optimizer, StepLR(optimizer, step_size=steps_per_epoch, gamma=options.gamma)
    # fused: one kernel for the whole step. Older releases refuse the strides of DataParallel's gradients.
    fused = not isinstance(model, torch.nn.DataParallel)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, fused=fused, foreach=not fused)
    return optimizer, OneCycleLR(optimizer, options.lr, total_steps=options.epochs * steps_per_epoch)
