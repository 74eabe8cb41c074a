"""Train with one process per GPU, on any number of nodes, and resume: plain PyTorch.

Put your data in the place of `made_up_images`, and your network in that of `Net`. The training saves its
whole state every few hundred steps, and also when Slurm signals that the job is about to end. When you start
it again it resumes, and it ends with the losses of a training that was never stopped.

Try: python train.py
     torchrun --standalone --nproc-per-node=2 train.py
"""

import argparse
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

# The job's folder, which stays the same when the job is requeued. Without a job, the current folder.
FOLDER = Path(os.environ.get("MANYGPUS_JOB_DIR", "."))
# Slurm sends USR2 a minute before the time limit, if the job script has `#SBATCH --signal=USR2@60`, and
# SIGTERM at the limit and when it preempts the job. Without a handler each of them ends Python.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
CHECK_STEPS = 10  # steps between two checks of whether any rank has been told to stop


def made_up_images(number: int, seed: int) -> TensorDataset:
    """Return images and their labels: a pattern for each of 10 labels, and noise; the same on all ranks."""
    patterns = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    random_numbers = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (number,), generator=random_numbers)
    noise = torch.randn(number, 1, 28, 28, generator=random_numbers)
    return TensorDataset(patterns[labels] + noise, labels)


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


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that skips the first `done` samples of an epoch, which are already trained on."""

    done = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.done, None)


def obey_the_trainer(_worker: int) -> None:
    """Let a loader worker end when the training process sends SIGTERM, but not when Slurm does.

    Slurm signals all processes of a job. If a worker ended then, the training would fail before it has saved.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    trainer = multiprocessing.parent_process().pid

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def must_stop(signals_received: list[int], device: torch.device) -> bool:
    """Return whether any rank has received a signal. All ranks get the same answer, so they stop together."""
    received = torch.tensor(len(signals_received), device=device)
    dist.all_reduce(received)
    return received.item() > 0


def random_states(device: torch.device) -> dict[str, object]:
    """Return the state of every source of random numbers, in types that torch.load accepts as weights."""
    name, keys, *position = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_states(states: dict[str, object], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def write_whole(state: dict[str, object], path: Path) -> None:
    """Write the file whole or not at all: if this process is killed meanwhile, the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # it has to be on the disk before it replaces the old file
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per optimizer step, in all")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="what the layers compute in"
    )
    parser.add_argument("--num-workers", type=int, default=4, help="processes that load images, at most")
    parser.add_argument("--save-every", type=int, default=500, help="steps from one checkpoint to the next")
    args = parser.parse_args()
    signals_received = []
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, lambda number, _: signals_received.append(number))

    # Without a launcher this process is alone. Those of srun are not, and job.sh tells them their ranks.
    if "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="localhost", MASTER_PORT="0")
    # Take the GPU of this process (GPU 0 if it sees only one), then meet the others.
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

    train_set = made_up_images(4000, seed=1)
    test_set = made_up_images(1000, seed=2)
    # Worker processes prepare the next batches, on the CPU cores that this process may use.
    num_workers = min(args.num_workers, len(os.sched_getaffinity(0)) - 1)
    worker_seeds = torch.Generator()  # separate: loaders must not use up the random numbers of dropout
    loader_options = {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,  # the same processes serve all epochs
        "pin_memory": device.type == "cuda",  # the GPU can fetch such a batch by itself (non_blocking)
        "worker_init_fn": obey_the_trainer,
        "generator": worker_seeds,
    }
    # Take one shard of every batch, and of the test images.
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide evenly among {world_size} ranks")
    sampler = ResumableSampler(train_set, num_replicas=world_size, rank=rank, drop_last=True)
    batch_size = args.batch_size // world_size
    test_set = Subset(test_set, range(rank, len(test_set), world_size))
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **loader_options)
    test_loader = DataLoader(test_set, batch_size=1000, **loader_options)
    steps = len(train_loader)
    if steps == 0:
        raise SystemExit(f"--batch-size {args.batch_size}: there are only {len(train_set)} images")

    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    loss_sum = torch.zeros(1, device=device)  # reading a loss in every step would make the CPU wait

    checkpoint = FOLDER / "checkpoints" / "train.pt"
    # Everything that has a state_dict. A GradScaler or averaged weights would belong here, too.
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    weights = sum(parameter.numel() for parameter in model.parameters())
    settings = {"ranks": world_size, "batch size": args.batch_size, "weights": weights}

    def save(epoch: int, step: int) -> None:
        """Save all that a resume needs: `step` steps of `epoch` are done."""
        rank_state = {"loss_sum": loss_sum.item(), "random": random_states(device)}
        rank_states = [None] * world_size
        dist.all_gather_object(rank_states, rank_state)
        if rank == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"settings": settings, "epoch": epoch, "step": step, "rank_states": rank_states}
            write_whole(state, checkpoint)
        dist.barrier()  # if a rank exited now, rank 0 could be ended before it has written the file

    first_epoch = 1
    step = 0
    if checkpoint.exists():
        # Load to the CPU, where random states have to be. Each part moves its own tensors to its device.
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        if saved.get("settings") != settings:
            raise SystemExit(f"{checkpoint} has {saved.get('settings')}, not {settings}: move it away")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        rank_state = saved["rank_states"][rank]
        loss_sum.fill_(rank_state["loss_sum"])
        set_random_states(rank_state["random"], device)
        first_epoch = saved["epoch"]
        step = saved["step"]
    # All ranks have to begin at the same step, or they would wait for each other forever.
    begins = [None] * world_size
    dist.all_gather_object(begins, (first_epoch, step))
    if len(set(begins)) > 1:
        raise SystemExit(f"not all ranks see the same {checkpoint}: it has to be on a disk that they share")
    if rank == 0 and checkpoint.exists():
        print(f"resumed from {checkpoint}: epoch {first_epoch}, {step} of {steps} steps done")
    if rank == 0 and first_epoch > args.epochs:
        print(f"there is nothing left to do: --epochs {args.epochs}")

    # Average the gradients over all ranks in every backward pass.
    ddp = DistributedDataParallel(model)

    for epoch in range(first_epoch, args.epochs + 1):
        sampler.set_epoch(epoch)  # a new order in every epoch
        sampler.done = step * batch_size
        worker_seeds.manual_seed(epoch * world_size + rank)
        model.train()
        to_train = (steps - step) * args.batch_size
        started = time.perf_counter()
        for images, labels in train_loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                loss = F.cross_entropy(ddp(images), labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(images)
            step += 1
            ranks_meet = step % CHECK_STEPS == 0 or step == steps
            stop = ranks_meet and must_stop(signals_received, device)
            if stop or step % args.save_every == 0:
                save(epoch, step)
            if stop:
                if rank == 0:
                    print(f"saved and stopped in epoch {epoch} after {step} of {steps} steps")
                    (FOLDER / "stopped").touch()  # the job script sends the job back to the queue
                dist.destroy_process_group()
                return
        # Report for all ranks, at the pace of the slowest.
        dist.all_reduce(loss_sum)
        mean = loss_sum.item() / (steps * args.batch_size)  # item() waits for the GPU: all its work is timed
        speed = to_train / (time.perf_counter() - started)

        model.eval()
        counts = torch.zeros(2, device=device)  # of right answers, and of images
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            for images, labels in test_loader:
                images = images.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
                counts[0] += (model(images).argmax(1) == labels).sum()
                counts[1] += len(labels)
        dist.all_reduce(counts)
        right, tested = counts.tolist()
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}, {right:.0f} of {tested:.0f} right, {speed:.0f} images/s")
        lr_scheduler.step()
        loss_sum.zero_()
        step = 0
        save(epoch + 1, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
