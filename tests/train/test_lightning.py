"""Lightning beside stage 03: equal losses, stop and go on, its four commands, its YAML, and its defaults."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY, STAGES, rows_of, weights_of
from forking import Forking, forking

FOLDER = REPOSITORY / "03_multigpu_ddp" / "beyond" / "lightning"
SCRIPT = FOLDER / "mnist_lightning.py"
TESTS = REPOSITORY / "tests"
SMALL = {"batch-size": 50, "train-size": 500, "test-size": 301, "width": 4, "precision": "fp32"}
# A second rank gets USR2 in the third step; `sys.argv` has the script's words.
STOPS = """\
import os, runpy, signal, sys
import torch.nn.functional as F
steps, nll_loss = [], F.nll_loss
def stopping(*args, **how):
    steps.append(0)
    if len(steps) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGUSR2)
    return nll_loss(*args, **how)
F.nll_loss = stopping
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")"""
WITHOUT = """\
import runpy, sys
sys.modules["lightning.pytorch"] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")"""


class Runs:
    """Runs programs in a process that has loaded Lightning, on the CPU."""

    def __init__(self, forks: Forking) -> None:
        self._forks = forks

    def __call__(
        self, *arguments: object, ranks: int | None = None, job: Path | None = None
    ) -> subprocess.CompletedProcess:
        env = ENVIRONMENT | ({"TRAINKIT_JOB_DIR": str(job)} if job else {})
        return self._forks.run(*arguments, env=env, ranks=ranks)

    def train(self, *arguments: object, **how: object) -> str:
        """Of a run that has to go well: what it printed."""
        options = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
        done = self(*arguments, *options, "--no-cuda", "--timeout", 60, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stderr and "deprecated" not in done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, mnist_dir: Path) -> Iterator[Runs]:
    found = f"import sys; sys.path.append({str(FOLDER)!r})"  # by what runs the script, too
    loaded = f"{found}\nimport lightning.pytorch.cli"
    with forking(tmp_path_factory.mktemp("forks"), ENVIRONMENT, loaded) as forks:
        yield Runs(forks)


@pytest.fixture(scope="module")
def results(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings without dropout, in NAME-RANKS; one by Lightning takes its options from YAML."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "own.yaml").write_text(f"epochs: 2\nrecipe: sgd\nresults_dir: {folder / 'lightning-1'}\n")
    for ranks in (1, 2):
        for name, script in (("ddp", STAGES["ddp"]), ("lightning", SCRIPT)):
            told = ("--epochs", 2, "--recipe", "sgd", "--results-dir", folder / f"{name}-{ranks}")
            if (name, ranks) == ("lightning", 1):
                told = ("fit", "--config", folder / "own.yaml")
            runs.train(TESTS / "without_dropout.py", script, *told, ranks=ranks)
    return folder


@pytest.fixture(scope="module")
def stopped(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder, in which a run of two ranks was stopped in its first epoch: it has trained that one."""
    job = tmp_path_factory.mktemp("job")
    (job / "stops.py").write_text(STOPS)
    places = ("--results-dir", job, "--checkpoint-dir", job / "checkpoints")
    told = runs.train(job / "stops.py", SCRIPT, *places, "--epochs", 2, ranks=2, job=job)
    assert "stopped after epoch 1 by a signal; --resume auto goes on from" in told
    return job


def numbers(rows: list[dict]) -> list[float]:
    return [
        row[name] for row in rows for name in ("train_loss", "test_loss", "test_accuracy", "learning_rate")
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_trains_as_stage_03(ranks: int, results: Path) -> None:
    """Each number is written with six digits."""
    of_stage, of_lightning = (rows_of(results / f"{name}-{ranks}") for name in ("ddp", "lightning"))
    assert numbers(of_lightning) == pytest.approx(numbers(of_stage), rel=1e-5)
    for name in set(of_stage[0]) - {"run_id", "stage", "started_at", "recorded_at"}:
        if not re.search("second|per_s|loss|accuracy|memory|elapsed", name):
            assert [row[name] for row in of_lightning] == [row[name] for row in of_stage], name
    assert numbers(of_lightning) == pytest.approx(numbers(rows_of(results / "lightning-1")), rel=1e-3)


def test_it_is_compared_by_its_own_name(results: Path, runs: Runs, tmp_path: Path) -> None:
    done = runs(REPOSITORY / "results" / "plot_results.py", results, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "comparison.csv")
    found = set(zip(table.stage, table.model, table.devices, strict=True))
    assert found == {(name, "Net", devices) for name in ("ddp", "lightning") for devices in (1, 2)}


def test_a_run_that_was_stopped_ends_as_stage_03_in_one_go(stopped: Path, runs: Runs, tmp_path: Path) -> None:
    """With dropout: the random numbers go on, too."""
    assert (stopped / "stopped").read_text() == f"{stopped / 'checkpoints'}\n"
    job = shutil.copytree(stopped, tmp_path / "job")
    checkpoints = job / "checkpoints"
    places = ("--results-dir", job, "--checkpoint-dir", checkpoints, "--resume", "auto", "--save-model")
    told = runs.train(SCRIPT, *places, "--epochs", 2, "--keep-checkpoints", ranks=2, job=job)
    assert f"resumed from {checkpoints / 'last.ckpt'}" in told
    told = runs.train(STAGES["ddp"], "--results-dir", tmp_path, "--save-model", "--epochs", 2, ranks=2)
    of_lightning, of_stage = rows_of(job), rows_of(tmp_path)
    assert [row["epoch"] for row in of_lightning] == [1, 2]
    assert numbers(of_lightning) == pytest.approx(numbers(of_stage), rel=1e-5)
    torch.testing.assert_close(weights_of(job), weights_of(tmp_path), rtol=1e-4, atol=1e-4)

    told = runs.train(SCRIPT, *places, "--epochs", 2, ranks=2, job=job)
    assert "all 2 epochs were done before" in told
    assert not checkpoints.exists()  # the job is at its end


@pytest.mark.full
def test_the_other_commands_use_a_checkpoint(stopped: Path, runs: Runs) -> None:
    (row,) = rows_of(stopped)
    """Whatever the options of the training were, but for the network's width."""
    newest = ("--ckpt_path", stopped / "checkpoints" / "last.ckpt", "--width", 4, "--test-size", 301)

    def use(command: str, ranks: int | None = None) -> str:
        done = runs(SCRIPT, command, *newest, "--no-cuda", "--timeout", 60, ranks=ranks)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for command, ranks in (("validate", 2), ("test", None)):
        told = use(command, ranks)
        (said,) = re.findall(r"301 images: accuracy ([\d.]+) %, loss ([\d.]+)", told)
        assert [float(text) for text in said] == pytest.approx(
            [row["test_accuracy"], row["test_loss"]], abs=0.0051
        )
    one, two = (use("predict", ranks) for ranks in (1, 2))
    assert one == two and one.startswith("predicted 301 digits, the first of them [")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--epochs 0", "argument --epochs: 0 is too small, it must be 1 to 2147483647. See --help."),
        ("--flatten", "unrecognized arguments: --flatten. See --help."),
        ("fit --trainer.fast 1", "unrecognized arguments: --trainer.fast 1. See --help."),
        ("fit --config STOPPED/bad.yaml", "'many' is not a whole number. See --help."),
        ("--batch-size-per-gpu 5 --batch-size 7", "--batch-size is of all GPUs together"),
        ("validate --ckpt_path nowhere.ckpt", "the checkpoint nowhere.ckpt cannot be read"),
        ("test --ckpt_path STOPPED/bad.yaml", "the checkpoint STOPPED/bad.yaml cannot be read"),
        ("test --ckpt_path STOPPED/checkpoints/last.ckpt", "the checkpoint was made with --width 4"),
        (
            "--checkpoint-dir STOPPED/checkpoints",
            "STOPPED/checkpoints holds the checkpoint of an earlier run",
        ),
        (
            "--checkpoint-dir STOPPED/checkpoints --resume auto --width 4 --recipe sgd --batch-size 50",
            "STOPPED/checkpoints/last.ckpt was made with --recipe classic, --lr 1.0, --train-size 500: give",
        ),
        ("--trainer.devices 4", "trainer.devices is decided by what starts the processes"),
        ("--dry-run --trainer.limit_val_batches 0", "the row of an epoch needs one validation, at its end"),
        ("--trainer.max_steps=-5", "Lightning refuses this: "),
    ],
)
def test_a_mistake_is_one_sentence(words: str, sentence: str, stopped: Path, runs: Runs) -> None:
    (stopped / "bad.yaml").write_text("batch_size: many\n")
    words, sentence = (text.replace("STOPPED", str(stopped)) for text in (words, sentence))
    done = runs(SCRIPT, *words.split(), "--no-cuda", "--results-dir", stopped)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {sentence}")
    assert len(done.stderr.splitlines()) == 1


def test_a_dry_run_is_one_step(runs: Runs, tmp_path: Path) -> None:
    told = runs.train(SCRIPT, "--dry-run", "--results-dir", tmp_path)
    assert told.count("epoch 1/1: ") == told.count("epoch ") == 1 and not [*tmp_path.iterdir()]


@pytest.mark.full
def test_its_cost_is_measured_beside_stage_03(runs: Runs, tmp_path: Path) -> None:
    """By the command of the page, with fewer and smaller trainings."""
    (words,) = re.findall(r"^python (results/bench/\S+)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    small = ("--workers", 1, "--pairs", 1, "--train-size", 128, "--test-size", 10, "--epochs", 2, "--no-cuda")
    done = runs(REPOSITORY / words, *small, "--width", 4, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    seconds = [rows_of(path)[1]["train_seconds"] for path in sorted((tmp_path / "out").iterdir())]
    told = re.search(r"^ +1  (\S+) \((\S+)\.\.(\S+)\)$", done.stdout, re.MULTILINE)
    assert [float(text) for text in told.groups()] == pytest.approx(3 * [seconds[1] / seconds[0]], abs=0.001)


def test_without_lightning_it_says_how_to_get_it(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(WITHOUT)
    done = runs(tmp_path / "without.py", SCRIPT)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Lightning is not installed here")
    assert done.stderr.endswith("pip install -e '.[lightning]' in the top folder.\n")


def test_the_page_tells_what_lightning_does_by_itself(runs: Runs, tmp_path: Path) -> None:
    """Its numbers are those of `lightning_defaults.py`."""
    done = runs(TESTS / "lightning_defaults.py", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    *_, line = (line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    by_print, by_self = (done.stdout.count(f"told by {name}\n") for name in ("print", "self.print"))
    assert by_print == 2 * by_self
    page = (FOLDER / "README.md").read_text()
    told = re.findall(r"\*\*(.+?)\*\*", page)
    expected = {
        "images_of_a_step": "64",
        "also_in_the_first_batch_of_one": "0 of 32",
        "tested": "1002",
        "by_rank": "100.00 and 0.00",
        "by_mean": "50.00",
        "by_sum": "49.95",
        "batches_tested_before": "2",
        "rate": "1.0",
        "updates": "3",
        "seed_everything": "1000 of 1000",
        "logged": "0",
        "checkpoints": "1",
        "broadcasts": "10",
    }
    assert told == list(expected.values())
    if tuple(map(int, version("lightning").split(".")[:2])) < (2, 6):  # which sends nothing
        del found["broadcasts"], expected["broadcasts"]
    assert found == {name: _value(text) for name, text in expected.items()}


def _value(text: str) -> float | list[float]:
    """The number of a cell, or both; of "0 of 32" the first."""
    values = [float(number) for number in text.partition(" of ")[0].split(" and ")]
    return values if len(values) > 1 else values[0]
