"""What each technique adds: train a few steps with the first N rungs of the ladder, print images/s.

python tools/bench/ladder.py 3 --data-dir data
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from classic_mnist import BATCH
from classic_mnist import Net as ClassicNet
from torch import nn

from manygpus import load_dataset
from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.data.loaders import Batch, DistributedBatchSampler, ResidentBatches
from manygpus.network.model import Dropout
from manygpus.training.process_tuning import keep_freed_memory

RUNGS = (
    "classic script",
    "data set resident as bytes",
    "pool before relu",
    "channels_last",
    "dropout masks from bytes",
    "foreach optimizer",
    "bf16",
    "freed memory kept",
)


class LadderNet(ClassicNet):
    """The classic network with the techniques of manygpus.network.model switched on one by one."""

    def __init__(self, have: set[str]) -> None:
        super().__init__()
        self.have = have
        if "dropout masks from bytes" in have:
            self.dropout1 = Dropout(0.25)
            self.dropout2 = Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(F.relu(self.conv1(x)))
        x = F.relu(F.max_pool2d(x, 2)) if "pool before relu" in self.have else F.max_pool2d(F.relu(x), 2)
        x = self.dropout1(x)
        if "channels_last" in self.have:
            x = x.permute(0, 2, 3, 1)  # as the pixels lie in memory, so that nothing is moved
        x = x.flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x).float(), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rung", type=int, choices=range(len(RUNGS)))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR)
    args = parser.parse_args()
    have = set(RUNGS[: args.rung + 1])

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "freed memory kept" in have and device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(1)
    train_set, _ = load_dataset("mnist", args.data_dir)
    model = LadderNet(have).to(device)
    if "channels_last" in have:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adadelta(model.parameters(), foreach="foreach optimizer" in have)

    order = DistributedBatchSampler(len(train_set), BATCH, seed=1)
    if "data set resident as bytes" in have:
        batches = ResidentBatches(train_set, order, device)
    else:
        batches = torch.utils.data.DataLoader(train_set, batch_sampler=order)
    batches = _endless(batches)
    _train(model, optimizer, batches, device, have, steps=5)  # warm-up
    start = time.perf_counter()
    _train(model, optimizer, batches, device, have, args.steps)
    print(args.steps * BATCH / (time.perf_counter() - start))


def _endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    device: torch.device,
    have: set[str],
    steps: int,
) -> None:
    for _ in range(steps):
        images, labels = next(batches)
        images = images.to(device)
        labels = labels.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled="bf16" in have):
            loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        if "data set resident as bytes" not in have:
            loss.item()
    loss.item()  # waits for the device


if __name__ == "__main__":
    main()
