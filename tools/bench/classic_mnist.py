"""The baseline: MNIST as most tutorials train it, timed from the outside and otherwise left alone.

torchvision's MNIST with ToTensor and Normalize through a DataLoader, float32, Adadelta, the loss read
with `.item()` at every step. Writes one CSV row per epoch to the path given.
"""

import argparse
import csv
import time

import psutil
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torchvision import datasets, transforms

BATCH = 128
COLUMNS = ("epoch", "images_per_s", "eval_images_per_s", "test_accuracy", "elapsed_s")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--stop-at", type=float, default=100, help="end when this test accuracy (%%) is reached"
    )
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--csv", required=True)
    args = parser.parse_args()
    started = psutil.Process().create_time()

    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    on_gpu = {"num_workers": 1, "pin_memory": True} if device.type == "cuda" else {}
    train_set = datasets.MNIST(args.data_dir, train=True, transform=transform)
    test_set = datasets.MNIST(args.data_dir, train=False, transform=transform)
    train_loader = torch.utils.data.DataLoader(train_set, BATCH, shuffle=True, **on_gpu)
    test_loader = torch.utils.data.DataLoader(test_set, 1000, **on_gpu)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

    with open(args.csv, "w", newline="") as file:  # noqa: PTH123
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for epoch in range(1, args.epochs + 1):
            # No synchronisation is needed for a true time: `.item()` waits for the device at every step.
            start = time.perf_counter()
            model.train()
            for data, target in train_loader:
                data = data.to(device)
                target = target.to(device)
                optimizer.zero_grad()
                loss = F.nll_loss(model(data), target)
                loss.backward()
                optimizer.step()
                loss.item()
            trained = time.perf_counter()
            model.eval()
            correct = 0
            test_loss = 0.0
            with torch.no_grad():
                for data, target in test_loader:
                    data = data.to(device)
                    target = target.to(device)
                    output = model(data)
                    test_loss += F.nll_loss(output, target, reduction="sum").item()
                    correct += output.argmax(dim=1).eq(target).sum().item()
            tested = time.perf_counter()
            scheduler.step()
            images_per_s = len(train_set) / (trained - start)
            accuracy = 100 * correct / len(test_set)
            row = {
                "epoch": epoch,
                "images_per_s": images_per_s,
                "eval_images_per_s": len(test_set) / (tested - trained),
                "test_accuracy": accuracy,
                "elapsed_s": time.time() - started,
            }
            writer.writerow(row)
            file.flush()
            print(f"epoch {epoch}: {images_per_s:.0f} images/s, test accuracy {accuracy:.2f} %", flush=True)
            if accuracy >= args.stop_at:
                break


if __name__ == "__main__":
    main()
