"""The weights that a training ends with: their file, and those of its best epoch."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from pickle import PickleError
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import nn

from trainkit.rank.model import unwrapped
from trainkit.runtime import process_group
from trainkit.runtime.errors import UserError, first_line, reason, tell
from trainkit.runtime.files import replacing

if TYPE_CHECKING:
    from trainkit.rank.sharded import Sharded

IF_SPLIT = "give Run sharded=Sharded(model, optimizer), or use torch.distributed.checkpoint in your own loop."


class Best:
    """The weights of the epoch with the lowest validation loss so far; `epoch` is 0 before the first.

    With a `path` they are written to that file. Otherwise rank 0 has them in its memory, and its checkpoints
    by `state_dict`.
    """

    def __init__(self, model: nn.Module, sharded: "Sharded | None" = None, path: Path | None = None) -> None:
        self._model, self._sharded, self._path = unwrapped(model), sharded, path
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
            advice = "give another folder."
            process_group.on_rank_0(lambda: save("the weights", weights, self._path, advice))
        elif process_group.is_rank_0():
            # Copies, as training goes on in the same memory. A network may have an extra state of any type.
            self.weights = {
                name: one.to("cpu", copy=True) if isinstance(one, torch.Tensor) else copy.deepcopy(one)
                for name, one in weights.items()
            }

    def load(self) -> None:
        """Give all ranks the weights that rank 0 has kept in its memory; the network must not be split."""
        self._model.load_state_dict(process_group.broadcast(self.weights))
        if process_group.is_rank_0():
            tell(f"the weights are those of epoch {self.epoch}, which has the lowest validation loss")

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


def is_split(value: object) -> bool:
    """Return whether this is a tensor of which the rank has only a part, as the other ranks have the rest."""
    if not isinstance(value, torch.Tensor):
        return False
    # A DTensor, whose module differs between releases; a ShardedTensor; a weight of the earlier FSDP.
    return hasattr(value, "to_local") or hasattr(value, "local_shards") or hasattr(value, "_is_flat_param")


def is_in_earlier_fsdp(network: nn.Module) -> bool:
    """Return whether any part of a network is in FullyShardedDataParallel, which came before fully_shard."""
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in network.modules())


def inner_optimizer(optimizer: object) -> object:
    """Return the optimizer of PyTorch's that Accelerate or Fabric has wrapped, or what is given."""
    return getattr(optimizer, "optimizer", optimizer)


def check_whole(parts: dict[str, object], way: str) -> None:
    """Check that each of `parts` is whole on this rank: torch.save would write a share without a word.

    Raises:
        UserError: "<name> is split over the ranks, ...: <way>".
    """
    for name, part in parts.items():
        if _is_shared_out(part):
            raise UserError(f"{name} is split over the ranks, and rank 0's part would be saved as all: {way}")


def check_equal(parts: dict[str, object], way: str) -> None:
    """Check that each of `parts` has weights of the same names and shapes on all ranks; call it on all.

    Raises:
        UserError: "<name> has other weights on rank <N> ...: <way>".
    """
    shapes = {
        name: {label: tuple(value.shape) for label, value in _weights_of(part)}
        for name, part in parts.items()
    }
    first, *others = process_group.gather(shapes)
    for rank, other in enumerate(others, start=1):
        for name, own in first.items():
            if other.get(name, own) != own:
                told = f"{name} has other weights on rank {rank} than on rank 0"
                raise UserError(f"{told}, which alone would be saved: {way}")


def _is_shared_out(part: object) -> bool:
    if hasattr(part, "consolidate_state_dict"):  # ZeroRedundancyOptimizer
        return True
    # Its own state_dict puts the weights together in a meeting of all ranks, and leaves the optimizer's.
    if isinstance(part, nn.Module) and is_in_earlier_fsdp(part):
        return True
    return any(is_split(value) for _, value in _weights_of(part))


def _weights_of(part: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and the weights of a network, or those that an optimizer trains."""
    optimizer = inner_optimizer(part)
    if isinstance(part, nn.Module):
        yield from part.named_parameters()
        yield from part.named_buffers()
    elif isinstance(optimizer, torch.optim.Optimizer):
        for number, group in enumerate(optimizer.param_groups):
            yield from ((f"{number} {place}", weights) for place, weights in enumerate(group["params"]))


def _tensors(state: object) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for inner in state.values() if isinstance(state, dict) else state:
            yield from _tensors(inner)


def pack(state: dict[str, object], file: BinaryIO, check: bool = True) -> None:
    """Write `state` to `file`, as torch.save does; with `check`, refuse what could not be loaded again.

    Raises:
        UserError: if a tensor in `state` is split over the ranks, or it has other than tensors, numbers and
            texts, which could run a program.
    """
    found = []
    try:
        for name, part in state.items():  # split after Run or Recorder had looked
            if any(map(is_split, _tensors(part))):
                raise UserError(f"{name} is split over the ranks, and only a part of it is here: {IF_SPLIT}")
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
