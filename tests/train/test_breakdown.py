"""Where a training step goes: 03_multigpu_ddp/breakdown.py, its file and its table."""

import json
import os
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import REPOSITORY, Script, succeeded

from trainkit.compare import breakdown_table
from trainkit.rank import step_phases
from trainkit.runtime.errors import UserError

SCRIPT = REPOSITORY / "03_multigpu_ddp" / "breakdown.py"
SMALL = ("--train-size", 48, "--batch-size", 16, "--width", 4, "--precision", "fp32", "--repeats", 1)
PHASES = ["data", "forward", "backward", "exchange", "waiting", "optimizer"]
OWN_WORK = "optimizer.zero_grad()"


@pytest.fixture(scope="module")
def slow_rank(
    script: Script, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess, Path]:
    """Two ranks, of which the second takes longer in every forward pass; what was said, and the results."""
    folder = tmp_path_factory.mktemp("slow rank")
    text = SCRIPT.read_text()
    assert "STEPS, TRACED = 10, 3" in text
    assert text.count(OWN_WORK) == 1
    text = text.replace("STEPS, TRACED = 10, 3", "STEPS, TRACED = 4, 1")
    slow = text.replace(OWN_WORK, f"here.rank and __import__('time').sleep(0.1); {OWN_WORK}")
    (folder / "slow.py").write_text(slow)
    (folder / "beyond").symlink_to(SCRIPT.with_name("beyond"))  # it imports by_hand_overlap.py
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


FACTS = {"run_id": "made-up", "dataset": "mnist", "model": "Net", "width": 32, "loader": "resident"}
FACTS |= {"workers_per_loader": 0, "recipe": "fast", "precision": "bf16", "debug": 0, "settings": ""}
FACTS |= {"device_name": "one GPU", "threads_per_worker": 1, "world_size": 2, "nodes": 2, "global_batch": 512}


def made_up(file: Path) -> None:
    """A measurement of two ranks on two nodes, whose step takes 13 s."""
    seconds = step_phases.split(times((1, 2, 9, 1), (2, 4, 6, 1)), times((1, 2, 4, 1), (2, 4, 4, 1)))
    step = {"step": torch.full((2, 3), 13.0)}
    step_phases.write(file, FACTS, ["n1", "n2"], seconds | step)


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


def test_the_table_has_all_of_the_folder(script: Script, tmp_path: Path) -> None:
    """One worker exchanges nothing and waits for no other."""
    folder = tmp_path / "breakdown"
    folder.mkdir()
    made_up(folder / "made-up.tsv")
    succeeded(script(SCRIPT, *SMALL, "--results-dir", tmp_path))
    lines = (folder / "breakdown.md").read_text().splitlines()
    header, _, *rows = [line[2:-2].split(" | ") for line in lines if line.startswith("| ")]
    assert header == ["workers", "nodes", "batch", *PHASES, "step", "settings"]
    (one,), (two,) = ([row[:-1] for row in rows if row[0] == workers] for workers in "12")
    assert two == ["2", "2", "512", *(f"{ms}.00" for ms in (1500, 3000, 4000, 2000, 1500, 1000, 13000))]
    assert one[:3] == ["1", "1", "16"]
    assert one[6:8] == ["0.00", "0.00"]


def test_an_exchange_by_hand_is_measured_apart_from_that_of_ddp(script: Script, tmp_path: Path) -> None:
    succeeded(script(SCRIPT, *SMALL, "--by-hand", "at-once", "--results-dir", tmp_path, ranks=2))
    assert set(rows_of(tmp_path).settings) == {"by_hand=at-once"}
    made_up(tmp_path / "breakdown" / "made-up.tsv")
    breakdown_table.write((tmp_path / "breakdown").glob("*.tsv"), tmp_path / "breakdown.md")
    *_, ddp, by_hand = sorted(
        (tmp_path / "breakdown.md").read_text().splitlines(), key=lambda row: "by_hand" in row
    )
    assert "by_hand=at-once" in by_hand and "by_hand" not in ddp


def test_the_exposed_exchanges_of_the_page_were_measured() -> None:
    page = (REPOSITORY / "03_multigpu_ddp" / "beyond" / "README.md").read_text()
    shown = re.findall(r"^\| (?:DDP|by hand, .*) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    samples = REPOSITORY / "results" / "sample" / "cpu-epyc-avx2-2-cores"
    for name, of_page in zip(("full_speed", "200_mbit"), zip(*shown, strict=True), strict=True):
        rows = pd.read_csv(samples / f"exchange_{name}.tsv", sep="\t", keep_default_na=False)
        measured = breakdown_table.milliseconds(rows).set_index("settings").exchange
        measured = measured[["", "by_hand=late", "by_hand=at-once"]]
        assert list(map(int, of_page)) == list(measured.round())


@pytest.mark.parametrize("damage", ["nothing", "another table", "cut", "no text", "a pipe"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "measured.tsv"
    made_up(file)
    cut = file.read_bytes()[:-1200]
    file.write_bytes(
        {"nothing": b"", "another table": b"phase\tseconds\ndata\t1\n", "no text": b"\xff\0"}.get(damage, cut)
    )
    if damage == "a pipe":
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(UserError) as refused:
        breakdown_table.write([file], tmp_path / "breakdown.md")
    assert str(refused.value).startswith(f"{file}: not read, ")


# --- what is made of the times ----------------------------------------------------------------------


def test_waiting_is_told_apart_from_the_exchange() -> None:
    # The second rank computes 3 s longer; the exchange ends 2 s after that, for both.
    seconds_of = step_phases.split(times((1, 2, 9, 1), (2, 4, 6, 1)), times((1, 2, 4, 1), (2, 4, 4, 1)))
    of_ranks = {phase: seconds.mean(1).tolist() for phase, seconds in seconds_of.items()}
    expected = [[1, 2], [2, 4], [4, 4], [2, 2], [3, 0], [1, 1]]
    assert of_ranks == dict(zip(PHASES, expected, strict=True))


@pytest.mark.parametrize(("step", "quiet"), [(1.04, True), (1.06, False)])
def test_a_sum_that_is_not_the_step_is_told(step: float, quiet: bool) -> None:
    seconds = step_phases.split(times((0.2, 0.2, 0.4, 0.2)), times((0.2, 0.2, 0.4, 0.2)))
    told = step_phases.as_text(FACTS, seconds, torch.full((1, 3), step, dtype=torch.float64))
    assert f"phases sum to 1000.00 ms, the step takes {1000 * step:.2f} ms" in told
    assert ("the machine was not quiet" in told) == (not quiet)
