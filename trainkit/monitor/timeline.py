"""The timeline of a job, from its samples: images/s, power, cores and memory on one time axis.

Each GPU, rank or node is a row as high as what it may use at most; what it used of that is filled.
"""

import math
import textwrap
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from trainkit.compare import style
from trainkit.monitor import waste
from trainkit.monitor.sampled_job import Place, SampledJob, consecutive, since_1970
from trainkit.runtime.errors import UserError, printable
from trainkit.schema import samples
from trainkit.schema.samples import GPU, NODE, RANK

EPOCH = ["warmup", "images_per_s", "train_seconds", "eval_seconds", "recorded_at"]
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
MOST_EPOCHS = 60  # whose evaluations are shaded: those of more would leave nothing white
FILLED = 0.86  # of a row; the rest is the space to the next one
STATES = {"T": "stopped", "D": "waits for a disk"}  # of a process, in which it does nothing


class PanelRow(NamedTuple):
    """A GPU, rank or node as it is drawn: by the time in s since 1970, as shares of its most.

    `areas` are one above the other, `line` is across. `told` stands on the right, in bold if it is a
    `warning`.
    """

    label: str
    areas: pd.DataFrame
    told: str
    warning: bool = False
    line: pd.Series | None = None


class Panel(NamedTuple):
    """`looks` are those of its rows' areas, by what they are; `line` is what their lines are.

    `beside` is what stands on the right of the rows.
    """

    title: str
    rows: list[PanelRow]
    looks: dict[str, style.Look]
    beside: str
    line: str = ""

    @property
    def inches(self) -> float:
        """The height of the panel."""
        return 0.45 + len(self.rows) * min(0.6, max(0.2, 1.8 / len(self.rows)))


def draw(folder: Path, out: Path) -> Path:
    """Write the timeline of the job with the samples in `folder` to `out`, a PNG, and return that.

    Raises:
        UserError: if there are no samples, or `out` cannot be written.
    """
    if out.suffix.lower() != ".png":  # what is there may be no picture, and would be replaced
        raise UserError(f"the timeline is a PNG: give a file that ends in .png instead of {out.name!r}.")
    try:
        style.save({out.name: figure(folder)}, out.parent)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): give another file.") from None
    return out


def figure(folder: Path) -> Figure:
    """Draw the same as a figure, not written yet.

    Raises:
        UserError: if there are no samples.
    """
    job = SampledJob(folder)
    verdict = waste.judge_job(job).lines(f"job {_name(folder)}")
    epochs = _epochs(job)
    panels = [panel for panel in (_speed(epochs), _power(job), _cores(job), _memory(job)) if panel.rows]
    if not panels:
        raise UserError(f"the samples in {folder} tell of no GPU, no rank and no memory: nothing to draw.")
    heights = [panel.inches for panel in panels]
    drawn = plt.figure(figsize=(10, 1 + sum(heights)), layout="constrained")
    axes_of_panels = drawn.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights).flat
    for axes, panel in zip(axes_of_panels, panels, strict=True):
        _draw_rows(axes, panel)
        if len(epochs) <= MOST_EPOCHS:
            for epoch in epochs.itertuples():
                axes.axvspan(epoch.trained, epoch.tested, **style.EVALUATION)
    times = [row["time"] for series in job.rows.values() for rows in series.values() for row in rows]
    _draw_time(axes, times)
    axes.set_xlabel(f"{axes.get_xlabel()}\n{_wrapped(verdict[-1], 120)}", fontsize=9)
    drawn.suptitle(_wrapped(verdict[0], 95), x=0.01, ha="left", fontsize=11, weight="bold")
    return drawn


def _epochs(job: SampledJob) -> pd.DataFrame:
    """Return the epochs whose times are known: training from `began` to `trained`, then `tested` (s)."""
    table = pd.DataFrame([row for training in job.trainings for row in training.epochs], columns=EPOCH)
    tested = table.recorded_at.map(since_1970).astype(float)
    trained = tested - table.eval_seconds
    return table.assign(tested=tested, trained=trained, began=trained - table.train_seconds).dropna()


def _speed(epochs: pd.DataFrame) -> Panel:
    looks, rows = {"training": style.TRAINING}, []
    if len(epochs):
        steady = epochs[epochs.warmup == 0]
        median = (epochs if steady.empty else steady).images_per_s.median()
        share = epochs.images_per_s / epochs.images_per_s.max()
        both_ends = [share.set_axis(epochs[end]) for end in ("began", "trained")]
        after = pd.Series(math.nan, epochs.trained)  # nothing, until the next epoch
        areas = pd.concat([*both_ends, after]).sort_index(kind="stable").to_frame("training")
        rows = [PanelRow("all ranks", areas, f"{median:,.0f}")]
    title = "images/s of each epoch's training (dark: evaluation), a full row is the fastest"
    return Panel(title, rows, looks, "median")


def _power(job: SampledJob) -> Panel:
    rows = []
    for label, gpu, of_gpu in _samples_of(job, GPU):
        judged = pd.DataFrame(job.judged_or_all(GPU, gpu))
        limit, median = of_gpu.power_limit_w.max(), _median(judged.power_w)
        told = [_of_limit(median, limit, "W")]
        if job.is_unused(gpu):
            told.append("no rank")
        if (hot := judged.throttled.str.contains("heat").mean()) >= waste.HOT:
            told.append(f"slowed by heat {100 * hot:.0f} % of the time")
        areas = (of_gpu.power_w / (limit if limit > 0 else of_gpu.power_w.max())).to_frame("power")
        warning = len(told) > 1 or job.load(gpu) < waste.LOW
        rows.append(PanelRow(label, areas, ", ".join(told), warning, of_gpu.utilisation / 100))
    title = "power of each GPU, a full row is its limit"
    return Panel(title, rows, {"power": style.POWER}, "median", "utilisation")


def _memory(job: SampledJob) -> Panel:
    rows = []
    for what, full in ((GPU, waste.GPU_FULL), (NODE, waste.HOST_FULL)):
        for label, _, of_one in _samples_of(job, what):
            share = of_one.memory_mb / of_one.memory_limit_mb
            if share.max() >= 0:
                told = _of_limit(of_one.memory_mb.max() / 1000, of_one.memory_limit_mb.max() / 1000, "GB")
                rows.append(PanelRow(label, share.to_frame("memory"), told, share.max() >= full))
    return Panel("memory, a full row is all of it", rows, {"memory": style.MEMORY}, "most")


def _cores(job: SampledJob) -> Panel:
    """Show cores, in a job with GPUs only if there are loader workers."""
    every, rows = list(_samples_of(job, RANK)), []
    looks = {"own process": style.CORES, "loader workers": style.LOADERS}
    if job.rows[GPU] and not any((rank.loaders > 0).any() for _, _, rank in every):
        every = []
    used = [(rank.cores + rank.loader_cores.fillna(0)).quantile(0.99) for _, _, rank in every]
    most = max(1, math.ceil(np.nanmax([1, *used]) - 0.1))
    for label, place, rank in every:
        judged = pd.DataFrame(job.judged_or_all(RANK, place))
        waiting, told = job.waits_for_core(place), [f"{_median(judged.cores):.1f} cores"]
        if (loaders := _median(judged.loaders)) > 0:
            told.append(f"{loaders:.0f} loader workers\xa0{_median(judged.loader_cores):.1f}")
        wrong = [f"waits for a core {100 * waiting:.0f} % of the time"] if waiting >= waste.CROWDED else []
        for state, words in STATES.items():
            if (part := (judged["name"] == state).mean()) >= waste.WORTH:
                wrong.append(f"{words} {100 * part:.0f} % of the time")
        areas = (rank[["cores", "loader_cores"]] / most).set_axis(list(looks), axis=1)
        rows.append(PanelRow(label, areas, ", ".join([*told, *wrong]), bool(wrong), rank.waiting))
    return Panel(f"cores of each rank, a full row is {most}", rows, looks, "median", "waiting for a core")


def _samples_of(job: SampledJob, what: str) -> Iterator[tuple[str, Place, pd.DataFrame]]:
    """Yield label, place and samples by time of each GPU, rank or node; at the end of a gap, one of NaN."""
    nodes = {node for node, _ in job.rows[NODE]}
    for place in sorted(job.rows[what], key=lambda place: (samples.natural(place[0]), place[1])):
        words = [_short(place[0])] if len(nodes) > 1 or what == NODE else []
        if what != NODE:
            words.append(f"{'GPU' if what == GPU else what} {place[1]}")
        rows = job.rows[what][place]
        whole = {id(after) for _, after in consecutive(rows)}
        ends = [{"time": row["time"]} for row in rows[1:] if id(row) not in whole]
        frame = pd.DataFrame([*ends, *rows]).sort_values("time", kind="stable")
        yield " ".join(words), place, frame.set_index("time")


def _median(values: pd.Series) -> float:
    return values.dropna().median()  # numpy warns of one that is only NaN


def _draw_rows(axes: Axes, panel: Panel) -> None:
    handles: dict[str, Artist] = {}
    middles = [number + FILLED / 2 for number in reversed(range(len(panel.rows)))]
    for middle, row in zip(middles, panel.rows, strict=True):
        bottom, top = middle - FILLED / 2, middle + FILLED / 2
        axes.axhspan(bottom, top, **style.UNUSED)
        times, known = row.areas.index.to_numpy(), row.areas.notna().any(axis=1).to_numpy()
        below = np.full(len(times), bottom)
        for name, look in panel.looks.items():
            share = row.areas[name].fillna(0).to_numpy()
            if (share > 0).any():
                above = np.minimum(below + FILLED * share, top)
                axes.fill_between(times, below, above, where=known, step="pre", **look)
                below, handles[name] = above, Patch(**look)
        if row.line is not None and (row.line > 0).any():
            line = bottom + FILLED * row.line.clip(0, 1).to_numpy()
            axes.plot(times, line, drawstyle="steps-pre", **style.THIN)
            handles[panel.line] = Line2D([], [], **style.THIN)
        look = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "va": "center"}
        axes.text(1.01, middle, _wrapped(row.told, 30), weight="bold" if row.warning else "normal", **look)
    axes.set_yticks(middles, [row.label for row in panel.rows])
    axes.set_ylim(0, len(panel.rows) - 1 + FILLED)
    axes.set_title(panel.title, loc="left", fontsize=9)
    above = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    axes.annotate(panel.beside, (1.01, 1), **above, fontsize=8, style="italic")
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(handles.values(), handles, ncols=len(panel.looks) + 1, frameon=False, fontsize=8, **where)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8)
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)


def _draw_time(axes: Axes, times: list[float]) -> None:
    start, end = min(times), max(*times, min(times) + 1)
    unit, units = next((unit for unit in UNITS if end - start >= 2 * unit[0]), UNITS[-1])
    ticks = MaxNLocator(8).tick_values(0, (end - start) / unit)
    axes.set_xticks([start + tick * unit for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlim(start, end)
    axes.set_xlabel(f"{units} since {datetime.fromtimestamp(start, timezone.utc):%Y-%m-%d %H:%M:%S} UTC")


def _of_limit(value: float, limit: float, unit: str) -> str:
    """Tell a value and its limit, such as 290 of 400 W, or 34.1 of 79.6 GB."""
    digits = 1 if unit == "GB" else 0
    known, most = (f"{number:,.{digits}f}" if math.isfinite(number) else "?" for number in (value, limit))
    return f"{known} of {most} {unit}"


def _wrapped(words: str, width: int) -> str:
    words = words.replace(" %", "\xa0%")  # which belongs to its number
    return textwrap.fill(words, width, max_lines=4, break_on_hyphens=False)


def _name(folder: Path) -> str:
    folder = folder.resolve()
    return (folder.parent if folder.name == samples.FOLDER else folder).name


def _short(name: str, most: int = 18) -> str:
    """Leave out the middle, as the names of nodes differ at their ends."""
    name = printable(name.partition(".")[0])
    return name if len(name) <= most else f"{name[: most // 3]}..{name[-most // 2 :]}"
