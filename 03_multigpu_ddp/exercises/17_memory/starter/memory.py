"""Measure the memory of a training step by counting the tensors that are alive, on a GPU or without one.

Try: python exercises/17_memory/mine/memory.py
"""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAYERS = 8
WIDTH = 512
BATCH = 2048
OPTIMIZER = torch.optim.AdamW


class Alive(TorchDispatchMode):
    """Sees what every operation returns: `now` and `peak` are the bytes of all tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # noqa: ANN204
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())  # which two views of one tensor share
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, count: int) -> None:
        self.now -= count


def measure(layers: int = LAYERS, width: int = WIDTH, batch: int = BATCH) -> dict[str, float]:
    """Return the MB in memory at six moments of the second step, and at the fullest moment of all."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    megabytes = {}
    with Alive() as alive:

        def note(moment: str) -> None:
            megabytes[moment] = alive.now / 1e6

        parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.ReLU())]
        model = nn.Sequential(*parts).to(device)
        optimizer = OPTIMIZER(model.parameters())
        for _ in range(2):  # the optimizer makes its state in the first step
            alive.peak = alive.now
            note("between two steps")
            inputs = torch.randn(batch, width, device=device)
            note("with the batch")
            loss = model(inputs).mean()
            note("after forward")
            loss.backward()
            note("after backward")
            optimizer.step()
            note("after the optimizer")
            del loss, inputs
            optimizer.zero_grad()
            note("after zero_grad")
        megabytes["fullest"] = alive.peak / 1e6
    return megabytes


if __name__ == "__main__":
    for moment, mb in measure().items():
        print(f"{moment:20} {mb:7.1f} MB")
    if torch.cuda.is_available():
        print(f"{'the counter of CUDA':20} {torch.cuda.max_memory_allocated() / 1e6:7.1f} MB")
