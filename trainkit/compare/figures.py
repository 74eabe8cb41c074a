"""The figures of a comparison: throughput, speedup, size, accuracy; panels for each section of the report."""

import math
import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from trainkit.compare import comparison, sizes, style

Looks = dict[str, style.Look]  # the lines of a figure by their texts


def draw(table: pd.DataFrame, rows: pd.DataFrame, out: Path) -> list[str]:
    """Write the figures that the runs support into `out`, and return their names.

    Args:
        table: from `comparison.compare`.
        rows: the epochs it was made of, from `comparison.load`.
        out: a folder that is there. A figure of an earlier call that these runs do not support goes.

    Raises:
        OSError: if a file cannot be written.
    """
    figures = {
        "throughput.png": _throughput(table[table.images_per_s.notna()]),
        "speedup.png": _speedup(table),
        "size.png": _size(table),
        "accuracy.png": _accuracy(table, rows[rows.test_accuracy.notna()]),
    }
    return style.save(figures, out)


def _figure(
    table: pd.DataFrame, lines_of: Callable, plot: Callable, panels: int = 1, inches: Callable | None = None
) -> Figure | None:
    """Draw some panels for each section of the report, one section below the other.

    Args:
        table: rows with the columns of `comparison.SECTION_BY`.
        lines_of: what there is to draw of the rows of a section; nothing: the section is left out.
        plot: draws that on the panels, and remembers how its lines look.
        inches: how high a section is, by its rows.
    """
    sections = [(names, rows, lines_of(rows)) for names, rows in table.groupby(comparison.SECTION_BY)]
    sections = [section for section in sections if len(section[2])]
    if not sections:
        return None
    heights = [inches(rows) if inches else 3.6 for _, rows, _ in sections]
    figure = plt.figure(figsize=(7, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(sections), squeeze=False, height_ratios=heights).flat
    looks: Looks = {}
    for part, (names, _, lines) in zip(parts, sections, strict=True):
        part.suptitle(_title(*names), fontsize=10)
        plot(*part.subplots(1, panels, squeeze=False).flat, lines, looks)
    if looks:
        _legend(figure)
    return figure


def _all_rows(rows: pd.DataFrame) -> pd.DataFrame:
    return rows


def _throughput(table: pd.DataFrame) -> Figure | None:
    return _figure(table, _all_rows, _bars, inches=lambda rows: 1.3 + 0.36 * len(rows))


def _bars(axes: Axes, section: pd.DataFrame, _: Looks) -> None:
    labels = [textwrap.fill(comparison.label(row), 32, max_lines=4) for row in section.itertuples()]
    spread = section.images_per_s - section.slowest, section.fastest - section.images_per_s
    spread = [side.tolist() for side in spread]  # of a Series of one, matplotlib 3.10 makes a number
    bars = [style.STAGE_BARS.get(stage, style.OWN_BAR) for stage in section.stage]
    colours, hatches = zip(*bars, strict=True)
    look = {"color": colours, "hatch": hatches, "edgecolor": "black", "linewidth": 0.6, "capsize": 4}
    axes.barh(range(len(section)), section.images_per_s, xerr=spread, tick_label=labels, **look)
    axes.tick_params(axis="y", labelsize=9)
    axes.invert_yaxis()
    axes.ticklabel_format(axis="x", style="plain")
    axes.set_xlabel("training images/s: median, min to max")


def _size(table: pd.DataFrame) -> Figure | None:
    """Draw a line per set of devices and equal settings, through all sizes of the data."""
    return _figure(table, sizes.lines, _epoch_and_run, panels=2)


def _epoch_and_run(left: Axes, right: Axes, lines: list[tuple[str, pd.DataFrame]], looks: Looks) -> None:
    """Plot both times; a dotted line stands where several devices begin to be sooner done than one."""
    for axes, column, saved, what in (
        (left, "epoch_seconds", "epoch_saved_s", "training of an epoch (s)"),
        (right, "elapsed_s", "run_saved_s", "whole run, start included (s)"),
    ):
        for text, rows in lines:
            look = _line_look(text, looks)
            axes.plot(rows.train_images, rows[column], **look)
            size = sizes.break_even(rows, saved)
            if 0 < size < math.inf:
                of_the_height = axes.get_xaxis_transform()
                axes.vlines(size, 0, 1, colors=look["color"], linestyles=":", transform=of_the_height)
                axes.text(size, 0.02, f"{size:,.0f}", rotation=90, ha="right", transform=of_the_height)
        axes.set(xscale="log", yscale="log", xlabel="images of an epoch", ylabel=what)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:,g}")  # the one of such a scale writes mathematics
            axis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", rotation=45)
        axes.grid(alpha=0.3)


def _speedup(table: pd.DataFrame) -> Figure | None:
    """Draw a line per stage and equal settings, another for weak scaling; none of one device alone."""

    def lines(section: pd.DataFrame) -> list[tuple[str, pd.Series]]:
        return [*_lines(section, "efficiency", weak=False), *_lines(section, "weak_efficiency", weak=True)]

    return _figure(table, lines, _speedup_and_efficiency, panels=2)


def _lines(section: pd.DataFrame, column: str, weak: bool) -> list[tuple[str, pd.Series]]:
    """Return texts for the legend, and efficiencies by device counts."""
    known = section[section[column].notna()]
    batch = "batch_per_device" if weak else "global_batch"
    groups = [group for _, group in known.groupby(["stage", batch, "variant"], sort=False)]
    return [
        (comparison.label(group.iloc[0], count=False, weak=weak), group.set_index("devices")[column])
        for group in groups
        if group.devices.max() > 1
    ]


def _speedup_and_efficiency(
    left: Axes, right: Axes, lines: list[tuple[str, pd.Series]], looks: Looks
) -> None:
    every = sorted({1}.union(*(line.index for _, line in lines)))
    most = every[-1]
    left.plot([1, most], [1, most], label="ideal", **style.IDEAL)
    right.axhline(100, **style.IDEAL)
    for text, line in lines:
        counts, efficiencies = list(line.index), list(line)
        if counts[0] > 1:  # the baseline is a row of another stage
            counts, efficiencies = [1, *counts], [1, *efficiencies]
        look = _line_look(text, looks)
        left.plot(counts, [n * share for n, share in zip(counts, efficiencies, strict=True)], **look)
        right.plot(counts, [100 * share for share in efficiencies], **look)
    left.set(xlabel="devices", ylabel="speedup over one device (x)", ylim=(0, None))
    right.set(xlabel="devices", ylabel="efficiency (%)", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks([n for n in every if n == 1 or n >= most / 8])  # closer ones would overlap
        axes.grid(alpha=0.3)


def _accuracy(table: pd.DataFrame, rows: pd.DataFrame) -> Figure | None:
    """Draw a curve per run; repeats of a configuration look alike."""
    columns = comparison.CONFIGURATION
    named = table.loc[table.test_accuracy.notna(), [*columns, "variant"]]
    return _figure(named.merge(rows, on=columns), _all_rows, _accuracy_curves)


def _accuracy_curves(axes: Axes, section: pd.DataFrame, looks: Looks) -> None:
    for _, epochs in section.groupby("run_id", sort=False):
        look = _line_look(comparison.label(epochs.iloc[0]), looks)
        axes.plot(epochs.elapsed_s, epochs.test_accuracy, **look)
    axes.set(xlabel="wall time since the start (s)", ylabel="test accuracy (%)")
    axes.grid(alpha=0.3)


def _title(dataset: str, model: str, device: str) -> str:
    what = "SYNTHETIC digits, not MNIST" if dataset == "synthetic" else dataset
    stand_in = "\nCPU workers standing in for GPUs" if comparison.is_cpu(device) else ""
    return f"{textwrap.fill(device, 45)}\n{comparison.with_model(what, model)}{stand_in}"


def _line_look(text: str, looks: Looks) -> style.Look:
    """Return label and style of a line: equal texts look alike in all panels of a figure."""
    label = text.lstrip("_")  # a legend leaves out what begins with an underscore
    return looks.setdefault(text, {"label": label} | style.line_look(len(looks)))


def _legend(figure: Figure) -> None:
    """Put one legend under all panels; it makes the figure taller rather than the panels smaller."""
    entries: dict[str, object] = {}
    for axes in figure.axes:
        handles, texts = axes.get_legend_handles_labels()
        entries |= dict(zip(texts, handles, strict=True))
    columns = 2 if max(map(len, entries)) < 45 else 1
    figure.set_figheight(figure.get_figheight() + 0.2 * (len(entries) / columns + 1))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=9)
