"""The answer to "how many GPUs?": on the terminal, as how_many_gpus.html, .md and .csv, a proposal."""

import sys
from pathlib import Path

import pandas as pd

from trainkit.advice import figures
from trainkit.advice.advice import Option, advise, all_reduces, sets
from trainkit.advice.answer import LEGEND, AnswerText, answer_for, checked
from trainkit.advice.constraints import Constraints
from trainkit.advice.proposal import proposal
from trainkit.compare import page
from trainkit.compare.report import report as comparison_report
from trainkit.compare.text import plain, wrapped, write_csv
from trainkit.runtime.errors import UserError, tell

MOST_SETS = 4  # that a page has an answer for
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
        notes = [f"Chosen among {', '.join(map(str, constraints.gpus))} {words.units} (--gpus).", *notes]
    few, marks = words.table(words.best_options())
    tell(f"{wrapped(words.answered())}\n\n{plain(_on_two_lines(few))}\n")
    tell("\n".join(map(wrapped, [LEGEND, *marks, *words.unknown(), *notes])) + "\n")
    tell(wrapped(f"{TRUST} {' '.join(words.trust())}") + "\n")
    if runs := words.next_runs():
        runs = [f"{wrapped(tells)}:\n    {command}" for tells, command in runs]
        tell(f"{NEXT_RUNS}, the cheapest run first:\n" + "\n".join(runs))
        tell("Then ask again, with results/runs, where it writes to, as one more folder.\n")
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
        tell(comparison_report(paths, out, constraints and constraints.target, blocks))
    except UserError as error:
        code = 1
        print(f"error: {error}", file=sys.stderr)
    if constraints:
        tell("")
        try:
            words, skipped = answer_for(paths, constraints)
            report(words, constraints, out, [f"Skipped: {sentence}" for sentence in skipped])
        except UserError as error:
            tell(str(error))
    return code


def blocks(rows: pd.DataFrame, paths: list[Path], target: float | None) -> list[page.Block]:
    """Return the answers for the page of a comparison, one for each set of its runs."""
    found = sets(rows)
    made: list[page.Block] = [page.Heading("How many devices to ask for?")]
    if len(found) > MOST_SETS:
        return [*made, page.Text(f"The runs are of {len(found)} sets: results/how_many_gpus.py --set N.")]
    for what, of_set in found:
        made += [page.Text(f"Of the runs with {what}:")] if what else []
        try:
            measured, _ = all_reduces(paths, of_set)
            words = AnswerText(checked(advise(of_set, Constraints(target), measured)), of_set)
            made += _blocks_of(words, words.best_options())
        except UserError as error:
            made.append(page.Text(str(error)))
    return [*made, page.Text("With a deadline or a budget: results/how_many_gpus.py --deadline or --budget.")]


def _blocks_of(words: AnswerText, options: list[Option], notes: list[str] | None = None) -> list[page.Block]:
    table, marks = words.table(options)
    made = [page.Text(words.answered()), page.Table(table)]
    made.append(page.Notes([LEGEND, *marks, *words.unknown(), *(notes or [])]))
    made += [page.Heading(TRUST), page.Text(" ".join(words.trust()))]
    if runs := words.next_runs():
        made.append(page.Heading(NEXT_RUNS))
    for tells, command in runs:
        made += [page.Text(f"{tells}:"), page.Command(command)]
    return made


def _write(
    words: AnswerText, constraints: Constraints, out: Path, notes: list[str], trainings: int | None
) -> list[str]:
    """Write the files, and return their names."""
    write_csv(words.numbers(), out / "how_many_gpus.csv")
    names = figures.draw(words, constraints, out)
    drawn = [page.Figure(out / name) for name in names]
    answer = [*_blocks_of(words, words.options(), notes), *drawn]
    for name in ("how_many_gpus.html", "how_many_gpus.md"):
        page.write(out / name, f"How many {words.units}?", answer)
    written = ["how_many_gpus.html", "how_many_gpus.md", "how_many_gpus.csv", *names]
    if trainings and words.answer.best:
        pages = proposal(words, trainings, drawn)
        page.write(out / "proposal.md", "Request for computing time", pages)
        written.append("proposal.md")
    return written


def _on_two_lines(table: pd.DataFrame) -> pd.DataFrame:
    """Put the intervals below the numbers, for a terminal."""
    middle = table.replace(r" \(.*", "", regex=True).assign(stage=table.stage, note=table.note)
    interval = table.replace(r"^[^(]*\(?|\)$", "", regex=True).assign(stage="", note="")
    return pd.concat([middle, interval]).sort_index(kind="stable")
