"""Make one GPU fast, line by line: a ResNet-18 on images of CIFAR's size, in plain PyTorch.

Try: python3 tools/bench/gpu/one_gpu.py --out /tmp/ladder.csv

Each rung of the ladder adds a line or two to the rung before it. The images are generated (50,000 of 32 x 32
pixels, with a class that can be learned) and, until the last rung, prepared on the CPU as most scripts do:
cropped, mirrored, turned into tensors and normalised one by one. Needs no kit.
"""

import argparse
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from measuring import DEVICE, Table, captured, wait
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

COLUMNS = [
    "rung", "added", "samples_per_s", "slowest", "fastest", "times_first", "ms_per_step", "windows",
    "start_s", "loss_after_steps", "loss_steps", "peak_memory_mb", "loader_workers", "batch",
]  # fmt: skip
CLASSES = 10
LOSS_STEPS = 100  # after which the mean loss of the last 25 steps is compared
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """What a rung of the ladder uses."""

    workers: int = 0
    pinned: bool = False  # pin_memory of the loader, and non_blocking copies
    reads_each_loss: bool = True  # by .item(), which makes the CPU wait for the GPU in every step
    tf32: bool = False
    bf16: bool = False
    channels_last: bool = False
    fused: bool = False
    compiled: str = ""  # "default" or "reduce-overhead"
    captured: bool = False  # the whole step, optimizer included
    batch: int = 128
    on_the_gpu: bool = False  # the images stay on the GPU, and are prepared there, batch by batch
    strict_fp32: bool = False  # no TF32 in convolutions, where PyTorch allows it by default


WORKERS = max(1, len(os.sched_getaffinity(0)) - 2)
BASELINE = Settings()
LOADED = replace(BASELINE, workers=WORKERS)
PINNED = replace(LOADED, pinned=True)
UNREAD = replace(PINNED, reads_each_loss=False)
TF32 = replace(UNREAD, tf32=True)
BF16 = replace(TF32, bf16=True)
CHANNELS_LAST = replace(BF16, channels_last=True)
FUSED = replace(CHANNELS_LAST, fused=True)
COMPILED = replace(FUSED, compiled="default")
REDUCED = replace(FUSED, compiled="reduce-overhead")
LARGER = replace(REDUCED, batch=512)
CAPTURED = replace(LARGER, compiled="default", captured=True)
RESIDENT = replace(CAPTURED, on_the_gpu=True)
RUNGS = {
    "baseline": ("0 loader workers, .to(device), loss.item() in each step", BASELINE),
    "workers": ("DataLoader(num_workers=N, persistent_workers=True)", LOADED),
    "pinned": ("pin_memory=True, .to(device, non_blocking=True)", PINNED),
    "no item": ("the loss is read after the epoch, not in each step", UNREAD),
    "tf32": ('torch.set_float32_matmul_precision("high")', TF32),
    "bf16": ('torch.autocast("cuda", torch.bfloat16)', BF16),
    "channels_last": ("model and images .to(memory_format=torch.channels_last)", CHANNELS_LAST),
    "fused": ("SGD(..., fused=True)", FUSED),
    "compile": ("torch.compile(model)", COMPILED),
    "reduce-overhead": ('torch.compile(model, mode="reduce-overhead")', REDUCED),
    "batch 512": ("batch 512 in place of 128", LARGER),
    "captured": ("the whole step of the compiled model in one CUDA graph", CAPTURED),
    "on the gpu": ("images stay on the GPU and are cropped and mirrored there", RESIDENT),
    # Beside the ladder: what each line does where no loader decides.
    "beside: strict fp32, on the gpu": (
        "rung `no item`, images on the GPU, no TF32 in convolutions",
        replace(UNREAD, on_the_gpu=True, strict_fp32=True),
    ),
    "beside: fp32, on the gpu": ("rung `no item`, images on the GPU", replace(UNREAD, on_the_gpu=True)),
    "beside: bf16, on the gpu": ("rung `bf16`, images on the GPU", replace(BF16, on_the_gpu=True)),
    "beside: channels_last, on the gpu": (
        "rung `channels_last`, images on the GPU", replace(CHANNELS_LAST, on_the_gpu=True)
    ),
    "beside: fused, on the gpu": ("rung `fused`, images on the GPU", replace(FUSED, on_the_gpu=True)),
    "beside: compile, on the gpu": ("rung `compile`, images on the GPU", replace(COMPILED, on_the_gpu=True)),
    "beside: reduce-overhead, on the gpu": (
        "rung `reduce-overhead`, images on the GPU", replace(REDUCED, on_the_gpu=True)
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rungs", nargs="*", metavar="RUNG", help=f"of {', '.join(RUNGS)} (default: the ladder)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV to write")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a window (default: %(default)s)")
    parser.add_argument(
        "--width", type=int, default=64, help="channels of the first block (default: %(default)s)"
    )
    parser.add_argument(
        "--loss-steps", type=int, default=LOSS_STEPS, help="steps before the loss is compared"
    )
    parser.add_argument("--compile-only", action="store_true", help="only fill the cache of torch.compile")
    args = parser.parse_args()
    table = Table(args.out, COLUMNS)
    first = None  # samples/s of the first rung that could be measured
    images, labels = generated_images(50_000)
    for name in args.rungs or [name for name in RUNGS if not name.startswith("beside")]:
        added, settings = RUNGS[name]
        try:
            row = measure(settings, images, labels, args)
        except Exception as error:  # the other rungs are still to be measured
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        finally:
            torch._dynamo.reset()
            gc.collect()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
        if "samples_per_s" in row:
            first = first or row["samples_per_s"]
            row["times_first"] = round(row["samples_per_s"] / first, 2)
        table.add(rung=name, added=added, loader_workers=settings.workers, batch=settings.batch, **row)


def measure(settings: Settings, images: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace) -> dict:
    """Train on the rung's batches: first to a loss, then in three timed windows; return the columns."""
    wait()
    started = time.perf_counter()
    torch.manual_seed(1)
    set_precision(settings)
    batches = endless_batches(settings, images, labels)
    step = make_step(settings, args.width, next(batches))
    first_losses = [step(*next(batches)) for _ in range(2)]
    first_losses[-1].item()
    start_s = time.perf_counter() - started
    if args.compile_only:
        return {"start_s": round(start_s, 1)}
    losses = []
    for _ in range(args.loss_steps):
        losses.append(step(*next(batches)).clone())
        if settings.reads_each_loss:
            losses[-1].item()
    loss = torch.stack(losses[-25:]).mean().item()
    speeds = []
    for _ in range(3):
        wait()
        steps = 0
        window_started = time.perf_counter()
        while time.perf_counter() - window_started < args.seconds:
            loss_of_step = step(*next(batches))
            if settings.reads_each_loss:
                loss_of_step.item()
            steps += 1
        wait()
        speeds.append(steps * settings.batch / (time.perf_counter() - window_started))
    row = {
        "samples_per_s": round(median(speeds)),
        "slowest": round(min(speeds)),
        "fastest": round(max(speeds)),
        "ms_per_step": round(1000 * settings.batch / median(speeds), 3),
        "windows": len(speeds),
        "start_s": round(start_s, 1),
        "loss_after_steps": round(loss, 4),
        "loss_steps": args.loss_steps,
    }
    if DEVICE.type == "cuda":
        row["peak_memory_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
        torch.cuda.reset_peak_memory_stats()
    return row


def set_precision(settings: Settings) -> None:
    """Set the switches of the process, those that the rung does not mention as PyTorch has them."""
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = not settings.strict_fp32
    torch.backends.cudnn.benchmark = False


def make_step(settings: Settings, width: int, batch: Batch) -> "torch.nn.Module":
    """Return a function that trains a new network on one batch, and returns its loss."""
    network = ResNet18(width).to(DEVICE)
    if settings.channels_last:
        network = network.to(memory_format=torch.channels_last)
    capturable = settings.captured and DEVICE.type == "cuda"
    lr = torch.tensor(0.05, device=DEVICE) if capturable else 0.05
    optimizer = torch.optim.SGD(network.parameters(), lr, momentum=0.9, fused=settings.fused or None)
    model: nn.Module = network
    if settings.compiled == "reduce-overhead":
        model = torch.compile(network, mode="reduce-overhead")
    elif settings.compiled:
        model = torch.compile(network)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=settings.bf16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if settings.captured:
        return captured(step, on_device(batch, settings))
    return lambda images, labels: step(*on_device((images, labels), settings))


def on_device(batch: Batch, settings: Settings) -> Batch:
    """Copy a batch to the GPU, where the loader has not done so."""
    images, labels = batch
    if settings.channels_last:
        images = images.to(DEVICE, non_blocking=settings.pinned, memory_format=torch.channels_last)
    else:
        images = images.to(DEVICE, non_blocking=settings.pinned)
    return images, labels.to(DEVICE, non_blocking=settings.pinned)


MEAN = (0.49, 0.48, 0.45)
STD = (0.25, 0.24, 0.26)


class Images(Dataset):
    """Images as most scripts prepare them, one by one on the CPU."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images = images
        self.labels = labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.ToPILImage(),
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


def endless_batches(settings: Settings, images: torch.Tensor, labels: torch.Tensor) -> Iterator[Batch]:
    """Yield batches epoch after epoch."""
    if settings.on_the_gpu:
        yield from batches_on_the_gpu(settings, images.to(DEVICE), labels.to(DEVICE))
        return
    loader = DataLoader(
        Images(images, labels),
        settings.batch,
        shuffle=True,
        drop_last=True,
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
        pin_memory=settings.pinned and DEVICE.type == "cuda",
    )
    while True:
        yield from loader


def batches_on_the_gpu(settings: Settings, images: torch.Tensor, labels: torch.Tensor) -> Iterator[Batch]:
    """Prepare whole batches on the GPU: one place to crop and one side for a batch, others in the next."""
    mean = torch.tensor(MEAN, device=DEVICE).view(3, 1, 1)
    std = torch.tensor(STD, device=DEVICE).view(3, 1, 1)
    padded = F.pad(images, (4, 4, 4, 4))
    while True:
        order = torch.randperm(len(images), device=DEVICE)
        offsets = torch.randint(0, 9, (len(images) // settings.batch, 2)).tolist()
        for (top, left), indices in zip(offsets, order.split(settings.batch), strict=False):
            some = padded[:, :, top : top + 32, left : left + 32].index_select(0, indices)
            if (top + left) % 2:
                some = some.flip(3)
            yield (some.float() / 255 - mean) / std, labels.index_select(0, indices)


def generated_images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes (count, 3, 32, 32) of noise over a pattern of the class, and the classes."""
    random = torch.Generator().manual_seed(1)
    patterns = F.interpolate(torch.rand(CLASSES, 3, 4, 4, generator=random), size=32, mode="bilinear")
    labels = torch.randint(0, CLASSES, (count,), generator=random)
    noise = torch.randint(0, 256, (count, 3, 32, 32), generator=random, dtype=torch.uint8)
    images = torch.empty_like(noise)
    for part in range(0, count, 5000):
        chosen = slice(part, part + 5000)
        images[chosen] = (90 * patterns[labels[chosen]] + 0.6 * noise[chosen]).to(torch.uint8)
    return images, labels


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.around = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 x 32 pixels: no stride and no pooling at the start. 11.2 million weights."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks = []
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [Block(inputs, outputs, stride), Block(outputs, outputs, stride=1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classes = nn.Linear(8 * width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(images))))
        return self.classes(x.mean((2, 3)))


if __name__ == "__main__":
    main()
