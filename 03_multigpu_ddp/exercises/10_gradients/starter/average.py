"""Train in several processes without DistributedDataParallel. Write the function `average`.

Try: torchrun --standalone --nproc-per-node=2 exercises/10_gradients/mine/average.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def average(model: nn.Module) -> None:
    """Make every gradient of the model its mean over all ranks."""


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    torch.manual_seed(1)  # the same first weights and the same data on every rank
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)  # frozen, as in fine-tuning
    inputs = torch.randn(24, 4)
    targets = inputs.sum(dim=1, keepdim=True)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(inputs[rank::size]), targets[rank::size]).backward()  # this rank's shard
        average(model)
        optimizer.step()
    print(f"rank {rank} of {size}: after 5 steps the sum of its weights is {model[1].weight.sum():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
