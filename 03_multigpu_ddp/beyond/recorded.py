"""Train as plain_ddp.py does, in its own loop, and write the record of a stage; stop and go on, too.

Try: torchrun --standalone --nproc-per-node=2 recorded.py --epochs 2
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
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms
from trainkit import Recorder

DATA = Path(__file__).resolve().parents[2] / "data"  # where `make data` puts MNIST
SAVED = Path(os.environ.get("TRAINKIT_JOB_DIR", "."), "checkpoints", "recorded.pt")  # a job has its folder


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per optimizer step, in all")
    parser.add_argument("--data-dir", default=DATA, help="the folder that holds MNIST/raw/")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # 1. Meet the others.
    rank, ranks, local_rank = dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank()
    assert options.batch_size % ranks == 0, f"--batch-size has to divide among {ranks} ranks"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1 + rank)  # each drops other neurons

    normal = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    train_set = datasets.MNIST(options.data_dir, train=True, transform=normal)
    test_set = datasets.MNIST(options.data_dir, train=False, transform=normal)
    shares = DistributedSampler(train_set, drop_last=True)  # 2. Take a share of every batch.
    train_batches = DataLoader(train_set, options.batch_size // ranks, sampler=shares, drop_last=True)
    test_batches = DataLoader(Subset(test_set, range(rank, len(test_set), ranks)), batch_size=1000)

    model = Net().to(device)
    # 3. Average the gradients over all ranks in every backward pass.
    ddp = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    sizes = {"batch_size": options.batch_size, "epochs": options.epochs}
    recorder = Recorder("recorded", model, optimizer, dataset="mnist", settings={"dropout": 0.5}, **sizes)
    parts = {"model": model, "optimizer": optimizer}
    recorder.load(SAVED, parts)

    for epoch in range(recorder.first_epoch, options.epochs + 1):
        shares.set_epoch(epoch)  # another order in every epoch
        model.train()
        losses = torch.zeros(1, device=device)  # reading a loss in every step would make the CPU wait
        started = time.perf_counter()
        for images, labels in train_batches:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images), labels)
            loss.backward()
            optimizer.step()
            losses += loss.detach() * len(images)
            if recorder.should_stop():
                break
        if recorder.should_stop():  # this epoch is trained again by the process that goes on
            break
        trained = len(train_batches) * options.batch_size // ranks
        mean = losses.item() / trained  # item waits for the GPU, and so the clock does
        seconds = time.perf_counter() - started

        model.eval()
        right = torch.zeros(2, device=device)  # and of how many
        with torch.no_grad():
            for images, labels in test_batches:
                right[0] += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
                right[1] += len(labels)
        right, tested = right.tolist()
        # 4. Report what this rank has; the recorder sums up over all, at the pace of the slowest.
        recorder.epoch(trained, seconds, mean, test_samples=tested, accuracy=100 * right / tested)
        recorder.save(SAVED, parts)
    recorder.finish(saved=SAVED if recorder.should_stop() else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
