"""DataParallel with several replicas on the CPU.

PyTorch's own are the replicas, their threads, the cutting into slices, and how gradients are flattened and
added up. In place of what it has for GPUs only stands code that does the same, with the same layouts.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.parallel import _functions, comm, scatter_gather


def pretend(gpus: int, put: Callable[[object, str, object], None] = setattr) -> int:
    """Have every DataParallel that is made from here on use `gpus` replicas; returns `gpus`."""
    init = nn.DataParallel.__init__

    def init_with_gpus(self: nn.DataParallel, module: nn.Module) -> None:
        init(self, module)
        self.device_ids, self.output_device, self.dim = list(range(gpus)), 0, 0
        self.src_device_obj = torch.device("cpu")

    put(nn.DataParallel, "__init__", init_with_gpus)
    put(_functions, "Broadcast", Broadcast)
    put(comm, "broadcast_coalesced", broadcast)
    put(comm, "reduce_add", lambda tensors, destination=None: torch.stack(tensors).sum(0))
    put(scatter_gather, "Scatter", SimpleNamespace(apply=lambda ids, _, dim, x: x.chunk(len(ids), dim)))
    put(scatter_gather, "Gather", SimpleNamespace(apply=lambda _, dim, *parts: torch.cat(parts, dim)))
    put(sys.modules["torch.nn.parallel.parallel_apply"], "torch", TorchWithoutStreams())
    return gpus


class TorchWithoutStreams:
    """For the threads of the replicas, which ask for a GPU and its stream (PyTorch 2.4 in torch.cuda)."""

    cuda = SimpleNamespace(
        current_stream=nullcontext, stream=nullcontext, device=nullcontext, Stream=torch.cuda.Stream
    )
    accelerator = SimpleNamespace(
        current_stream=nullcontext,
        device_index=nullcontext,
        is_available=lambda: True,
        current_accelerator=lambda: torch.device("cpu"),
    )

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def broadcast(tensors: list[torch.Tensor], devices: list[int]) -> list[list[torch.Tensor]]:
    """Do as torch/csrc/cuda/comm.cpp: the first replica has the tensors, the others copies, which are
    contiguous whatever the layout was."""
    layout = torch.contiguous_format
    copies = [[tensor.clone(memory_format=layout) for tensor in tensors] for _ in devices[1:]]
    return [list(tensors), *copies]


class Broadcast(torch.autograd.Function):
    """PyTorch's own refuses tensors of the CPU."""

    @staticmethod
    def forward(ctx: object, devices: list[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.count = len(tensors)
        return tuple(chain.from_iterable(broadcast(tensors, devices)))

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple:
        of_replicas = [gradients[i : i + ctx.count] for i in range(0, len(gradients), ctx.count)]
        return None, *comm.reduce_add_coalesced(of_replicas)
