"""What the layers of a network compute in: fp32 or bf16, and which of the two is faster here.

A network that can do both has the attribute `precision`, as `trainkit.model.Net` has. Every other
one computes in the type of its weights.
"""

import copy
import time

import torch
from torch import nn

from trainkit import world
from trainkit.data import Split
from trainkit.errors import UserError
from trainkit.model import bare

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def precision_of(model: nn.Module) -> str:
    """What the layers of `model` compute in, as the record calls it."""
    network = bare(model)
    if hasattr(network, "precision"):
        return network.precision
    return NAMES[next(network.parameters()).dtype]


def choose_precision(model: nn.Module, wanted: str, train_set: Split) -> None:
    """Have `model` compute in `wanted`, or for "auto" in the faster of fp32 and bf16, alike on every rank.

    A GPU is asked whether it has bf16 units. On a CPU the name of the chip does not tell, so a few
    training steps in each precision do, on the first images of `train_set`.

    Raises:
        UserError: if the model cannot compute in it.
    """
    if not hasattr(model, "precision"):
        if wanted not in ("auto", precision_of(model)):
            raise UserError(
                f"{type(model).__name__} computes in {precision_of(model)} only: leave out "
                f"--precision {wanted}, or give it an attribute `precision` as trainkit.model.Net has."
            )
        return
    if wanted == "auto":
        wanted = world.from_first("bf16" if _bf16_is_faster(model, train_set) else "fp32")
    model.precision = wanted


def _bf16_is_faster(model: nn.Module, train_set: Split) -> bool:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    seconds = {"fp32": [], "bf16": []}
    images = train_set.prepare(train_set.inputs[:64])
    trial = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):  # the training's dropout is not to depend on this
        for _ in range(5):  # in turns, so that a busy moment of the machine meets both
            for trial.precision, times in seconds.items():
                start = time.perf_counter()
                trial(images).square().mean().backward()
                times.append(time.perf_counter() - start)
    return min(seconds["bf16"]) < min(seconds["fp32"])
