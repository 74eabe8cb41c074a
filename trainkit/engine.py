"""Train one epoch, evaluate, and time both so that the numbers are true.

Every number is that of the whole run, on every rank: seconds are the slowest rank's, losses and
counts are summed over all ranks.
"""

import math
import resource
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from trainkit import world
from trainkit.batches import Batches
from trainkit.checkpoint import Checkpoints
from trainkit.epoch import Part, Tested, Trained
from trainkit.errors import UserError
from trainkit.model import Net


def train_epoch(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    epoch: int,
    checkpoints: Checkpoints,
    log_interval: int,
) -> Trained:
    """Train on every batch of `epoch` that an earlier process has not trained on.

    Raises:
        UserError: if the loss stops being a number; the text tells the step.
        Stopped: if a signal asked to save and stop within the epoch.
    """
    model.train()
    device = batches.device
    done = checkpoints.part_of(epoch) or Part(0, 0.0, schedule.get_last_lr()[0], torch.zeros(0))
    batches.set_epoch(epoch, done.steps)
    # Losses stay on the device until the epoch ends: reading one makes the CPU wait for the GPU.
    losses = torch.zeros(len(batches), device=device)
    losses[: done.steps] = done.losses
    seconds = done.seconds
    bar = tqdm(
        batches,
        initial=done.steps,
        desc=f"epoch {epoch}",
        unit="step",
        leave=False,
        miniters=log_interval,
        mininterval=0,
        disable=None if world.is_first() else True,  # None: shown on a terminal, not in a log file
    )
    start = _start_clock(device)
    for step, (images, labels) in enumerate(bar, start=done.steps):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
        if checkpoints.due() and step + 1 < len(batches):
            seconds += _stop_clock(device, start)  # saving is not training
            part = Part(step + 1, seconds, done.learning_rate, _mean_over_ranks(losses[: step + 1]).cpu())
            checkpoints.save(epoch, part)
            start = _start_clock(device)
    seconds += _stop_clock(device, start)

    losses = _mean_over_ranks(losses)
    broken = losses.isfinite().logical_not().nonzero()
    if len(broken):
        first = broken[0].item()
        raise UserError(
            f"the loss is {losses[first].item()} at step {first + 1} of epoch {epoch}: lower --lr. "
            "The epochs before are recorded."
        )
    return Trained(len(batches), seconds, losses.mean().item(), done.learning_rate)


def evaluate(model: nn.Module, batches: Batches) -> Tested:
    """Evaluate on every test image once: sums over this rank's share, then over the ranks.

    Raises:
        UserError: if the loss is not a number: the last training step went wrong.
    """
    model.eval()
    device = batches.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, images
    start = _start_clock(device)
    with torch.no_grad():  # not inference_mode: the threads of DataParallel would not be in it
        for images, labels in batches:
            output = model(images)
            loss = F.nll_loss(output, labels, reduction="sum")
            correct = output.argmax(1).eq(labels).sum()
            sums += torch.stack([loss, correct, torch.full_like(loss, len(labels))])
    seconds = _stop_clock(device, start)
    loss, correct, images = world.total(sums).tolist()
    if not math.isfinite(loss):
        raise UserError(f"the test loss is {loss}: lower --lr. The epochs before are recorded.")
    peak = world.largest(peak_memory_mb(device), device)
    return Tested(seconds, loss / images, 100 * correct / images, peak)


def choose_precision(wanted: str, device: torch.device) -> str:
    """`wanted`, or for "auto" the faster of fp32 and bf16 on this device, the same on every rank.

    A GPU is asked whether it has bf16 units. On a CPU the name of the chip does not tell, so a few
    training steps in each precision do.
    """
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        seconds = {"fp32": [], "bf16": []}
        for _ in range(5):  # in turns, so that a busy moment of the machine meets both
            for precision, times in seconds.items():
                times.append(_seconds_of_a_step(precision))
        faster = min(seconds["bf16"]) < min(seconds["fp32"])
    return "bf16" if world.share(faster) else "fp32"


def _seconds_of_a_step(precision: str) -> float:
    model = Net(precision).to(memory_format=torch.channels_last)
    images = torch.rand(64, 1, 28, 28)
    start = time.perf_counter()
    model(images).square().mean().backward()
    return time.perf_counter() - start


def _start_clock(device: torch.device) -> float:
    """Seconds on a clock that starts when every rank is here and every GPU idle."""
    world.barrier()
    _synchronize(device)
    return time.perf_counter()


def _stop_clock(device: torch.device, start: float) -> float:
    """Seconds since `start`, when the work is done and not merely queued, on the slowest rank."""
    _synchronize(device)
    return world.largest(time.perf_counter() - start, device)


def _mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    return world.total(values.clone()).div_(world.count())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_mb(device: torch.device) -> float:
    """Megabytes (1e6 bytes) at the peak so far: allocated on the fullest GPU, or resident on a CPU."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
