"""How many operations a network needs for one training image: with them, speeds become shares of a peak."""

import copy
import math

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainkit.rank.data import Split
from trainkit.rank.model import unwrapped
from trainkit.runtime.device import keeping_random_numbers

INPUTS = 2  # BatchNorm refuses a single one


def per_image(model: nn.Module, train_set: Split) -> float:
    """Count the operations of a forward and a backward pass for one image; NaN where nobody can.

    By PyTorch's formulas for matrix products and convolutions, of which a multiplication with its addition
    is two operations; the rest is little, and not counted. A copy of the network computes it, in every rank
    alike, as a network may talk to the other ranks. Nothing of it is left, random numbers neither.
    """
    network = unwrapped(model)
    device = next(network.parameters()).device
    tries, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False  # not for this one step
    # Attention as matrix products: not every device's own kernel for it has a formula.
    counter, attention = FlopCounterMode(display=False), sdpa_kernel(SDPBackend.MATH)
    try:
        with keeping_random_numbers(device), counter, attention:
            inputs = train_set.prepare(train_set.inputs[:INPUTS].to(device))
            copy.deepcopy(network).train()(inputs).square().mean().backward()
    except Exception:  # a network with inputs and outputs of its own kind trains all the same
        return math.nan
    finally:
        torch.backends.cudnn.benchmark = tries
    return counter.get_total_flops() // len(inputs) or math.nan
