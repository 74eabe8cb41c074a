"""What the measurements of this folder share: a table that is written row by row, and a clock for a GPU."""

import csv
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Table:
    """A CSV whose rows are written and printed when they are measured, so that no interruption costs one."""

    def __init__(self, path: Path, columns: Iterable[str], printed: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = list(columns)
        self._printed = printed
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")
        self._writer.writeheader()
        self._file.flush()

    def add(self, **row: object) -> None:
        """Write one row; columns that it lacks stay empty."""
        self._writer.writerow(row)
        self._file.flush()
        if self._printed:
            print("  ".join(f"{name}={row[name]}" for name in self._columns if name in row), flush=True)


def wait() -> None:
    """Wait until the GPU has done all it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def steps_per_s(step: Callable[[], object], windows: int, seconds: float, warmup_steps: int) -> list[float]:
    """Call `step` for `seconds` in each window; return the speed of each window, past a warm-up."""
    for _ in range(warmup_steps):
        step()
    speeds = []
    for _ in range(windows):
        wait()
        steps = 0
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            step()
            steps += 1
        wait()
        speeds.append(steps / (time.perf_counter() - started))
    return speeds


def captured(
    step: Callable[..., torch.Tensor], batch: tuple[torch.Tensor, ...]
) -> Callable[..., torch.Tensor]:
    """Return `step(*batch)` as a CUDA graph, which reads its batches from fixed tensors.

    On a CPU `step` itself is returned, so that the scripts can be tried there.
    """
    if DEVICE.type == "cpu":
        return step
    fixed = [tensor.clone() for tensor in batch]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*fixed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*fixed)

    # The graph knows addresses only: whoever has it needs the network and the optimizer, which `step` holds.
    def replay(*new_batch: torch.Tensor, _keep: object = step) -> torch.Tensor:
        for tensor, new in zip(fixed, new_batch, strict=True):
            tensor.copy_(new, non_blocking=True)
        graph.replay()
        return loss

    return replay
