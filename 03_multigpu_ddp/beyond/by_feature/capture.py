"""Part of the training step captured in a CUDA graph: one launch starts all its recorded kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manygpus import UserError
from manygpus.devices import accelerator_of, keeping_random_numbers
from manygpus.errors import first_line


def check(model: nn.Module) -> None:
    """Raise a UserError if no CUDA graph can be made."""
    if isinstance(model, nn.DataParallel):
        raise UserError("DataParallel copies the network in every step and cannot be captured: use stage 03.")
    if not accelerator_of(next(model.parameters()).device).captures_graphs:
        raise UserError("a CUDA graph needs a GPU, and this run is on the CPU: train with --how eager there.")


def graphed(model: nn.Module, inputs: torch.Tensor) -> None:
    """Capture the forward and the backward pass in a CUDA graph each, for `inputs` of this size."""
    # The trial runs must not change the training's dropout.
    with _explained(), keeping_random_numbers(inputs.device):
        torch.cuda.make_graphed_callables(model.train(), (inputs,))


class CapturedStep:
    """Calls `step(*batch)`, which returns the loss: eagerly at first, then as a CUDA graph.

    It writes to the same gradients and loss each time: `step` calls `zero_grad(set_to_none=False)`.
    """

    def __init__(self, step: Callable, model: nn.Module, stream: torch.cuda.Stream) -> None:
        self._step, self._stream, self._graph = step, stream, None
        # Real steps before the capture: DDP reads the clock in its first ten.
        self._eager_steps = 11 if isinstance(model, DistributedDataParallel) else 3

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """Run the step; raise a UserError if it cannot be captured, or the batch has another size."""
        if self._eager_steps:
            self._eager_steps -= 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._step(*batch)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if not self._graph:
            self._capture(batch)
        for fixed, given in zip(self._batch, batch, strict=True):
            if fixed.shape != given.shape:
                sizes = f"{tuple(fixed.shape)} and now {tuple(given.shape)}"
                raise UserError(f"a captured step needs batches of one size, not {sizes}: or --how eager.")
            fixed.copy_(given)
        self._graph.replay()
        return self._loss

    def _capture(self, batch: tuple[torch.Tensor, ...]) -> None:
        self._batch = [tensor.clone() for tensor in batch]
        graph = torch.cuda.CUDAGraph()
        # thread_local: a loader's thread may ask for pinned memory meanwhile.
        capture = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
        with _explained(), capture:
            self._loss = self._step(*self._batch)
        self._graph = graph


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__ or error  # the later error only ends the capture
        if isinstance(cause, torch.cuda.OutOfMemoryError):
            raise
        raise UserError(
            f"this training cannot be captured ({first_line(cause)}): within its graph nothing may read a "
            "tensor's value, as .item(), print, if and GradScaler.step do. Or train with --how eager."
        ) from None
