"""The report on runs, for people: conclusion, tables on the terminal, comparison.md, .html, .csv, figures."""

import math
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from manygpus.errors import UserError, print_line
from manygpus.record.columns import DDP, DP, SINGLE
from manygpus.reports import comparison, doubts, figures, html_page, page
from manygpus.reports.comparison import SECTION_BY, TUTORIAL_STAGES, is_cpu, stage_name
from manygpus.reports.page import Block, Heading, Page


class _Shown(NamedTuple):
    """A column of the comparison, and the format of its numbers."""

    column: str
    format: str = ""


# The header of the speeds; where a training has another unit, `report` puts that in its place.
SPEED = "images/s"
# By their headers, with the units.
SHOWN = {
    "stage": _Shown("stage"),
    "devices": _Shown("devices", "d"),
    "nodes": _Shown("nodes", "d"),
    "batch": _Shown("global_batch", "d"),
    "variant": _Shown("variant"),
    SPEED: _Shown("images_per_s", ".0f"),
    "min..max": _Shown("spread"),
    "speedup": _Shown("speedup", ".2f"),
    "eff. %": _Shown("efficiency_percent", ".0f"),
    "weak eff. %": _Shown("weak_percent", ".0f"),
    "note": _Shown("note"),
    "doubt": _Shown("doubt"),
    "acc. %": _Shown("test_accuracy", ".2f"),
    "eval s": _Shown("eval_seconds", ".2f"),
    "wall s": _Shown("elapsed_s", ".1f"),
    "mem. MB": _Shown("peak_memory_mb", ".0f"),
    "runs": _Shown("runs", "d"),
    "epochs": _Shown("epochs"),
}
# The columns that a narrow terminal omits, in this order.
LEAST_NEEDED = (
    "eval s",
    "train s to it",
    "mem. MB",
    "epochs",
    "runs",
    "wall s",
    "min..max",
    "eff. %",
)
# The columns that are left out if no row has something to say in them.
LEFT_OUT_IF_SILENT = ("nodes", "variant", "weak eff. %", "note", "doubt")
SILENT_CELLS = {"", "1", "-"}
# Characters of a line of the table on a terminal.
MOST_CHARACTERS = 120
LEGEND = (
    "`{speeds}` is the median over all epochs but the warm-up, which is the first epoch of each process, and "
    "`min..max` is the range over the same epochs. `speedup` and `eff. %` compare a row with one device of "
    "the same kind. `wall s` counts from the start of the process (rank 0) to its last evaluation."
)
WEAK_LEGEND = (
    "`weak eff. %` compares with one device that has the same batch per device, and `eff. %` with one that "
    "has the same global batch."
)
TARGET_LEGEND = (
    "`s to {0:g} %` counts from the start of the process to the end of the first epoch with that test "
    "accuracy, and is the median of the repeats that reached it."
)


def report(paths: list[Path], out: Path, target: float | None = None, answer: Page | None = None) -> str:
    """Print the comparison of all runs under `paths`, write it to `out`, return the conclusion.

    With a `target` the tables show how long it took to reach that accuracy (%). The `answer`, to how many
    GPUs to ask for, is printed nowhere: comparison.html has it below the comparison.

    Raises:
        UserError: if a path is not there, no file can be read, or `out` cannot be written to.
    """
    rows, skipped = comparison.load_some(paths)
    table = comparison.compare(comparison.summarize(rows, target))
    sections = []
    speed_of = {}
    for task, section in table.groupby(SECTION_BY):
        in_its_unit, unit = comparison.in_its_unit(section)
        sections.append(in_its_unit)
        speed_of[task] = f"{unit}/s"
    shown, legends = as_text(pd.concat(sections).loc[table.index], target)
    notes = legends + _notes(rows, skipped, set(speed_of.values()))
    conclusion = conclude(table)
    narrow, omitted = _for_a_terminal(shown)
    blocks: list[Block] = [conclusion]
    for task, section in table.groupby(SECTION_BY):
        dataset, model, device = task
        title = f"{device}, {comparison.with_model(dataset, model)}"
        settings = comparison.common(section)
        headers = {SPEED: speed_of[task]}
        shown_section = shown.loc[section.index].rename(columns=headers)
        blocks += [Heading(title), settings, shown_section]
        # The terminal first: it is useful even if nothing can be written.
        narrow_section = narrow.loc[section.index].rename(columns=headers)
        print_line(f"{title}: {settings}\n\n{page.plain(narrow_section)}\n")
    sentences = [*notes, f"In comparison.md only: {', '.join(omitted)}."]
    print_line("\n".join(map(page.wrapped, sentences)) + "\n")
    with page.writing_to(out):
        page.write_csv(table, out / "comparison.csv")
        names = figures.draw(table, rows, out)
        compared = Page("Comparison", [*blocks, notes], names)
        page.write(out / "comparison.md", compared)
        html_page.write(out / "comparison.html", [compared, answer] if answer else [compared])
    written = ["comparison.md", "comparison.html", "comparison.csv", *names]
    print_line(f"Written to {out}: {', '.join(written)}\n")
    return conclusion


def report_each(folders: list[Path], out: Path, target: float | None = None) -> str:
    """Print a table with a separate comparison for each folder, and write it to `out`.

    Equal configurations stand below each other: yours and ours, or those of a class. A folder without
    runs is named and left out. `target` as in `report`. Return where it was written.

    Raises:
        UserError: if a folder is not there, none has runs, or `out` cannot be written to.
    """
    tables = []
    rows_of_all = []
    left_out = []
    for folder in folders:
        rows, skipped = comparison.load([folder])
        left_out += skipped
        if rows.empty:
            left_out.append(f"{folder} has no runs.")
            continue
        rows_of_all.append(rows)
        compared = comparison.compare(comparison.summarize(rows, target))
        tables.append(compared.assign(folder=str(folder)))
    if not tables:
        raise UserError(f"no runs found in {', '.join(map(str, folders))}. {' '.join(left_out)}")
    table = comparison.beneath_each_other(pd.concat(tables, ignore_index=True))
    in_its_unit, unit = comparison.in_its_unit(table)
    shown, legends = as_text(in_its_unit, target)
    shown = shown.rename(columns={SPEED: f"{unit}/s"})
    omitted = [name for name in LEAST_NEEDED if name in shown and name != "eff. %"]
    shown = shown.drop(columns=omitted)
    shown.insert(0, "folder", table.folder)
    for column, header in (("device_name", "device"), ("model", "model"), ("dataset", "dataset")):
        if table[column].nunique() > 1:
            shown.insert(1, header, table[column])
    notes = legends + _notes(pd.concat(rows_of_all), left_out, {f"{unit}/s"})
    lines = map(page.wrapped, notes)
    print_line(f"{page.plain(shown)}\n\n" + "\n".join(lines) + "\n")
    with page.writing_to(out):
        page.write_csv(table, out / "each.csv")
        page.write(out / "each.md", Page("Each folder by itself", [shown, notes]))
    return f"Written to {out}: each.md, each.csv"


# --- the table as text ------------------------------------------------------------------------------


def as_text(table: pd.DataFrame, target: float | None = None) -> tuple[pd.DataFrame, list[str]]:
    """Return the table with all cells as text, and the meaning of marks and columns not in every table.

    The speeds stand under `SPEED`, whatever their unit.
    """
    notes = [_note(row) for row in table.itertuples()]
    mark_of_note = {}
    for note in notes:
        if note and note not in mark_of_note:
            mark_of_note[note] = f"[{len(mark_of_note) + 1}]"
    # On one device the weak efficiency is the efficiency.
    has_weak = (table.weak_efficiency.notna() & (table.devices > 1)).any()
    spread = table.slowest.map("{:.0f}".format) + ".." + table.fastest.map("{:.0f}".format)
    table = table.assign(
        spread=spread.where(table.images_per_s.notna()),
        efficiency_percent=100 * table.efficiency,
        weak_percent=100 * table.weak_efficiency if has_weak else math.nan,
        note=[mark_of_note.get(note, "") for note in notes],
    )
    columns = dict(SHOWN)
    if target is not None:
        table = table.assign(reached=[_reached_in_words(row) for row in table.itertuples()])
        columns[f"s to {target:g} %"] = _Shown("reached")
        columns["train s to it"] = _Shown("target_train_s", ".1f")
    shown = pd.DataFrame(index=table.index)
    for header, (column, number_format) in columns.items():
        shown[header] = ["-" if pd.isna(value) else format(value, number_format) for value in table[column]]
    silent = [name for name in LEFT_OUT_IF_SILENT if set(shown[name]) <= SILENT_CELLS]
    legends = [f"{mark} {note}." for note, mark in mark_of_note.items()]
    legends += doubts.legend(table)
    if has_weak:
        legends.append(WEAK_LEGEND)
    if target is not None:
        legends.append(TARGET_LEGEND.format(target))
    return shown.drop(columns=silent), legends


def _note(row: tuple) -> str:
    """Return why a row has no speedup, or what it is against where that is not a `single` that is equal."""
    clauses = []
    if not row.baseline:
        clauses.append(row.why)
    elif row.baseline != SINGLE:
        clauses.append(f"speedup against {row.baseline} on one device: no single run is equal")
    if row.other_arguments:
        clauses.append(f"its arguments differ from those on one device in {row.other_arguments}")
    return "; ".join(clauses)


def _reached_in_words(row: tuple) -> str:
    """Return the seconds to the target, and how many of the runs reached it if some did not."""
    if row.target_runs == 0:
        return "not reached"
    seconds = f"{row.target_s:.1f}"
    if row.target_runs < row.runs:
        return f"{seconds} ({row.target_runs} of {row.runs})"
    return seconds


def _for_a_terminal(shown: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Leave out as many of the least needed columns as it takes, one at least; return their names too."""
    candidates = [name for name in LEAST_NEEDED if name in shown]
    omitted = []
    for name in candidates:
        omitted.append(name)
        shown = shown.drop(columns=name)
        if max(map(len, page.plain(shown).splitlines())) <= MOST_CHARACTERS:
            break
    return shown, omitted


def _notes(rows: pd.DataFrame, skipped: list[str], speeds: set[str]) -> list[str]:
    notes = [LEGEND.format(speeds=", ".join(sorted(speeds)))]
    if "synthetic" in set(rows.dataset):
        notes.append("SYNTHETIC DATA: generated digits, NOT MNIST. Its accuracies say nothing about MNIST.")
    for device_name in sorted(set(rows.device_name)):
        if is_cpu(device_name):
            notes.append(f"{device_name}: CPU workers standing in for GPUs.")
    for row in rows[rows.slow_rank != ""].drop_duplicates("run_id").itertuples():
        notes.append(f"In {row.run_id} {row.slow_rank}.")
    versions = sorted(set(rows.torch_version))
    if len(versions) > 1:
        notes.append(f"The runs mix PyTorch versions: {', '.join(versions)}.")
    return notes + [f"Skipped: {sentence}" for sentence in skipped]


# --- the conclusion ---------------------------------------------------------------------------------


def conclude(table: pd.DataFrame) -> str:
    """Say for each section what its largest counts of devices gain over one, and which rows to doubt."""
    sentences = []
    for values, section in table.groupby(SECTION_BY):
        trainings = [stage for stage in (DDP, DP) if stage in set(section.stage)]
        trainings += sorted(set(section.stage) - set(TUTORIAL_STAGES))
        clauses = [_judge(stage, section[section.stage == stage]) for stage in trainings]
        sentence = "; ".join(clauses) or "there is no run on several devices"
        named = [
            value for value, column in zip(values, SECTION_BY, strict=True) if table[column].nunique() > 1
        ]
        if named:
            sentence = f"{', '.join(named)}: {sentence}"
        sentences.append(f"{sentence}.")
    doubtful = doubts.sentence(table)
    if doubtful:
        sentences.append(doubtful)
    return " ".join(sentences)


def _judge(stage: str, rows: pd.DataFrame) -> str:
    """Return the clause of the conclusion on a stage: the best speedup on the most devices."""
    name = stage_name(stage)
    is_one_process = stage == DP or (rows.world_size < rows.devices).any()
    unit = "device" if is_one_process else "worker"
    on_several = rows[rows.devices > 1]
    if on_several.empty:
        return f"{name} had only one {unit} and cannot be judged"
    units = f"CPU {unit}s" if is_cpu(rows.device_name.iloc[0]) else f"{unit}s"
    compared = on_several[on_several.speedup.notna()]
    batch = "global batch {0.global_batch}"
    if compared.empty:
        compared = on_several[on_several.weak_efficiency.notna()]
        compared = compared.assign(
            speedup=compared.weak_efficiency * compared.devices,
            efficiency=compared.weak_efficiency,
            baseline=compared.weak_baseline,
        )
        batch = "batch {0.batch_per_device} on each"
    if compared.empty:
        why = on_several.why.iloc[0] if on_several.why.nunique() == 1 else "for the reasons noted"
        return f"{name} on {on_several.devices.max()} {units} cannot be judged ({why})"
    best = compared.sort_values(["devices", "speedup"]).iloc[-1]
    baseline = "single" if best.baseline == SINGLE else f"{name} on one"
    circumstances = [batch.format(best), best.variant]
    if best.nodes > 1:
        circumstances.append(f"{best.nodes} nodes")
    if best.doubt:
        circumstances.append(f"doubt {best.doubt}")
    return (
        f"{name} on {best.devices} {units} trained {best.speedup:.2f}x as fast as {baseline} "
        f"({100 * best.efficiency:.0f} % efficiency at {', '.join(filter(None, circumstances))})"
    )
