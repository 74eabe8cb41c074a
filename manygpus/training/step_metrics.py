"""The numbers that a training logs in its steps: losses, and others by name."""

import torch

from manygpus.distributed import process_group
from manygpus.errors import UserError, diverged


class StepMetrics:
    """The numbers of the steps of one epoch, by name; the first is the loss.

    They stay on the device until the epoch ends: reading one makes the CPU wait for the GPU.

    Args:
        steps: how many steps the epoch has.
        earlier: the numbers of the steps that an earlier process has made, (steps done,) of each name, or no
            steps.
    """

    def __init__(self, steps: int, earlier: dict[str, torch.Tensor], device: torch.device) -> None:
        self.steps_logged = len(earlier["loss"])
        self._steps = steps
        self._device = device
        self._values: dict[str, torch.Tensor] = {}
        for name, values in earlier.items():
            self._values[name] = self._no_values()
            self._values[name][: self.steps_logged] = values

    def log(self, numbers: dict[str, torch.Tensor | float]) -> None:
        """Note the numbers of the next step: means over this rank's shard of the batch.

        Raises:
            UserError: if the names differ from those of the step before.
        """
        if not self.steps_logged:
            self._values = {name: self._no_values() for name in numbers}
        if self._values.keys() != numbers.keys():
            before = ", ".join(self._values)
            now = ", ".join(numbers)
            raise UserError(f"run.log got {before}, and then {now}: give it the same names in every step.")
        for name, number in numbers.items():
            tensor = number.detach() if isinstance(number, torch.Tensor) else torch.tensor(float(number))
            self._values[name][self.steps_logged] = tensor
        self.steps_logged += 1

    def has_broken_loss(self) -> bool:
        """Return whether a loss of this rank is not a number."""
        return not self._values["loss"][: self.steps_logged].isfinite().all()

    def check_losses(self, epoch: int) -> None:
        """Raise a UserError that names the first step whose loss, the mean over all ranks, is no number."""
        check_finite(mean_over_ranks(self._values["loss"][: self.steps_logged]), epoch)

    def means(self) -> dict[str, torch.Tensor]:
        """Return of each name the mean over all ranks at each step of the epoch, (steps,).

        Every rank calls it.

        Raises:
            UserError: if the ranks have logged other names.
        """
        names = [*self._values]
        if any(names_of_rank != names for names_of_rank in process_group.gather(names)):
            raise UserError("the ranks give run.log other names: give it the same on all of them.")
        return {name: mean_over_ranks(values) for name, values in self._values.items()}

    def _no_values(self) -> torch.Tensor:
        return torch.zeros(self._steps, device=self._device)


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of each of the `values` over all ranks."""
    return process_group.sum_in_place(values.clone()).div_(process_group.count())


def check_finite(losses: torch.Tensor, epoch: int) -> None:
    """Raise a UserError that names the first step whose loss is not a number."""
    broken = losses.isfinite().logical_not().nonzero()
    if len(broken):
        first = broken[0].item()
        raise diverged(f"the loss is {losses[first].item()} at step {first + 1} of epoch {epoch}")
