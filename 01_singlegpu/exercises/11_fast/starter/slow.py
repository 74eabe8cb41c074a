"""Train a small network on digits in plain PyTorch. It runs and learns, but makes a GPU wait in eight ways.

Try: python exercises/11_fast/mine/slow.py
"""

import json
import os
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from manygpus.data import synthetic

EPOCHS = 3
BATCH = 64
LARGEST = 6.0  # features are cut off at this value
SEEN = Path(__file__).parent / "runs" / "seen.json"  # what the last run did, for the check


def main() -> None:
    """Train; nothing in this function needs repair."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would report that there is no GPU
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    loader = make_loader(Digits(2_000, seed=1), device)
    test_loader = DataLoader(Digits(500, seed=2), 250)
    model = Net().to(device)
    # "eager" splits the network into graphs as on a GPU, but compiles none: a CPU may have no compiler.
    compiled = torch.compile(model, backend="inductor" if device.type == "cuda" else "eager")
    optimizer = make_optimizer(model)
    for epoch in range(1, EPOCHS + 1):
        loss = train_epoch(compiled, loader, optimizer, device)
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.1f} %")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train_epoch(compiled, loader, optimizer, device)
    print(profiler.key_averages().table(sort_by="count", row_limit=30))
    seen = {
        "program": sha256(Path(__file__).read_bytes()).hexdigest(),
        "device": device.type,
        "calls": {event.key: event.count for event in profiler.key_averages()},
        "graphs": counters["stats"]["unique_graphs"],
        "weights": str(model.fc.weight.dtype),
    }
    SEEN.parent.mkdir(exist_ok=True)
    SEEN.write_text(json.dumps(seen, indent=1))


class Digits(Dataset):
    """Generated digits, prepared one by one."""

    def __init__(self, count: int, seed: int) -> None:
        self.pixels, self.labels = synthetic.digits(count, seed)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pixels[index] / 255 - 0.2, self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.fc = nn.Linear(400, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        if x.max() > LARGEST:
            x = x.clamp(max=LARGEST)
        return self.fc(x.flatten(1))


def make_loader(data: Dataset, device: torch.device) -> DataLoader:
    """Return a loader whose batches come in a new order in every epoch, for a training on the device."""
    return DataLoader(data, BATCH, shuffle=True)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device
) -> float:
    """Train for one epoch, and return the mean of the losses of its batches."""
    model.train()
    total = 0.0
    for images, labels in loader:
        images = images.to(device)
        labels = labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Return the accuracy in percent."""
    model.eval()
    right = torch.zeros((), device=device)
    seen = 0
    for images, labels in loader:
        answers = model(images.to(device)).argmax(1)
        right += (answers == labels.to(device)).sum()
        seen += len(labels)
    return 100 * right.item() / seen


if __name__ == "__main__":
    main()
