"""`make compare`, in a copy of the project whose path has spaces, from another directory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from conftest import ENVIRONMENT, REPOSITORY

QUICK = "--train-size 512 --epochs 2 --batch-size 64 --workers 2 --no-cuda"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project, with the environment that runs this test as its own."""
    copy = tmp_path / "a folder with spaces" / "the project"
    for name in ("01_singlegpu", "02_multigpu_dp", "03_multigpu_ddp", "results", "trainkit"):
        ignored = shutil.ignore_patterns("__pycache__", "runs", "comparisons", "models")
        shutil.copytree(REPOSITORY / name, copy / name, ignore=ignored)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, copy)
    (copy / "data").symlink_to(REPOSITORY / "data")
    # What `make` builds: here it is there already, and newer than pyproject.toml.
    (copy / ".venv" / "bin").mkdir(parents=True)
    python = copy / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{copy}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (copy / ".venv" / "ready").touch()
    return copy


def compare(project: Path, arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "-C", project, "compare", f"ARGS={arguments}"],
        cwd="/",
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_compare_ends_with_table_figures_and_a_sentence(project: Path) -> None:
    done = compare(project, QUICK)
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


def test_a_failing_stage_leaves_the_others(project: Path) -> None:
    script = project / "02_multigpu_dp" / "mnist_multigpu.py"
    script.write_text("raise SystemExit('planted')\n")
    done = compare(project, QUICK)
    assert done.returncode != 0
    assert "failed: dp on 1." in done.stderr
    (folder,) = (project / "results" / "comparisons").iterdir()
    assert sorted(pd.read_csv(folder / "comparison.csv").stage) == ["ddp", "ddp", "single"]
    assert "planted" in (folder / "logs" / "dp-on-1.log").read_text()


def test_without_mnist_it_says_loudly_what_it_uses_instead(project: Path) -> None:
    tools = project / "tools"  # a PATH without npm
    tools.mkdir()
    for name in ("make", "sh", "git"):
        (tools / name).symlink_to(shutil.which(name))
    (project / "data").unlink()
    cut_off = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = compare(project, QUICK, PATH=str(tools), **cut_off)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GENERATED DIGITS" in done.stdout
    assert "SYNTHETIC" in done.stdout
    (folder,) = (project / "results" / "comparisons").iterdir()
    assert set(pd.read_csv(folder / "comparison.csv").dataset) == {"synthetic"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--workers 4000 --no-cuda", "--workers 4000 is more than the"),
        ("--workers 0", "0 is too small"),
        ("--dry-run", "--dry-run measures nothing"),
        ("--epoch 3", "unrecognized arguments: --epoch 3"),
        ("--results-dir /proc/nowhere --no-cuda", "cannot be written"),
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
