"""A training split over the ranks: put together on rank 0 to be saved, and dealt out again by any number."""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from trainkit.distributed import process_group
from trainkit.errors import UserError
from trainkit.training.optim import KERNELS
from trainkit.training.weights import is_sharded

NEEDED = "2.9"


def check_pytorch() -> None:
    """Raise a UserError if this PyTorch cannot split a network over the ranks, or cannot save it."""
    if torch.__version__ < NEEDED:
        raise UserError(
            f"a network that is split over the ranks needs PyTorch {NEEDED} or newer, and this is "
            f"{torch.__version__}: update it, or train with mnist_ddp.py."
        )


class Sharded:
    """A network that is split over the ranks, and its optimizer.

    Either `fully_shard` splits it, or each rank has some of the layers, under names that no other rank has.
    Every rank creates one, and calls its methods at the same points.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        # The optimizer's state goes by the names of the weights: their numbers differ between ranks.
        self._by_name = StateDictOptions(flatten_optimizer_state_dict=True)

    def parameters(self) -> int:
        """Count the weights that are trained, on all ranks together."""
        trained = (weights for weights in self._model.parameters() if weights.requires_grad)
        return sum(process_group.gather(sum(local_part(weights).numel() for weights in trained)))

    def weights(self) -> dict[str, torch.Tensor]:
        """Gather all weights on rank 0, where they have to fit into memory, as if the network were whole."""
        return _gathered(self._model.state_dict())

    def state_dict(self) -> dict[str, dict]:
        """Gather the weights and the optimizer's state on rank 0, where they have to fit into memory."""
        return {name: _gathered(own) for name, own in self._parts().items()}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        """Take this rank's part of rank 0's `state`, which any number of ranks may have had.

        The other ranks give empty dictionaries.

        Raises:
            ValueError: if it comes from another network or optimizer.
        """
        parts = self._parts()
        # This process chooses how the optimizer computes.
        kernels = {
            name: value for name, value in parts["optimizer"].items() if name.rpartition(".")[2] in KERNELS
        }
        for name, part in parts.items():
            _take(part, state[name])
        parts["optimizer"].update(kernels)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=self._by_name,
        )

    def _parts(self) -> dict[str, dict]:
        parts = get_state_dict(self._model, self._optimizer, options=self._by_name)
        return dict(zip(("model", "optimizer"), parts, strict=True))


# Tensors travel one by one: a GPU may have no room for more.
def _gathered(own: dict[str, object]) -> dict[str, object]:
    """Return on rank 0, in the memory of the CPU, what the ranks have by name; {} on the others."""
    owners, whole = {}, {}
    for rank, names in enumerate(process_group.gather([*own])):
        owners |= {name: rank for name in names if name not in owners}
    for name, owner in owners.items():
        value = own.get(name)
        if is_sharded(value):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor) and process_group.rank() in (0, owner):
            value = value.cpu()
        if owner:
            value = process_group.broadcast(value, owner)
        if process_group.is_rank_0():
            whole[name] = value
    return whole


def _take(own: dict[str, object], whole: dict[str, object]) -> None:
    """Replace what this rank has in `own` by its part of what rank 0 has in `whole`."""
    from torch.distributed.tensor import distribute_tensor  # PyTorch has it there from 2.5 on

    shapes = process_group.broadcast(process_group.on_rank_0(lambda: _shapes(whole)))
    if shapes != {name: shape for one in process_group.gather(_shapes(own)) for name, shape in one.items()}:
        raise ValueError("its weights have other names or shapes")
    for name in shapes:
        value, target = process_group.broadcast(whole.get(name)), own.get(name)
        if is_sharded(target):
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        if isinstance(target, torch.Tensor):
            local_part(target).copy_(local_part(value))
        elif name in own:
            own[name] = value


def _shapes(values: dict[str, object]) -> dict[str, torch.Size | None]:
    return {name: getattr(value, "shape", None) for name, value in values.items()}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: its share if fully_shard has split it, else all of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor
