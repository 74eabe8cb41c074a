"""A training for those who have none: a small network on made-up data, on any number of ranks.

It does not use the kit. Try: python exercises/10_your_job/mine/train.py --steps 50
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 64  # samples of a step on each rank


class Rows(Dataset):
    """Rows of 256 numbers and their mean square; each row is made only when it is needed."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randn(256, generator=torch.Generator().manual_seed(number))
        return row, row.square().mean(dim=0, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps, at most an epoch")
    parser.add_argument("--workers", type=int, default=1, help="loader processes of each rank")
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:  # started by `python` alone
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)

    sampler = DistributedSampler(Rows(), drop_last=True)
    batches = DataLoader(Rows(), BATCH, sampler=sampler, drop_last=True, num_workers=options.workers)
    network = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    )
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step, (rows, targets) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = F.mse_loss(model(rows.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if step == options.steps:
            break
    if rank == 0:
        folder = Path(os.environ.get("MANYGPUS_JOB_DIR", "."))
        torch.save(network.state_dict(), folder / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
