"""A stage on an accelerator that the kit does not know: one class is all that it needs."""

import json
import shutil
from pathlib import Path

import pretended_accelerator
from checkout import Checkout
from conftest import ENVIRONMENT, Script, assert_same_end, rows_of, succeeded
from forking import Forking

SMALL = ("--train-size", 384, "--test-size", 60, "--batch-size", 48, "--precision", "fp32", "--width", 4)
TRAINING = (*SMALL, "--epochs", 2, "--save-model")


def test_a_stage_trains_on_another_accelerator(
    checkout: Checkout, script: Script, forking: Forking, tmp_path: Path
) -> None:
    """With two ranks, by its own clock, memory and name; the numbers are those of the CPU."""
    succeeded(script("ddp", *TRAINING, "--results-dir", tmp_path / "cpu", ranks=2))
    stage = checkout.script("ddp")
    shutil.copy(pretended_accelerator.__file__, stage.parent)
    counts = tmp_path / "calls"
    checkout.plant("ddp", f"import pretended_accelerator; pretended_accelerator.register({str(counts)!r})")
    folders = ("--results-dir", tmp_path / "pretended", "--checkpoint-dir", tmp_path / "kept")
    done = succeeded(forking.run(stage, *TRAINING, *folders, env=ENVIRONMENT, ranks=2))
    assert "2 x Pretended 1" in done.stdout
    assert_same_end(tmp_path / "pretended", tmp_path / "cpu")
    for row in rows_of(tmp_path / "pretended"):
        assert row["device_name"] == "Pretended 1"
        assert row["peak_memory_mb"] == pretended_accelerator.MEMORY_BYTES / 1e6
    for rank in (0, 1):
        calls = json.loads(Path(f"{counts}-{rank}").read_text())
        expected = ("set_device", "synchronize", "Event", "reset_peak_memory_stats", "get_rng_state_all")
        assert not [name for name in expected if not calls.get(name)]
