"""How long a rank works by itself in a step, without the time it waits for the others' gradients."""

import math

import torch
from torch import nn

from manygpus.devices import accelerator_of, between, moment


class ComputeTime:
    """The seconds from one gradient all-reduce to the moment this rank has its own gradients for the next.

    All ranks leave DistributedDataParallel's backward pass together, so a clock around the step shows the
    same on each of them, however slow one is. What differs is when a rank has computed its own gradients.
    If ranks also meet in the forward pass (SyncBatchNorm; the buffers of BatchNorm, which rank 0 sends),
    that waiting counts as their own work. A step captured in a CUDA graph cannot be measured.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._device = device
        self._seconds, self._steps, self._captured = 0.0, 0, False
        self._measured: list[tuple] = []  # beginning and end of each step not yet in the sum
        self._hooks = [
            (weights, weights.register_post_accumulate_grad_hook(self._gradient))
            for weights in model.parameters()
            if weights.requires_grad
        ]
        optimizer.register_step_pre_hook(self._all_reduced)
        self._start()

    def begin(self) -> None:
        """Start the clock: from now on this rank works by itself. The GPU has to be idle."""
        self._seconds += sum(between(*moments) for moments in self._measured)
        self._steps += len(self._measured)
        self._measured = []
        self._start()

    def end_of_step(self) -> None:
        """End a step. One without an update, as GradScaler skips after an overflow, does not count."""
        if self._last is not None:
            self._start()

    def per_step(self) -> float:
        """Return the mean over the steps since the last call, in seconds; NaN if none counted.

        The GPU has to be idle.
        """
        self.begin()
        mean = self._seconds / self._steps if self._steps and not self._captured else math.nan
        self._seconds, self._steps = 0.0, 0
        return mean

    def _start(self) -> None:
        self._last, self._began = None, moment(self._device)

    def _gradient(self, weights: torch.Tensor) -> None:
        if accelerator_of(self._device).is_capturing():
            self._captured = True
            return
        self._last, self._ended = weights, moment(self._device)

    def _all_reduced(self, *_: object) -> None:
        """Note the moment before the optimizer's step, when all ranks have all gradients."""
        if self._last is None:
            return
        self._measured.append((self._began, self._ended))
        # A hook on one tensor is enough. It is not in a branch that the first step leaves out.
        for weights, hook in self._hooks:
            if weights is not self._last:
                hook.remove()
        self._hooks = []
        self._start()
