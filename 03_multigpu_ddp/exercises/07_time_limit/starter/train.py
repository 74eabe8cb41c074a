"""Train a small network with BatchNorm on images that lie on disk, with one process per GPU.

It saves after every epoch, and has no handler for signals yet. This is the solution of exercise convert.

Try: torchrun --standalone --nproc-per-node=2 exercises/07_time_limit/mine/train.py --epochs 3
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

FOLDER = Path(__file__).resolve().parent / "digits"
BATCH = 32  # images of an optimizer step, on all ranks together


class Images(Dataset):
    """The images of one of the files that digits.py writes; each is read only when it is needed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.images = np.load(folder / f"{name}-images.npy", mmap_mode="r")
        self.labels = np.load(folder / f"{name}-labels.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.images[number] / np.float32(255)), int(self.labels[number])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)
    )


def choose_device() -> torch.device:
    """Return the GPU of this process, which becomes the current one, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main(arguments: list[str] | None = None) -> list[tuple[float, float]]:
    """Train; return the mean loss and the accuracy (%) of each epoch, over all images of all processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)

    device = choose_device()
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    train_set = Images(options.folder, "train")
    validation_set = Images(options.folder, "validation")
    shards = DistributedSampler(train_set, drop_last=True)
    batches = DataLoader(train_set, BATCH // size, sampler=shards, drop_last=True)
    own = Subset(validation_set, range(rank, len(validation_set), size))
    validation_batches = DataLoader(own, BATCH)

    model = network().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    begin = 0
    best = 0.0
    results = []
    last = options.folder / "last.pt"
    if last.exists():  # resume where an earlier run ended
        state = torch.load(last, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"]
        best = state["best"]

    for epoch in range(begin, options.epochs):
        shards.set_epoch(epoch)
        loss = train_epoch(ddp, batches, optimizer, device)
        for buffer in model.buffers():  # each rank has seen different images: validate and save those of one
            dist.broadcast(buffer, src=0)
        accuracy = validate(model, validation_batches, device)
        results.append((loss, accuracy))
        if rank > 0:
            continue
        print(f"epoch {epoch + 1}: loss {loss:.4f}, {accuracy:.2f} % right")
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), options.folder / "best.pt")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"epoch": epoch + 1, "best": best}, last)
    dist.destroy_process_group()
    return results


def train_epoch(
    model: nn.Module, batches: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device
) -> float:
    """Train for one epoch; return its mean loss."""
    model.train()
    losses = torch.zeros(1, device=device)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses += loss.detach()
    dist.all_reduce(losses)
    return losses.item() / len(batches) / dist.get_world_size()


def validate(model: nn.Module, batches: DataLoader, device: torch.device) -> float:
    """Return the accuracy on the validation set, in percent."""
    model.eval()
    right = torch.zeros(2, device=device)  # how many are right, and of how many
    with torch.no_grad():
        for images, labels in batches:
            right[0] += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
            right[1] += len(labels)
    dist.all_reduce(right)
    return 100 * (right[0] / right[1]).item()


if __name__ == "__main__":
    main()
