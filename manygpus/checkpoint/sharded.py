"""A training that is split over the ranks: each rank writes its own part, and any number reads them again.

The files are those of torch.distributed.checkpoint (DCP), in a folder that all ranks share. DCP reads what is
no tensor, and its list of contents, by pickle, which can run a program: load none that you do not trust.
"""

import math
import zipfile
from concurrent.futures import Future
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from manygpus.distributed import process_group
from manygpus.errors import UserError, first_line
from manygpus.network.optim import KERNELS
from manygpus.network.rank_weights import is_sharded, is_zero_optimizer

NEEDED = "2.9"


def check_pytorch() -> None:
    """Raise a UserError if this PyTorch cannot split a network over the ranks, or cannot save it."""
    if torch.__version__ < NEEDED:
        raise UserError(
            f"a network that is split over the ranks needs PyTorch {NEEDED} or newer, and this is "
            f"{torch.__version__}: update it, or train with mnist_ddp.py."
        )


class Sharded:
    """A network that is split over the ranks, and its optimizer, as one part of a checkpoint.

    Either `fully_shard` splits it, or each rank has some of the layers, under names that no other rank has.
    Every rank creates one, and calls its methods at the same points. No rank ever has more than its own part,
    except in `weights`.

    Raises:
        UserError: if only the state of the optimizer is split.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # Seen: the first save, after an epoch, was a traceback.
        if is_zero_optimizer(optimizer):
            raise UserError(
                "Sharded cannot save a ZeroRedundancyOptimizer, and the network beside it is whole: give Run "
                "or Checkpointer both of them without it."
            )
        self.model = model
        self.optimizer = optimizer
        # The optimizer's state goes by the names of the weights: their numbers differ between ranks.
        self._by_name = StateDictOptions(flatten_optimizer_state_dict=True)
        # The ranks meet in it while the files are written, beside the training's own meetings.
        self._group: dist.ProcessGroup | None = None

    def parameters(self) -> int:
        """Count the weights that are trained, on all ranks together."""
        trained = (weights for weights in self.model.parameters() if weights.requires_grad)
        own_share = sum(local_part(weights).numel() / _replicas(weights) for weights in trained)
        return round(sum(process_group.gather(own_share)))

    def weights(self) -> dict[str, torch.Tensor]:
        """Gather all weights on rank 0, where they have to fit into memory, as if the network were whole."""
        return _gathered(self.model.state_dict())

    def state_dict(self) -> dict[str, dict[str, object]]:
        """Return this rank's part of the weights, and of what the optimizer keeps, by the weights' names."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._by_name)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        """Take this rank's part, as `state_dict` has returned it."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._by_name,
        )

    def connect(self) -> None:
        """Connect the ranks' CPUs, before the first `start_saving` or `load`: DCP asks for that (async_save).

        It comes before the training, which should not end at its first checkpoint where gloo cannot connect.
        """
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def start_saving(self, folder: Path) -> Future:
        """Write this rank's part to files in `folder`, while the training goes on from a copy of it.

        Returns:
            What is done when all ranks have written their parts, or one of them has failed.
        """
        return dcp.async_save(_flat(self.state_dict()), checkpoint_id=folder, process_group=self._group)

    def load(self, folder: Path) -> None:
        """Take this rank's part of what any number of ranks have written to `folder`.

        Raises:
            ValueError: if it comes from another network or optimizer, or cannot be read.
        """
        state = self.state_dict()
        _check_same(_flat(state), _metadata(folder))
        # This process chooses how the optimizer computes.
        kernels = {
            name: value for name, value in state["optimizer"].items() if name.rpartition(".")[2] in KERNELS
        }
        flat = _flat(state)
        try:
            dcp.load(flat, checkpoint_id=folder, process_group=self._group)
        except dcp.CheckpointException as error:  # which no `except Exception` would catch
            raise ValueError(failure_of(error)) from None
        for name in state:
            state[name] = {label: flat[f"{name}.{label}"] for label in state[name]}
        state["optimizer"].update(kernels)
        self.load_state_dict(state)


def failure_of(error: BaseException) -> str:
    """Return the reason of an error of DCP, which lists those of all ranks."""
    failures = getattr(error, "failures", None)
    if not failures:
        return first_line(error)
    rank, (cause, _) = min(failures.items())
    return f"{first_line(cause)}, on rank {rank}"


def check_files(folder: Path) -> str:
    """Compare the checksums of the files that `Sharded` has written, each rank those of some pieces.

    Returns:
        What is wrong with the files that this rank has read; "" if nothing is.
    """
    try:
        pieces = [*_metadata(folder).storage_data.values()]
        for piece in pieces[process_group.rank() :: process_group.count()]:
            with (folder / piece.relative_path).open("rb") as file:
                file.seek(piece.offset)
                content = file.read(piece.length)
            # As in a whole checkpoint, each tensor is a zip, and PyTorch does not compare its checksums.
            damaged = zipfile.ZipFile(BytesIO(content)).testzip()
            if damaged:
                return f"wrong checksum of {damaged} in {piece.relative_path}"
    except Exception as error:  # a damaged list of contents raises many kinds
        return first_line(error) or type(error).__name__
    return ""


def _metadata(folder: Path) -> Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


def _flat(state: dict[str, dict[str, object]]) -> dict[str, object]:
    return {f"{part}.{name}": value for part, values in state.items() for name, value in values.items()}


def _check_same(rank_state: dict[str, object], saved: Metadata) -> None:
    """Raise a ValueError if the ranks together have not the tensors that were saved, of the same shapes.

    DCP itself ignores what it is not asked for.
    """
    shapes_of_ranks = process_group.gather(
        {name: tuple(value.shape) for name, value in rank_state.items() if isinstance(value, torch.Tensor)}
    )
    shapes = {name: shape for rank_shapes in shapes_of_ranks for name, shape in rank_shapes.items()}
    saved_shapes = {
        name: tuple(entry.size)
        for name, entry in saved.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    if shapes != saved_shapes:
        raise ValueError("its weights have other names or shapes")


# Tensors travel one by one: a GPU may have no room for more.
def _gathered(rank_state: dict[str, object]) -> dict[str, object]:
    """Return on rank 0, in the memory of the CPU, what the ranks have by name; {} on the others."""
    owners, whole = {}, {}
    for rank, names in enumerate(process_group.gather([*rank_state])):
        owners |= {name: rank for name in names if name not in owners}
    for name, owner in owners.items():
        value = rank_state.get(name)
        if is_sharded(value):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor) and process_group.rank() in (0, owner):
            value = value.cpu()
        if owner:
            value = process_group.broadcast(value, owner)
        if process_group.is_rank_0():
            whole[name] = value
    return whole


def _replicas(tensor: torch.Tensor) -> int:
    """Return how many ranks have this same part of a tensor: several where a mesh also replicates (HSDP)."""
    if not is_sharded(tensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(dim) for dim, place in enumerate(tensor.placements) if place.is_replicate())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: its shard if fully_shard has split it, else all of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor
