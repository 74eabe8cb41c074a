"""Train on all GPUs of a node, save the network, and load it into a plain one. Three things are wrong."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(20, 64)
        self.output = nn.Linear(64, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.output(F.relu(self.hidden(images)))

    def guess(self, images: torch.Tensor) -> torch.Tensor:
        return self(images).argmax(1)


def wrap(model: nn.Module) -> nn.Module:
    return model  # nothing is wrapped yet


def save(model: nn.Module, path: Path) -> None:
    """Save the weights of a wrapped network."""
    torch.save(model.state_dict(), path)


def load(model: nn.Module, path: Path) -> None:
    """Load them into a plain network."""
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), strict=False)


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)  # more are no faster with so little work
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.randn(2000, 20, device=device)
    labels = (images @ torch.randn(20, 4, device=device)).argmax(1)

    model = wrap(Net().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    print(f"{type(model).__name__}: the first name in state_dict() is {next(iter(model.state_dict()))}")
    print("parameters on", {str(weights.device) for weights in model.parameters()})
    print(f"trained: {accuracy(model, images, labels):.1%} right")

    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "weights.pt")
        plain = Net()
        load(plain, Path(folder) / "weights.pt")
    print(f"loaded:  {accuracy(plain.to(device), images, labels):.1%} right")


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return (model(images).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
