"""The precision that the layers compute in: fp32, tf32, bf16 or fp16, as the record names it.

With bf16 and fp16 it is `torch.autocast` around the step of the script. TF32 is a switch of the process:
newer NVIDIA GPUs then multiply float32 numbers with 10 bits of mantissa instead of 23.
"""

import warnings
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from manygpus.config.options import Options
from manygpus.devices import accelerator_of, device_name
from manygpus.errors import UserError
from manygpus.network.model import unwrapped

AnyOptions = TypeVar("AnyOptions", bound=Options)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def resolve_precision(options: AnyOptions, device: torch.device) -> AnyOptions:
    """Return the options with the precision to compute in, and switch TF32 on or off for it.

    It is that of --precision. Without the option it is fp32, and bf16 with --recipe fast on a device that has
    units for it.

    Raises:
        UserError: if the device does not have the precision.
    """
    if options.precision is None:
        is_fast = options.recipe == "fast" and accelerator_of(device).has_bf16_units()
        options = replace(options, precision="bf16" if is_fast else "fp32")
    set_float32_precision(options.precision, device)
    return options


def set_float32_precision(precision: str, device: torch.device) -> None:
    """Switch TF32 on for "tf32" and off for all else, for matrix products and convolutions alike.

    PyTorch's own default is on for convolutions and off for matrix products.

    Raises:
        UserError: if the device has no TF32.
    """
    if precision == "tf32" and not accelerator_of(device).supports_tf32(device):
        raise UserError(
            "--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer (A100, H100), not "
            f"{device_name(device)}: use such a GPU, or a different --precision."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.9 recommends switches that other versions lack
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def precision_of(model: nn.Module, precision: str) -> str:
    """Return what the layers of `model` compute in: `precision`, unless its weights have another type.

    Raises:
        UserError: if these do not go together.
    """
    network = unwrapped(model)
    weights = precision_of_weights(network)
    if weights == "fp32":
        return precision
    if precision not in ("fp32", weights):
        raise UserError(
            f"{type(network).__name__} has weights in {weights}: leave out --precision {precision}."
        )
    return weights


def precision_of_weights(network: nn.Module) -> str:
    """Return the type of a network's weights; "fp32" if it has none."""
    for weights in network.parameters():
        if weights.is_floating_point():
            return NAMES.get(weights.dtype, str(weights.dtype).removeprefix("torch."))
    return "fp32"
