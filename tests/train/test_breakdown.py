"""Where a training step goes: 03_multigpu_ddp/breakdown.py, its file and what it prints."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch
from conftest import REPOSITORY, Script, one_error, ran, succeeded

SCRIPT = REPOSITORY / "03_multigpu_ddp" / "breakdown.py"
SMALL = ("--train-size", 48, "--batch-size", 16, "--width", 4, "--precision", "fp32", "--repeats", 1)
PHASES = ["data", "forward", "backward", "communication", "waiting", "optimizer"]
OWN_WORK = "optimizer.zero_grad()"


@pytest.fixture(scope="module")
def slow_rank(
    script: Script, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess, Path]:
    """Two ranks, of which the second takes longer in every forward pass; what was said, and the results."""
    folder = tmp_path_factory.mktemp("slow rank")
    text = SCRIPT.read_text()
    assert "STEPS = 10  #" in text and "TRACED_STEPS = 3" in text
    assert text.count(OWN_WORK) == 1
    text = text.replace("STEPS = 10  #", "STEPS = 4  #").replace("TRACED_STEPS = 3", "TRACED_STEPS = 1")
    slow = text.replace(OWN_WORK, f"dist_env.rank and __import__('time').sleep(0.1); {OWN_WORK}")
    (folder / "slow.py").write_text(slow)
    # It imports by_hand_overlap.py, and what lies beside it.
    for name in ("beyond", "step_phases.py"):
        (folder / name).symlink_to(SCRIPT.with_name(name))
    results = folder / "results"
    done = script(folder / "slow.py", *SMALL, "--repeats", 2, "--trace", "--results-dir", results, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, results


def rows_of(results: Path) -> pd.DataFrame:
    (file,) = (results / "breakdown").glob("*.tsv")
    return pd.read_csv(file, sep="\t")


def times(*ranks: tuple[float, float, float, float]) -> torch.Tensor:
    """Seconds of data, forward, backward and optimizer of each rank, the same in 3 repeats of 5 steps."""
    return torch.tensor(ranks, dtype=torch.float64)[:, None, None].expand(-1, 3, 5, -1)


FACTS = {"dataset": "mnist", "loader": "resident", "recipe": "fast", "precision": "bf16", "settings": ""}
FACTS |= {"device_name": "one GPU", "world_size": 2, "global_batch": 512}


def test_a_line_for_each_phase_rank_and_repeat(slow_rank: tuple) -> None:
    rows = rows_of(slow_rank[1])
    assert rows.groupby(["rank", "repeat"]).phase.apply(list).tolist() == [[*PHASES, "step"]] * 4
    assert set(rows["repeat"]) == {1, 2}
    for name, value in {"world_size": 2, "nodes": 1, "global_batch": 16, "precision": "fp32"}.items():
        assert set(rows[name]) == {value}
    lines = slow_rank[0].stdout.splitlines()
    assert [line.split()[0] for line in lines[2:8]] == PHASES
    assert lines[8].startswith("phases sum to ") and ", the step takes " in lines[8]


def test_the_others_wait_for_the_slow_rank(slow_rank: tuple) -> None:
    ms = rows_of(slow_rank[1]).groupby(["phase", "rank"]).seconds.median().unstack()
    assert ms.loc["forward", 1] > ms.loc["forward", 0]
    assert ms.loc["waiting", 0] > ms.loc["waiting", 1]
    assert ms.loc["waiting", 0] > ms.loc["forward", 0]


def test_every_rank_writes_a_trace(slow_rank: tuple) -> None:
    done, results = slow_rank
    assert "ui.perfetto.dev" in done.stdout
    traces = sorted((results / "breakdown").glob("*.rank-*.json"))
    assert [path.name.split(".")[1] for path in traces] == ["rank-0", "rank-1"]
    for path in traces:
        names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
        assert "DistributedDataParallel.forward" in names
        assert any(name.startswith("Optimizer.step") for name in names)


@pytest.mark.usefixtures("mnist_dir")
def test_a_trace_that_is_not_written_is_told(tmp_path: Path) -> None:
    """PyTorch says nothing of it."""
    options = [*map(str, SMALL), "--no-cuda", "--trace", "--results-dir", tmp_path]
    command = f"ulimit -f 60; exec {shlex.join(map(str, [sys.executable, SCRIPT, *options]))}"
    error = one_error(ran("bash", "-c", command))
    assert ".rank-0.json could not be written: free the space" in error


def test_one_worker_neither_communicates_nor_waits(script: Script, tmp_path: Path) -> None:
    succeeded(script(SCRIPT, *SMALL, "--results-dir", tmp_path))
    rows = rows_of(tmp_path)
    assert (rows.seconds[rows.phase.isin(["communication", "waiting"])] == 0).all()


def test_an_all_reduce_by_hand_is_named(script: Script, tmp_path: Path) -> None:
    done = succeeded(script(SCRIPT, *SMALL, "--by-hand", "at-once", "--results-dir", tmp_path, ranks=2))
    assert set(rows_of(tmp_path).settings) == {"by_hand=at-once"}
    assert "by_hand=at-once" in done.stdout


def test_the_exposed_communication_of_the_page_was_measured() -> None:
    page = (REPOSITORY / "03_multigpu_ddp" / "beyond" / "README.md").read_text()
    shown = re.findall(r"^\| (?:DDP|by hand, .*) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    samples = REPOSITORY / "results" / "sample" / "cpu-epyc-avx2-2-cores"
    for name, of_page in zip(("full_speed", "200_mbit"), zip(*shown, strict=True), strict=True):
        rows = pd.read_csv(samples / f"communication_{name}.tsv", sep="\t", keep_default_na=False)
        of_ranks = rows[rows.phase == "communication"].groupby(["settings", "rank"]).seconds.median()
        measured = 1000 * of_ranks.groupby("settings").mean()[["", "by_hand=late", "by_hand=at-once"]]
        assert list(map(int, of_page)) == list(measured.round())


# --- what is made of the times ----------------------------------------------------------------------


@pytest.fixture
def step_phases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What lies beside the script."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("step_phases")


def test_waiting_is_told_apart_from_communication(step_phases: ModuleType) -> None:
    # The second rank computes 3 s longer; the all-reduce ends 2 s after that, for both.
    seconds_of = step_phases.split(times((1, 2, 9, 1), (2, 4, 6, 1)), times((1, 2, 4, 1), (2, 4, 4, 1)))
    of_ranks = {phase: seconds.mean(1).tolist() for phase, seconds in seconds_of.items()}
    expected = [[1, 2], [2, 4], [4, 4], [2, 2], [3, 0], [1, 1]]
    assert of_ranks == dict(zip(PHASES, expected, strict=True))


@pytest.mark.parametrize(("step", "quiet"), [(1.04, True), (1.06, False)])
def test_a_sum_that_is_not_the_step_is_told(step: float, quiet: bool, step_phases: ModuleType) -> None:
    seconds = step_phases.split(times((0.2, 0.2, 0.4, 0.2)), times((0.2, 0.2, 0.4, 0.2)))
    text = step_phases.as_text(FACTS, seconds, torch.full((1, 3), step, dtype=torch.float64))
    assert f"phases sum to 1000.00 ms, the step takes {1000 * step:.2f} ms" in text
    assert ("the machine was not quiet" in text) == (not quiet)
