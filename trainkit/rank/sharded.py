"""A training of which each rank holds another part: each writes its own, and any number of ranks reads it."""

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
# All that `dcp.save` names in what it writes about its files, but for the types of tensors.
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
    """Raise a UserError if this PyTorch cannot split a network over the ranks, or not save it then."""
    if torch.__version__ < NEEDED:
        raise UserError(
            f"a network that is split over the ranks needs PyTorch {NEEDED} or newer, and this is "
            f"{torch.__version__}: update it, or train with mnist_ddp.py."
        )


class Sharded:
    """A network that is split over the ranks, and its optimizer.

    Either by `fully_shard`, or so that each rank has some of the layers, under names that no other rank has.
    All ranks make one, and call its methods at the same points.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        # What the optimizer keeps goes by the names of the weights: their numbers are others on every rank.
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
        """Gather all weights on rank 0, where they have to fit into memory, as of a network in one piece.

        With NCCL each rank also needs room on its GPU for the largest part that another one has.
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
        """Write what this rank holds to `folder`, a new one; returns why that failed on a rank, or ""."""
        try:
            dcp.save(self._state(), checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            return _reason(error)
        return ""

    def load(self, folder: Path) -> None:
        """Take what this rank holds from `folder`, whatever ranks have written it.

        Raises:
            ValueError: if that is of another network or optimizer.
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
    """Makes what `dcp.save` has written about its files, and nothing else: a forged file runs no command."""

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
        except Exception as error:  # whatever pickle makes of a damaged file
            raise ValueError(first_line(error)) from None

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: dcp.planner.ReadItem, value: io.BytesIO) -> None:
        """Take what is no tensor, such as a learning rate; PyTorch's own would run what is in it."""
        content = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), content)
        content.seek(0)
        super().load_bytes(read_item, content)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: all, but for a share of what fully_shard has split."""
    return tensor.to_local() if _is_split(tensor) else tensor


def _is_split(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")  # DTensor, which has come from another module than today's


def _reason(error: dcp.api.CheckpointException) -> str:
    return reason(next(iter(error.failures.values()))[0])
