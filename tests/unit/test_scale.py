"""Hundreds of runs: all count, and none takes much memory. For how long it takes: results/bench/scale.py."""

import tracemalloc
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from conftest import REPOSITORY

from trainkit.analysis import comparison, figures
from trainkit.analysis.report import report

CONFIGURATIONS, REPEATS = 60, 5
MOST_KILOBYTES = 100  # of a run of three epochs: 10,000 of them have room in a gigabyte


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "results" / "bench")
        import scale

        folder = tmp_path_factory.mktemp("scale") / "runs"
        scale.write_runs(folder, CONFIGURATIONS, REPEATS)
        return folder


def test_hundreds_of_runs(runs: Path, tmp_path: Path) -> None:
    """Every configuration has its row, its repeats and, from the run on one device, its speedup."""
    report([runs], tmp_path, target=98)
    table = pd.read_csv(tmp_path / "comparison.csv")
    assert len(table) == CONFIGURATIONS and set(table.runs) == {REPEATS}
    assert set(table.steady_epochs) == {2 * REPEATS}
    assert table.speedup.notna().all() and (table.baseline == "single").all()
    page = (tmp_path / "report.html").read_text()
    assert all(f"<td>{path.stem}</td>" in page for path in runs.glob("*.csv"))


def test_memory_of_a_run(runs: Path) -> None:
    tracemalloc.start()
    try:
        rows, _ = comparison.load([runs])
        comparison.compare(comparison.summarize(rows))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most / (CONFIGURATIONS * REPEATS) < 1000 * MOST_KILOBYTES


def test_a_figure_shows_what_it_has_room_for(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more rows than that the fastest, or those of the best accuracy; its title says so."""
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    rows, _ = comparison.load([runs])
    table = comparison.compare(comparison.summarize(rows))
    names = figures.draw(table, rows, tmp_path)
    shown = {name: figure.axes[0] for name, figure in zip(names, drawn, strict=True)}
    bars = shown["throughput.png"].patches
    assert sorted(bar.get_width() for bar in bars) == sorted(table.images_per_s)[-figures.MOST :]
    assert f"the {figures.MOST} fastest of {CONFIGURATIONS}" in shown["throughput.png"].get_title()
    assert len(shown["accuracy.png"].lines) == REPEATS * figures.MOST
    assert f"the {figures.MOST} most accurate of {CONFIGURATIONS}" in shown["accuracy.png"].get_title()
