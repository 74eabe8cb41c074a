"""Train the classic MNIST network in a loop of your own, in plain PyTorch, with the kit's Checkpointer.

It saves the whole state every 500 steps, and when a signal announces the end of the time limit. If you start
it again, it resumes, and reaches the losses of a training that was never stopped.

Try: torchrun --standalone --nproc-per-node=2 own_loop.py --epochs 2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from manygpus import Checkpointer, ResumableSampler, obey_the_trainer

DATA = Path(__file__).resolve().parents[3] / "data"  # where `make data` puts MNIST


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(9216, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc(self.dropout(F.max_pool2d(x, 2).flatten(1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per optimizer step and rank")
    parser.add_argument("--data-dir", default=DATA, help="the folder that holds MNIST/raw/")
    parser.add_argument("--save-every", type=int, default=500, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(1 + dist.get_rank())  # so that each rank drops different neurons

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    train_set = datasets.MNIST(args.data_dir, train=True, transform=transform)
    sampler = ResumableSampler(train_set, drop_last=True)
    worker_seeds = torch.Generator()  # separate: the loader must not use up the random numbers of dropout
    train_loader = DataLoader(
        train_set,
        args.batch_size,
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        persistent_workers=True,
        generator=worker_seeds,
        worker_init_fn=obey_the_trainer,  # Slurm signals the workers, too: they end only with their rank
    )
    steps = len(train_loader)

    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    loss_sum = torch.zeros((), device=device)  # of this rank, over the epoch

    checkpointer = Checkpointer(
        {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler},
        every_steps=args.save_every,
        settings={"batch size": args.batch_size},
        per_rank_state={"loss_sum": loss_sum},
    )
    first_epoch, step = checkpointer.resume()

    for epoch in range(first_epoch, args.epochs + 1):
        sampler.set_epoch(epoch)  # a new order in every epoch
        sampler.done = step * args.batch_size
        worker_seeds.manual_seed(epoch * dist.get_world_size() + dist.get_rank())
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
            step += 1
            if checkpointer.step(epoch, step):  # a signal came, and all is saved: every rank leaves
                dist.destroy_process_group()
                return
        dist.all_reduce(loss_sum)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss_sum.item() / (steps * dist.get_world_size()):.8f}")
        lr_scheduler.step()
        loss_sum.zero_()
        step = 0
        checkpointer.save(epoch + 1)
    checkpointer.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
