"""The recipes: an optimizer and its lr_scheduler, both stepped after every batch."""

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, LRScheduler, OneCycleLR, StepLR

from manygpus.config.options import Options

KERNELS = {"capturable", "foreach", "fused"}  # how an optimizer computes; they change no result


def build_optimizer(
    options: Options, model: torch.nn.Module, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return the optimizer for `model` and its lr_scheduler, as `--recipe` says; both step after a batch.

    Both have the recipe's name as their attribute `recipe`, by which a `Run` knows how to record them.
    """
    optimizer, lr_scheduler = _of_recipe(options, model, steps_per_epoch)
    optimizer.recipe = lr_scheduler.recipe = options.recipe
    return optimizer, lr_scheduler


def is_by_recipe(part: torch.optim.Optimizer | LRScheduler | None) -> bool:
    """Return whether `build_optimizer` has made this optimizer or lr_scheduler."""
    return hasattr(part, "recipe")


def _of_recipe(
    options: Options, model: torch.nn.Module, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    weights = model.parameters()
    lr = options.scaled_lr
    if options.recipe == "fast":
        # fused: one kernel for the whole step. Older releases refuse the strides of DataParallel's gradients.
        fused = not isinstance(model, torch.nn.DataParallel)
        optimizer = torch.optim.Adam(weights, lr=lr, fused=fused, foreach=not fused)
        return optimizer, OneCycleLR(optimizer, lr, total_steps=options.epochs * steps_per_epoch)
    # foreach: one kernel for all tensors instead of one for each.
    if options.recipe == "sgd":
        optimizer = torch.optim.SGD(weights, lr=lr, momentum=0.9, nesterov=True, foreach=True)
    else:
        optimizer = torch.optim.Adadelta(weights, lr=lr, foreach=True)
    lr_scheduler = StepLR(optimizer, step_size=steps_per_epoch, gamma=options.gamma)
    # Counted in images: a step's learning rate is that of its last image.
    warmup_steps = options.lr_warmup_images // options.batch_size
    if warmup_steps > 1:
        warmup = LinearLR(optimizer, start_factor=1 / warmup_steps, total_iters=warmup_steps - 1)
        lr_scheduler = _Chained([lr_scheduler, warmup])
    return optimizer, lr_scheduler


class _Chained(ChainedScheduler):
    """A ChainedScheduler that counts its steps in `last_epoch`, as other schedules do."""

    @property
    def last_epoch(self) -> int:
        return self._schedulers[0].last_epoch
