"""The state of a training of which every rank holds another part: each writes its own, any number reads it."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from trainkit import world
from trainkit.errors import reason

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # each value under the name of its weights
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Sharded:
    """A network that is split over the ranks, and its optimizer.

    Either by `fully_shard`, or so that each rank has some of the layers, with names that no other rank has.
    All ranks make one, and call its methods at the same points.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def parameters(self) -> int:
        """How many the network has, on all ranks together."""
        return sum(world.gather(sum(local(weights).numel() for weights in self._model.parameters())))

    def finite(self) -> bool:
        """Whether all weights that are on this rank are numbers."""
        return all(local(weights).isfinite().all() for weights in self._model.parameters())

    def weights(self) -> dict[str, torch.Tensor]:
        """All of them, on rank 0, as the state_dict() of the network that is not split."""
        own = get_model_state_dict(self._model, options=WHOLE)  # all that fully_shard has split: on rank 0
        of_ranks = [{} for _ in range(world.count())]
        dist.gather_object(own, of_ranks if world.is_first() else None, dst=0)
        return {name: value for part in of_ranks for name, value in part.items()}

    def save(self, folder: Path) -> str:
        """Write what this rank holds to `folder`, a new one; returns why that failed on a rank, or ""."""
        try:
            dcp.save(self._state(), checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            return _why(error)
        return ""

    def load(self, folder: Path) -> None:
        """Take what this rank holds from `folder`, whatever ranks have written it.

        Raises:
            ValueError: if that is of another network or optimizer.
        """
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            raise ValueError(_why(error)) from None
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self._model, self._optimizer, **parts, options=BY_NAME)

    def _state(self) -> dict[str, dict]:
        parts = get_state_dict(self._model, self._optimizer, options=BY_NAME)
        return dict(zip(("model", "optimizer"), parts, strict=True))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _why(error: dcp.api.CheckpointException) -> str:
    return reason(next(iter(error.failures.values()))[0])
