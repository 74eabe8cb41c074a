"""The weights that a training ends with: their file, and those of its best epoch."""

import copy
import math
from pathlib import Path
from pickle import PickleError
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import nn

from trainkit.rank.model import unwrapped
from trainkit.runtime import process_group
from trainkit.runtime.errors import UserError, first_line, reason
from trainkit.runtime.files import identity, replacing

if TYPE_CHECKING:
    from trainkit.rank.sharded import Sharded


class Best:
    """The weights of the epoch with the lowest validation loss so far; `epoch` is 0 before the first.

    With a `path` they are written to that file; it may be there only next to checkpoints, else a UserError.
    Otherwise rank 0 has them in its memory, and its checkpoints by `state_dict`.
    """

    def __init__(self, model: nn.Module, sharded: "Sharded | None" = None, path: Path | None = None) -> None:
        if path and (path.is_symlink() or path.exists()) and not any(path.parent.glob("epoch-*-step-*.pt")):
            raise UserError(f"{path} is not of this training: move it, or give another --checkpoint-dir.")
        self._model, self._sharded, self._path = unwrapped(model), sharded, path
        self._own = path and identity(path)
        self.epoch, self.loss, self.weights = 0, math.inf, {}

    def keep(self, epoch: int, loss: float) -> None:
        """Keep the weights if `loss` is lower than before; to be called on all ranks.

        Raises:
            UserError: if they cannot be written.
        """
        if not loss < self.loss:  # nor NaN
            return
        self.epoch, self.loss = epoch, loss
        weights = self._sharded.weights() if self._sharded else self._model.state_dict()
        if self._path:
            process_group.on_rank_0(lambda: self._replace(weights))
        elif process_group.is_rank_0():
            # Copies, as training goes on in the same memory. A network may have an extra state of any type.
            self.weights = {
                name: one.to("cpu", copy=True) if isinstance(one, torch.Tensor) else copy.deepcopy(one)
                for name, one in weights.items()
            }

    def _replace(self, weights: dict[str, object]) -> None:
        if identity(self._path) not in (None, self._own):
            raise UserError(f"{self._path} is no longer this training's: put that back, and go on.")
        save("the weights", weights, self._path, "give another folder.")
        self._own = identity(self._path)

    def load(self) -> None:
        """Give all ranks the weights that were kept; a network that is split over them keeps its own."""
        if not self._sharded:
            self._model.load_state_dict(process_group.broadcast(self.weights))

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state: dict[str, object]) -> None:
        epoch, loss = int(state.get("epoch", 0)), float(state["loss"])  # an earlier gpt.py kept the loss only
        weights = state.get("weights", {})
        own, kept = (
            {name: getattr(one, "shape", None) for name, one in part.items()}
            for part in (self._model.state_dict(), weights)
        )
        if kept and kept != own and not self._sharded:
            raise ValueError("its best weights are of another network")
        if not self._path and bool(kept) != math.isfinite(loss):
            raise ValueError("its best weights and their loss do not fit together")
        self.epoch, self.loss = epoch, loss
        self.weights = weights if process_group.is_rank_0() else {}


def pack(state: dict[str, object], file: BinaryIO, check: bool = True) -> None:
    """Write `state` to `file`, as torch.save does; with `check`, refuse what could not be loaded again.

    Raises:
        UserError: if `state` has other than tensors, numbers and texts, which could run a program.
    """
    found = []
    try:
        torch.save(state, file)
        if check:
            file.seek(0)
            # Of PyTorch 2.6 and newer.
            find = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", lambda _: [])
            found = find(getattr(file, "name", file))
    except (TypeError, AttributeError, PickleError, RecursionError) as error:
        found = [first_line(error)]
    if found:
        raise UserError(f"tensors, numbers and texts can be saved, not all here ({found[0]}): convert them.")


def save(what: str, state: dict[str, object], path: Path, advice: str, check: bool = True) -> None:
    """Write `state` to `path`, as torch.save does; with `check`, refuse what could not be loaded again.

    Raises:
        UserError: "<what> cannot be written to <path> (<reason>): <advice>".
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "wb") as file:
            pack(state, file, check)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{what} cannot be written to {path} ({reason(error)}): {advice}") from None
