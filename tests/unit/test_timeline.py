"""The timeline of a job as a picture (trainkit/monitor/timeline.py)."""

import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import traces
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainkit.monitor import timeline, waste
from trainkit.runtime.errors import UserError
from trainkit.schema import records, samples

HEALTHY = traces.H100 / "healthy_4096_bf16_short"
EVERY = [*map(traces.folder_of, traces.WRITTEN), *traces.TRACES.glob("cpu_*"), *traces.H100.iterdir()]
BEGAN = 1_795_000_000.0


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def sampled(folder: Path, seconds: int, period: int, gap: range) -> Path:
    """Samples of two GPUs, of which a rank uses the first, but for a `gap` in it (s)."""
    rows = []
    for second in range(0, seconds, period):
        if second in gap:
            continue
        rows.append({"time": BEGAN + second, "what": samples.NODE, "memory_mb": 900, "memory_limit_mb": 9000})
        for number, (rank, power) in enumerate((("0", 600), ("-", 70))):
            row = {"time": BEGAN + second, "what": samples.GPU, "number": number, "ranks": rank}
            rows.append(row | {"power_w": power, "power_limit_w": 700, "utilisation": 98, "throttled": "-"})
    samples.Writer(folder, "n1").add(rows)
    return folder


def panel(figure: Figure, title: str) -> Axes:
    (found,) = (axes for axes in figure.axes if axes.get_title("left").startswith(title))
    return found


def labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def beside(axes: Axes) -> dict[str, bool]:
    """What is told on the right of a panel, and whether in bold."""
    return {" ".join(text.get_text().split()): text.get_weight() == "bold" for text in axes.texts}


def title(figure: Figure) -> str:
    return " ".join(figure.texts[0].get_text().split())


@pytest.mark.parametrize("folder", EVERY, ids=lambda folder: folder.name)
def test_a_trace_is_drawn_as_it_is(folder: Path) -> None:
    """With its verdict, the images/s of each epoch, a row for each GPU or rank."""
    figure = timeline.figure(folder)
    assert title(figure) == waste.judge(folder).lines("")[0]
    rows = samples.read(folder)
    what = "rank" if folder.name.startswith("cpu") else "gpu"
    part = "cores of each rank" if what == "rank" else "power of each GPU"
    places = {(row["node"], row["number"]) for row in rows if row["what"] == what}
    assert len(labels(panel(figure, part))) == len(places) > 0
    epochs = [row for path in samples.runs(folder) for row in records.read(path)]
    bars = [path.get_extents() for path in panel(figure, "images/s").collections[0].get_paths()]
    speeds = [row["images_per_s"] for row in epochs]
    assert [bar.y1 for bar in bars] == pytest.approx([timeline.FILLED * s / max(speeds) for s in speeds])
    assert [bar.width for bar in bars] == pytest.approx([row["train_seconds"] for row in epochs])


@pytest.mark.parametrize(
    ("name", "part", "told"),
    [
        ("input_bound", "power", r"1\d\d of 700 W"),
        ("launch_bound_64_tf32", "power", r"1\d\d of 700 W"),
        ("gpu_no_rank", "power", r"55 of 400 W, no rank"),
        ("gpu_idle", "power", r"6\d of 400 W"),
        ("gpu_memory_full", "memory", r"3[89]\.\d of 40\.0 GB"),
        ("gpu_throttled_by_heat", "power", r"1\d\d of 400 W, slowed by heat 8\d % of the time"),
        ("cpu_stalled_rank", "cores", r"\d\.\d cores, stopped \d\d % of the time"),
        ("cpu_shared_cores", "cores", r"\d\.\d cores, waits for a core \d\d % of the time"),
    ],
)
def test_what_is_wrong_stands_out(name: str, part: str, told: str) -> None:
    (folder,) = (folder for folder in EVERY if folder.name == name)
    found = beside(panel(timeline.figure(folder), part))
    assert {bold for text, bold in found.items() if re.fullmatch(told, text)} == {True}, found


def test_nothing_stands_out_of_what_is_well(tmp_path: Path) -> None:
    figure = timeline.figure(HEALTHY)
    assert not any(bold for axes in figure.axes for bold in beside(axes).values())
    (tmp_path / "timeline.png").write_text("of before")
    assert timeline.draw(HEALTHY, tmp_path / "timeline.png") == tmp_path / "timeline.png"
    height, width, _ = plt.imread(tmp_path / "timeline.png").shape
    assert width == 1500 and 700 < height < 2000


def test_a_gap_stays_empty(tmp_path: Path) -> None:
    """The job went back to the queue; and a day has its time in hours."""
    figure = timeline.figure(sampled(tmp_path, 24 * 3600, period=120, gap=range(30_000, 42_000)))
    power = panel(figure, "power")
    # The power of GPU 0.
    assert [path.get_extents().x1 - BEGAN for path in power.collections[0].get_paths()] == [29_880, 86_280]
    assert figure.axes[-1].get_xlabel().startswith("hours since 2026-11-18 11:06:40 UTC\njob test_a_gap")
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()][:3] == ["0", "3", "6"]


def test_what_cannot_be_drawn_is_told_in_one_sentence(tmp_path: Path) -> None:
    def told(folder: Path, out: Path) -> str:
        with pytest.raises(UserError) as error:
            timeline.draw(folder, out)
        return str(error.value)

    out, other = tmp_path / "out.png", tmp_path / "other"
    other.mkdir()
    assert re.fullmatch(r"there are no samples in .*other: give a job that was sampled .*", told(other, out))
    (other / "results.csv").write_text("name,value\n1,2\n")
    assert "results.csv: no samples of slurm/monitor.py" in told(other, out)
    assert not out.exists()
    other_file = other / "results.csv"
    assert "give a file that ends in .png instead of 'results.csv'" in told(HEALTHY, other_file)
    assert other_file.read_text() == "name,value\n1,2\n"
    place, why = tmp_path / "missing" / "out.png", "No such file or directory"
    assert told(HEALTHY, place) == f"{place} cannot be written ({why}): give another file."
