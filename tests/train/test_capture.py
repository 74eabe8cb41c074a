"""What a GPU's speed asks for: epochs of many passes, larger evaluation batches, no waiting, captured steps.

As far as a machine without a GPU shows it; test_gpu.py has the rest.
"""

import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import AROUND, BY_FEATURE, STAGES, Script, rows_of, succeeded
from torch import nn

from manygpus.config.options import parse_options
from manygpus.data import loaders as batches
from manygpus.data.datasets import InMemoryDataset
from manygpus.data.loaders import eval_loader, train_loader
from manygpus.errors import UserError
from manygpus.launchers import DistEnv

CPU = torch.device("cpu")


@pytest.mark.parametrize("loader", ["resident", "workers"])
def test_an_epoch_of_more_images_than_there_are(loader: str) -> None:
    """Pass by pass, each in another order, alike on every rank, and from any step on."""
    count, size, batch = 24, 60, 6  # two passes and a half
    arguments = ["--train-size", str(size), "--batch-size", str(batch), "--loader", loader]
    opts = parse_options("", arguments=arguments)
    split = InMemoryDataset("numbers", torch.zeros(count, 1, 28, 28, dtype=torch.uint8), torch.arange(count))

    def seen(epoch: int, rank: int = 0, world_size: int = 1, first_step: int = 0) -> torch.Tensor:
        loaded = train_loader(split, opts, DistEnv(rank=rank, world_size=world_size, device=CPU))
        loaded.set_epoch(epoch, first_step)
        return torch.stack([labels for _, labels in loaded])

    whole = seen(1)
    assert len(whole) == size // batch
    first, second, rest = whole.flatten().split(count)
    for one_pass in (first, second):
        assert one_pass.sort().values.tolist() == list(range(count))
    assert Counter(rest.tolist()).most_common(1)[0][1] == 1
    assert not torch.equal(first, second)
    assert not torch.equal(whole, seen(2))
    assert torch.equal(torch.cat([seen(1, rank, 2) for rank in (0, 1)], dim=1), whole)
    assert torch.equal(seen(1, first_step=7), whole[7:])


@pytest.mark.parametrize(
    ("device", "batch_size", "size"), [("cpu", "", 250), ("cuda", "", 2500), ("cuda", "7", 7)]
)
def test_evaluation_batches_fit_the_device(
    device: str, batch_size: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_make_batches", lambda dataset, order, *_, **__: order)
    opts = parse_options("", arguments=["--test-batch-size", batch_size] if batch_size else [])
    split = InMemoryDataset("numbers", torch.zeros(5000, 1), torch.zeros(5000))
    order = eval_loader(split, opts, DistEnv(device=torch.device(device)))
    assert max(map(len, order)) == size


# --- no step makes the CPU wait; the clock, meetings and the end of an epoch are meant to -------------

CHOSEN = ("--width", 4, "--batch-size", 8, "--test-batch-size", 10, "--epochs", 1, "--precision", "fp32")


@pytest.mark.quick
@pytest.mark.parametrize("recipe", ["classic", "fast"])
def test_more_steps_wait_no_more_often(recipe: str, script: Script, tmp_path: Path) -> None:
    waits = []
    for steps in (5, 25):
        sizes = ("--train-size", 8 * steps, "--test-size", 10 * steps)
        arguments = (*CHOSEN, *sizes, "--recipe", recipe, "--results-dir", tmp_path)
        done = succeeded(script(AROUND, "count-waits", STAGES["single"], *arguments))
        waits += [line for line in done.stdout.splitlines() if line.startswith("waits: [")]
    few, many = waits
    assert few == many != "waits: []"


# --- a step captured in a CUDA graph -----------------------------------------------------------------

CAPTURED = BY_FEATURE / "captured.py"
SMALL = ("--train-size", 250, "--test-size", 100, "--batch-size", 60, "--epochs", 2, "--precision", "fp32")


def test_eager_it_is_stage_03(script: Script, tmp_path: Path) -> None:
    rows = []
    for stage in ("ddp", CAPTURED):
        arguments = ("--how", "eager") if stage == CAPTURED else ()
        folder = tmp_path / Path(stage).stem
        succeeded(script(stage, *arguments, *SMALL, "--results-dir", folder, ranks=2))
        rows.append(rows_of(folder))
    plain, captured = rows
    for loss in ("train_loss", "test_loss"):
        assert [row[loss] for row in plain] == [row[loss] for row in captured]
    assert {row["stage"] for row in captured} == {"ddp-eager"}


def test_data_parallel_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BY_FEATURE)
    capture = importlib.import_module("capture")
    with pytest.raises(UserError, match="DataParallel copies the network"):
        capture.check(nn.DataParallel(nn.Linear(1, 1)))
