"""Train the classic MNIST network in a loop of your own, in plain PyTorch, and write the record of a stage.

The loop, the data and the network are in this file. The kit's Recorder writes the CSV, and its Checkpointer
saves the whole state, including that of the record. If a signal stops the script, or it is killed, start it
again. It then resumes, and the record has the rows of a training that was never stopped.

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
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms

from manygpus import Checkpointer, Recorder, ResumableSampler, obey_the_trainer

DATA = Path(__file__).resolve().parents[3] / "data"  # where `make data` puts MNIST


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
    parser.add_argument("--batch-size", type=int, default=64, help="images of all ranks per optimizer step")
    parser.add_argument("--data-dir", default=DATA, help="the folder that holds MNIST/raw/")
    parser.add_argument("--num-workers", type=int, default=4, help="processes that load images, at most")
    parser.add_argument("--save-every", type=int, default=500, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    # 1. Take the GPU of this process (GPU 0 if it sees only one), then meet the others.
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(1 + rank)  # so that each rank drops different neurons

    if not Path(args.data_dir, "MNIST").is_dir():
        raise SystemExit(f"there is no MNIST in {args.data_dir}: `make data` in the top folder fetches it")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    train_set = datasets.MNIST(args.data_dir, train=True, transform=transform)
    test_set = datasets.MNIST(args.data_dir, train=False, transform=transform)
    # Worker processes prepare the next batches, on the CPU cores that this process may use.
    num_workers = min(args.num_workers, len(os.sched_getaffinity(0)) - 1)
    worker_seeds = torch.Generator()  # separate: loaders must not use up the random numbers of dropout
    loader_options = {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,  # the same processes serve all epochs
        "pin_memory": device.type == "cuda",  # the GPU can fetch such a batch by itself (non_blocking)
        "worker_init_fn": obey_the_trainer,  # Slurm signals the workers, too: they end only with their rank
        "generator": worker_seeds,
    }
    # 2. Take one shard of every batch, and of the test images.
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide evenly among {world_size} ranks")
    sampler = ResumableSampler(train_set, num_replicas=world_size, rank=rank, drop_last=True)
    batch_size = args.batch_size // world_size
    test_set = Subset(test_set, range(rank, len(test_set), world_size))
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **loader_options)
    test_loader = DataLoader(test_set, batch_size=1000, **loader_options)

    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    # Of this rank, over an epoch. Reading a loss in every step would make the CPU wait.
    loss_sum = torch.zeros(1, device=device)
    seconds = torch.zeros(1, dtype=torch.float64)

    # 3. Average the gradients over all ranks in every backward pass.
    ddp = DistributedDataParallel(model)

    recorder = Recorder(
        "recorded",
        model,
        optimizer,
        batch_size=args.batch_size,
        epochs=args.epochs,
        dataset="mnist",
        settings={"dropout": 0.5},
    )
    checkpointer = Checkpointer(
        {"model": model, "optimizer": optimizer, "recorder": recorder},
        every_steps=args.save_every,
        per_rank_state={"loss_sum": loss_sum, "seconds": seconds},
    )
    first_epoch, step = checkpointer.resume()

    for epoch in range(first_epoch, args.epochs + 1):
        sampler.set_epoch(epoch)  # a new order in every epoch
        sampler.done = step * batch_size
        worker_seeds.manual_seed(epoch * world_size + rank)
        model.train()
        started = time.perf_counter() - seconds.item()  # the epoch may have begun in an earlier start
        for images, labels in train_loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images), labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(images)
            step += 1
            seconds.fill_(time.perf_counter() - started)
            if checkpointer.step(epoch, step):  # a signal came, and all is saved: every rank leaves
                dist.destroy_process_group()
                return
        trained = step * batch_size
        mean = loss_sum.item() / trained  # item() waits for the GPU: all its work is timed
        seconds.fill_(time.perf_counter() - started)

        model.eval()
        counts = torch.zeros(2, device=device)  # of right answers, and of images
        with torch.no_grad():
            for images, labels in test_loader:
                images = images.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
                counts[0] += (model(images).argmax(1) == labels).sum()
                counts[1] += len(labels)
        right, tested = counts.tolist()
        # 4. Report what this rank has; the recorder sums up over all, at the pace of the slowest.
        recorder.epoch(trained, seconds.item(), mean, test_samples=tested, accuracy=100 * right / tested)
        loss_sum.zero_()
        seconds.zero_()
        step = 0
        checkpointer.save(epoch + 1)
    checkpointer.finish()
    recorder.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
