"""Train the classic MNIST network in plain PyTorch on any number of GPUs, and resume after whatever ended it.

It saves its whole state every few hundred steps, and when a signal says that its time is over. Started again,
it goes on from there, and reaches the losses of a training that was never stopped.

Try: python plain_resume.py --epochs 2     end it with kill -9, and start it again
     torchrun --standalone --nproc-per-node=2 plain_resume.py --epochs 2
"""

import argparse
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

# Slurm sends USR2 a minute before the time limit, if the job script has `#SBATCH --signal=USR2@60`, and
# SIGTERM at the limit and when it preempts the job. Each would end Python, also during the imports below.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
signals_received = []
for stop_signal in STOP_SIGNALS:
    signal.signal(stop_signal, lambda number, _: signals_received.append(number))

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms

DATA = Path(__file__).resolve().parents[1] / "data"  # where `make data` puts MNIST
JOB = os.environ.get("TRAINKIT_JOB_DIR")  # in jobs of the kit; the same folder when the job comes back
CHECK_STEPS = 10  # after so many steps the ranks ask whether to stop; they take much less than a minute


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


class Process(NamedTuple):
    """This process among all; alone it is rank 0 of 1, and needs no process group."""

    rank: int
    ranks: int
    device: torch.device


@dataclass
class Progress:
    """How far this rank is: `step` steps of `epoch` are done, and their losses add up to `loss_sum`."""

    epoch: int = 1
    step: int = 0
    loss_sum: float = 0.0


class Checkpoint:
    """One file with the whole state of a training. All ranks make one and call its methods at the same step.

    Args:
        path: on a disk that all nodes share.
        parts: what has a state_dict, by name: the model (without DDP around it), the optimizer, the schedule;
            also a GradScaler, or averaged weights, where a training has them.
        settings: what decides which samples a step has; a file with others is refused.
        here: this process.
    """

    def __init__(self, path: Path, parts: dict[str, object], settings: dict[str, int], here: Process) -> None:
        self.path = path
        self.parts = parts
        self.settings = settings
        self.here = here

    def save(self, progress: Progress) -> None:
        """Write the file whole or not at all: if this is killed meanwhile, the one before it is left."""
        own = {"progress": asdict(progress), "random": random_states(self.here.device)}
        of_ranks = gather(own, self.here)
        if self.here.rank == 0:
            states = {name: part.state_dict() for name, part in self.parts.items()}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".new")
            with unfinished.open("wb") as file:
                torch.save({"parts": states, "of_ranks": of_ranks, "settings": self.settings}, file)
                file.flush()
                os.fsync(file.fileno())  # it has to be on the disk before it replaces the other
            unfinished.replace(self.path)
        if self.here.ranks > 1:
            dist.barrier()  # a rank that ended now could have rank 0 ended before the file is written

    def load(self) -> Progress:
        """Restore the state in the file, and return how far it was; without a file, begin."""
        progress = Progress()
        if self.path.exists():
            # To the CPU, where random states have to be. Each part moves its own tensors to its device.
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            if saved["settings"] != self.settings:
                raise SystemExit(f"{self.path} has {saved['settings']}, not {self.settings}: move it away")
            for name, part in self.parts.items():
                part.load_state_dict(saved["parts"][name])
            own = saved["of_ranks"][self.here.rank]
            set_random_states(own["random"], self.here.device)
            progress = Progress(**own["progress"])
        if len(set(gather((progress.epoch, progress.step), self.here))) > 1:
            raise SystemExit(f"not all ranks see the same {self.path}: save it on a disk that they share")
        return progress


def gather(own: object, here: Process) -> list[object]:
    """Return what each rank has, in the order of the ranks."""
    of_ranks = [own] * here.ranks
    if here.ranks > 1:
        dist.all_gather_object(of_ranks, own)
    return of_ranks


def random_states(device: torch.device) -> dict[str, object]:
    """Return the state of every source of random numbers, as types that `weights_only` accepts."""
    name, keys, *position = np.random.get_state()
    states = {"python": random.getstate(), "numpy": (name, keys.tolist(), *position)}
    states["torch"] = torch.get_rng_state()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, object], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that leaves out the first `done` samples of this rank's share of the epoch."""

    done = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.done, None)


def must_stop(here: Process) -> bool:
    """Return whether any rank has received a signal: all get the same answer, and stop together."""
    received = torch.tensor(len(signals_received), device=here.device)
    if here.ranks > 1:
        dist.all_reduce(received)
    return bool(received)


def obey_the_rank(_worker: int) -> None:
    """End a loader worker, in which the signals are blocked, when its rank sends SIGTERM, but nobody else.

    Slurm signals all processes of a job. A worker that ended by that would take the rank with it, unsaved.
    """
    rank = multiprocessing.parent_process().pid

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per optimizer step, in all")
    parser.add_argument("--num-workers", type=int, default=4, help="processes that load images, at most")
    parser.add_argument("--save-every", type=int, default=500, help="steps from one checkpoint to the next")
    parser.add_argument("--data-dir", default=DATA, help="the folder that holds MNIST/raw/")
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        # Number 0 if this process sees no other GPU.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    here = Process(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), device)
    if here.ranks > 1 and device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    elif here.ranks > 1:
        dist.init_process_group("gloo")
    train(options, here)
    if here.ranks > 1:
        dist.destroy_process_group()


def train(options: argparse.Namespace, here: Process) -> None:
    """Train to the last epoch, or until a signal says to stop."""
    rank, ranks, device = here
    assert options.batch_size % ranks == 0, f"--batch-size has to divide among {ranks} ranks"
    torch.manual_seed(1 + rank)  # so that each rank drops different neurons
    normal = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    train_set = datasets.MNIST(options.data_dir, train=True, transform=normal)
    test_set = datasets.MNIST(options.data_dir, train=False, transform=normal)
    share_of_batch = options.batch_size // ranks
    # Processes beside this one prepare the next batches, on the CPU cores that this one may use.
    num_workers = min(options.num_workers, len(os.sched_getaffinity(0)) - 1)
    sampler = ResumableSampler(train_set, ranks, rank, drop_last=True)
    steps = len(sampler) // share_of_batch
    worker_seeds = torch.Generator()  # of its own, or the loader would draw from the numbers of the dropout
    train_batches = DataLoader(
        train_set,
        share_of_batch,
        sampler=sampler,
        drop_last=True,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=obey_the_rank,
        generator=worker_seeds,
    )
    test_batches = DataLoader(Subset(test_set, range(rank, len(test_set), ranks)), batch_size=1000)

    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    checkpoint = Checkpoint(
        Path(JOB or ".") / "checkpoints" / "plain_resume.pt",
        parts={"model": model, "optimizer": optimizer, "schedule": schedule},
        settings={"ranks": ranks, "batch_size": options.batch_size},
        here=here,
    )
    progress = checkpoint.load()
    if rank == 0 and progress.step > 0:
        print(f"resumed in epoch {progress.epoch} after step {progress.step} of {steps}")
    network = model
    if ranks > 1:
        network = DistributedDataParallel(model)

    for epoch in range(progress.epoch, options.epochs + 1):
        sampler.set_epoch(epoch)  # a new order in every epoch, the same after a resume
        sampler.done = progress.step * share_of_batch
        worker_seeds.manual_seed(epoch * ranks + rank)
        losses = torch.tensor([progress.loss_sum], device=device)
        model.train()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as the workers inherit it, which start here
        batches = enumerate(train_batches, start=progress.step + 1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        for step, (images, labels) in batches:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(network(images), labels)
            loss.backward()
            optimizer.step()
            losses += loss.detach() * len(images)
            stop = step % CHECK_STEPS == 0 and must_stop(here)
            if stop or step % options.save_every == 0 or step == steps:
                checkpoint.save(Progress(epoch, step, losses.item()))
            if stop:
                if rank == 0 and JOB:
                    (Path(JOB) / "stopped").touch()  # the kit sends the job back to the queue
                if rank == 0:
                    print(f"saved and stopped in epoch {epoch} after step {step} of {steps}")
                return
        progress = Progress(epoch + 1)
        schedule.step()

        model.eval()
        counts = torch.zeros(2, device=device)  # of right answers, and of images
        with torch.no_grad():
            for images, labels in test_batches:
                images = images.to(device)
                labels = labels.to(device)
                counts[0] += (model(images).argmax(1) == labels).sum()
                counts[1] += len(labels)
        if ranks > 1:
            dist.all_reduce(losses)
            dist.all_reduce(counts)
        mean = losses.item() / (steps * options.batch_size)
        right, tested = counts.tolist()
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.6f}, {right:.0f} of {tested:.0f} right")
            torch.save(model.state_dict(), "plain.pt")


if __name__ == "__main__":
    main()
