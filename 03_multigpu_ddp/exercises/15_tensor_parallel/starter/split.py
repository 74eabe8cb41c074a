"""The two linear layers of a transformer block, split over the ranks: by hand, then by PyTorch.

Try: torchrun --standalone --nproc-per-node=2 exercises/15_tensor_parallel/mine/split.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import parallel


class Layers(nn.Module):
    """The two linear layers of a block; (n, width) to (n, width), with `hidden` numbers between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def shard(layers: Layers, rank: int, size: int) -> Layers:
    """Return new layers with this rank's part of the weights, 1 / size of the hidden numbers."""
    hidden, width = layers.up.weight.shape  # the number of outputs comes first
    mine = Layers(width, hidden)
    mine.up.weight.data = layers.up.weight.data  # all of it: where to cut?
    mine.down.weight.data = layers.down.weight.data
    return mine


class Enter(torch.autograd.Function):
    """Where x enters the split layers: every rank has all of x."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient  # what is missing?


class Leave(torch.autograd.Function):
    """Where the split layers end: each rank has a part of a sum."""

    @staticmethod
    def forward(context: object, part: torch.Tensor) -> torch.Tensor:
        return part.view_as(part)  # what is missing?

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def by_hand(mine: Layers, x: torch.Tensor) -> torch.Tensor:
    """Return what the whole layers would; `mine` are this rank's shard of them."""
    return Leave.apply(mine(Enter.apply(x)))


def by_pytorch(layers: Layers, size: int) -> nn.Module:
    """Split the layers in place over all ranks."""
    plan = {}  # for each of "up" and "down": parallel.ColwiseParallel() or parallel.RowwiseParallel()
    return parallel.parallelize_module(layers, init_device_mesh("cpu", (size,)), plan)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    torch.manual_seed(1)  # the same weights and the same input on every rank
    layers = Layers(8, 32)
    x = torch.randn(4, 8, requires_grad=True)
    mine = shard(layers, rank, size)
    for name, result in {
        "whole": layers(x),
        "by hand": by_hand(mine, x),
        "by PyTorch": by_pytorch(layers, size)(x),
    }.items():
        (gradient,) = torch.autograd.grad(result.square().mean(), x)
        if rank == 0:
            print(f"{name}: result {result.norm():.5f}, gradient of x {gradient.norm():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
