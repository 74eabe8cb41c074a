"""The answer to "how many GPUs?": on the terminal, as how_many_gpus.md and .csv, a figure, a proposal.

The figure has the cost of each choice against its time. The proposal is the page that computing centres
ask for: how much time, why so many devices, and the evidence.
"""

import sys
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainkit.advice.advice import Option, interval
from trainkit.advice.answer import LEGEND, AnswerText, answer_for, number, text
from trainkit.advice.constraints import Constraints
from trainkit.compare import comparison, page, style
from trainkit.compare.page import plain, wrapped, write_csv
from trainkit.compare.report import report as comparison_report
from trainkit.runtime.errors import UserError, tell

MOST_NODES = 10  # that the proposal names
TRUST, NEXT_RUNS = "How far may I trust this?", "To know better"


def report(
    words: AnswerText, constraints: Constraints, out: Path, notes: list[str], trainings: int | None = None
) -> None:
    """Print the answer and write it to `out`, with a proposal for the number of `trainings`, if any.

    Raises:
        UserError: if `out` cannot be written to.
    """
    if words.on_cpu:
        notes = [f"{words.rows.device_name.iloc[0]}: CPU workers standing in for GPUs.", *notes]
    if constraints.gpus:
        notes = [f"Chosen from {', '.join(map(str, constraints.gpus))} {words.units} (--gpus).", *notes]
    few, marks = words.table(words.best_options())
    tell(f"{wrapped(words.answered())}\n\n{plain(_on_two_lines(few))}\n")
    tell("\n".join(map(wrapped, [LEGEND, *marks, *words.unknown(), *notes])) + "\n")
    tell(wrapped(f"{TRUST} {' '.join(words.trust())}") + "\n")
    if runs := words.next_runs():
        runs = [f"{wrapped(use)}:\n    {command}" for use, command in runs]
        tell(f"{NEXT_RUNS}, the cheapest run first:\n" + "\n".join(runs))
        tell("Then ask again, and also give results/runs, the folder that it writes to.\n")
    if trainings and not words.answer.best:
        tell("No proposal.md: without a recommendation there is nothing to ask for.\n")
    with page.writing_to(out):
        tell(f"Written to {out}: {', '.join(_write(words, constraints, out, notes, trainings))}")


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
    made = [page.escaped(words.answered()), page.markdown(table)]
    made.append(page.listed([LEGEND, *marks, *words.unknown(), *notes]))
    made += [page.heading(TRUST), page.escaped(" ".join(words.trust()))]
    if runs := words.next_runs():
        made.append(page.heading(NEXT_RUNS))
    for use, command in runs:
        made += [page.escaped(f"{use}:"), page.command(command)]
    return made


def _write(
    words: AnswerText, constraints: Constraints, out: Path, notes: list[str], trainings: int | None
) -> list[str]:
    """Write the files, and return their names."""
    write_csv(words.numbers(), out / "how_many_gpus.csv")
    names = style.save({"how_many_cost.png": _cost(words, constraints)}, out, dpi=120)
    drawn = page.figures(names)
    answer = [*_blocks(words, notes), *drawn]
    page.write(out / "how_many_gpus.md", f"How many {words.units}?", answer)
    written = ["how_many_gpus.md", "how_many_gpus.csv", *names]
    if trainings and words.answer.best:
        page.write(out / "proposal.md", "Request for computing time", _proposal(words, trainings, drawn))
        written.append("proposal.md")
    return written


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
    axes.legend(fontsize=8, title="filled: measured, empty: predicted", title_fontsize=8)
    return figure


def _plot_options(axes: Axes, group: int, name: str, options: list[Option]) -> None:
    """Draw a group of options: their medians, with the 90 % intervals both ways."""
    look = style.line_look(group) | {"linestyle": ""}
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


def _proposal(words: AnswerText, trainings: int, figures: list[str]) -> list[str]:
    """Return the page for `trainings` trainings with the recommended choice, which has to exist."""
    rows, best = words.rows, words.answer.best
    low, middle, high = (number(trainings * hours) for hours in interval(best.hours))
    table, marks = words.table(words.best_options())
    how_known, *limits = words.trust()
    if rows.dataset.iloc[0] == "synthetic":
        limits.append("Measured with generated digits, not with MNIST: their accuracies say nothing of it.")
    return [
        page.heading("What is asked for"),
        page.escaped(
            f"{words.choice(best)}, for {trainings:,} training{'s' * (trainings > 1)}: {middle} "
            f"{words.hours} ({low} to {high})."
        ),
        page.escaped(f"A training ({words.answer.goal}) takes {text(best.seconds / 60)} minutes."),
        page.heading("Why so many"),
        page.escaped(f"It is {words.why}."),
        page.markdown(table),
        page.escaped(LEGEND),
        *figures,
        page.heading("Machine and software"),
        page.listed(_machine(rows)),
        page.heading("How it was measured"),
        page.escaped(
            f"{rows.run_id.nunique()} runs, {(~rows.warmup).sum()} epochs after the warm-up of each process, "
            f"timed on the slowest rank with its device synchronised. {how_known}"
        ),
        page.heading("Limits"),
        page.listed([words.how_sure(), *marks, *words.unknown(), *limits]),
    ]


def _machine(rows: pd.DataFrame) -> list[str]:
    row, nodes = rows.iloc[0], sorted(set(rows.node_list) - {""})
    versions = {"PyTorch": "torch_version", "CUDA": "cuda_version", "this program": "git_commit"}
    found = {name: sorted(set(rows[column]) - {""}) for name, column in versions.items()}
    where = f" ({', '.join(nodes[:MOST_NODES])})" if nodes else ""
    settings = comparison.common(rows.assign(train_images=rows.images.max()))
    return [
        f"{row.device_name}, up to {rows.devices.max()} on {rows.nodes.max()} node(s){where}",
        ", ".join(f"{name} {', '.join(values)}" for name, values in found.items() if values),
        f"{comparison.with_model(row.dataset, row.model)}: {settings}",
    ]
