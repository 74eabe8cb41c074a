"""What a rank keeps in memory from one step to the next, whether it has all of a network or a shard."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from manygpus.network.rank_weights import is_sharded


class KeptBytes(NamedTuple):
    """Bytes of this rank."""

    weights: int
    gradients: int
    optimizer: int


def kept_bytes(optimizer: torch.optim.Optimizer) -> KeptBytes:
    """Count what this rank has of the weights that `optimizer` trains, of their gradients, and of its state.

    Call it after a backward pass: `zero_grad` gives the memory of the gradients back.
    """
    # Not those of the network: it has some of them whole after a forward pass without a backward pass.
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
    state = []
    for parameter_state in optimizer.state.values():
        # The counters of steps, which have no dimensions, are no shard of anything.
        state += [
            value for value in parameter_state.values() if isinstance(value, torch.Tensor) and value.dim()
        ]
    return KeptBytes(_local_bytes(weights), _local_bytes(gradients), _local_bytes(state))


def _local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's parts of the tensors."""
    return sum((tensor.to_local() if is_sharded(tensor) else tensor).nbytes for tensor in tensors)
