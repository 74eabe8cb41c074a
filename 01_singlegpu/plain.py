"""Train the classic MNIST network on one GPU (or on the CPU, if there is none), in plain PyTorch.

Try: python plain.py --epochs 2
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

DATA = Path(__file__).resolve().parents[1] / "data"  # where `make data` puts MNIST


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(self.dropout2(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per optimizer step, in all")
    parser.add_argument("--data-dir", default=DATA, help="the folder that holds MNIST/raw/")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)

    if not Path(args.data_dir, "MNIST").is_dir():
        raise SystemExit(f"there is no MNIST in {args.data_dir}: `make data` in the top folder fetches it")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    train_set = datasets.MNIST(args.data_dir, train=True, transform=transform)
    test_set = datasets.MNIST(args.data_dir, train=False, transform=transform)
    # Loader processes prepare the next batches, on the CPU cores that this process may use.
    num_workers = min(4, len(os.sched_getaffinity(0)) - 1)
    loader_options = {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,  # the same processes serve all epochs
        "pin_memory": device.type == "cuda",  # the GPU can fetch such a batch by itself (non_blocking)
    }
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **loader_options)
    test_loader = DataLoader(test_set, batch_size=1000, **loader_options)
    trained = len(train_loader) * args.batch_size  # images in an epoch

    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    for epoch in range(1, args.epochs + 1):
        model.train()
        loss_sum = torch.zeros(1, device=device)  # reading a loss in every step would make the CPU wait
        started = time.perf_counter()
        for images, labels in train_loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(images)
        lr_scheduler.step()
        mean = loss_sum.item() / trained  # item() waits for the GPU: all its work is timed
        speed = trained / (time.perf_counter() - started)

        model.eval()
        counts = torch.zeros(2, device=device)  # of right answers, and of images
        with torch.no_grad():
            for images, labels in test_loader:
                images = images.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
                counts[0] += (model(images).argmax(1) == labels).sum()
                counts[1] += len(labels)
        right, tested = counts.tolist()
        print(f"epoch {epoch}: loss {mean:.4f}, {right:.0f} of {tested:.0f} right, {speed:.0f} images/s")

    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
