"""Runs a script of ours with something else in it.

usage: around.py without-dropout SCRIPT [options]    the only thing that differs between 1 and N ranks
       around.py stop-in-step STEP SCRIPT [options]  rank 1 gets USR2 in this optimizer step, counted from 1
       around.py kill-in-step STEP SCRIPT [options]  it is killed there; so is a process that is no rank
       around.py count-waits SCRIPT [options]        how often the CPU would have waited for a GPU

`pretend` has DataParallel use several replicas on the CPU. PyTorch's own are the replicas, their threads, the
cutting into slices, and how gradients are flattened and added up. In place of what it has for GPUs only
stands code that does the same, with the same layouts.
"""

import os
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.parallel import _functions, comm, scatter_gather
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from manygpus.checkpoint.stop_signal import Agreement
from manygpus.network import model

# .item(), nonzero(), selections by a mask: the CPU needs to know numbers, or how many there are.
WAITING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}


class Waits(TorchDispatchMode):
    """Counts such calls by their names, but for copies and meetings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(
        self, call: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        name = call.overloadpacket.__name__
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in WAITING or by_mask:
            self.seen[name] += 1
        return call(*args, **kwargs or {})


def send_in(step: int, number: signal.Signals) -> None:
    numbers = count(1)

    def send(*_: object) -> None:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        chosen = min(1, ranks - 1)  # a lone process, or rank 1
        if next(numbers) == step and int(os.environ.get("RANK", "0")) == chosen:
            os.kill(os.getpid(), number)

    register_optimizer_step_post_hook(send)


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


if __name__ == "__main__":
    _, how, *sys.argv = sys.argv
    if how in ("stop-in-step", "kill-in-step"):
        step, *sys.argv = sys.argv
        send_in(int(step), signal.SIGUSR2 if how == "stop-in-step" else signal.SIGKILL)
    if how == "without-dropout":
        model.Dropout = lambda _: nn.Identity()
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as Python does
    if how == "count-waits":
        Agreement.is_due = lambda self: False  # as often as the clock wants
        main = runpy.run_path(sys.argv[0])["main"].__wrapped__  # it does not end the process
        with Waits() as waits:
            main()
        print("waits:", sorted(waits.seen.items()))
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
