"""How long a rank works by itself in a step, without its waiting for the gradients of the others."""

import math
import time

import torch
from torch import nn


class OwnTime:
    """The seconds from one exchange of gradients to this rank's own last gradient of the next.

    All ranks leave DistributedDataParallel's backward pass together, so a clock around the step shows the
    same on each of them, however slow one is. What differs is when a rank has computed its own gradients.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._device = device
        self._steps: list[tuple] = []  # beginning and end of each
        self._last: torch.Tensor | None = None
        self._hooks = [
            (weights, weights.register_post_accumulate_grad_hook(self._gradient))
            for weights in model.parameters()
            if weights.requires_grad
        ]
        optimizer.register_step_pre_hook(self._exchanged)

    def begin(self) -> None:
        """From now on this rank works by itself."""
        self._last, self._began = None, self._now()

    def per_step(self) -> float:
        """The mean over the steps since the last call, in seconds; NaN if none was seen.

        The GPU has to be idle.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return math.nan
        if self._device.type == "cuda":
            return sum(began.elapsed_time(ended) for began, ended in steps) / 1000 / len(steps)
        return sum(ended - began for began, ended in steps) / len(steps)

    def _gradient(self, weights: torch.Tensor) -> None:
        self._last, self._ended = weights, self._now()

    def _exchanged(self, *_: object) -> None:
        """Before the optimizer's step, when all ranks have all gradients."""
        if self._last is not None:
            self._steps.append((self._began, self._ended))
            for weights, hook in self._hooks:
                if weights is not self._last:  # the last one is the same in every step
                    hook.remove()
            self._hooks = []
        self.begin()

    def _now(self) -> float | torch.cuda.Event:
        """A moment of the GPU's own time, where there is one: the CPU is ahead of it."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
