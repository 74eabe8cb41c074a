"""Fit a line to the readings of three stations, one rank for each, and keep the best weights.

Last year one line fitted all stations. This year one of them differs.

Try: torchrun --standalone --nproc-per-node=3 exercises/08_hang/mine/train.py
"""

import faulthandler
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

BEST = Path(__file__).resolve().parent / "best.pt"
EPOCHS, STEPS = 8, 10
# The slope at each station. The line is fitted to last year's readings and validated on this year's.
LAST_YEAR, THIS_YEAR = (2.0, 2.0, 2.0), (1.9, 2.0, 0.9)


def readings(slope: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the inputs and the targets of a station, each of shape (64, 1)."""
    inputs = torch.linspace(0, 1, 64).unsqueeze(1)
    return inputs, slope * inputs


def average_gradients(model: nn.Module) -> None:
    """Make every gradient its mean over all ranks."""
    for weights in model.parameters():
        dist.all_reduce(weights.grad)
        weights.grad /= dist.get_world_size()


def validate(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the mean squared error."""
    with torch.no_grad():
        return F.mse_loss(model(inputs), targets).item()


def save(model: nn.Module) -> None:
    """Write the weights. No rank continues before the file is complete."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), BEST)
    dist.barrier()


def main() -> list[int]:
    """Train; return the epochs whose mean error over all stations was the lowest so far."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    last_year, this_year = readings(LAST_YEAR[rank]), readings(THIS_YEAR[rank])
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    best, saved = float("inf"), []
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.mse_loss(model(last_year[0]), last_year[1]).backward()
            average_gradients(model)
            optimizer.step()
        error = validate(model, *this_year)
        if error < best:
            best = error
            saved.append(epoch)
            save(model)
        if rank == 0:
            print(f"epoch {epoch}: error {error:.4f}, best {best:.4f}", flush=True)
    return saved


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` makes this process print its stacks
    main()
    dist.destroy_process_group()
