"""The figures of a comparison: throughput, speedup, accuracy; panels for each section of the report."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainkit.compare import comparison, style

Looks = dict[str, style.Look]  # the lines of a figure by their texts


def draw(table: pd.DataFrame, rows: pd.DataFrame, out: Path) -> list[str]:
    """Write the figures that the runs support into `out`, and return their names.

    Args:
        table: from `comparison.compare`.
        rows: the epochs it was made of, from `comparison.load`.
        out: an existing folder. A figure of an earlier call that these runs do not support is removed.

    Raises:
        OSError: if a file cannot be written.
    """
    measured = table[table.images_per_s.notna()]
    tested = table.loc[table.test_accuracy.notna(), [*comparison.CONFIGURATION, "variant"]]
    tested = tested.merge(rows[rows.test_accuracy.notna()], on=comparison.CONFIGURATION)
    figures = {
        "throughput.png": _figure(measured, _bars, inches=lambda rows: 1.3 + 0.36 * len(rows)),
        "speedup.png": _figure(table, _speedup_and_efficiency, _scaling, panels=2),
        "accuracy.png": _figure(tested, _accuracy_curves),
    }
    return style.save(figures, out)


def _figure(
    table: pd.DataFrame,
    plot: Callable,
    lines_of: Callable = lambda rows: rows,
    panels: int = 1,
    inches: Callable = lambda rows: 3.6,
) -> Figure | None:
    """Draw some panels for each section of the report, one section below the other.

    Args:
        plot: draws what `lines_of` returns on the panels, and remembers how its lines look.
        lines_of: returns what to draw for the rows of a section; if nothing, the section is left out.
        panels: the number of panels of a section, side by side.
        inches: the height of a section, by its rows.
    """
    sections = [(names, rows, lines_of(rows)) for names, rows in table.groupby(comparison.SECTION_BY)]
    sections = [section for section in sections if len(section[2])]
    if not sections:
        return None
    heights = [inches(rows) for _, rows, _ in sections]
    figure = plt.figure(figsize=(7, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(sections), squeeze=False, height_ratios=heights).flat
    looks: Looks = {}
    for part, ((dataset, model, device), _, lines) in zip(parts, sections, strict=True):
        what = "SYNTHETIC digits, not MNIST" if dataset == "synthetic" else dataset
        stand_in = "\nCPU workers standing in for GPUs" if comparison.is_cpu(device) else ""
        title = f"{textwrap.fill(device, 45)}\n{comparison.with_model(what, model)}{stand_in}"
        part.suptitle(title, fontsize=10)
        plot(*part.subplots(1, panels, squeeze=False).flat, lines, looks)
    if looks:  # a legend under all panels makes the figure taller rather than the panels smaller
        entries: dict[str, object] = {}
        for axes in figure.axes:
            handles, texts = axes.get_legend_handles_labels()
            entries |= dict(zip(texts, handles, strict=True))
        columns = 2 if max(map(len, entries)) < 45 else 1
        figure.set_figheight(figure.get_figheight() + 0.2 * (len(entries) / columns + 1))
        below = {"loc": "outside lower center", "ncols": columns, "fontsize": 9}
        figure.legend(entries.values(), entries.keys(), **below)
    return figure


def _bars(axes: Axes, section: pd.DataFrame, _: Looks) -> None:
    labels = [textwrap.fill(comparison.label(row), 32, max_lines=4) for row in section.itertuples()]
    spread = section.images_per_s - section.slowest, section.fastest - section.images_per_s
    spread = [side.tolist() for side in spread]  # matplotlib 3.10 turns a Series of one into a number
    bars = [style.STAGE_BARS.get(stage, style.OWN_BAR) for stage in section.stage]
    colours, hatches = zip(*bars, strict=True)
    look = {"color": colours, "hatch": hatches, "edgecolor": "black", "linewidth": 0.6, "capsize": 4}
    axes.barh(range(len(section)), section.images_per_s, xerr=spread, tick_label=labels, **look)
    axes.tick_params(axis="y", labelsize=9)
    axes.invert_yaxis()
    axes.ticklabel_format(axis="x", style="plain")
    axes.set_xlabel("training images/s: median, min to max")


def _scaling(section: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    """Return texts for the legend, and efficiencies by device count: strong scaling, then weak scaling.

    There is a line per stage and equal settings; none for one device alone.
    """
    lines = []
    for column, weak in (("efficiency", False), ("weak_efficiency", True)):
        batch = "batch_per_device" if weak else "global_batch"
        known = section[section[column].notna()]
        for _, group in known.groupby(["stage", batch, "variant"], sort=False):
            if group.devices.max() > 1:
                text = comparison.label(group.iloc[0], count=False, weak=weak)
                lines.append((text, group.set_index("devices")[column]))
    return lines


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


def _accuracy_curves(axes: Axes, section: pd.DataFrame, looks: Looks) -> None:
    """Draw a curve per run; repeats of a configuration look the same."""
    for _, epochs in section.groupby("run_id", sort=False):
        look = _line_look(comparison.label(epochs.iloc[0]), looks)
        axes.plot(epochs.elapsed_s, epochs.test_accuracy, **look)
    axes.set(xlabel="wall time since the start (s)", ylabel="test accuracy (%)")
    axes.grid(alpha=0.3)


def _line_look(text: str, looks: Looks) -> style.Look:
    """Return label and style of a line: equal texts look the same in all panels of a figure."""
    return looks.setdefault(text, {"label": text} | style.line_look(len(looks)))
