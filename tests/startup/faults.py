"""What goes wrong in a training, and when: for code that `Checkout.plant` puts at the beginning of main().

The moments are those of every training with PyTorch and a `Run`, whatever the lines of its script are called.
Steps and epochs are counted from 1 in each process, so a training that has resumed begins with 1 again.
"""

import os
import signal
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from manygpus.training.run import Run

InStep = Callable[[torch.optim.Optimizer], object]
InEpoch = Callable[[], object]


def rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def is_first_start() -> bool:
    """Whether the job has not come back from the queue yet."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") == "0"


def signal_itself(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def fail(error: BaseException) -> None:
    """Raise, where only an expression fits."""
    raise error


def before_step(number: int, do: InStep) -> None:
    """At the optimizer's step of this number: the gradients are there, and the weights are as before."""
    register_optimizer_step_pre_hook(_at(number, do))


def after_step(number: int, do: InStep) -> None:
    """Right after the optimizer's step of this number: the training has not counted it yet."""
    register_optimizer_step_post_hook(_at(number, do))


def before_every_step(do: InStep) -> None:
    def and_return_nothing(optimizer: torch.optim.Optimizer, *_: object) -> None:
        do(optimizer)  # what a hook returns would take the place of the arguments of step()

    register_optimizer_step_pre_hook(and_return_nothing)


def before_every_backward(do: Callable[[], object]) -> None:
    """After the forward pass, before the gradients are averaged."""
    backward = torch.Tensor.backward

    def later(self: torch.Tensor, *arguments: object, **named: object) -> None:
        do()
        backward(self, *arguments, **named)

    torch.Tensor.backward = later


def at_end_of_epoch(number: int, do: InEpoch) -> None:
    """When all images are evaluated, before anything of this epoch is written."""
    _around_end_of_epoch(before=_at(number, do))


def after_epoch(number: int, do: InEpoch) -> None:
    """When everything of this epoch is written, before the next one begins."""
    _around_end_of_epoch(after=_at(number, do))


def _at(number: int, do: Callable[..., object]) -> Callable[..., None]:
    calls = 0

    def when_it_is_time(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            do(*arguments[:1])  # PyTorch gives a hook of an optimizer more than that optimizer

    return when_it_is_time


def _around_end_of_epoch(
    before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
) -> None:
    end_of_epoch = Run.end_of_epoch

    def with_fault(self: Run, *arguments: object, **named: object) -> object:
        before()
        result = end_of_epoch(self, *arguments, **named)
        after()
        return result

    Run.end_of_epoch = with_fault
