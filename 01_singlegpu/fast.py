"""Train a small network fast on one GPU, in plain PyTorch, and show where the time of three steps goes.

Try: python fast.py
"""

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

DATA = Path(__file__).resolve().parents[1] / "data"  # where `make data` puts MNIST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=128, help="images per step")
    parser.add_argument("--steps", type=int, default=12, help="steps to train: at least 11, at most an epoch")
    parser.add_argument("--data-dir", default=DATA, help="the folder that holds MNIST/raw/")
    parser.add_argument("--num-workers", type=int, default=4, help="processes that load images, at most")
    parser.add_argument("--trace", metavar="FILE", help="also write the timeline, such as trace.json.gz")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    torch.manual_seed(1)

    if not Path(args.data_dir, "MNIST").is_dir():
        raise SystemExit(f"there is no MNIST in {args.data_dir}: `make data` in the top folder fetches it")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    train_set = datasets.MNIST(args.data_dir, train=True, transform=transform)
    num_workers = min(args.num_workers, len(os.sched_getaffinity(0)) - 1)
    loader = DataLoader(
        train_set,
        args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=on_gpu,
    )

    torch.set_float32_matmul_precision("high")
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    if on_gpu:  # on a CPU it would need a compiler
        model = torch.compile(model, mode="reduce-overhead")

    def show(profiler: profile) -> None:
        """Print what the recorded steps spent most time in."""
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=50))
        if args.trace:
            profiler.export_chrome_trace(args.trace)

    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    # The first five steps start workers and compile. Then one is left out, two warm the profiler up, and the
    # next three are recorded.
    when = schedule(skip_first=5, wait=1, warmup=2, active=3, repeat=1)
    loss_sum = torch.zeros((), device=device)
    steps = min(args.steps, len(loader))
    with profile(activities=activities, schedule=when, on_trace_ready=show) as profiler:
        for images, labels in islice(loader, steps):
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
            profiler.step()
    print(f"mean loss of {steps} steps: {loss_sum.item() / steps:.3f}")


if __name__ == "__main__":
    main()
