"""The weights of the best epoch of a training."""

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from manygpus.checkpoint.state_file import save
from manygpus.distributed import process_group
from manygpus.errors import print_line
from manygpus.network.model import unwrapped

if TYPE_CHECKING:
    from manygpus.checkpoint.sharded import Sharded


class BestWeights:
    """The weights of the epoch with the lowest validation loss so far; `epoch` is 0 before the first.

    With a `path` they are written to that file. Otherwise rank 0 has them in its memory, and its checkpoints
    by `state_dict`.
    """

    def __init__(self, model: nn.Module, sharded: "Sharded | None" = None, path: Path | None = None) -> None:
        self._model = unwrapped(model)
        self._sharded = sharded
        self._path = path
        self.epoch = 0
        self.loss = math.inf
        self.weights: dict[str, object] = {}

    def keep(self, epoch: int, loss: float) -> None:
        """Keep the weights if `loss` is lower than before; to be called on all ranks.

        Raises:
            UserError: if they cannot be written.
        """
        if not loss < self.loss:  # also if it is NaN
            return
        self.epoch, self.loss = epoch, loss
        weights = self._sharded.weights() if self._sharded else self._model.state_dict()
        if self._path:
            advice = "give a different folder."
            process_group.on_rank_0(lambda: save("the weights", weights, self._path, advice))
        elif process_group.is_rank_0():
            # Copies, as training goes on in the same memory. A network may have an extra state of any type.
            self.weights = {
                name: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for name, value in weights.items()
            }

    def load(self) -> None:
        """Give all ranks the weights that rank 0 has kept in its memory; the network must not be split."""
        self._model.load_state_dict(process_group.broadcast(self.weights))
        if process_group.is_rank_0():
            print_line(f"the weights are those of epoch {self.epoch}, which has the lowest validation loss")

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.epoch, self.loss = state["epoch"], state["loss"]
        self.weights = state["weights"] if process_group.is_rank_0() else {}
