"""Whether a rank has all of the weights, and the same as the others: what rank 0 saves counts for all."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from manygpus.distributed import process_group
from manygpus.errors import UserError

IF_SHARDED = (
    "give Run sharded=Sharded(model, optimizer), or, in your own loop, Checkpointer that in place of both."
)


def is_sharded(value: object) -> bool:
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


def is_zero_optimizer(optimizer: object) -> bool:
    """Return whether this is a ZeroRedundancyOptimizer: each rank has its state for some of the weights."""
    return hasattr(optimizer, "consolidate_state_dict")  # its class takes long to import


def gather_on_rank_0(parts: dict[str, object]) -> None:
    """Gather the whole state of each optimizer in `parts` on rank 0; every rank calls it before a save."""
    for part in parts.values():
        optimizer = _optimizer_of(part)
        if is_zero_optimizer(optimizer):
            optimizer.consolidate_state_dict(to=0)


def check_whole(parts: dict[str, object], way: str) -> None:
    """Check that each of `parts` is whole on this rank: torch.save would write a shard without a word.

    Raises:
        UserError: "<name> is split over the ranks, ...: <way>".
    """
    for name, part in parts.items():
        if _is_sharded(part):
            raise UserError(f"{name} is split over the ranks, and rank 0's part would be saved as all: {way}")


def check_equal(parts: dict[str, object], way: str) -> None:
    """Check that each of `parts` has weights of the same names and shapes on all ranks; call it on all.

    Raises:
        UserError: "<name> has different weights on rank <N> ...: <way>".
    """
    shapes = {
        name: {label: tuple(value.shape) for label, value in _weights_of(part)}
        for name, part in parts.items()
    }
    first, *others = process_group.gather(shapes)
    for rank, other in enumerate(others, start=1):
        for name, shapes_on_rank_0 in first.items():
            if other.get(name, shapes_on_rank_0) != shapes_on_rank_0:
                raise UserError(
                    f"{name} has different weights on rank {rank} than on rank 0, which saves them: {way}"
                )


def _is_sharded(part: object) -> bool:
    # Its own state_dict puts the weights together in a meeting of all ranks, and leaves the optimizer's.
    if isinstance(part, nn.Module) and is_in_earlier_fsdp(part):
        return True
    return any(is_sharded(value) for _, value in _weights_of(part))


def _weights_of(part: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and the weights of a network, or those that an optimizer trains."""
    optimizer = _optimizer_of(part)
    if isinstance(part, nn.Module):
        yield from part.named_parameters()
        yield from part.named_buffers()
    elif optimizer is not None:
        for number, group in enumerate(optimizer.param_groups):
            yield from ((f"{number} {place}", weights) for place, weights in enumerate(group["params"]))


def _optimizer_of(part: object) -> torch.optim.Optimizer | None:
    """Return the optimizer that this part of a checkpoint is, or wraps; None if it is something else."""
    # An lr_scheduler has an optimizer, too, and saves nothing of it.
    optimizer = None if isinstance(part, LRScheduler) else inner_optimizer(part)
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
