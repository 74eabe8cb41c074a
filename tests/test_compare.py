"""`make compare` without Slurm, in a copy of the project whose path has spaces, from another directory."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from checkout import copy_project
from conftest import ENVIRONMENT, REPOSITORY

QUICK = "--train-size 512 --test-size 200 --epochs 2 --batch-size 64 --precision fp32 --no-cuda"


def make_project(folder: Path) -> Path:
    """A copy of the project, with the environment that runs this test as its own."""
    copy = folder / "a folder with spaces" / "the project"
    copy_project(copy)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, copy)
    # What `make` builds: here it is there already, and newer than pyproject.toml.
    (copy / ".venv" / "bin").mkdir(parents=True)
    python = copy / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{copy}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (copy / ".venv" / "ready").touch()
    return copy


def compare(project: Path, arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return run(["make", "-C", project, "compare", f"ARGS={arguments}"], **environment)


def run(command: list, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd="/", env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=300
    )


def test_compare_ends_with_table_figures_and_a_sentence(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    done = compare(project, f"{QUICK} --workers 2")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (project / "results" / "comparisons").iterdir()
    table = pd.read_csv(folder / "comparison.csv")
    assert sorted(zip(table.stage, table.devices, strict=True)) == [
        ("ddp", 1),
        ("ddp", 2),
        ("dp", 1),
        ("single", 1),
    ]
    # Equal conditions, or the comparison would be worth nothing.
    for column in ("global_batch", "images", "precision", "threads_per_worker", "dataset", "loader"):
        assert table[column].nunique() == 1
    assert table.threads_per_worker.unique() == [1]
    assert table.set_index(["stage", "devices"]).speedup["ddp", 2] > 0
    for name in ("comparison.md", "throughput.png", "speedup.png", "accuracy.png"):
        assert (folder / name).stat().st_size > 0
    assert str(folder) in done.stdout
    assert re.search(r"^DDP on 2 CPU workers trained \d", done.stdout, re.MULTILINE), done.stdout
    assert "SYNTHETIC" not in done.stdout
    # The runs as they go, and each one's log.
    for name in ("single-1gpu", "dp-1gpu", "ddp-1gpu", "ddp-2gpu"):
        assert f"{name}-batch64-train512-r1 running: epoch 2/2: " in done.stdout
        assert "epoch 2/2: " in (folder / f"{name}-batch64-train512-r1" / "log").read_text()
    assert "[4/4] ddp-2gpu-batch64-train512-r1 finished: " in done.stdout

    go_on = re.search(r"^go on    (.*)$", done.stdout, re.MULTILINE)[1]
    again = run(shlex.split(go_on), PYTHONPATH=str(project))
    assert again.returncode == 0, again.stderr
    assert "4 runs, 4 of them finished" in again.stdout


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """A machine that cannot get MNIST, with a fault in stage dp: its folder and what compare told."""
    project = make_project(tmp_path_factory.mktemp("faulty"))
    (project / "02_multigpu_dp" / "mnist_multigpu.py").write_text("raise SystemExit('planted')\n")
    tools = project / "tools"  # a PATH without npm
    tools.mkdir()
    for name in ("make", "sh", "bash", "env", "git"):
        (tools / name).symlink_to(shutil.which(name))
    (project / "data").unlink()
    cut_off = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = compare(project, f"{QUICK} --workers 1", PATH=str(tools), **cut_off)
    (folder,) = (project / "results" / "comparisons").iterdir()
    return folder, done


def test_a_failing_stage_leaves_the_others(faulty: tuple[Path, subprocess.CompletedProcess]) -> None:
    folder, done = faulty
    assert done.returncode != 0
    assert "failed: dp-1gpu-batch64-train512-r1. The same command" in done.stderr
    assert sorted(pd.read_csv(folder / "comparison.csv").stage) == ["ddp", "single"]
    assert "planted" in (folder / "dp-1gpu-batch64-train512-r1" / "log").read_text()


def test_without_mnist_it_says_loudly_what_it_uses_instead(
    faulty: tuple[Path, subprocess.CompletedProcess],
) -> None:
    folder, done = faulty
    assert "GENERATED DIGITS" in done.stdout
    assert "SYNTHETIC" in done.stdout
    assert set(pd.read_csv(folder / "comparison.csv").dataset) == {"synthetic"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--workers 4000 --no-cuda", "--workers 4000 is more than the"),
        ("--workers 0", "0 is too small"),
        ("--dry-run", "--dry-run measures nothing"),
        ("--epoch 3", "unrecognized arguments: --epoch 3"),
        ("--results-dir /proc/nowhere --no-cuda", "cannot be written"),
        ("--train-size 100 --no-cuda --workers 1", "--batch-size 256 is more than the 100 training images"),
    ],
)
def test_bad_arguments(arguments: str, sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "results" / "compare.py", *arguments.split()],
        env=os.environ, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
