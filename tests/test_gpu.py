"""What only GPUs can show; skipped with the reason where there are none."""

from pathlib import Path

import pytest
import torch
from conftest import rows_of, run_stage

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NAME = torch.cuda.get_device_name(0) if GPUS else ""
SHORT = ("--epochs", 2, "--train-size", 6400 * max(GPUS, 1), "--batch-size", 64 * max(GPUS, 1))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]
several = pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA GPUs, finds {GPUS}")


@pytest.mark.parametrize("loader", ["resident", "workers"])
def test_single_trains_on_the_gpu(loader: str, tmp_path: Path) -> None:
    done = run_stage("single", *SHORT, "--loader", loader, "--results-dir", tmp_path, device=())
    assert done.returncode == 0, done.stderr
    row = rows_of(tmp_path)[-1]
    assert (row["device_name"], row["devices"]) == (NAME, 1)
    assert row["test_accuracy"] > 90
    assert row["cuda_version"] == torch.version.cuda


@several
def test_data_parallel_uses_every_gpu(tmp_path: Path) -> None:
    done = run_stage("dp", *SHORT, "--results-dir", tmp_path, device=())
    assert done.returncode == 0, done.stderr
    row = rows_of(tmp_path)[-1]
    assert (row["devices"], row["world_size"]) == (GPUS, 1)
    assert row["test_accuracy"] > 85


def test_ddp_uses_every_gpu(tmp_path: Path) -> None:
    done = run_stage("ddp", *SHORT, "--results-dir", tmp_path, processes=GPUS, device=())
    assert done.returncode == 0, done.stderr
    row = rows_of(tmp_path)[-1]
    assert (row["devices"], row["world_size"], row["device_name"]) == (GPUS, GPUS, NAME)
    assert row["test_accuracy"] > 85


def test_more_processes_than_gpus_is_one_sentence(tmp_path: Path) -> None:
    done = run_stage(
        "ddp", "--batch-size", 60 * (GPUS + 1), "--results-dir", tmp_path, processes=GPUS + 1, device=()
    )
    assert done.returncode != 0
    assert "has no GPU of its own" in done.stderr
    assert f"{GPUS} visible GPU(s)" in done.stderr
