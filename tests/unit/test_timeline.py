"""The timeline of a job as a picture (trainkit/monitor/timeline.py)."""

import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib.dates
import matplotlib.pyplot as plt
import pytest
import traces
from matplotlib.figure import Figure

from trainkit.monitor import timeline, waste
from trainkit.runtime.errors import UserError
from trainkit.schema import records, samples

HEALTHY = traces.H100 / "healthy_4096_bf16_short"
EVERY = [*map(traces.folder_of, traces.WRITTEN), *traces.recorded(), *traces.H100.iterdir()]
BEGAN = 1_795_000_000.0


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def sampled(folder: Path, seconds: int, period: int, gap: range) -> Path:
    """Samples of two GPUs, but for a `gap` in it (s)."""
    rows = []
    for second in sorted({*range(0, seconds, period)} - {*gap}):
        rows.append({"time": BEGAN + second, "what": samples.NODE, "memory_mb": 900, "memory_limit_mb": 9000})
        row = {"time": BEGAN + second, "what": samples.GPU, "ranks": "0", "power_w": 600, "throttled": "-"}
        rows += [row | {"number": number, "power_limit_w": 700} for number in (0, 1)]
    samples.Writer(folder, "n1").add(rows)
    return folder


def areas(figure: Figure, panel: int) -> list[tuple[float, float, float]]:
    """What is filled in the first row of a panel: from when to when (s since 1970), and how high."""
    parts = [path.get_extents() for path in figure.axes[panel].collections[0].get_paths()]
    return [
        (*(date.timestamp() for date in matplotlib.dates.num2date([part.x0, part.x1])), part.y1)
        for part in parts
    ]


def told(figure: Figure) -> list[tuple[str, str]]:
    """What stands on the left and right of each row."""
    lefts = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    rights = [" ".join(text.get_text().split()) for axes in figure.axes for text in axes.texts]
    return list(zip(lefts, rights, strict=True))


@pytest.mark.parametrize("folder", EVERY, ids=lambda folder: folder.name)
def test_a_trace_is_drawn_as_it_is(folder: Path) -> None:
    """With its verdict, the images/s of each epoch, and rows for all GPUs, ranks and nodes."""
    figure = timeline.figure(folder)
    verdict = " ".join(waste.judge(folder).lines(f"job {folder.name}"))
    assert " ".join(figure.texts[0].get_text().split()) == verdict
    rows = samples.read(folder)
    places = {(row["node"], row["what"], row["number"]) for row in rows}
    gpus = sum(what == samples.GPU for _, what, _ in places)
    assert len(told(figure)) == 1 + len(places) + gpus  # a GPU has power and memory
    epochs = [row for path in samples.runs(folder) for row in records.read(path)]
    bars = areas(figure, 0)
    speeds = [row["images_per_s"] for row in epochs]
    assert [top for *_, top in bars] == pytest.approx([timeline.HEIGHT * s / max(speeds) for s in speeds])
    seconds = [ended - began for began, ended, _ in bars]
    assert seconds == pytest.approx([row["train_seconds"] for row in epochs], abs=1e-3)


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("launch_bound_64_tf32", "GPU 0", r"1\d\d of 700 W"),
        ("gpu_no_rank", "GPU 2", r"55 of 400 W"),
        ("gpu_memory_full", "GPU 1", r"38\.8 of 40\.0 GB"),
        ("gpu_network_bound", "n2 GPU 0", r"1\d\d of 400 W"),
        ("input_bound", "rank 0", r"0\.\d cores 2 loader workers 1\.0"),
    ],
)
def test_the_numbers_stand_on_the_right(name: str, left: str, right: str, tmp_path: Path) -> None:
    (folder,) = (folder for folder in EVERY if folder.name == name)
    figure = timeline.figure(folder)
    assert [text for name, text in told(figure) if name == left and re.fullmatch(right, text)], told(figure)
    (tmp_path / "timeline.png").write_text("of before")
    assert timeline.draw(folder, tmp_path / "timeline.png") == tmp_path / "timeline.png"
    height, width, _ = plt.imread(tmp_path / "timeline.png").shape
    assert width == 1500 and 700 < height < 2000


def test_a_gap_stays_empty(tmp_path: Path) -> None:
    """The job went back to the queue."""
    figure = timeline.figure(sampled(tmp_path, 24 * 3600, period=120, gap=range(30_000, 42_000)))
    ends = [(began - BEGAN, ended - BEGAN) for began, ended, _ in areas(figure, 0)]
    assert ends == [pytest.approx((120, 29_880)), pytest.approx((42_120, 86_280))]


def test_what_cannot_be_drawn_is_told_in_one_sentence(tmp_path: Path) -> None:
    def error(folder: Path, out: Path) -> str:
        with pytest.raises(UserError) as raised:
            timeline.draw(folder, out)
        return str(raised.value)

    out, other = tmp_path / "out.png", tmp_path / "other"
    other.mkdir()
    assert re.fullmatch(r"there are no samples in .*other: give a job that was sampled .*", error(other, out))
    (other / "results.csv").write_text("name,value\n1,2\n")
    assert "results.csv: no samples of slurm/monitor.py" in error(other, out)
    assert not out.exists()
    other_file = other / "results.csv"
    assert "give a file that ends in .png instead of 'results.csv'" in error(HEALTHY, other_file)
    assert other_file.read_text() == "name,value\n1,2\n"
    place, why = tmp_path / "missing" / "out.png", "No such file or directory"
    assert error(HEALTHY, place) == f"{place} cannot be written ({why}): give another file."
