"""`make compare` without Slurm, in a copy of the project whose path has spaces, from another directory."""

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from checkout import Checkout, make_project
from conftest import ENVIRONMENT, REPOSITORY, STARTUP, one_error, ran, succeeded
from forking import Forking

from manygpus.commands import compare_stages
from manygpus.errors import UserError

QUICK = "--train-size 512 --test-size 200 --epochs 2 --batch-size 64 --width 4 --precision fp32 --no-cuda"


@pytest.mark.usefixtures("mnist_dir")
@pytest.mark.full
def test_compare_ends_with_table_figures_and_a_sentence(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    done = succeeded(ran("make", "-C", project, "compare", f"ARGS={QUICK} --workers 2", cwd="/"))
    (folder,) = (project / "results" / "comparisons").iterdir()
    table = pd.read_csv(folder / "comparison.csv")
    compared = sorted(zip(table.stage, table.devices, strict=True))
    assert compared == [("ddp", 1), ("ddp", 2), ("dp", 1), ("single", 1)]
    # Equal conditions, or the comparison would be worth nothing.
    for column in ("global_batch", "images", "precision", "threads_per_worker", "dataset", "loader"):
        assert table[column].nunique() == 1
    assert table.threads_per_worker.unique() == [1]
    assert table.set_index(["stage", "devices"]).speedup["ddp", 2] > 0
    for name in ("comparison.md", "comparison.html", "throughput.png", "speedup.png", "accuracy.png"):
        assert (folder / name).stat().st_size > 0
    assert str(folder) in done.stdout
    assert re.search(r"^DDP on 2 CPU workers trained \d", done.stdout, re.MULTILINE), done.stdout
    assert "SYNTHETIC" not in done.stdout
    # The runs as they go, and each one's log.
    for name in ("single-1gpu", "dp-1gpu", "ddp-1gpu", "ddp-2gpu"):
        assert f"{name}-batch64-train512-r1 running: " in done.stdout
        (log,) = (folder / f"{name}-batch64-train512-r1").glob("job/*_0_log.out")
        assert "epoch 2/2: " in log.read_text()
    assert "[4/4] ddp-2gpu-batch64-train512-r1 finished: " in done.stdout

    resume = re.search(r"^resume   (.*)$", done.stdout, re.MULTILINE)[1]
    env = ENVIRONMENT | {"PYTHONPATH": f"{project}:{STARTUP}"}
    again = succeeded(ran(*shlex.split(resume), cwd="/", env=env))
    assert "4 runs, 4 of them finished" in again.stdout


@pytest.mark.full
def test_without_mnist_and_with_a_failing_stage(checkout: Checkout) -> None:
    """Where MNIST cannot be had it says loudly what it uses instead, and it compares the other stages."""
    checkout.pretend()
    checkout.plant("dp", "raise SystemExit('planted')")
    (checkout.folder / "data").unlink()
    cut_off = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = checkout.python("results/compare.py", *QUICK.split(), "--workers", 1, **cut_off)
    (folder,) = (checkout.folder / "results" / "comparisons").iterdir()
    assert done.returncode != 0
    assert "failed: dp-1gpu-batch64-train512-r1. The same command" in done.stderr
    (log,) = (folder / "dp-1gpu-batch64-train512-r1").glob("job/*_0_log.out")
    assert "planted" in log.read_text()
    assert "GENERATED DIGITS" in done.stdout
    assert "SYNTHETIC" in done.stdout
    table = pd.read_csv(folder / "comparison.csv")
    assert sorted(table.stage) == ["ddp", "single"]
    assert set(table.dataset) == {"synthetic"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--workers 4000 --no-cuda", "--workers 4000 is more than the"),
        ("--dry-run", "--dry-run measures nothing"),
        ("--epoch 3", "unrecognized arguments: --epoch 3"),
        ("--results-dir /proc/nowhere --no-cuda", "cannot be written"),
        ("--train-size 100 --no-cuda --workers 1", "--batch-size 256 is more than the 100 training images"),
    ],
)
def test_compare_refuses_bad_options_in_one_sentence(arguments: str, sentence: str, forking: Forking) -> None:
    done = forking.run(REPOSITORY / "results" / "compare.py", *arguments.split(), env=ENVIRONMENT)
    assert sentence in one_error(done)


# --- on GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "speed", "gpus", "size"),
    [
        (1024, 1_000_000, 1, 50 * 60_000),
        (1024, 1_000_000, 8, 50 * 60_000),
        (256, 21_000, 4, 60_000),  # never less than a pass, where one takes three seconds
        (4096, 100_000, 8, 11 * 60_000),  # longer, for twenty steps of the largest batch
        (256, 1e9, 1, 1666 * 60_000),  # no more than --train-size takes
        (256, 9_000, 2, 52 * 512),  # CPUs in place of the practice cluster's GPUs: whole steps
    ],
)
def test_an_epoch_of_about_three_seconds(batch: int, speed: float, gpus: int, size: int) -> None:
    assert compare_stages.choose_train_size(speed, batch, gpus) == size


def test_numbers_of_gpus_and_the_batch_that_they_can_share() -> None:
    counts = {1: (1,), 2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 4), 6: (1, 2, 4, 6), 8: (1, 2, 4, 8)}
    assert {gpus: compare_stages.device_counts(gpus) for gpus in counts} == counts
    assert compare_stages.share_batch_size(8, None, None) == 4096
    assert compare_stages.share_batch_size(6, None, None) == 4104
    assert compare_stages.share_batch_size(2, 99, None) == 100
    with pytest.raises(UserError, match="--train-size 8191 is not one step with batch 4096 on each of 2"):
        compare_stages.share_batch_size(2, None, 8191)
