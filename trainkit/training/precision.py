"""The precision that the layers compute in: fp32, tf32, bf16 or fp16, and which one to choose here.

A network that supports bf16 and fp16 has the attribute `precision`, as `model.Net` has. Every other
network computes in the type of its weights. With TF32, newer NVIDIA GPUs multiply float32 numbers with
10 bits of mantissa instead of 23. It is a switch of the process, not of the network.
"""

import copy
import warnings

import torch
from torch import nn

from trainkit.config.options import Options
from trainkit.data.datasets import Split
from trainkit.data.loaders import Data
from trainkit.devices import accelerator_of, device_name, has_tf32, keeping_random_numbers
from trainkit.distributed import process_group
from trainkit.errors import UserError
from trainkit.training import clock
from trainkit.training.model import unwrapped
from trainkit.training.optim import optimizer_and_schedule

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
CLEARLY = 1.1  # fewer bits must be at least this many times as fast
TURNS = 3  # of the trial, after one for warm-up
MOST_INPUTS_ON_CPU = 128  # larger batches show the same and take seconds


def precision_of(model: nn.Module) -> str:
    """Return the precision that the layers of `model` compute in, as the record names it."""
    network = unwrapped(model)
    name = network.precision if hasattr(network, "precision") else _of_weights(network)
    return "tf32" if name == "fp32" and torch.backends.cuda.matmul.allow_tf32 else name


def choose_precision(model: nn.Module, options: Options, train_set: Data) -> None:
    """Set the precision of `model` to `--precision`; "auto" picks what pays here, the same on every rank.

    Raises:
        UserError: if the model or its device cannot compute in it.
    """
    wanted = options.precision
    if wanted == "auto":
        names = process_group.broadcast(_worth_a_trial(model))
        wanted = names[0]
        if len(names) > 1 and isinstance(train_set, Split):  # other data sets have no batch at hand to try
            wanted = _worth_its_loss(names, model, options, train_set)
    set_precision(model, wanted)


def set_precision(model: nn.Module, precision: str) -> None:
    """Set the precision of `model`, and switch TF32 on or off for the whole process.

    Raises:
        UserError: if the model or its device cannot compute in it.
    """
    network = unwrapped(model)
    weights, own_choice = _of_weights(network), hasattr(network, "precision")
    possible = {"fp32", "tf32"} if weights == "fp32" else {weights}
    if own_choice:
        possible |= {"fp32", "bf16", "fp16"}
    if precision not in possible:
        raise UserError(
            f"{type(network).__name__} computes in {weights} only: leave out "
            f"--precision {precision}, or give it an attribute `precision` as model.Net has."
        )
    if precision == "tf32" and not has_tf32(_device(network)):
        raise UserError(
            "--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer (A100, H100), not "
            f"{device_name(_device(network))}: use such a GPU, or another --precision."
        )
    if own_choice:
        network.precision = precision if precision in ("bf16", "fp16") else "fp32"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.9 recommends switches that other versions lack
        # For both kinds of layers: PyTorch's default allows it in convolutions only.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _of_weights(network: nn.Module) -> str:
    types = [own.dtype for own in network.parameters() if own.is_floating_point()]
    return NAMES.get(types[0], str(types[0]).removeprefix("torch.")) if types else "fp32"


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def _worth_a_trial(model: nn.Module) -> list[str]:
    """List what "auto" chooses from, the most exact first."""
    network = unwrapped(model)
    device, weights = _device(network), _of_weights(network)
    names = ["tf32" if weights == "fp32" and has_tf32(device) else weights]
    if hasattr(network, "precision") and weights == "fp32" and accelerator_of(device).supports_bf16():
        names.append("bf16")
    return names


def _worth_its_loss(names: list[str], model: nn.Module, options: Options, train_set: Split) -> str:
    """Return the second of `names` if training steps are clearly faster in every turn; else the first.

    The trial runs steps of a copy of the network, with this run's optimizer and a device's share of a batch,
    in turns, so that a busy moment of the machine affects both. If a GPU waits for kernel launches, the two
    differ only by noise, and the more exact one costs nothing. All ranks choose the same, as the clock of the
    slowest rank counts.
    """
    network = unwrapped(model)
    device = _device(network)
    devices = len(model.device_ids) if isinstance(model, nn.DataParallel) else process_group.count()
    batch, steps = options.batch_size // devices, 10  # in a row, as a GPU works through a queue
    if not accelerator_of(device).runs_ahead:
        batch, steps = min(batch, MOST_INPUTS_ON_CPU), 1
    inputs = train_set.prepare(train_set.inputs[torch.arange(batch) % len(train_set)].to(device))
    # The training's dropout must not depend on this.
    with keeping_random_numbers(device):
        trial = copy.deepcopy(network).train()
        optimizer, _ = optimizer_and_schedule(options, trial, steps_per_epoch=1)

        def seconds(name: str) -> float:
            set_precision(trial, name)
            started = clock.start(device)
            for _ in range(steps):
                optimizer.zero_grad()
                trial(inputs).square().mean().backward()
                optimizer.step()
            return clock.stop(device, started)

        _, *turns = [[seconds(name) for name in names] for _ in range(1 + TURNS)]
    return names[1] if all(exact >= CLEARLY * other for exact, other in turns) else names[0]
