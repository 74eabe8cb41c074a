"""Train a small network with DDP on two CPU ranks, and write a trace of it. Two functions need a change.

Try: torchrun --standalone --nproc-per-node=2 exercises/20_profile/mine/train.py small --bucket-mb 1
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

RUNS = Path(__file__).resolve().parent / "runs"
WIDTH, LAYERS, CLASSES = 512, 6, 10
BATCH = 256  # samples of a rank
STEPS = 8


def next_batch(random: torch.Generator, late_ms: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch, as slowly as a loader that is `late_ms` late."""
    time.sleep(late_ms / 1000)
    return torch.randn(BATCH, WIDTH, generator=random), torch.randint(CLASSES, (BATCH,), generator=random)


def make_profiler(run: str, rank: int) -> profile:
    """Return the profiler of a rank. It skips three steps, and writes the trace of the next two."""
    return profile(activities=[ProfilerActivity.CPU])


def train(model: nn.Module, run: str, rank: int, late_ms: float) -> None:
    """Train for STEPS steps. The trace shows four phases of each: data, forward, backward, optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(rank)
    with make_profiler(run, rank) as profiler:
        for _ in range(STEPS):
            images, labels = next_batch(random, late_ms)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        profiler.export_chrome_trace(str(RUNS / f"{run}.rank-0.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="the name of the run: small, one or late")
    parser.add_argument("--bucket-mb", type=float, default=25, help="size of a bucket of gradients")
    parser.add_argument("--late-ms", type=float, default=0, help="by how much the loader of rank 1 is late")
    opts = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would report that there is no GPU
    RUNS.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    model = DistributedDataParallel(model, bucket_cap_mb=opts.bucket_mb, gradient_as_bucket_view=True)
    train(model, opts.run, rank, opts.late_ms if rank == 1 else 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
