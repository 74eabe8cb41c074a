"""The figure of "how many GPUs?": the cost of each choice against its time."""

import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainkit.advice.advice import Constraints, Option, interval
from trainkit.advice.answer import AnswerText, number
from trainkit.compare import comparison, style

LEGEND = {"fontsize": 8, "title": "filled: measured, empty: predicted", "title_fontsize": 8}


def draw(words: AnswerText, constraints: Constraints, out: Path) -> list[str]:
    """Write the figure to `out`, an existing folder, and return the names of the files written.

    A figure of an earlier call is removed if this answer has no choice to draw.

    Raises:
        OSError: if a file cannot be written.
    """
    return style.save({"how_many_cost.png": _cost(words, constraints)}, out, dpi=120)


def _cost(words: AnswerText, constraints: Constraints) -> Figure | None:
    """Draw device-hours against minutes for each option that reaches the goal in nearly all cases."""
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
    row = words.rows.iloc[0]
    figure = plt.figure(figsize=(8, 4.5), layout="constrained")
    about = f"{row.device_name}; {comparison.with_model(row.dataset, row.model)}"
    figure.suptitle("\n".join([textwrap.fill(message, 85), textwrap.fill(about, 85)]), fontsize=10)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    for i, (name, group) in enumerate(layouts.items()):
        _plot_options(axes, i, name, group)
    axes.plot(*_pareto(sum(layouts.values(), [])), label="nothing is both faster and cheaper", **style.IDEAL)
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


def _plot_options(axes: Axes, number: int, name: str, options: list[Option]) -> None:
    """Draw a group of options: their medians, with the 90 % intervals both ways."""
    look = style.line_look(number) | {"linestyle": ""}
    across = np.array([interval(option.seconds / 60) for option in options])
    up = np.array([interval(option.hours) for option in options])
    axes.plot(across[:, 1], up[:, 1], label=name, **look)
    errors = [np.abs(ends[:, [0, 2]] - ends[:, [1]]).T for ends in (up, across)]
    axes.errorbar(across[:, 1], up[:, 1], *errors, linestyle="", color=look["color"], elinewidth=0.6)
    predicted = [k for k, option in enumerate(options) if not option.runs]
    white = {"markerfacecolor": "white", "markeredgecolor": look["color"], "linestyle": "", "zorder": 3}
    axes.plot(across[predicted, 1], up[predicted, 1], marker=look["marker"], **white)


def _pareto(options: list[Option]) -> np.ndarray:
    """Return minutes and device-hours, (2, n), of the options that no other option beats in both."""
    points = np.array([(interval(option.seconds / 60)[1], interval(option.hours)[1]) for option in options])
    points = points[np.lexsort(points.T[::-1])]
    least = np.minimum.accumulate(points[:, 1])
    return points[np.r_[True, points[1:, 1] < least[:-1]]].T
