"""Lightning against stage 03: equal losses, also after a stop, and what it does by itself."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import (
    COMPLETE,
    ENVIRONMENT,
    REPOSITORY,
    STAGES,
    STARTUP,
    STOPS,
    WITHOUT_DROPOUT,
    Script,
    one_error,
    rows_of,
    succeeded,
    weights_of,
)
from forking import forking

FOLDER = COMPLETE / "lightning"
SCRIPT = FOLDER / "mnist_lightning.py"
SMALL = ("--batch-size", 50, "--train-size", 500, "--test-size", 301, "--width", 4, "--precision", "fp32")
SMALL = (*SMALL, "--epochs", 2, "--no-cuda", "--timeout", 60)
Runs = Callable[..., str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, mnist_dir: Path) -> Iterator[Runs]:
    """Runs a program in a process that has loaded Lightning; returns what it printed."""
    finds_the_script = {"PYTHONPATH": f"{FOLDER}{os.pathsep}{STARTUP}"}  # for lightning_defaults.py
    with forking(
        tmp_path_factory.mktemp("forks"), ENVIRONMENT | finds_the_script, ["lightning.pytorch"]
    ) as forks:

        def run(*arguments: object, ranks: int | None = None) -> str:
            done = succeeded(forks.run(*arguments, env=ENVIRONMENT, ranks=ranks))
            assert "Warning" not in done.stderr and "deprecated" not in done.stderr
            return done.stdout

        yield run


# Columns that differ between two starts.
OF_A_START = ("run_id", "start", "resumed_from", "started_at", "recorded_at")


def assert_equal(of_lightning: Path, of_stage: Path) -> None:
    """Each number is written with six digits."""
    ours, theirs = rows_of(of_lightning), rows_of(of_stage)
    names = ("epoch", "train_loss", "test_loss", "test_accuracy", "learning_rate")
    numbers = [[row[name] for row in rows for name in names] for rows in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    for name in set(ours[0]) - {*OF_A_START, "stage", "script"}:
        if not re.search("second|per_s|loss|accuracy|memory|elapsed", name):
            assert [row[name] for row in ours] == [row[name] for row in theirs], name


def test_lightning_trains_as_stage_03(runs: Runs, tmp_path: Path) -> None:
    for name, script in (("ddp", STAGES["ddp"]), ("lightning", SCRIPT)):
        arguments = (*SMALL, "--recipe", "sgd", "--patience", 5, "--results-dir", tmp_path / name)
        runs(*WITHOUT_DROPOUT, script, *arguments, ranks=2)
    assert_equal(tmp_path / "lightning", tmp_path / "ddp")


def test_a_run_that_was_stopped_ends_as_stage_03_in_one_go(runs: Runs, tmp_path: Path) -> None:
    """With dropout: the random numbers continue, too."""
    job, whole, to_end = tmp_path / "job", tmp_path / "whole", (*SMALL, "--save-model")
    places = ("--results-dir", job, "--checkpoint-dir", tmp_path / "checkpoints")
    printed = runs(*STOPS, 3, SCRIPT, *to_end, *places, ranks=2)
    assert re.search(r"^stopped after (step \d of )?epoch 1 by a signal", printed, re.MULTILINE)
    printed = runs(SCRIPT, *to_end, *places, "--resume", "auto", ranks=2)
    assert f"resumed from {tmp_path / 'checkpoints'}" in printed
    runs(STAGES["ddp"], *to_end, "--results-dir", whole, ranks=2)
    assert_equal(job, whole)
    torch.testing.assert_close(weights_of(job), weights_of(whole), rtol=1e-4, atol=1e-4)
    assert "all 2 epochs were done before" in runs(SCRIPT, *to_end, *places, "--resume", "auto", ranks=2)


def test_without_lightning_it_says_how_to_get_it(script: Script, tmp_path: Path) -> None:
    (tmp_path / "lightning.py").write_text("raise ModuleNotFoundError('none')")
    runs_it = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    (tmp_path / "without.py").write_text(runs_it)  # which looks for Lightning in its own folder first
    error = one_error(script(tmp_path / "without.py"))
    assert error.startswith("error: Lightning is not installed here (none): pip install -e '.[lightn")


def test_the_page_tells_what_lightning_does_by_itself(runs: Runs) -> None:
    """Its numbers are those of `lightning_defaults.py`, in this order."""
    *_, line = runs(REPOSITORY / "tests" / "lightning_defaults.py", ranks=2).splitlines()
    pairs = re.findall(r"\*\*([\d.]+)(?: of \d+)?(?: and ([\d.]+))?\*\*", (FOLDER / "README.md").read_text())
    numbers = [float(number) for pair in pairs for number in filter(None, pair)]
    numbers_of_lightning = json.loads(line).values()
    assert numbers == [
        item for value in numbers_of_lightning for item in (value if isinstance(value, list) else [value])
    ]
