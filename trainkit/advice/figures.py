"""The figures of "how many GPUs?": the speedup by devices, and the cost against the time."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainkit.advice.advice import Constraints, Option, interval
from trainkit.advice.answer import AnswerText, number
from trainkit.compare import comparison, style

LEGEND = {"fontsize": 8, "title": "filled: measured, empty: predicted", "title_fontsize": 8}
Draws = Callable[[Option], np.ndarray]


def draw(words: AnswerText, constraints: Constraints, out: Path) -> list[str]:
    """Write the figures that the answer supports into `out`, a folder that is there, and return their names.

    A figure of an earlier call that this answer does not support goes.

    Raises:
        OSError: if a file cannot be written.
    """
    figures = {"how_many_speedup.png": _speedup(words), "how_many_cost.png": _cost(words, constraints)}
    return style.save(figures, out, dpi=120)


def _speedup(words: AnswerText) -> Figure | None:
    """Draw a line for each training and batch: the global one, or that of each device."""
    lines: dict[str, list[Option]] = {}
    for option in words.options():
        if option.shape.devices > 1 and np.isfinite(option.efficiency).all():
            weak = option.efficiency_at == "batch per device"
            batch = f"{option.shape.batch} on each" if weak else option.global_batch
            name = f"{comparison.stage_name(option.stage)}, batch {batch}"
            lines.setdefault(name, []).append(option)
    if not lines:
        return None
    figure, axes = _panel(words, "Speedup over one device with the same batch")
    counts = sorted({1, *(option.shape.devices for line in lines.values() for option in line)})
    axes.plot(counts, counts, label="ideal", **style.IDEAL)
    for i, (name, line) in enumerate(lines.items()):
        _plot_options(axes, i, name, line, _devices, _speedups, joined=True)
    axes.set(xlabel=words.units, ylabel="speedup (x)", ylim=(0, None))
    axes.set_xticks([n for n in counts if n == 1 or n >= counts[-1] / 8])  # closer ones would overlap
    axes.legend(**LEGEND)
    return figure


def _cost(words: AnswerText, constraints: Constraints) -> Figure | None:
    """Draw device-hours against minutes of each option that gets there in nearly all cases."""
    layouts: dict[str, list[Option]] = {}
    for option in words.options():
        if np.isfinite(interval(option.seconds)).all():
            layouts.setdefault(words.choice(option).rpartition(",")[0], []).append(option)
    if not layouts:
        return None
    best, message = words.answer.best, "No choice keeps to what was asked for"
    if best:
        minutes, hours = (number(interval(draws)[1]) for draws in (best.seconds / 60, best.hours))
        message = f"{words.choice(best)}: {minutes} min, {hours} {words.hours}"
    figure, axes = _panel(words, message)
    for i, (name, group) in enumerate(layouts.items()):
        _plot_options(axes, i, name, group, lambda option: option.seconds / 60, lambda option: option.hours)
    if best:
        ring = {"marker": "o", "markersize": 15, "fillstyle": "none", "linestyle": ""}
        here = interval(best.seconds / 60)[1], interval(best.hours)[1]
        axes.plot(*here, color="black", label="recommended", **ring)
    if constraints.deadline_s:
        axes.axvline(constraints.deadline_s / 60, linestyle="--", label="deadline", **style.THIN)
    if constraints.budget_hours:
        axes.axhline(constraints.budget_hours, linestyle=":", label="budget", **style.THIN)
    axes.set(xlabel=f"minutes ({words.answer.goal})", ylabel=words.hours, xlim=(0, None), ylim=(0, None))
    axes.legend(**LEGEND)
    return figure


def _plot_options(
    axes: Axes, number: int, name: str, options: list[Option], x: Draws, y: Draws, joined: bool = False
) -> None:
    """Draw a group of options: their medians, with the 90 % intervals both ways."""
    look = style.line_look(number) | ({} if joined else {"linestyle": ""})
    across, up = (np.array([interval(draws(option)) for option in options]) for draws in (x, y))
    axes.plot(across[:, 1], up[:, 1], label=name, **look)
    errors = [np.abs(ends[:, [0, 2]] - ends[:, [1]]).T for ends in (up, across)]
    axes.errorbar(across[:, 1], up[:, 1], *errors, linestyle="", color=look["color"], elinewidth=0.6)
    predicted = [k for k, option in enumerate(options) if not option.runs]
    white = {"markerfacecolor": "white", "markeredgecolor": look["color"], "linestyle": "", "zorder": 3}
    axes.plot(across[predicted, 1], up[predicted, 1], marker=look["marker"], **white)


def _devices(option: Option) -> np.ndarray:
    return np.array([option.shape.devices])


def _speedups(option: Option) -> np.ndarray:
    return option.efficiency * option.shape.devices


def _panel(words: AnswerText, message: str) -> tuple[Figure, Axes]:
    row = words.rows.iloc[0]
    figure = plt.figure(figsize=(8, 4.5), layout="constrained")
    about = f"{row.device_name}; {comparison.with_model(row.dataset, row.model)}"
    figure.suptitle("\n".join([textwrap.fill(message, 85), textwrap.fill(about, 85)]), fontsize=10)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes
