"""The number by which a sweep compares its runs, as it stands in their logs, and what is best."""

import math
from pathlib import Path

import pytest

from manygpus.jobs.sweeps.metric import MAXIMIZE, MINIMIZE, metric

GROUP = r"val_loss=([\d.]+)"


@pytest.mark.parametrize(
    ("text", "log", "expected"),
    [
        # The last one counts, also of a progress bar.
        (GROUP, "val_loss=0.9\nepoch 2 val_loss=0.31 lr=0.1", 0.31),
        (GROUP, "1/9 val_loss=0.9\r2/9 val_loss=0.3\r", 0.3),
        # Of these, the group alone would match a part, or leave the one before as the last.
        (GROUP, "val_loss=0.9\nval_loss=1.2e-05", 1.2e-05),
        (GROUP, "val_loss=0.9\nval_loss=-3", -3),
        (GROUP, "val_loss=0.9\nval_loss=nan", math.nan),
        (GROUP, "val_loss=0.9\nval_loss=-inf", -math.inf),
        (r"([\d,]+) images/s", "epoch 1: 300,000 images/s.", 300_000),
        (r"loss.*([\d.]+)", "loss of epoch 3: 12.5e-3", 0.0125),
        (r"(?i)[(](?:top-?1) ([0-9.]+)%[)]", "(Top1 91.2%)", 91.2),
        (r"[(](?P<epoch>\d+)\)", "(5)", 5),
        (GROUP, "no number", None),
        # Words in front of it.
        ("val_loss", "{'train/val_loss': 7, 'val_loss': 0.31, 'epoch': 2.0}", 0.31),
        ("val loss", "val loss 0.05", 0.05),
        ("loss", "loss: -1e3 val_loss=3 loss2=4 loss_5", -1000),
        ("loss=", "loss=.5", 0.5),
        # What the kit prints around what the script does.
        ("lr", "script  train.py lr 0.1\nlr 0.2\n\nwatch   lr 7\n", 0.2),
        ("torch", "script  train.py\ntorch: 1\nenv     import torch: 3.1 s\n", 1),
    ],
)
def test_the_last_number_in_a_log(text: str, log: str, expected: float | None, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    number = metric(text, MINIMIZE).of_run(tmp_path, "run", tmp_path / "log")
    assert number == (expected if expected is None else pytest.approx(expected, nan_ok=True))


@pytest.mark.parametrize(("goal", "best_first"), [(MINIMIZE, [-1, 0.5, 3]), (MAXIMIZE, [3, 0.5, -1])])
def test_what_is_no_number_is_never_the_best(goal: str, best_first: list[float]) -> None:
    numbers = [math.nan, 3, math.inf, None, -1, -math.inf, 0.5]
    assert sorted(numbers, key=metric("loss", goal).sort_key)[:3] == best_first
