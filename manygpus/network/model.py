"""The classic MNIST network of 1,199,882 parameters, or others of its kind; and what any network has.

That is the number of its trained weights, and the network itself inside the wrappers of PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manygpus.record.columns import DEFAULT_WIDTH


class Net(nn.Module):
    """Two convolutions, one pooling, two linear layers, as in the PyTorch MNIST example.

    Takes normalised images, float32 (n, 1, 28, 28); returns log-probabilities, float32 (n, 10).
    `width` is the number of channels of the first convolution.
    """

    def __init__(self, width: int = DEFAULT_WIDTH) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, kernel_size=3)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3)
        self.dropout1 = Dropout(0.25)
        self.dropout2 = Dropout(0.5)
        self.fc1 = nn.Linear(288 * width, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(images))
        # Pooling before relu: the largest of four, then relu, is the same number as relu, then the
        # largest of four, and leaves relu a quarter of the work.
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = self.dropout1(x)
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.dropout2(x)
        # In float32 also under autocast, which leaves it bfloat16 on a CPU.
        return F.log_softmax(self.fc2(x).float(), dim=1)


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
    is_fabric_wrapper = type(model).__name__ == "_FabricModule"
    if is_fabric_wrapper or isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        return unwrapped(model.module)
    if hasattr(model, "_orig_mod"):  # torch.compile's wrapper, whose class takes seconds to import
        return unwrapped(model._orig_mod)
    return model
