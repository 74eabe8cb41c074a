"""The time of a step by phase and number of workers: a figure and a table from stage 03's breakdown.py."""

import textwrap
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from trainkit.compare import comparison
from trainkit.compare.page import markdown, writing_to
from trainkit.compare.style import PHASES, save
from trainkit.runtime.errors import UserError
from trainkit.runtime.files import replacing

# Panels differ in the first, and the bars of a panel in the second.
SETTINGS = ["device_name", "dataset", "model", "width", "precision", "recipe", "loader", "workers_per_loader"]
SETTINGS += ["threads_per_worker", "debug", "settings"]
BARS = ["global_batch", "world_size", "nodes"]
COLUMNS = ["run_id", *SETTINGS, *BARS, "rank", "repeat", "phase", "seconds"]
MOST_APART = 0.05  # the most that the sum of the phases may differ from the step, as a share of it
ROOM = 0.08  # of the widest bar: a narrower segment shows no number


def draw(files: Iterable[Path], out: Path) -> list[str]:
    """Write breakdown.png and breakdown.md into `out`, an existing folder, and return their names.

    Measurements with equal settings, batch and workers are pooled.

    Raises:
        UserError: if a file cannot be read, or `out` cannot be written to.
    """
    table = milliseconds(pd.concat([_read(file) for file in files], ignore_index=True))
    panels = list(table.groupby(SETTINGS))
    heights = [len(panel) + 2.5 for _, panel in panels]
    figure = plt.figure(figsize=(7.5, 0.8 + 0.45 * sum(heights)), layout="constrained")
    every = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights}).flat
    for axes, (_, panel) in zip(every, panels, strict=True):
        _bars(axes, panel)
        row, message = panel.sort_values("world_size").iloc[-1], "One worker has nothing to exchange"
        if row.world_size > 1:
            share = max((row.exchange + row.waiting) / row.step, 0)
            message = f"With {row.world_size} workers {100 * share:.0f} % of a step is exchange and waiting"
        axes.set_title(f"{message}\n{textwrap.fill(_settings(panel.iloc[0]), 85)}", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    shown = table.assign(settings=[_settings(row) for _, row in table.iterrows()])
    shown = shown.rename(columns={"world_size": "workers", "global_batch": "batch"})
    shown = shown[["workers", "nodes", "batch", *PHASES, "step", "settings"]]
    cells = shown.apply(lambda column: column.map("{:.2f}".format if column.dtype == float else str))
    with writing_to(out, "give another folder"):
        save({"breakdown.png": figure}, out)
        text = f"ms of a training step\n\n{markdown(cells)}\n"
        with replacing(out / "breakdown.md") as file:
            file.write(text)
    return ["breakdown.png", "breakdown.md"]


def milliseconds(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per configuration: the mean over its ranks of each phase, and of the `step` (ms).

    Each rank counts with its median over all repeats, so a busy moment of the machine does not matter.
    """
    of_rank = rows.groupby([*SETTINGS, *BARS, "phase", "rank"]).seconds.median()
    table = 1000 * of_rank.groupby([*SETTINGS, *BARS, "phase"]).mean().unstack("phase")
    return table[[*PHASES, "step"]].reset_index()


def _read(file: Path) -> pd.DataFrame:
    try:
        rows = pd.read_csv(file, sep="\t", dtype=dict.fromkeys(SETTINGS, str))
        rows = rows.assign(settings=rows.get("settings", "")).fillna({"settings": ""})[COLUMNS]
        numbers = ["rank", "seconds", *BARS]
        rows[numbers] = rows[numbers].apply(pd.to_numeric)
        if rows.isna().any(axis=None) or set(rows.phase) != {*PHASES, "step"}:
            raise ValueError("it is cut short, or has phases that are not known")
    except (OSError, ValueError, KeyError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"{file}: not read, {why}. Take it out of this folder.") from None
    return rows


def _bars(axes: Axes, panel: pd.DataFrame) -> None:
    # If nothing is exchanged, the difference may be below 0.
    bars = panel[[*PHASES]].clip(lower=0).set_axis([_label(row) for row in panel.itertuples()])
    colours = [colour for colour, _ in PHASES.values()]
    bars.plot.barh(stacked=True, ax=axes, color=colours, edgecolor="black", linewidth=0.6, legend=False)
    room, paper = ROOM * panel.step.max(), {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for segments, (_, hatch) in zip(axes.containers, PHASES.values(), strict=True):
        for segment in segments:
            segment.set_hatch(hatch)
        labels = [f"{width:.1f}" if width > room else "" for width in segments.datavalues]
        axes.bar_label(segments, labels, label_type="center", fontsize=8, bbox=paper)
    axes.plot(panel.step, range(len(panel)), "kD", markersize=5, label="the step, timed as a whole")
    axes.tick_params(axis="y", labelsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="ms of a training step: mean of the ranks", ylabel="")


def _label(row: tuple) -> str:
    nodes = f" on {row.nodes} nodes" if row.nodes > 1 else ""
    workers = "1 worker" if row.world_size == 1 else f"{row.world_size} workers"
    if abs(sum(getattr(row, phase) for phase in PHASES) / row.step - 1) > MOST_APART:
        workers += " (not quiet)"
    return f"{workers}{nodes}\nbatch {row.global_batch}"


def _settings(row: pd.Series) -> str:
    words = [row.device_name, comparison.with_model(row.dataset, row.model)]
    named = [
        name for name in SETTINGS[3:-1] if name not in ("workers_per_loader", "debug") or row[name] != "0"
    ]
    words += [f"{name.replace('_', ' ')} {row[name]}" for name in named] + [row.settings] * (
        row.settings != ""
    )
    words += ["CPU workers standing in for GPUs"] * comparison.is_cpu(row.device_name)
    return ", ".join(words)
