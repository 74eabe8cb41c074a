"""The comparison of runs for people: tables on the terminal, comparison.md and .csv, and figures."""

import math
from pathlib import Path

import numpy as np
import pandas as pd

from trainkit.compare import comparison, figures, page, trust
from trainkit.compare.summary import verdict
from trainkit.errors import UserError, tell
from trainkit.record.columns import SINGLE

# Header, with its unit: the column of the comparison and the format of its numbers.
SHOWN = {
    "stage": ("stage", ""),
    "devices": ("devices", "d"),
    "nodes": ("nodes", "d"),
    "batch": ("global_batch", "d"),
    "variant": ("variant", ""),
    "images/s": ("images_per_s", ".0f"),
    "min..max": ("spread", ""),
    "speedup": ("speedup", ".2f"),
    "eff. %": ("efficiency_percent", ".0f"),
    "weak eff. %": ("weak_percent", ".0f"),
    "note": ("note", ""),
    "doubt": ("doubt", ""),
    "acc. %": ("test_accuracy", ".2f"),
    "eval s": ("eval_seconds", ".2f"),
    "wall s": ("elapsed_s", ".1f"),
    "mem. MB": ("peak_memory_mb", ".0f"),
    "runs": ("runs", "d"),
    "epochs": ("epochs", ""),
}
# The columns that a narrow terminal omits, in this order.
LEAST_NEEDED = ("eval s", "train s to it", "mem. MB", "epochs", "runs", "wall s")
LEAST_NEEDED += ("min..max", "eff. %")
TERMINAL = 120  # characters of a line
LEGEND = (
    "images/s: median over all epochs but the warm-up (the first of a process); min..max: over the same. "
    "speedup, eff. %: against one device of the same kind. "
    "wall s: from the start of the process (rank 0) to its last evaluation."
)
WEAK_LEGEND = (
    "weak eff. %: against one device with the same batch per device; eff. %: with the same global batch."
)
TARGET_LEGEND = (
    "s to {0:g} %: from the start of the process to the end of the first epoch with that test accuracy; the "
    "median of the repeats that had it."
)


def report(paths: list[Path], out: Path, target: float | None = None) -> str:
    """Print the comparison of all runs under `paths`, write it to `out`, return the verdict.

    With a `target` the tables show how long it took to reach that accuracy (%).

    Raises:
        UserError: if a path is not there, no file can be read, or `out` cannot be written to.
    """
    rows, skipped = comparison.load_some(paths)
    table = comparison.compare(comparison.summarize(rows, target))
    shown, reasons = as_text(table, target)
    notes = reasons + _notes(rows, skipped)
    conclusion = verdict(table)
    needless = [name for name in LEAST_NEEDED if name in shown]
    for count in range(1, len(needless) + 1):
        narrow = shown.drop(columns=needless[:count])
        if max(map(len, page.plain(narrow).splitlines())) <= TERMINAL:
            break
    blocks = [conclusion]
    for (dataset, model, device), section in table.groupby(comparison.SECTION_BY):
        title = f"{device}, {comparison.with_model(dataset, model)}"
        settings = comparison.common(section)
        blocks += [f"## {title}", settings, page.markdown(shown.loc[section.index])]
        # The terminal first: it is useful even if nothing can be written.
        tell(f"{title}: {settings}\n\n{page.plain(narrow.loc[section.index])}\n")
    sentences = [*notes, f"In comparison.md only: {', '.join(needless[:count])}."]
    tell("\n".join(map(page.wrapped, sentences)) + "\n")
    with page.writing_to(out):
        page.write_csv(table, out / "comparison.csv")
        names = figures.draw(table, rows, out)
        page.write(out / "comparison.md", "Comparison", [*blocks, page.listed(notes)], names)
    tell(f"Written to {out}: {', '.join(['comparison.md', 'comparison.csv', *names])}\n")
    return conclusion


def report_each(folders: list[Path], out: Path, target: float | None = None) -> str:
    """Print a table with a separate comparison for each folder, and write it to `out`.

    Equal configurations stand below each other: yours and ours, or those of a class. A folder without
    runs is named and left out. `target` as in `report`. Return where it was written.

    Raises:
        UserError: if a folder is not there, none has runs, or `out` cannot be written to.
    """
    tables, every, left_out = [], [], []
    for folder in folders:
        rows, skipped = comparison.load([folder])
        name = str(folder)
        left_out += skipped
        if rows.empty:
            left_out.append(f"{name} has no runs.")
        else:
            every.append(rows)
            tables.append(comparison.compare(comparison.summarize(rows, target)).assign(folder=name))
    if not tables:
        raise UserError(f"no runs found in {', '.join(map(str, folders))}. {' '.join(left_out)}")
    table = comparison.beneath_each_other(pd.concat(tables, ignore_index=True))
    shown, reasons = as_text(table, target)
    shown = shown.drop(columns=set(LEAST_NEEDED) & set(shown) - {"eff. %"})
    shown.insert(0, "folder", table.folder)
    for column, header in (("device_name", "device"), ("model", "model"), ("dataset", "dataset")):
        if table[column].nunique() > 1:
            shown.insert(1, header, table[column])
    notes = reasons + _notes(pd.concat(every), left_out)
    tell(f"{page.plain(shown)}\n\n" + "\n".join(map(page.wrapped, notes)) + "\n")
    with page.writing_to(out):
        page.write_csv(table, out / "each.csv")
        page.write(out / "each.md", "Each folder by itself", [page.markdown(shown), page.listed(notes)])
    return f"Written to {out}: each.md, each.csv"


def as_text(table: pd.DataFrame, target: float | None = None) -> tuple[pd.DataFrame, list[str]]:
    """Return the table with all cells as text, and the meaning of marks and columns not in every table."""
    own = table.baseline.map(lambda stage: f"speedup against {stage} on one device: no single run is equal")
    notes = table.why.where(table.baseline == "", own.where(table.baseline != SINGLE, ""))
    numbers = {note: f"[{i}]" for i, note in enumerate(filter(None, notes.unique()), start=1)}
    known, weak = table.images_per_s.notna(), table.weak_efficiency.notna()
    table = table.assign(
        spread=(table.slowest.map("{:.0f}".format) + ".." + table.fastest.map("{:.0f}".format)).where(known),
        efficiency_percent=100 * table.efficiency,
        # On one device it equals that of the previous column.
        weak_percent=100 * table.weak_efficiency if (weak & (table.devices > 1)).any() else math.nan,
        note=[numbers.get(note, "") for note in notes],
    )
    columns = dict(SHOWN)
    if target is not None:
        some = [f" ({row.target_runs} of {row.runs})" for row in table.itertuples()]
        some = table.target_s.map("{:.1f}".format) + np.where(table.target_runs < table.runs, some, "")
        table = table.assign(reached=some.where(table.target_runs > 0, "not reached"))
        columns |= {f"s to {target:g} %": ("reached", ""), "train s to it": ("target_train_s", ".1f")}
    shown = pd.DataFrame(
        {
            header: ["-" if pd.isna(value) else format(value, form) for value in table[column]]
            for header, (column, form) in columns.items()
        },
        index=table.index,
    )
    silent = ["nodes", "variant", "weak eff. %", "note", "doubt"]
    silent = [name for name in silent if set(shown[name]) <= {"", "1", "-"}]
    legends = [f"{number} {note}." for note, number in numbers.items()] + trust.legend(table)
    if "weak eff. %" not in silent:
        legends.append(WEAK_LEGEND)
    if target is not None:
        legends.append(TARGET_LEGEND.format(target))
    return shown.drop(columns=silent), legends


def _notes(rows: pd.DataFrame, skipped: list[str]) -> list[str]:
    notes, versions = [LEGEND], sorted(set(rows.torch_version))
    if "synthetic" in set(rows.dataset):
        notes.append("SYNTHETIC DATA: generated digits, NOT MNIST. Its accuracies say nothing about MNIST.")
    devices = filter(comparison.is_cpu, sorted(set(rows.device_name)))
    notes += [f"{name}: CPU workers standing in for GPUs." for name in devices]
    slow = rows[rows.slow_rank != ""].drop_duplicates("run_id")
    notes += [f"In {row.run_id} {row.slow_rank}." for row in slow.itertuples()]
    if len(versions) > 1:
        notes.append(f"The runs mix PyTorch versions: {', '.join(versions)}.")
    return notes + [f"Skipped: {sentence}" for sentence in skipped]
