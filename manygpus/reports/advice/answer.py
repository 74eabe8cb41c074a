"""The answer to "how many GPUs?" in words: on the terminal, as how_many_gpus.md, and a figure of its cost."""

import math
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from manygpus.errors import UserError, print_line
from manygpus.reports import comparison, doubts, page
from manygpus.reports.advice.choice import (
    AS_GOOD,
    SURE,
    Answer,
    Constraints,
    Option,
    advise,
    interval,
    read_all_reduces,
)
from manygpus.reports.advice.run_set import NamedRuns, sets
from manygpus.reports.advice.scaling import Scaling
from manygpus.reports.page import Heading, Page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The factor between the medians of equal runs beyond which something changed between them.
MOST_FACTOR_OF_EQUAL_RUNS = 1.5
# The relative error of the model on held-out runs beyond which it explains nothing.
MOST_ERROR = 0.3
LEGEND = (
    "In brackets is where 90 % of the fits of the model lie. `eff. %` is the speedup over one device with "
    "the same global batch, unless a note says otherwise, divided by the number of devices. `minutes` count "
    "from the start of the process, and include the evaluations. `pays from` is the number of {samples} per "
    "epoch above which such a run, start-up included, finishes before a run on one device; 0 means any "
    "number."
)
HOW_FAR_TO_TRUST = "How far may I trust this?"
NOT_REACHED = "not reached"


class SeveralSetsError(UserError):
    """The runs belong to several sets, which cannot be fitted together, as those of a sweep over a setting.

    Attributes:
        sentence: the same as an answer, where that is nothing to correct.
    """

    def __init__(self, run_sets: Sequence[NamedRuns]) -> None:
        clauses = []
        for number, (name, rows) in enumerate(run_sets, start=1):
            clauses.append(f"{number}: {name} ({rows.run_id.nunique()} runs)")
        listed = "; ".join(clauses)
        super().__init__(
            f"these runs are of {len(run_sets)} sets that cannot be fitted together: {listed}. Choose one "
            "with --set N."
        )
        self.sentence = (
            f"How many GPUs to ask for can be answered for one set of runs at a time. These runs are of "
            f"{len(run_sets)}: {listed}."
        )


class AnswerForFiles(NamedTuple):
    """The answer for the runs of some files, and a sentence for each thing left out."""

    text: "AnswerText"
    skipped: list[str]


def answer_for(paths: list[Path], constraints: Constraints, set_number: int | None = None) -> AnswerForFiles:
    """Answer for the runs in these files and folders.

    Raises:
        UserError: if there are none, if they belong to several sets and `set_number` chooses none, or if they
            support no answer.
    """
    rows, skipped = comparison.load_some(paths)
    rows = choose_set(rows, set_number)
    all_reduces, not_read = read_all_reduces(paths, rows)
    answer = checked(advise(rows, constraints, all_reduces))
    return AnswerForFiles(AnswerText(answer, rows, constraints.price), skipped + not_read)


def choose_set(rows: pd.DataFrame, number: int | None) -> pd.DataFrame:
    """Return the set that was chosen, counted from 1, or the only one."""
    run_sets = sets(rows)
    if number is None and len(run_sets) == 1:
        return run_sets[0].rows
    if number and number <= len(run_sets):
        return run_sets[number - 1].rows
    if len(run_sets) == 1:
        raise UserError("these runs are of one set: leave out --set.")
    raise SeveralSetsError(run_sets)


# --- answers that cannot be right -------------------------------------------------------------------


def checked(answer: Answer) -> Answer:
    """Return the answer, without a recommendation if the runs or the model cannot be right."""
    model = _model_of(answer)
    objection = (
        _equal_runs_differ(model) or _all_efficiencies_are_too_high(answer) or _model_explains_nothing(model)
    )
    if not objection:
        return answer
    return replace(answer, best=None, why=f"{objection}: measure again", sure=0.0)


def _equal_runs_differ(model: Scaling) -> str:
    """Return why the runs cannot be right, as a clause; "" if they can. So do the next two."""
    factor_of = {}
    for shape, runs in model.measured.items():
        medians = [np.median(run) for run in runs]
        factor_of[shape] = max(medians) / min(medians)
    shape = max(factor_of, key=lambda shape: (factor_of[shape], shape))
    if factor_of[shape] <= MOST_FACTOR_OF_EQUAL_RUNS:
        return ""
    return (
        f"equal runs on {shape.devices} device(s), {shape.batch} images on each, differ by a factor of "
        f"{factor_of[shape]:.1f}, as before and after a repair (give only the files that are still valid)"
    )


def _all_efficiencies_are_too_high(answer: Answer) -> str:
    medians = [
        np.median(option.efficiency)
        for option in answer.options
        if option.shape.devices > 1 and option.runs and np.isfinite(option.efficiency).all()
    ]
    if not medians or min(medians) <= doubts.MOST_EFFICIENCY:
        return ""
    return "all efficiencies are above 100 %, so the runs on one device must have been disturbed"


def _model_explains_nothing(model: Scaling) -> str:
    # It is not if the error is NaN.
    if not model.error > MOST_ERROR:
        return ""
    return (
        f"the model does not explain these runs: it is off by {100 * model.error:.0f} % on runs that "
        "were left out of its fit"
    )


def _model_of(answer: Answer) -> Scaling:
    """Return the model of the recommended training, or of the first one without a recommendation."""
    if answer.best and answer.best.stage in answer.models:
        return answer.models[answer.best.stage]
    return next(iter(answer.models.values()))


# --- the answer in words ----------------------------------------------------------------------------


class AnswerText:
    """An `choice.Answer` in words, in the units of its devices.

    Args:
        rows: the rows of the chosen set.
        price: the price of a device-hour; without it no cost is given.
    """

    def __init__(self, answer: Answer, rows: pd.DataFrame, price: float | None = None) -> None:
        self.answer = answer
        self.rows = rows
        self.price = price
        self.on_cpu = comparison.is_cpu(rows.device_name.iloc[0])
        self.unit = "CPU worker" if self.on_cpu else "GPU"
        self.hours = "worker-hours" if self.on_cpu else "GPU-hours"
        self.samples = comparison.samples_in_words(rows)
        has_one_unit = rows.unit.nunique() == 1
        self.speed_unit = rows.unit.iloc[0] if has_one_unit else comparison.SAMPLES
        self.per_sample = rows.per_sample.median() if has_one_unit else 1
        self.why = answer.why.replace("GPU-hours", self.hours)

    def layout(self, option: Option) -> str:
        """Name the devices and the stage of an option, as `2 GPUs on 1 node, DDP`."""
        devices = counted(option.shape.devices, self.unit)
        nodes = counted(option.shape.nodes, "node")
        return f"{devices} on {nodes}, {comparison.stage_name(option.stage)}"

    def choice(self, option: Option) -> str:
        """Name the option, as `2 GPUs on 1 node, DDP, batch 256`."""
        return f"{self.layout(option)}, batch {option.global_batch}"

    def answered(self) -> str:
        """Return the recommendation and how sure it is, or that there is none, and the reason."""
        best = self.answer.best
        goal = self.answer.goal
        if best is None:
            return f"No recommendation for {goal}: {self.why}."
        speed = f"{text(self.per_sample * best.images_per_s)} {self.speed_unit}/s"
        numbers = f"{speed}, {text(best.seconds / 60)} min and {text(best.hours)} {self.hours}"
        if self.price:
            numbers += f", which cost {text(self.price * best.hours)},"
        purpose = f"to {goal}" if "accuracy" in goal else f"for {goal}"
        if not best.runs:
            certainty = "Nobody has run this choice, and the model may not hold there"
        elif self.answer.sure >= SURE:
            certainty = "Sure"
        else:
            certainty = "Not sure"
        # Nothing is certain.
        cases = min(round(100 * self.answer.sure), 99)
        return (
            f"Ask for {self.choice(best)}: {numbers} {purpose} ({best.basis}). This choice is {self.why}. "
            f"{certainty}: when the measurements are varied as much as they scatter, this choice is the "
            f"best, or within {100 * AS_GOOD:.0f} % of the best, in {cases} of 100 cases."
        )

    def options(self) -> list[Option]:
        """Return all options, from few devices to many."""
        return sorted(self.answer.options, key=lambda option: (*_layout_of(option), option.global_batch))

    def best_options(self) -> list[Option]:
        """Return the fastest option for each device count, and all with the batch of the best one."""
        options = self.options()
        best = self.answer.best
        fastest: dict[tuple, Option] = {}
        for option in sorted(options, key=lambda option: np.median(option.seconds)):
            fastest.setdefault(_layout_of(option), option)
        shown = []
        for option in options:
            is_fastest = option is fastest[_layout_of(option)]
            has_best_batch = best is not None and option.global_batch == best.global_batch
            if is_fastest or has_best_batch:
                shown.append(option)
        return shown

    def table(self, options: list[Option]) -> tuple[pd.DataFrame, list[str]]:
        """Return the options as texts, a row each, and the meanings of the marks in the column `note`."""
        notes: dict[str, str] = {}
        rows = []
        for option in options:
            row = {
                "stage": comparison.stage_name(option.stage),
                "devices": str(option.shape.devices),
                "nodes": str(option.shape.nodes),
                "batch": str(option.global_batch),
                f"{self.speed_unit}/s": text(self.per_sample * option.images_per_s),
                "eff. %": text(100 * option.efficiency),
                "minutes": text(option.seconds / 60, infinite=NOT_REACHED),
                self.hours: text(option.hours, infinite=NOT_REACHED),
            }
            if self.price:
                row["cost"] = text(self.price * option.hours, infinite=NOT_REACHED)
            row["pays from"] = text(option.break_even) if option.shape.devices > 1 else "-"
            row["note"] = _note(option, notes)
            rows.append(row)
        table = pd.DataFrame(rows)
        if (table.nodes == "1").all():
            table = table.drop(columns="nodes")
        return table, [f"{mark} {note}." for note, mark in notes.items()]

    def legend(self) -> str:
        """Say what the columns of the table mean."""
        return LEGEND.format(samples=self.samples)

    def trust(self) -> list[str]:
        """Say how far to trust the answer: the model and its error, the intervals, doubtful measurements."""
        model = _model_of(self.answer)
        if math.isnan(model.error):
            tested = "There are too few runs to leave some out of its fit and test it on those"
        else:
            tested = f"On runs left out of its fit, it is off by {100 * model.error:.1f} % (root mean square)"
        sentences = [
            f"What was not measured is predicted by a model of what a step costs. {tested}.",
            # In 9 of 12 cases of each of two sets of runs, and in more of published ones (METHODS.md).
            "In tests on real runs, such an interval held the true value in three of four cases or more. It "
            "is for this machine as it was during the runs, and does not cover a different network, busy "
            "neighbours, or a different version of the program.",
        ]
        doubtful = doubts.sentence(comparison.compare(comparison.summarize(self.rows)))
        if doubtful:
            sentences.append(doubtful)
        return sentences

    def unknown(self) -> list[str]:
        """List what is not predicted, and why."""
        return [f"Not predicted: {clause}." for clause in self.answer.unknown]


def _shell_line(words: list[object]) -> str:
    return shlex.join(map(str, words))


def counted(count: int, unit: str) -> str:
    """Return `1 node` or `2 nodes`."""
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def _layout_of(option: Option) -> tuple[int, int, str]:
    return option.shape.devices, option.shape.nodes, option.stage


def _note(option: Option, notes: dict[str, str]) -> str:
    """Return `measured` or `predicted`, with a mark that refers to a note; `notes` has the mark of each."""
    known = "measured" if option.runs else "predicted"
    clauses = [option.basis.removeprefix(known).lstrip(":, ")]
    if option.efficiency_at == "batch per device" and option.shape.devices > 1:
        clauses.append("eff. % against one device with the same batch per device")
    note = "; ".join(filter(None, clauses))
    if not note:
        return known
    mark = notes.setdefault(note, f"[{len(notes) + 1}]")
    return f"{known} {mark}"


def number(value: float, infinite: str = "never", digits: int = 3) -> str:
    """Format a number with so many digits; a dash if it is unknown."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return infinite
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.10g}"


def text(draws: np.ndarray, infinite: str = "never") -> str:
    """Format the middle, and the interval in brackets if it has a width."""
    if np.isnan(draws).all():
        return "-"
    low, middle, high = (number(value, infinite) for value in interval(draws))
    return middle if low == high else f"{middle} ({low}..{high})"


# --- on the terminal, as a page, as a figure --------------------------------------------------------


def report(answer: AnswerText, constraints: Constraints, out: Path, skipped: list[str]) -> None:
    """Print the answer and write it to `out`.

    Raises:
        UserError: if `out` cannot be written to.
    """
    # It loads matplotlib, which takes a second: an answer for a program has no figure.
    from manygpus.reports import figures

    notes = _notes(answer, skipped)
    _print(answer, notes)
    with page.writing_to(out):
        written = figures.save({"how_many_cost.png": _cost_figure(answer, constraints)}, out, dpi=120)
        page.write(out / "how_many_gpus.md", _page(answer, notes, written))
    print_line(f"Written to {out}: {', '.join(['how_many_gpus.md', *written])}")


def compare_and_answer(paths: list[Path], out: Path, constraints: Constraints | None) -> int:
    """Compare the runs, and answer if `constraints` are given; print both, and write them to `out`.

    Return the exit code, which is that of the comparison. If the runs support no answer, print why.
    """
    from manygpus.reports.comparison_report import report as report_comparison

    code = 0
    target = constraints.target if constraints else None
    answer_page = page_of_answer(paths, constraints) if constraints else None
    try:
        print_line(report_comparison(paths, out, target, answer_page))
    except UserError as error:
        code = 1
        print_line(f"error: {error}", sys.stderr)
    if constraints:
        print_line("")
        try:
            answer, skipped = answer_for(paths, constraints)
            report(answer, constraints, out, skipped)
        except SeveralSetsError as error:
            command = ["manygpus", "how-many", out, "--set", 1]
            print_line(f"{page.wrapped(error.sentence)}\nFor the first:\n    {_shell_line(command)}")
        except UserError as error:
            print_line(str(error))
    return code


def page_of_answer(paths: list[Path], constraints: Constraints) -> Page:
    """Return the answer as how_many_gpus.md has it, without the figure, or why there is none."""
    try:
        answer, skipped = answer_for(paths, constraints)
    except SeveralSetsError as error:
        return Page("How many GPUs?", [f"{error.sentence} The option --set of how_many_gpus.py takes one."])
    except UserError as error:
        return Page("How many GPUs?", [f"No answer: {error}"])
    return _page(answer, _notes(answer, skipped), [])


def _notes(answer: AnswerText, skipped: list[str]) -> list[str]:
    notes = [f"Skipped: {sentence}" for sentence in skipped]
    if answer.on_cpu:
        notes.insert(0, f"{answer.rows.device_name.iloc[0]}: CPU workers standing in for GPUs.")
    return notes


def _print(answer: AnswerText, notes: list[str]) -> None:
    table, marks = answer.table(answer.best_options())
    print_line(f"{page.wrapped(answer.answered())}\n\n{page.plain(_on_two_lines(table))}\n")
    sentences = [answer.legend(), *marks, *answer.unknown(), *notes]
    print_line("\n".join(map(page.wrapped, sentences)) + "\n")
    print_line(page.wrapped(f"{HOW_FAR_TO_TRUST} {' '.join(answer.trust())}") + "\n")


def _on_two_lines(table: pd.DataFrame) -> pd.DataFrame:
    """Put the intervals below the numbers, for a terminal."""
    numbers = table.replace(r" \(.*", "", regex=True).assign(stage=table.stage, note=table.note)
    intervals = table.replace(r"^[^(]*\(?|\)$", "", regex=True).assign(stage="", note="")
    return pd.concat([numbers, intervals]).sort_index(kind="stable")


def _page(answer: AnswerText, notes: list[str], written: list[str]) -> Page:
    """Return the answer with all options, and the figures that were written."""
    table, marks = answer.table(answer.options())
    blocks = [
        answer.answered(),
        table,
        [answer.legend(), *marks, *answer.unknown(), *notes],
        Heading(HOW_FAR_TO_TRUST),
        " ".join(answer.trust()),
    ]
    return Page(f"How many {answer.unit}s?", blocks, written)


def _cost_figure(answer: AnswerText, constraints: Constraints) -> "Figure | None":
    """Draw device-hours against minutes for each option that reaches the goal in nearly all cases."""
    from manygpus.reports import figures

    options_of_layout: dict[str, list[Option]] = {}
    for option in answer.options():
        if np.isfinite(interval(option.seconds)).all():
            options_of_layout.setdefault(answer.layout(option), []).append(option)
    if not options_of_layout:
        return None
    figure = figures.plt.figure(figsize=(8, 4.5), layout="constrained")
    figure.suptitle(_title(answer), fontsize=10)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    for i, (layout, options) in enumerate(options_of_layout.items()):
        _plot_options(axes, options, layout, figures.line_look(i))
    best = answer.answer.best
    if best:
        axes.plot(
            interval(best.seconds / 60).middle,
            interval(best.hours).middle,
            color="black",
            label="recommended",
            marker="o",
            markersize=15,
            fillstyle="none",
            linestyle="",
        )
    if constraints.deadline_s:
        axes.axvline(constraints.deadline_s / 60, linestyle="--", label="deadline", **figures.THIN)
    if constraints.budget_hours:
        axes.axhline(constraints.budget_hours, linestyle=":", label="budget", **figures.THIN)
    axes.set(xlabel=f"minutes ({answer.answer.goal})", ylabel=answer.hours, xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=8, title="filled: measured, empty: predicted", title_fontsize=8)
    return figure


def _title(answer: AnswerText) -> str:
    best = answer.answer.best
    message = "No choice meets the request"
    if best:
        minutes = number(interval(best.seconds / 60).middle)
        hours = number(interval(best.hours).middle)
        message = f"{answer.choice(best)}: {minutes} min, {hours} {answer.hours}"
    row = answer.rows.iloc[0]
    about = f"{row.device_name}; {comparison.with_model(row.dataset, row.model)}"
    return "\n".join([textwrap.fill(message, 85), textwrap.fill(about, 85)])


def _plot_options(axes: "Axes", options: list[Option], label: str, line_look: dict[str, object]) -> None:
    """Draw options of one layout: their medians, with the 90 % intervals both ways."""
    colour = line_look["color"]
    # (options, 3): the lower end, the middle and the upper end.
    minutes = np.array([interval(option.seconds / 60) for option in options])
    hours = np.array([interval(option.hours) for option in options])
    axes.plot(minutes[:, 1], hours[:, 1], label=label, **line_look | {"linestyle": ""})
    axes.errorbar(
        minutes[:, 1],
        hours[:, 1],
        xerr=_distances_from_middle(minutes),
        yerr=_distances_from_middle(hours),
        linestyle="",
        color=colour,
        elinewidth=0.6,
    )
    is_predicted = [not option.runs for option in options]
    axes.plot(
        minutes[is_predicted, 1],
        hours[is_predicted, 1],
        marker=line_look["marker"],
        markerfacecolor="white",
        markeredgecolor=colour,
        linestyle="",
        zorder=3,
    )


def _distances_from_middle(intervals: np.ndarray) -> np.ndarray:
    """Return the distances to the lower and the upper ends, (2, options), as matplotlib wants them."""
    return np.abs(intervals[:, [0, 2]] - intervals[:, [1]]).T
