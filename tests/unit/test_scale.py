"""Hundreds of runs: all count, and none takes much memory."""

import random
import tracemalloc
from itertools import islice, product
from pathlib import Path

import pandas as pd
import pytest

from trainkit.analysis import comparison
from trainkit.analysis.report import report
from trainkit.records import ADDED, COLUMNS, SCHEMA_VERSION

CONFIGURATIONS, REPEATS = 60, 5
MOST_KILOBYTES = 100  # of a run of three epochs: 10,000 of them have room in a gigabyte


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made up, and written as files, without waiting for the disk as a run does."""
    folder, chance = tmp_path_factory.mktemp("runs"), random.Random(1)
    every = islice(product((8, 16, 32), (64, 128, 256, 512, 1024), (1, 2, 4, 8)), CONFIGURATIONS)
    for (number, (width, batch, devices)), seed in product(enumerate(every), range(REPEATS)):
        stage = "ddp" if devices > 1 else "single"
        facts = dict.fromkeys(COLUMNS, "") | ADDED | {"stage": stage, "run_id": f"{stage}-{number}-{seed}"}
        facts |= {"dataset": "mnist", "device_name": "made up", "loader": "resident", "recipe": "classic"}
        facts |= {"workers_per_loader": 0, "precision": "bf16", "images": 4096, "lr": 1, "gamma": 0.7}
        facts |= {"width": width, "global_batch": batch, "batch_per_device": batch // devices, "steps": 4}
        facts |= {"devices": devices, "world_size": devices, "nodes": 1, "threads_per_worker": 1}
        facts |= {"accumulate": 1, "train_loss": 0.1, "test_loss": 0.1, "learning_rate": 1, "seed": seed}
        facts |= {"eval_seconds": 1, "peak_memory_mb": 300, "schema_version": SCHEMA_VERSION}
        rows = []
        for epoch in (1, 2, 3):
            took = (1 + batch * width / devices / 1e3) * chance.uniform(1, 1.1)
            of_epoch = {"epoch": epoch, "warmup": int(epoch == 1), "train_seconds": took}
            of_epoch |= {"images_per_s": 4096 / took, "elapsed_s": 5 + epoch * took}
            rows.append(facts | of_epoch | {"test_accuracy": 99 - chance.random() / epoch})
        pd.DataFrame(rows, columns=COLUMNS).to_csv(
            folder / f"{facts['run_id']}.csv", index=False, na_rep="nan"
        )
    return folder


def test_hundreds_of_runs(runs: Path, tmp_path: Path) -> None:
    """Every configuration has its row, its repeats and, from the run on one device, its speedup."""
    report([runs], tmp_path, target=98)
    table = pd.read_csv(tmp_path / "comparison.csv")
    assert len(table) == CONFIGURATIONS and set(table.runs) == {REPEATS}
    assert set(table.steady_epochs) == {2 * REPEATS}
    assert table.speedup.notna().all() and (table.baseline == "single").all()
    page = (tmp_path / "report.html").read_text()
    assert all(f"<td>{path.stem}</td>" in page for path in runs.glob("*.csv"))


def test_memory_of_a_run(runs: Path) -> None:
    tracemalloc.start()
    try:
        rows, _ = comparison.load([runs])
        comparison.compare(comparison.summarize(rows))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most / (CONFIGURATIONS * REPEATS) < 1000 * MOST_KILOBYTES
