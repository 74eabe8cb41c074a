"""The recipes: optimizer and learning rate schedule, both stepped after every batch."""

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, LRScheduler, OneCycleLR, StepLR

from trainkit.rank.options import DEFAULT_LR, Options, in_words

KERNELS = {"capturable", "foreach", "fused"}  # how an optimizer computes; they change no result


def optimizer_and_schedule(
    options: Options, model: torch.nn.Module, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return the optimizer for `model` and its learning rate schedule, as `--recipe` says."""
    weights, lr = model.parameters(), options.scaled_lr
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
    schedule = StepLR(optimizer, step_size=steps_per_epoch, gamma=options.gamma)
    # Counted in images: a step's learning rate is that of its last image.
    warmup_steps = options.lr_warmup_images // options.batch_size
    if warmup_steps > 1:
        warmup = LinearLR(optimizer, start_factor=1 / warmup_steps, total_iters=warmup_steps - 1)
        schedule = _Chained([schedule, warmup])
    return optimizer, schedule


def own_optimizer(options: Options, optimizer: torch.optim.Optimizer) -> str:
    """Describe how an optimizer differs from `--recipe`, as `optimizer=AdamW lr=0.1`; "" if it does not."""
    kind, of_recipe = type(optimizer), None
    if options.recipe in DEFAULT_LR:
        of_recipe, _ = optimizer_and_schedule(options, torch.nn.ParameterList([torch.zeros(1)]), 1)
    same = kind is type(of_recipe)
    usual = of_recipe.defaults if same else {"lr": options.scaled_lr}
    given = optimizer.defaults
    other = {name: given.get(name) for name in usual.keys() - KERNELS if given.get(name) != usual[name]}
    return in_words({} if same and not other else {"optimizer": kind.__name__} | dict(sorted(other.items())))


class _Chained(ChainedScheduler):
    """A ChainedScheduler that counts its steps in `last_epoch`, as other schedules do."""

    @property
    def last_epoch(self) -> int:
        return self._schedulers[0].last_epoch
