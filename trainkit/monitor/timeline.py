"""The timeline of a job, from its samples: images/s, power, cores and memory on one time axis.

Each GPU, rank or node is a row as high as what it may use at most; what it used of that is filled.
"""

import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from trainkit.compare import style
from trainkit.monitor import waste
from trainkit.monitor.sampled_job import Place, SampledJob
from trainkit.runtime.errors import UserError, printable
from trainkit.schema import samples
from trainkit.schema.samples import GPU, NODE, RANK

UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
MOST_EPOCHS = 60  # whose evaluations are shaded: those of more would leave nothing white
FILLED = 0.86  # of a row; the rest is the space to the next one
STATES = {"T": "stopped", "D": "waits for a disk"}  # of a process, in which it does nothing


class PanelRow(NamedTuple):
    """A GPU, rank or node as it is drawn: by the time in s since 1970, as shares of its most.

    `told` stands on the right, in bold if it is a `warning`.
    """

    label: str
    shares: pd.DataFrame
    told: str
    warning: bool = False


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
    job, place = SampledJob(folder), folder.resolve()
    name = (place.parent if place.name == samples.FOLDER else place).name
    first, *_, watched = waste.judge_job(job).lines(f"job {name}")
    epochs = pd.concat([one.epochs for one in job.trainings] or [pd.DataFrame(columns=["tested"])])
    epochs = epochs[epochs.tested.notna()]
    used = (rows.cores + rows.loader_cores.fillna(0) for rows in job.rows[RANK].values())
    # But for rare moments.
    most = max(1, math.ceil(np.nanmax([1, *(cores.quantile(0.99) for cores in used)]) - 0.1))
    # Title; rows; what is in them, above each other or as a line across.
    speed, power = {"training": style.TRAINING}, {"power": style.POWER, "utilisation": style.THIN}
    cores = {"own process": style.CORES, "loader workers": style.LOADERS, "waiting for a core": style.THIN}
    panels = [
        (
            "images/s of epochs (right: median; dark: test), a full row is the fastest",
            _speed(epochs),
            speed,
        ),
        ("power of each GPU (right: median), a full row is its limit", _power(job), power),
        (f"cores of each rank (right: median), a full row is {most}", _cores(job, most), cores),
        ("memory (right: most), a full row is all of it", _memory(job), {"memory": style.MEMORY}),
    ]
    panels = [(title, list(rows), looks) for title, rows, looks in panels]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        raise UserError(f"the samples in {folder} tell of no GPU, no rank and no memory: nothing to draw.")
    heights = [0.45 + len(rows) * min(0.6, max(0.2, 1.8 / len(rows))) for _, rows, _ in panels]
    drawn = plt.figure(figsize=(10, 1 + sum(heights)), layout="constrained")
    axes_of_panels = drawn.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights).flat
    for axes, panel in zip(axes_of_panels, panels, strict=True):
        _draw_rows(axes, *panel)
        for epoch in epochs.itertuples() if len(epochs) <= MOST_EPOCHS else ():
            axes.axvspan(epoch.trained, epoch.tested, **style.EVALUATION)
    start, end = job.table.time.min(), max(job.table.time.max(), job.table.time.min() + 1)
    unit, units = next((unit for unit in UNITS if end - start >= 2 * unit[0]), UNITS[-1])
    ticks = MaxNLocator(8).tick_values(0, (end - start) / unit)
    axes.set_xticks([start + tick * unit for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlim(start, end)
    since = f"{units} since {pd.Timestamp(start, unit='s'):%Y-%m-%d %H:%M:%S} UTC"
    axes.set_xlabel(f"{since}\n{_wrapped(watched, 120)}", fontsize=9)
    drawn.suptitle(_wrapped(first, 95), x=0.01, ha="left", fontsize=11, weight="bold")
    return drawn


def _speed(epochs: pd.DataFrame) -> Iterator[PanelRow]:
    if len(epochs):
        steady = epochs if epochs.warmup.all() else epochs[~epochs.warmup]
        share = epochs.images_per_s / epochs.images_per_s.max()
        after = pd.Series(math.nan, epochs.trained)  # nothing, until the next one
        points = [share.set_axis(epochs.began), share.set_axis(epochs.trained), after]
        shares = pd.concat(points).sort_index(kind="stable").to_frame("training")
        yield PanelRow("all ranks", shares, f"{steady.images_per_s.median():,.0f}")


def _power(job: SampledJob) -> Iterator[PanelRow]:
    for label, gpu, rows in _samples_of(job, GPU):
        judged, limit = job.judged_or_all(GPU, gpu), rows.power_limit_w.max()
        told = [_of_limit(judged.power_w.median(), limit, "W")]
        if job.is_unused(gpu):
            told.append("no rank")
        if (hot := judged.throttled.str.contains("heat").mean()) >= waste.HOT:
            told.append(f"slowed by heat {100 * hot:.0f} % of the time")
        power = rows.power_w / (limit if limit > 0 else rows.power_w.max())
        shares = pd.DataFrame({"power": power, "utilisation": rows.utilisation / 100})
        yield PanelRow(label, shares, ", ".join(told), len(told) > 1 or job.load(gpu) < waste.LOW)


def _memory(job: SampledJob) -> Iterator[PanelRow]:
    for what, (_, full, *_) in waste.FULL.items():
        for label, _, rows in _samples_of(job, what):
            share = waste.memory_in_use(rows)
            if share.max() >= 0:
                told = _of_limit(rows.memory_mb.max() / 1000, rows.memory_limit_mb.max() / 1000, "GB")
                yield PanelRow(label, share.to_frame("memory"), told, share.max() >= full)


def _cores(job: SampledJob, most: int) -> Iterator[PanelRow]:
    """Show cores, in a job with GPUs only if there are loader workers."""
    if job.rows[GPU] and not any((rows.loaders > 0).any() for rows in job.rows[RANK].values()):
        return
    for label, place, rows in _samples_of(job, RANK):
        judged = job.judged_or_all(RANK, place)
        waiting, told = job.waits_for_core(place), [f"{judged.cores.median():.1f} cores"]
        if (loaders := judged.loaders.median()) > 0:
            told.append(f"{loaders:.0f} loader workers\xa0{judged.loader_cores.median():.1f}")
        wrong = [f"waits for a core {100 * waiting:.0f} % of the time"] if waiting >= waste.CROWDED else []
        for state, words in STATES.items():
            if (part := (judged["name"] == state).mean()) >= waste.WORTH:
                wrong.append(f"{words} {100 * part:.0f} % of the time")
        shares = {"own process": rows.cores / most, "loader workers": rows.loader_cores / most}
        shares |= {"waiting for a core": rows.waiting}
        yield PanelRow(label, pd.DataFrame(shares), ", ".join([*told, *wrong]), bool(wrong))


def _samples_of(job: SampledJob, what: str) -> Iterator[tuple[str, Place, pd.DataFrame]]:
    """Yield label, place and samples by time of each GPU, rank or node; at the end of a gap, one of NaN."""
    for place in sorted(job.rows[what], key=lambda place: (samples.natural(place[0]), place[1])):
        # Without the middle, as the names of nodes differ at their ends.
        name = printable(place[0].partition(".")[0])
        name = name if len(name) <= 18 else f"{name[:6]}..{name[-9:]}"
        words = [name] if len(job.rows[NODE]) > 1 or what == NODE else []
        if what != NODE:
            words.append(f"{'GPU' if what == GPU else what} {place[1]}")
        rows = job.rows[what][place]
        ends = rows.loc[rows.seconds.isna(), ["time"]][1:]
        by_time = pd.concat([ends, rows] if len(ends) else [rows]).sort_values("time", kind="stable")
        yield " ".join(words), place, by_time.set_index("time")


def _draw_rows(axes: Axes, title: str, rows: list[PanelRow], looks: dict[str, style.Look]) -> None:
    handles = {}
    middles = [number + FILLED / 2 for number in reversed(range(len(rows)))]
    for middle, row in zip(middles, rows, strict=True):
        bottom, top = middle - FILLED / 2, middle + FILLED / 2
        axes.axhspan(bottom, top, **style.UNUSED)
        times, below = row.shares.index.to_numpy(), bottom
        areas = [name for name in row.shares if looks[name] != style.THIN]
        known = row.shares[areas].notna().any(axis=1)
        for name, share in row.shares.items():
            if not (share > 0).any():
                continue
            if name in areas:
                above = np.minimum(below + FILLED * share.fillna(0).to_numpy(), top)
                axes.fill_between(times, below, above, where=known, step="pre", **looks[name])
                below, handles[name] = above, Patch(**looks[name])
            else:
                axes.plot(times, bottom + FILLED * share.clip(0, 1), drawstyle="steps-pre", **looks[name])
                handles[name] = Line2D([], [], **looks[name])
        look = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "va": "center"}
        axes.text(1.01, middle, _wrapped(row.told, 30), weight="bold" if row.warning else "normal", **look)
    axes.set_yticks(middles, [row.label for row in rows])
    axes.set_ylim(0, len(rows) - 1 + FILLED)
    axes.set_title(title, loc="left", fontsize=9)
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(handles.values(), handles, ncols=3, frameon=False, fontsize=8, **where)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8)
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)


def _of_limit(value: float, limit: float, unit: str) -> str:
    """Tell a value and its limit, such as 290 of 400 W, or 34.1 of 79.6 GB."""
    digits = 1 if unit == "GB" else 0
    known, most = (f"{number:,.{digits}f}" if math.isfinite(number) else "?" for number in (value, limit))
    return f"{known} of {most} {unit}"


def _wrapped(words: str, width: int) -> str:
    words = words.replace(" %", "\xa0%")  # which belongs to its number
    return textwrap.fill(words, width, max_lines=4, break_on_hyphens=False)
