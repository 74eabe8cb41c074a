"""The classic MNIST network: 1,199,882 parameters, 71.6 MFLOP per training image, or others of its kind.

Also what the kit asks of any network: its weights, and its number of operations, from which a speed becomes
a share of the hardware's peak.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from trainkit.rank.data import Split
from trainkit.runtime.device import keeping_random_numbers
from trainkit.schema.columns import DEFAULT_WIDTH

INPUTS = 2  # to count operations: BatchNorm refuses a single input


class Net(nn.Module):
    """Two convolutions, one pooling, two linear layers, as in the PyTorch MNIST example.

    Takes normalised images, float32 (n, 1, 28, 28); returns log-probabilities, float32 (n, 10).
    `width` is the number of channels of the first convolution. `precision` is what the layers compute in,
    "fp32", "bf16" or "fp16"; the weights are float32 either way.
    """

    def __init__(self, width: int = DEFAULT_WIDTH, precision: str = "fp32") -> None:
        super().__init__()
        self.precision = precision
        self.conv1 = nn.Conv2d(1, width, kernel_size=3)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3)
        self.dropout1 = Dropout(0.25)
        self.dropout2 = Dropout(0.5)
        self.fc1 = nn.Linear(288 * width, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Here and not around the call: DataParallel's threads would fall back to float16.
        kind = torch.float16 if self.precision == "fp16" else torch.bfloat16
        with torch.autocast(images.device.type, kind, enabled=self.precision != "fp32"):
            return F.log_softmax(self._logits(images).float(), dim=1)

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(images))
        # Pooling before relu: the largest of four, then relu, is the same number as relu, then the
        # largest of four, and leaves relu a quarter of the work.
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = self.dropout1(x)
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.dropout2(x)
        return self.fc2(x)


class Dropout(nn.Dropout):
    """nn.Dropout with a mask of random bytes on the CPU.

    PyTorch draws one float per element in a single thread there, which costs more than the
    pooling and both linear layers together. A byte per element is enough, because the
    probabilities are whole 256ths. On a GPU it is nn.Dropout itself.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or x.device.type != "cpu":
            return super().forward(x)
        dropped = round(self.p * 256)
        # Eight bytes per draw; the bounds ask for all 64 bits.
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        mask = words.view(torch.uint8)[: x.numel()].as_strided(x.size(), x.stride()) >= dropped
        return x * mask.to(x.dtype).mul_(256 / (256 - dropped))


def class_name(model: nn.Module) -> str:
    """Return the name of the network's class, without the "FSDP" that fully_shard puts before it."""
    return type(unwrapped(model)).__name__.removeprefix("FSDP")


def trained_weights(model: nn.Module) -> int:
    """Count the weights that are trained."""
    return sum(weights.numel() for weights in model.parameters() if weights.requires_grad)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network without the wrapper of DataParallel, DDP, torch.compile or Fabric.

    They put "module." and "_orig_mod." before the names of the weights.
    """
    of_fabric = type(model).__name__ == "_FabricModule"
    if of_fabric or isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        return unwrapped(model.module)
    if hasattr(model, "_orig_mod"):  # torch.compile's wrapper, whose class takes seconds to import
        return unwrapped(model._orig_mod)
    return model


def operations_per_image(model: nn.Module, train_set: Split) -> float:
    """Count the operations of a forward and a backward pass for one image; NaN if they cannot be counted.

    PyTorch's formulas for matrix products and convolutions count a multiplication with its addition as two
    operations; the rest is small and not counted. Every rank runs a copy of the network, as a network may
    communicate with the other ranks. Nothing of the copy remains, and the random numbers do not change.
    """
    from torch.utils.flop_counter import FlopCounterMode  # 0.3 s, which those who only load weights save

    network = unwrapped(model)
    device = next(network.parameters()).device
    tries, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False  # one step is not worth it
    # Attention as matrix products: some devices' fused kernels have no formula.
    counter, attention = FlopCounterMode(display=False), sdpa_kernel(SDPBackend.MATH)
    try:
        with keeping_random_numbers(device), counter, attention:
            inputs = train_set.prepare(train_set.inputs[:INPUTS].to(device))
            copy.deepcopy(network).train()(inputs).square().mean().backward()
    except Exception:  # a network with unusual inputs or outputs still trains
        return math.nan
    finally:
        torch.backends.cudnn.benchmark = tries
    return counter.get_total_flops() // len(inputs) or math.nan
