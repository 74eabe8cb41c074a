"""The timeline of a job, from its samples: images/s, power, cores and memory on one time axis.

Each GPU, rank or node is a row as high as the most that it may use; the part that it used is filled.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure

from trainkit.compare import style
from trainkit.monitor import waste
from trainkit.monitor.sampled_job import SampledJob
from trainkit.runtime.errors import UserError, printable
from trainkit.runtime.files import explained
from trainkit.schema import samples
from trainkit.schema.samples import GPU, NODE, RANK

HEIGHT = 0.86  # of a row's filled part; the rest is the space to the next row


class Row(NamedTuple):
    """A GPU, rank or node as it is drawn, with the labels on its left and right.

    `used`, by time in s since 1970, is stacked, up to `most`; a `line` (0 to 1) is drawn across it.
    """

    title: str  # of all rows that have the same
    left: str
    right: str
    used: pd.DataFrame
    most: float
    line: pd.Series | None = None


def draw(folder: Path, out: Path) -> Path:
    """Write the timeline of the job with the samples in `folder` to `out`, a PNG, and return that.

    Raises:
        UserError: if there are no samples, or `out` cannot be written.
    """
    if out.suffix.lower() != ".png":  # an existing file may not be a picture, and would be replaced
        raise UserError(f"the timeline is a PNG: give a file that ends in .png instead of {out.name!r}.")
    with explained(f"{out} cannot be written", "give another file."):
        style.save({out.name: figure(folder)}, out.parent)
    return out


def figure(folder: Path) -> Figure:
    """Return the timeline as a figure, not yet written.

    Raises:
        UserError: if there are no samples.
    """
    job, place = SampledJob(folder), folder.resolve()
    name = (place.parent if place.name == samples.FOLDER else place).name
    lines = waste.judge_job(job).lines(f"job {name}")
    rows = [*_speed(job), *_power(job), *_cores(job), *_memory(job)]
    if not rows:
        raise UserError(f"the samples in {folder} have no GPU, no rank and no memory: nothing to draw.")
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.title, []).append(row)
    heights = [0.4 + len(of_panel) * max(0.2, min(0.7, 6 / len(rows))) for of_panel in panels.values()]
    texts = [textwrap.fill(text.replace(" %", "\xa0%"), 110, break_on_hyphens=False) for text in lines]
    verdict = "\n".join(texts)
    height = 0.8 + 0.18 * len(verdict.splitlines()) + sum(heights)
    drawn = plt.figure(figsize=(10, height), layout="constrained")
    column = drawn.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights).flat
    for axes, (title, of_panel) in zip(column, panels.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=9)
        _draw_rows(axes, of_panel)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(axes.xaxis.get_major_locator()))
    axes.set_xlabel("time (UTC)", fontsize=9)
    drawn.suptitle(verdict, x=0.01, ha="left", fontsize=10, weight="bold")
    return drawn


def _draw_rows(axes: Axes, rows: list[Row]) -> None:
    middles = [HEIGHT / 2 - number for number in range(len(rows))]
    for middle, row in zip(middles, rows, strict=True):
        times, bottom = pd.to_datetime(row.used.index, unit="s"), middle - HEIGHT / 2
        axes.axhspan(bottom, bottom + HEIGHT, **style.UNUSED)
        # The use, if the limit is unknown; a rare moment above it is cut off.
        most = row.most if row.most > 0 else np.nanmax([1e-9, row.used.sum(axis=1).max()])
        used = HEIGHT * row.used / most
        tops = bottom + used.cumsum(axis=1).clip(upper=HEIGHT)
        below = tops.shift(axis=1, fill_value=bottom)
        for name, top in tops.items():
            axes.fill_between(times, below[name], top, step="pre", **style.TIMELINE[name])
        if row.line is not None:
            axes.plot(times, bottom + HEIGHT * row.line.clip(0, 1), drawstyle="steps-pre", **style.THIN)
        look = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
        axes.text(1.01, middle, row.right.replace("nan", "?"), **look)
    axes.set_yticks(middles, [row.left for row in rows], fontsize=8)
    axes.set_ylim(1 - len(rows), HEIGHT)
    axes.margins(x=0)
    axes.spines[:].set_visible(False)


def _speed(job: SampledJob) -> Iterator[Row]:
    epochs = pd.concat([training.epochs for training in job.trainings] or [pd.DataFrame()])
    if len(epochs):
        epochs = epochs[epochs.tested.notna() & (epochs.began >= 0)]
    if len(epochs):
        after = pd.Series(np.nan, epochs.trained)  # nothing, until the next one
        points = [epochs.images_per_s.set_axis(times) for times in (epochs.began, epochs.trained)]
        used = pd.concat([*points, after]).sort_index(kind="stable").to_frame("training")
        title = "images/s of epochs (right: median), a full row is the fastest"
        right = f"{job.steady.images_per_s.median():,.0f}"
        yield Row(title, "all ranks", right, used, epochs.images_per_s.max())


def _power(job: SampledJob) -> Iterator[Row]:
    title = "power of each GPU (right: median), a full row is its limit; line: utilisation"
    for left, rows, judged in _samples_of(job, GPU):
        most = rows.power_limit_w.max()
        right = f"{judged.power_w.median():,.0f} of {most:,.0f} W"
        yield Row(title, left, right, rows[["power_w"]], most, rows.utilisation / 100)


def _cores(job: SampledJob) -> Iterator[Row]:
    used = [rows.cores + rows.loader_cores.fillna(0) for rows in job.rows[RANK].values()]
    # But for rare moments.
    most = max((cores.quantile(0.99) for cores in used), default=0)
    most = max(most, 1) if most == most else 1
    title = f"cores of each rank, a full row is {most:.1f}; hatched: loader workers; line: waiting for one"
    for left, rows, judged in _samples_of(job, RANK):
        right = f"{judged.cores.median():.1f} cores"
        if (loaders := judged.loaders.median()) > 0:
            right += f"\n{loaders:.0f} loader workers {judged.loader_cores.median():.1f}"
        yield Row(title, left, right, rows[["cores", "loader_cores"]].fillna(0), most, rows.waiting)


def _memory(job: SampledJob) -> Iterator[Row]:
    for what in (GPU, NODE):
        for left, rows, _ in _samples_of(job, what):
            used, most = rows[["memory_mb"]] / 1000, rows.memory_limit_mb.max() / 1000
            if most > 0:
                right = f"{used.memory_mb.max():,.1f} of {most:,.1f} GB"
                yield Row("memory (right: most), a full row is all of it", left, right, used, most)


def _samples_of(job: SampledJob, what: str) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Yield for each GPU, rank or node: label, samples by time (NaN after a gap), samples to judge."""
    for place in sorted(job.rows[what], key=lambda place: (samples.natural(place[0]), place[1])):
        words = [printable(place[0])[:18]] if len(job.rows[NODE]) > 1 or what == NODE else []
        if what != NODE:
            words.append(f"{'GPU' if what == GPU else what} {place[1]}")
        rows = job.rows[what][place].set_index("time")
        yield " ".join(words), rows.where(rows.seconds.notna()), job.judged_or_all(what, place)
