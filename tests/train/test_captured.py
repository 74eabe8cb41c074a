"""A step captured in a CUDA graph, as far as a machine without a GPU shows it; test_gpu.py has the rest."""

from pathlib import Path

import pytest
from conftest import REPOSITORY, Script, rows_of
from torch import nn

from trainkit import capture
from trainkit.errors import UserError

CAPTURED = REPOSITORY / "03_multigpu_ddp" / "beyond" / "captured.py"
SMALL = ("--train-size", 250, "--test-size", 100, "--batch-size", 60, "--epochs", 2, "--precision", "fp32")


@pytest.mark.parametrize("how", ["captured", "graphed"])
def test_without_a_gpu_it_is_one_sentence(how: str, script: Script, tmp_path: Path) -> None:
    done = script(CAPTURED, "--how", how, *SMALL, "--results-dir", tmp_path)
    assert done.returncode == 1
    assert "a CUDA graph needs a GPU" in done.stderr and "--how eager" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize("ranks", [None, 2])
def test_eager_it_is_stage_03(ranks: int | None, script: Script, tmp_path: Path) -> None:
    rows = []
    for stage in ("ddp", CAPTURED):
        how = ("--how", "eager") if stage == CAPTURED else ()
        folder = tmp_path / Path(stage).stem
        done = script(stage, *how, *SMALL, "--results-dir", folder, ranks=ranks)
        assert done.returncode == 0, done.stderr
        rows.append(rows_of(folder))
    plain, captured = rows
    for loss in ("train_loss", "test_loss"):
        assert [row[loss] for row in plain] == [row[loss] for row in captured]
    assert {row["stage"] for row in captured} == {"ddp-eager"}


def test_data_parallel_cannot_be_captured() -> None:
    with pytest.raises(UserError, match="DataParallel copies the network"):
        capture.check(nn.DataParallel(nn.Linear(1, 1)))
