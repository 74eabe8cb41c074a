"""Train a small network on digits with DistributedDataParallel. It runs, and has ten bugs.

Try: torchrun --standalone --nproc-per-node=2 exercises/05_repair/mine/broken_ddp.py
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split

from manygpus.data import synthetic

EPOCHS = 6
BATCH = 64  # images of all ranks together
SEED = 1


def main() -> None:
    """Train; nothing in this function needs repair."""
    rank, size = join()
    torch.manual_seed(SEED + rank)  # each rank drops different neurons
    train_set, validation_set = split(load(6_000, seed=1))
    loader = training_batches(train_set, rank, size)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    epochs = fit(model, loader, optimizer)
    validated = evaluate(model.module, validation_set, rank, size)
    tested = evaluate(model.module, load(1_001, seed=2), rank, size)
    if rank == 0:
        for number, epoch in enumerate(epochs, start=1):
            print(f"epoch {number}: mean loss {epoch['loss']:.3f}", end=", ")
            print(f"{epoch['images_per_s']:,.0f} images/s of all ranks, {epoch['seconds']:.2f} s")
        print(f"accuracy: validation {validated:.2f} %, test {tested:.2f} %")
    save(model, rank)
    dist.destroy_process_group()


def join() -> tuple[int, int]:
    """Meet the other processes, on any number of nodes; return rank and world size."""
    os.environ["MASTER_ADDR"] = "localhost"
    rank = int(os.environ["LOCAL_RANK"])
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    return rank, size


def load(images: int, seed: int) -> Dataset:
    """Return generated digits, the same on every rank."""
    pixels, labels = synthetic.digits(images, seed)
    return TensorDataset(pixels / 255 - 0.2, labels)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def split(images: Dataset) -> tuple[Dataset, Dataset]:
    """Return the images to train on, and a sixth of all images to validate with."""
    validation = len(images) // 6
    sizes = [len(images) - validation, validation]
    train_set, validation_set = random_split(images, sizes)
    return train_set, validation_set


def training_batches(train_set: Dataset, rank: int, size: int) -> DataLoader:
    """Return a loader of this rank's shard of every batch, in a new order in every epoch."""
    sampler = DistributedSampler(train_set, size, rank, shuffle=True, drop_last=True)
    return DataLoader(train_set, BATCH // size, sampler=sampler, drop_last=True)


def fit(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Train; return the mean loss of all images, the images/s of all ranks and the seconds of each epoch."""
    numbers = []
    for epoch in range(EPOCHS):
        start = time.perf_counter()
        loss, images = train_epoch(model, loader, optimizer, epoch)
        seconds = time.perf_counter() - start
        numbers.append({"loss": loss, "images_per_s": images / seconds, "seconds": seconds})
    return numbers


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, epoch: int
) -> tuple[float, int]:
    """Train for one epoch; return its mean loss and the number of its images."""
    model.train()
    trained = 0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        for weights in model.parameters():
            weights.grad /= dist.get_world_size()
        optimizer.step()
        trained += len(images)
    return loss.item(), trained


def evaluate(model: nn.Module, images: Dataset, rank: int, size: int) -> float:
    """Return the accuracy on `images` in percent; each rank evaluates a part of them."""
    model.eval()
    sampler = DistributedSampler(images, size, rank, shuffle=False)
    sums = torch.zeros(2)
    with torch.no_grad():
        for inputs, labels in DataLoader(images, 250, sampler=sampler):
            correct = model(inputs).argmax(1).eq(labels).sum()
            sums += torch.tensor([correct, len(labels)])
    dist.all_reduce(sums)
    correct, seen = sums.tolist()
    return 100 * correct / seen


def save(model: nn.Module, rank: int) -> None:
    """Save the trained weights in a file next to this one."""
    torch.save(model.module.state_dict(), Path(__file__).with_name("weights.pt"))


if __name__ == "__main__":
    main()
