"""A training split over the ranks: each rank writes its own part, and any number of ranks can read them."""

import io
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from trainkit.runtime import process_group
from trainkit.runtime.errors import UserError, first_line, reason

NEEDED = "2.9"
# All names in the metadata that `dcp.save` writes, except the types of tensors.
NAMED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
}  # fmt: skip


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

    def finite(self) -> bool:
        """Return whether all weights are numbers, on every rank."""
        own = all(local_part(weights).isfinite().all() for weights in self._model.parameters())
        return all(process_group.gather(own))

    def weights(self) -> dict[str, torch.Tensor]:
        """Gather all weights on rank 0, where they have to fit into memory, as if the network were whole.

        With NCCL each rank also needs room on its GPU for the largest part of any other rank.
        """
        own = {}
        for name, value in self._model.state_dict().items():
            if not _is_split(value):
                own[name] = value.cpu()
            else:
                whole = value.full_tensor()  # on every rank, one after the other
                if process_group.is_rank_0():
                    own[name] = whole.cpu()
        if not process_group.is_rank_0():
            dist.gather_object(own, dst=0)
            return {}
        of_ranks = [{}] * process_group.count()
        dist.gather_object({}, of_ranks, dst=0)  # its own need not travel
        return own | {name: value for part in of_ranks for name, value in part.items()}

    def save(self, folder: Path) -> str:
        """Write this rank's part to `folder`, a new one; return why that failed on a rank, or ""."""
        try:
            dcp.save(self._state(), checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            return _reason(error)
        return ""

    def load(self, folder: Path) -> None:
        """Load this rank's part from `folder`, which any number of ranks may have written.

        Raises:
            ValueError: if it comes from another network or optimizer.
        """
        state = self._state()
        try:
            dcp.load(state, storage_reader=_Reader(folder), planner=_Planner())
        except dcp.api.CheckpointException as error:
            raise ValueError(_reason(error)) from None
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self._model, self._optimizer, **parts, options=self._by_name)

    def _state(self) -> dict[str, dict]:
        parts = get_state_dict(self._model, self._optimizer, options=self._by_name)
        return dict(zip(("model", "optimizer"), parts, strict=True))


class _Unpickler(pickle.Unpickler):
    """Reads the metadata that `dcp.save` writes, and nothing else: a forged file runs no command."""

    def find_class(self, module: str, name: str) -> type:
        if name in NAMED.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which no checkpoint does")


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            with (folder / ".metadata").open("rb") as file:
                self._metadata = _Unpickler(file).load()
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        except Exception as error:  # pickle raises many kinds for a damaged file
            raise ValueError(first_line(error)) from None

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: dcp.planner.ReadItem, value: io.BytesIO) -> None:
        """Read what is not a tensor, such as a learning rate; PyTorch's own method would run code in it."""
        content = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), content)
        content.seek(0)
        super().load_bytes(read_item, content)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: its share if fully_shard has split it, else all of it."""
    return tensor.to_local() if _is_split(tensor) else tensor


def _is_split(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")  # DTensor, whose module differs between releases


def _reason(error: dcp.api.CheckpointException) -> str:
    return reason(next(iter(error.failures.values()))[0])
