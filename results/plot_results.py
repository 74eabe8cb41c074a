"""Compare runs: a table on the terminal, comparison.md, comparison.csv and three figures.

Try: python results/plot_results.py results/runs
"""

import argparse
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # compute nodes have no screen

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainkit import analysis
from trainkit.errors import UserError, run

RESULTS = Path(__file__).resolve().parent
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
    "note": ("note", ""),
    "acc. %": ("test_accuracy", ".2f"),
    "eval s": ("eval_seconds", ".2f"),
    "wall s": ("elapsed_s", ".1f"),
    "mem. MB": ("peak_memory_mb", ".0f"),
    "runs": ("runs", "d"),
    "epochs": ("epochs", ""),
}
TEXTS = ("stage", "variant", "note")
LEGEND = (
    "images/s: median over all epochs but the warm-up (the first of a process); min..max: over the same. "
    "speedup, eff. %: against one device of the same kind. "
    "wall s: from the start of the process (rank 0) to its last evaluation."
)
# Colour is never the only difference: figures are read on grey paper too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS, LINES = "osD^vPX*", ("-", "--", ":", "-.")
BARS = {"single": ("#999999", ""), "dp": ("#F7D9A0", "xx"), "ddp": ("#BFE0F5", "//")}


def report(paths: list[Path], out: Path) -> str:
    """Print the comparison of all runs under `paths`, write it to `out`, return the verdict.

    Raises:
        UserError: if a path is not there, no file can be read, or `out` cannot be written to.
    """
    rows, skipped = analysis.load(paths)
    if rows.empty:
        reasons = " ".join(skipped) or "There is no CSV."
        raise UserError(f"no runs found in {', '.join(map(str, paths))}. {reasons}")
    table = analysis.compare(analysis.summarize(rows))
    shown, reasons = _for_people(table)
    notes = reasons + _notes(rows, skipped)
    verdict = analysis.verdict(table)
    plain, marked = [], [f"# Comparison\n\n{verdict}"]
    for (device, dataset), bench in table.groupby(analysis.BENCH):
        title, lines = f"{device}, {dataset}", shown.loc[bench.index]
        plain.append(f"{title}: {analysis.common(bench)}\n\n{_text(lines.drop(columns='eval s'))}")
        marked.append(f"## {title}\n\n{analysis.common(bench)}\n\n{_markdown(lines)}")
    # The terminal first: it is of use even where nothing can be written.
    print("\n\n".join(plain) + "\n")
    print("\n".join(textwrap.fill(note, 110, subsequent_indent="    ") for note in notes) + "\n")
    try:
        out.mkdir(parents=True, exist_ok=True)
        table.to_csv(out / "comparison.csv", index=False)
        names = _draw(table, rows, out)
        marked += ["\n".join(f"- {note}" for note in notes)] + [f"![{name}]({name})" for name in names]
        (out / "comparison.md").write_text("\n\n".join(marked) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written to ({error.strerror}): give another --out.") from None
    print(f"Written to {out}: comparison.md, comparison.csv, {', '.join(names)}\n")
    return verdict


def _for_people(table: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The table as text, and the notes that its [1], [2] point to."""
    own = table.baseline.map(
        lambda stage: f"speedup against {stage} on one device: there is no equal single run"
    )
    notes = table.why.where(table.baseline == "", own.where(table.baseline != "single", ""))
    numbers = {note: f"[{i}]" for i, note in enumerate(filter(None, notes.unique()), start=1)}
    known = table.images_per_s.notna()
    table = table.assign(
        spread=(table.slowest.map("{:.0f}".format) + ".." + table.fastest.map("{:.0f}".format)).where(known),
        efficiency_percent=100 * table.efficiency,
        note=[numbers.get(note, "") for note in notes],
    )
    shown = pd.DataFrame(
        {
            header: ["-" if pd.isna(value) else format(value, form) for value in table[column]]
            for header, (column, form) in SHOWN.items()
        },
        index=table.index,
    )
    silent = [name for name in ("nodes", "variant", "note") if set(shown[name]) <= {"", "1"}]
    return shown.drop(columns=silent), [f"{number} {note}." for note, number in numbers.items()]


def _notes(rows: pd.DataFrame, skipped: list[str]) -> list[str]:
    notes, versions = [LEGEND], sorted(set(rows.torch_version))
    if "synthetic" in set(rows.dataset):
        notes.append("SYNTHETIC DATA: generated digits, NOT MNIST. Its accuracies say nothing about MNIST.")
    devices = filter(analysis.is_cpu, sorted(set(rows.device_name)))
    notes += [f"{name}: CPU workers standing in for GPUs." for name in devices]
    if len(versions) > 1:
        notes.append(f"The runs mix PyTorch versions: {', '.join(versions)}.")
    return notes + [f"Skipped: {sentence}" for sentence in skipped]


def _text(shown: pd.DataFrame) -> str:
    columns = []
    for name in shown:
        cells = [name, *shown[name]]
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if name in TEXTS else cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _markdown(shown: pd.DataFrame) -> str:
    lines = [list(shown), ["---"] * len(shown.columns), *shown.values.tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _draw(table: pd.DataFrame, rows: pd.DataFrame, out: Path) -> list[str]:
    figures = {
        "throughput.png": _throughput(table[table.images_per_s.notna()]),
        "speedup.png": _speedup(table[table.speedup.notna()]),
        "accuracy.png": _accuracy(table, rows),
    }
    for name, figure in figures.items():
        # A figure of an earlier call would be taken for one of these runs.
        (out / name).unlink(missing_ok=True)
        if figure:
            figure.savefig(out / name, dpi=150)
            plt.close(figure)
    return [name for name, figure in figures.items() if figure]


def _throughput(table: pd.DataFrame) -> Figure | None:
    benches = list(table.groupby(analysis.BENCH))
    if not benches:
        return None
    heights = [len(bench) + 2 for _, bench in benches]
    figure, panels = _panels(len(benches), 1 + 0.36 * sum(heights), height_ratios=heights)
    for axes, (name, bench) in zip(panels, benches, strict=True):
        labels = [textwrap.fill(analysis.label(row), 32) for row in bench.itertuples()]
        spread = [bench.images_per_s - bench.slowest, bench.fastest - bench.images_per_s]
        colours, hatches = zip(*bench.stage.map(BARS), strict=True)
        look = {"color": colours, "hatch": hatches, "edgecolor": "black", "linewidth": 0.6, "capsize": 4}
        axes.barh(range(len(bench)), bench.images_per_s, xerr=spread, tick_label=labels, **look)
        axes.tick_params(axis="y", labelsize=9)
        axes.invert_yaxis()
        axes.ticklabel_format(axis="x", style="plain")
        axes.set_xlabel("training images/s: median, min to max")
        axes.set_title(_title(*name), fontsize=10)
    return figure


def _speedup(table: pd.DataFrame) -> Figure | None:
    """One line per stage and set of equal settings. One device alone makes no line."""
    groups = table.groupby(["stage", *analysis.SAME], sort=False)
    lines = [line for _, line in groups if line.devices.max() > 1]
    if not lines:
        return None
    figure, (left, right) = _panels(1, 3.6, ncols=2)
    every = sorted({1}.union(*(line.devices for line in lines)))
    most = every[-1]
    left.plot([1, most], [1, most], color="silver", linewidth=4, label="ideal")
    right.axhline(100, color="silver", linewidth=4)
    for i, line in enumerate(lines):
        counts, speedups = list(line.devices), list(line.speedup)
        if counts[0] > 1:  # the baseline is a row of another stage
            counts, speedups = [1, *counts], [1, *speedups]
        where = f" ({line.device_name.iloc[0]})" if table.device_name.nunique() > 1 else ""
        left.plot(counts, speedups, label=analysis.label(line.iloc[0], count=False) + where, **_style(i))
        right.plot(counts, [100 * s / n for s, n in zip(speedups, counts, strict=True)], **_style(i))
    left.set(xlabel="devices", ylabel="speedup over one device (x)", ylim=(0, None))
    right.set(xlabel="devices", ylabel="efficiency (%)", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks([n for n in every if n == 1 or n >= most / 8])  # closer ones would overlap
        axes.grid(alpha=0.3)
    benches = table[analysis.BENCH].drop_duplicates().values.tolist()
    figure.suptitle("\n".join(_title(*bench) for bench in benches), fontsize=10)
    _legend(figure)
    return figure


def _accuracy(table: pd.DataFrame, rows: pd.DataFrame) -> Figure | None:
    """One curve per run; repeats of a configuration look alike."""
    rows = table[[*analysis.CONFIG, "variant"]].merge(rows, on=analysis.CONFIG)
    benches = list(rows.groupby(analysis.BENCH))
    if not benches:
        return None
    figure, panels = _panels(len(benches), 1 + 3.2 * len(benches))
    styles: dict[str, dict[str, object]] = {}
    for axes, (name, bench) in zip(panels, benches, strict=True):
        for _, epochs in bench.groupby("run_id", sort=False):
            text = analysis.label(epochs.iloc[0])
            style = styles.setdefault(text, _style(len(styles)))
            axes.plot(epochs.elapsed_s, epochs.test_accuracy, label=text, **style)
        axes.set(xlabel="wall time since the start (s)", ylabel="test accuracy (%)")
        axes.set_title(_title(*name), fontsize=10)
        axes.grid(alpha=0.3)
    _legend(figure)
    return figure


def _panels(nrows: int, height: float, ncols: int = 1, **options: object) -> tuple[Figure, list[Axes]]:
    figure = plt.figure(figsize=(7, height), layout="constrained")
    return figure, list(figure.subplots(nrows, ncols, squeeze=False, gridspec_kw=options).flat)


def _title(device: str, dataset: str) -> str:
    what = "SYNTHETIC digits, not MNIST" if dataset == "synthetic" else dataset
    stand_in = "\nCPU workers standing in for GPUs" if analysis.is_cpu(device) else ""
    return f"{textwrap.fill(device, 45)}\n{what}{stand_in}"


def _style(i: int) -> dict[str, object]:
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINES[i % len(LINES)],
    }


def _legend(figure: Figure) -> None:
    """One legend under all panels; it makes the figure taller rather than the panels smaller."""
    entries: dict[str, object] = {}
    for axes in figure.axes:
        handles, texts = axes.get_legend_handles_labels()
        entries |= dict(zip(texts, handles, strict=True))
    columns = 2 if max(map(len, entries)) < 45 else 1
    figure.set_figheight(figure.get_figheight() + 0.2 * (len(entries) / columns + 1))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[RESULTS / "runs"],
        help="CSV files of runs, or folders that hold some (default: results/runs)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write to (default: results)")
    args = parser.parse_args()
    print(report(args.paths, args.out))


if __name__ == "__main__":
    run(main)
