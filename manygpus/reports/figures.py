"""The figures of a comparison: throughput, speedup, accuracy; panels for each section of the report.

Also the style of all figures. Colour is never the only difference, since figures are also printed in grey: a
bar has its name and its value, and a line its own marker and dash.
"""

import os
import textwrap
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path

# Compute nodes have no screen. matplotlib reads this when it is imported, and fails if it does not know the
# backend (seen: MPLBACKEND=Qt4Agg in a user's shell).
os.environ["MPLBACKEND"] = "Agg"

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manygpus.files import replacing
from manygpus.reports import comparison

# A user's matplotlibrc is not for our figures (seen: with text.usetex, and without LaTeX, none is drawn).
matplotlib.rcdefaults()
# Nor is our backend for what this process starts: a notebook draws with one of its own.
del os.environ["MPLBACKEND"]

# Keywords of matplotlib's artists.
Look = dict[str, object]
# The lines of a figure by their texts in the legend.
Looks = dict[str, Look]

# The palette of Okabe and Ito, made for all kinds of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX*"
LINE_STYLES = ("-", "--", ":", "-.")
# All bars have one colour, because each has its name beside it. A colour per stage would contradict the other
# figures, in which a colour belongs to a line.
BAR = COLOURS[0]
THIN: Look = {"color": "black", "linewidth": 0.9}
IDEAL: Look = {"color": "dimgray", "linewidth": 1.2, "linestyle": "--", "zorder": 1}

FIGURE_WIDTH_INCHES = 7
LINE_PANEL_INCHES = 3.6
LEGEND_ROW_INCHES = 0.2
# Characters of a text in a legend that has two columns.
MOST_CHARACTERS_IN_TWO_COLUMNS = 45
# Of a title of 10 points.
CHARACTERS_OF_A_TITLE_LINE = 90
# The values beside the last points of more lines than this would overlap.
MOST_LINES_WITH_VALUES = 4
# On an axis of device counts those below this share of the largest one would overlap.
LEAST_TICK_DISTANCE = 1 / 8


def draw(table: pd.DataFrame, rows: pd.DataFrame, out: Path) -> list[str]:
    """Write the figures that the runs support into `out`, and return their names.

    Args:
        table: what `comparison.compare` returns.
        rows: the epochs it was made of, from `comparison.load`.
        out: an existing folder. A figure of an earlier call that these runs do not support is removed.

    Raises:
        OSError: if a file cannot be written.
    """
    return save(figures_of(table, rows), out)


def figures_of(table: pd.DataFrame, rows: pd.DataFrame) -> dict[str, Figure | None]:
    """Make the figures by the names of their files; None where the runs do not support one."""
    measured = table[table.images_per_s.notna()]
    tested = table.loc[table.test_accuracy.notna(), [*comparison.CONFIGURATION, "variant"]]
    tested_rows = tested.merge(rows[rows.test_accuracy.notna()], on=comparison.CONFIGURATION)
    return {
        "throughput.png": _figure(measured, _bars, inches_of=lambda section: 1.3 + 0.36 * len(section)),
        "speedup.png": _figure(table, _speedup_and_efficiency, data_of=_scaling_lines, panels=2),
        "accuracy.png": _figure(tested_rows, _accuracy_curves),
    }


def save(figures: dict[str, Figure | None], out: Path, dpi: float = 150) -> list[str]:
    """Write the figures to `out` by their names, and return the names of those written.

    A figure of an earlier call that this one lacks is removed: it would seem to show these runs.

    Raises:
        OSError: if a file cannot be written.
    """
    written = []
    for name, figure in figures.items():
        if figure is None:
            (out / name).unlink(missing_ok=True)
            continue
        with replacing(out / name, "wb") as file:
            figure.savefig(file, format=Path(name).suffix.removeprefix("."), dpi=dpi)
        plt.close(figure)
        written.append(name)
    return written


def scaling(lines: dict[str, pd.DataFrame], unit: str, speed: str) -> Figure:
    """Draw how trainings scale: speed, against the ideal that begins at its first point, and efficiency.

    Args:
        lines: by their texts in the legend `speed` and `percent` (of efficiency), by number of devices.
        unit: what the devices are called.
        speed: the unit of the speed.
    """
    figure = plt.figure(figsize=(FIGURE_WIDTH_INCHES, LINE_PANEL_INCHES), layout="constrained")
    left, right = figure.subplots(1, 2)
    right.axhline(100, **IDEAL)
    for line_number, (text, line) in enumerate(lines.items()):
        first = line.speed.iloc[0] / line.index[0]
        left.plot(line.index, first * line.index, label="ideal" if line_number == 0 else None, **IDEAL)
        look = {"label": text} | line_look(line_number)
        left.plot(line.index, line.speed, **look)
        right.plot(line.index, line.percent, **look)
    counts = sorted({count for line in lines.values() for count in line.index})
    left.set(xlabel=unit, ylabel=speed)
    # With a tick at each doubling.
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter("{x:,.10g}")
    right.set(xlabel=unit, ylabel="efficiency (%)", ylim=(0, 1.05 * right.dataLim.ymax))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, map(str, counts))
        axes.minorticks_off()
        _tidy(axes, "y")
    _add_legend(figure)
    return figure


def line_look(number: int) -> Look:
    """Return the colour, marker and dash of line `number`."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINE_STYLES[number % len(LINE_STYLES)],
    }


@dataclass(frozen=True)
class _Section:
    """What one section of a figure shows: its title, its data, and its height."""

    title: str
    data: Sized
    inches: float


def _figure(
    table: pd.DataFrame,
    plot: Callable[..., None],
    data_of: Callable[[pd.DataFrame], Sized] = lambda section: section,
    panels: int = 1,
    inches_of: Callable[[pd.DataFrame], float] = lambda section: LINE_PANEL_INCHES,
) -> Figure | None:
    """Draw some panels for each section of the report, one section below the other.

    Args:
        plot: draws the data of a section on its panels, and remembers how its lines look.
        data_of: returns what to draw for the rows of a section; if nothing, the section is left out.
        panels: the number of panels of a section, side by side.
        inches_of: returns the height of a section, by its rows.
    """
    sections = []
    for (dataset, model, device), rows in table.groupby(comparison.SECTION_BY):
        data = data_of(rows)
        if len(data):
            sections.append(_Section(_title(dataset, model, device), data, inches_of(rows)))
    if not sections:
        return None
    heights = [section.inches for section in sections]
    figure = plt.figure(figsize=(FIGURE_WIDTH_INCHES, sum(heights)), layout="constrained")
    subfigures = figure.subfigures(len(sections), squeeze=False, height_ratios=heights).flat
    looks: Looks = {}
    for subfigure, section in zip(subfigures, sections, strict=True):
        subfigure.suptitle(section.title, fontsize=10, fontweight="bold", x=0.01, horizontalalignment="left")
        axes = subfigure.subplots(1, panels, squeeze=False).flat
        plot(*axes, section.data, looks)
    if looks:
        _add_legend(figure)
    return figure


def _title(dataset: str, model: str, device: str) -> str:
    data = "SYNTHETIC digits, not MNIST" if dataset == "synthetic" else dataset
    parts = [device, comparison.with_model(data, model)]
    if comparison.is_cpu(device):
        parts.append("CPU workers standing in for GPUs")
    return textwrap.fill(" · ".join(parts), CHARACTERS_OF_A_TITLE_LINE)


def _add_legend(figure: Figure) -> None:
    """Add a legend below all panels, which makes the figure taller rather than the panels smaller."""
    handle_of: dict[str, object] = {}
    for axes in figure.axes:
        handles, texts = axes.get_legend_handles_labels()
        handle_of |= dict(zip(texts, handles, strict=True))
    columns = 2 if max(map(len, handle_of)) < MOST_CHARACTERS_IN_TWO_COLUMNS else 1
    rows = len(handle_of) / columns + 1
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW_INCHES * rows)
    figure.legend(
        handle_of.values(),
        handle_of.keys(),
        loc="outside lower center",
        ncols=columns,
        fontsize=9,
        frameon=False,
    )


def _bars(axes: Axes, section: pd.DataFrame, _: Looks) -> None:
    section, unit = comparison.in_its_unit(section)
    below = section.images_per_s - section.slowest
    above = section.fastest - section.images_per_s
    bars = axes.barh(
        range(len(section)),
        section.images_per_s,
        # As lists: matplotlib 3.10 turns a Series of one into a number.
        xerr=[below.tolist(), above.tolist()],
        tick_label=[textwrap.fill(comparison.label(row), 32, max_lines=4) for row in section.itertuples()],
        color=BAR,
        height=0.7,
        capsize=3,
    )
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in section.images_per_s], padding=5, fontsize=9)
    axes.tick_params(axis="y", labelsize=9, length=0)
    axes.invert_yaxis()
    # Room for the values, and none above and below the bars.
    axes.margins(x=0.12, y=0.02)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"training {unit}/s: median, min to max")
    _tidy(axes, "x")


def _tidy(axes: Axes, grid: str) -> None:
    """Leave out what says nothing, and put a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, alpha=0.3)


@dataclass(frozen=True)
class _ScalingLine:
    """A line of the figure of speedups: its text in the legend, and its efficiencies by device count."""

    text: str
    efficiencies: pd.Series


def _scaling_lines(section: pd.DataFrame) -> list[_ScalingLine]:
    """Return a line per stage and equal settings: strong scaling, then weak scaling.

    There is none for one device alone.
    """
    strong = _lines_of(section, "efficiency", equal_batch="global_batch", weak=False)
    weak = _lines_of(section, "weak_efficiency", equal_batch="batch_per_device", weak=True)
    return strong + weak


def _lines_of(section: pd.DataFrame, column: str, equal_batch: str, weak: bool) -> list[_ScalingLine]:
    lines = []
    known = section[section[column].notna()]
    for _, group in known.groupby(["stage", equal_batch, "variant"], sort=False):
        if group.devices.max() > 1:
            text = comparison.label(group.iloc[0], count=False, weak=weak)
            lines.append(_ScalingLine(text, group.set_index("devices")[column]))
    return lines


def _speedup_and_efficiency(left: Axes, right: Axes, lines: list[_ScalingLine], looks: Looks) -> None:
    all_counts = sorted({1}.union(*(line.efficiencies.index for line in lines)))
    largest = all_counts[-1]
    left.plot([1, largest], [1, largest], label="ideal", **IDEAL)
    right.axhline(100, **IDEAL)
    for line in lines:
        counts = list(line.efficiencies.index)
        efficiencies = list(line.efficiencies)
        if counts[0] > 1:
            # The baseline is a row of another stage.
            counts = [1, *counts]
            efficiencies = [1, *efficiencies]
        look = _line_look(line.text, looks)
        speedups = [count * efficiency for count, efficiency in zip(counts, efficiencies, strict=True)]
        percents = [100 * efficiency for efficiency in efficiencies]
        left.plot(counts, speedups, **look)
        right.plot(counts, percents, **look)
        if len(lines) <= MOST_LINES_WITH_VALUES:
            _write_beside(left, counts[-1], speedups[-1], f"{speedups[-1]:.2f}")
            _write_beside(right, counts[-1], percents[-1], f"{percents[-1]:.0f}")
    left.set(xlabel="devices", ylabel="speedup over one device (x)")
    right.set(xlabel="devices", ylabel="efficiency (%)")
    ticks = [count for count in all_counts if count == 1 or count >= LEAST_TICK_DISTANCE * largest]
    for axes in (left, right):
        axes.set_xticks(ticks)
        axes.margins(x=0.1)
        axes.set_ylim(0, 1.05 * axes.dataLim.ymax)
        _tidy(axes, "y")
    left.set_yticks(ticks)


def _write_beside(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (7, 0), textcoords="offset points", verticalalignment="center", fontsize=9)


def _accuracy_curves(axes: Axes, section: pd.DataFrame, looks: Looks) -> None:
    """Draw a curve per run; repeats of a configuration look the same."""
    for _, epochs in section.groupby("run_id", sort=False):
        look = _line_look(comparison.label(epochs.iloc[0]), looks)
        axes.plot(epochs.elapsed_s, epochs.test_accuracy, **look)
    axes.set(xlabel="wall time since the start (s)", ylabel="test accuracy (%)", xlim=(0, None))
    _tidy(axes, "both")


def _line_look(text: str, looks: Looks) -> Look:
    """Return label and style of a line: equal texts look the same in all panels of a figure."""
    return looks.setdefault(text, {"label": text} | line_look(len(looks)))
