"""The answer to "how many GPUs?": on the terminal, as how_many_gpus.md, and a figure of cost against time."""

import sys
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainkit.advice.advice import Option, interval
from trainkit.advice.answer import LEGEND, AnswerText, answer_for, number
from trainkit.advice.constraints import Constraints
from trainkit.compare import comparison, figures, page
from trainkit.compare.report import report as comparison_report
from trainkit.errors import UserError, tell

TRUST, NEXT_RUNS = "How far may I trust this?", "To know better"


def report(words: AnswerText, constraints: Constraints, out: Path, notes: list[str]) -> None:
    """Print the answer and write it to `out`.

    Raises:
        UserError: if `out` cannot be written to.
    """
    if words.on_cpu:
        notes = [f"{words.rows.device_name.iloc[0]}: CPU workers standing in for GPUs.", *notes]
    few, marks = words.table(words.best_options())
    tell(f"{page.wrapped(words.answered())}\n\n{page.plain(_on_two_lines(few))}\n")
    tell("\n".join(map(page.wrapped, [LEGEND, *marks, *words.unknown(), *notes])) + "\n")
    tell(page.wrapped(f"{TRUST} {' '.join(words.trust())}") + "\n")
    if runs := words.next_runs():
        runs = [f"{page.wrapped(use)}:\n    {command}" for use, command in runs]
        tell(f"{NEXT_RUNS}, the cheapest run first:\n" + "\n".join(runs))
        tell("Then ask again, and also give results/runs, the folder that it writes to.\n")
    with page.writing_to(out):
        written = figures.save({"how_many_cost.png": _cost(words, constraints)}, out, dpi=120)
        page.write(out / "how_many_gpus.md", f"How many {words.units}?", _blocks(words, notes), written)
    tell(f"Written to {out}: {', '.join(['how_many_gpus.md', *written])}")


def compare_and_answer(paths: list[Path], out: Path, constraints: Constraints | None) -> int:
    """Compare the runs, and answer if `constraints` are given; print both, and write them to `out`.

    Return the exit code, which is that of the comparison. If the runs support no answer, print why.
    """
    code = 0
    try:
        tell(comparison_report(paths, out, constraints and constraints.target))
    except UserError as error:
        code = 1
        tell(f"error: {error}", sys.stderr)
    if constraints:
        tell("")
        try:
            words, skipped = answer_for(paths, constraints)
            report(words, constraints, out, [f"Skipped: {sentence}" for sentence in skipped])
        except UserError as error:
            tell(str(error))
    return code


def _blocks(words: AnswerText, notes: list[str]) -> list[str]:
    table, marks = words.table(words.options())
    made = [words.answered(), page.markdown(table)]
    made.append(page.bullets([LEGEND, *marks, *words.unknown(), *notes]))
    made += [f"## {TRUST}", " ".join(words.trust())]
    if runs := words.next_runs():
        made.append(f"## {NEXT_RUNS}")
    for use, command in runs:
        made += [f"{use}:", f"```\n{command}\n```"]
    return made


def _on_two_lines(table: pd.DataFrame) -> pd.DataFrame:
    """Put the intervals below the numbers, for a terminal."""
    middle = table.replace(r" \(.*", "", regex=True).assign(stage=table.stage, note=table.note)
    interval = table.replace(r"^[^(]*\(?|\)$", "", regex=True).assign(stage="", note="")
    return pd.concat([middle, interval]).sort_index(kind="stable")


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
    if best:
        ring = {"marker": "o", "markersize": 15, "fillstyle": "none", "linestyle": ""}
        here = interval(best.seconds / 60)[1], interval(best.hours)[1]
        axes.plot(*here, color="black", label="recommended", **ring)
    if constraints.deadline_s:
        axes.axvline(constraints.deadline_s / 60, linestyle="--", label="deadline", **figures.THIN)
    if constraints.budget_hours:
        axes.axhline(constraints.budget_hours, linestyle=":", label="budget", **figures.THIN)
    axes.set(xlabel=f"minutes ({words.answer.goal})", ylabel=words.hours, xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=8, title="filled: measured, empty: predicted", title_fontsize=8)
    return figure


def _plot_options(axes: Axes, group: int, name: str, options: list[Option]) -> None:
    """Draw a group of options: their medians, with the 90 % intervals both ways."""
    look = figures.line_look(group) | {"linestyle": ""}
    across = np.array([interval(option.seconds / 60) for option in options])
    up = np.array([interval(option.hours) for option in options])
    axes.plot(across[:, 1], up[:, 1], label=name, **look)
    errors = [np.abs(ends[:, [0, 2]] - ends[:, [1]]).T for ends in (up, across)]
    axes.errorbar(across[:, 1], up[:, 1], *errors, linestyle="", color=look["color"], elinewidth=0.6)
    predicted = [k for k, option in enumerate(options) if not option.runs]
    white = {"markerfacecolor": "white", "markeredgecolor": look["color"], "linestyle": "", "zorder": 3}
    axes.plot(across[predicted, 1], up[predicted, 1], marker=look["marker"], **white)
