"""No step makes the CPU wait for the GPU; the clock, meetings and the end of an epoch are meant to."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY, STAGES, Script

Waits = Callable[[Path, str, int], str]
PROGRAM = REPOSITORY / "tests" / "count_waits.py"
CHOSEN = ("--width", 4, "--batch-size", 8, "--test-batch-size", 10, "--epochs", 1, "--precision", "fp32")


@pytest.fixture
def waits(script: Script, tmp_path: Path) -> Waits:
    """What a run tells of its waits."""

    def count(stage: Path, recipe: str, steps: int) -> str:
        sizes = ("--train-size", 8 * steps, "--test-size", 10 * steps)
        done = script(PROGRAM, stage, *CHOSEN, *sizes, "--recipe", recipe, "--results-dir", tmp_path)
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("waits: ["))
        return line

    return count


@pytest.mark.parametrize("recipe", ["classic", "fast"])
def test_more_steps_wait_no_more_often(recipe: str, waits: Waits) -> None:
    few, many = (waits(STAGES["single"], recipe, steps) for steps in (5, 25))
    assert few == many != "waits: []"
