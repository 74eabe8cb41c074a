"""Generated signals, and a network for them. There is nothing to change here."""

import torch
from torch import nn


def waves(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy sines (rows, 1, 64) of 2, 3 or 4 periods, and which of the three each one is (rows,)."""
    random = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, (rows,), generator=random)
    phase = torch.rand(rows, 1, generator=random)
    periods = (2 + targets).unsqueeze(1) * torch.arange(64) / 64
    noise = torch.randn(rows, 64, generator=random)
    return (torch.sin(2 * torch.pi * (periods + phase)) + 0.3 * noise).unsqueeze(1), targets


class WaveNet(nn.Sequential):
    """Returns raw logits (rows, 3), not their logarithms."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(1, 8, 16, stride=4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(104, 32),
            nn.ReLU(),
            nn.Linear(32, 3),
        )
