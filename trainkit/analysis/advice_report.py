"""The answer to "how many GPUs?": on the terminal, as how_many_gpus.html, .md and .csv, a proposal."""

from pathlib import Path

import pandas as pd

from trainkit.analysis import advice_figures, page
from trainkit.analysis.advice import Wishes, advise, all_reduces, sets
from trainkit.analysis.answer import LEGEND, InWords, checked
from trainkit.analysis.proposal import proposal
from trainkit.analysis.text import escaped, markdown, no_formula, plain, wrapped
from trainkit.errors import UserError, tell

MOST_SETS = 4  # that a page has an answer for
TRUST, PROBES = "How far may I trust this?", "To know better"


def report(words: InWords, wishes: Wishes, out: Path, notes: list[str], trainings: int | None = None) -> None:
    """Print the answer and write it to `out`, with a proposal for so many `trainings` if there are any.

    Raises:
        UserError: if `out` cannot be written to.
    """
    if words.on_cpu:
        notes = [f"{words.rows.device_name.iloc[0]}: CPU workers standing in for GPUs.", *notes]
    answer = _answer(words)
    few, marks = words.table(words.few())
    if wishes.gpus:
        notes = [f"Chosen among {', '.join(map(str, wishes.gpus))} {words.units} (--gpus).", *notes]
    told = [LEGEND, *marks, *words.unknown(), *notes]
    tell(f"{wrapped(answer)}\n\n{plain(_on_two_lines(few))}\n")
    tell("\n".join(map(wrapped, told)) + "\n")
    tell(wrapped(f"{TRUST} {' '.join(words.trust())}") + "\n")
    if probes := words.probes():
        runs = [f"{wrapped(tells)}:\n    {command}" for tells, command in probes]
        tell(f"{PROBES}, the cheapest run first:\n" + "\n".join(runs))
        tell("Then ask again, with results/runs, where it writes to, as one more folder.\n")
    if trainings and not words.answer.best:
        tell("No proposal.md: without a recommendation there is nothing to ask for.\n")
    try:
        tell(f"Written to {out}: {', '.join(_write(words, wishes, answer, out, notes, trainings))}")
    except OSError as error:
        raise UserError(f"{out} cannot be written to ({error.strerror}): give another --out.") from None


def blocks(rows: pd.DataFrame, paths: list[Path], target: float | None) -> list[page.Block]:
    """The answer for the page of a comparison, of each set of its runs."""
    found = sets(rows)
    made: list[page.Block] = [page.Heading("How many devices to ask for?")]
    if len(found) > MOST_SETS:
        return [*made, page.Text(f"The runs are of {len(found)} sets: results/how_many_gpus.py --set N.")]
    for what, of_set in found:
        made += [page.Text(f"Of the runs with {what}:")] if what else []
        try:
            measured, _ = all_reduces(paths, of_set)
            made += _blocks_of(InWords(checked(advise(of_set, Wishes(target), measured)), of_set))
        except UserError as error:
            made.append(page.Text(str(error)))
    return [*made, page.Text("With a deadline or a budget: results/how_many_gpus.py --deadline or --budget.")]


def _blocks_of(words: InWords) -> list[page.Block]:
    table, marks = words.table(words.few())
    made = [page.Text(_answer(words)), page.Table(table)]
    made.append(page.Notes([LEGEND, *marks, *words.unknown(), *words.trust()]))
    for tells, command in words.probes():
        made += [page.Text(f"{PROBES}: {tells}:"), page.Command(command)]
    return made


def _answer(words: InWords) -> str:
    return " ".join(filter(None, [words.sentence(), words.how_sure()]))


def _write(
    words: InWords, wishes: Wishes, answer: str, out: Path, notes: list[str], trainings: int | None
) -> list[str]:
    """Returns the names of the files."""
    out.mkdir(parents=True, exist_ok=True)
    numbers = words.numbers().apply(lambda column: column.map(no_formula))
    numbers.to_csv(out / "how_many_gpus.csv", index=False)
    figures = advice_figures.draw(words, wishes, out)
    table, marks = words.table(words.options())
    parts = [f"# How many {words.units}?", escaped(answer), markdown(table)]
    parts.append("\n".join(f"- {escaped(note)}" for note in [LEGEND, *marks, *words.unknown(), *notes]))
    parts += [f"## {TRUST}", escaped(" ".join(words.trust()))]
    if probes := words.probes():
        parts.append(f"## {PROBES}")
        parts += [f"{escaped(tells)}:\n\n```\n{command}\n```" for tells, command in probes]
    parts += [f"![{name}]({name})" for name in figures]
    (out / "how_many_gpus.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    shown = [page.Figure(out / name, name.removesuffix(".png")) for name in figures]
    title = f"How many {words.units}?"
    page.write(out / "how_many_gpus.html", title, [*_blocks_of(words), *shown, page.Notes(notes)])
    names = ["how_many_gpus.html", "how_many_gpus.md", "how_many_gpus.csv", *figures]
    if trainings and words.answer.best:
        (out / "proposal.md").write_text(proposal(words, trainings, figures), encoding="utf-8")
        names.append("proposal.md")
    return names


def _on_two_lines(table: pd.DataFrame) -> pd.DataFrame:
    """With the intervals beneath the numbers, for a terminal."""
    lines = []
    for row in table.to_dict("records"):
        parts = {name: cell.partition(" (") for name, cell in row.items() if name not in ("stage", "note")}
        lines.append(row | {name: middle for name, (middle, _, _) in parts.items()})
        lines.append({name: parts[name][2].rstrip(")") if name in parts else "" for name in row})
    return pd.DataFrame(lines)
