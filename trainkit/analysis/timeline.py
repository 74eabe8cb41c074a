"""The timeline of a job, from its samples: power, memory, cores and images/s on one time axis.

Each GPU, rank or node is a row as high as what it may use at most; what it used of that is filled.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from trainkit import samples
from trainkit.analysis import waste, watched
from trainkit.analysis.figures import save
from trainkit.errors import UserError, printable
from trainkit.samples import GPU, NODE, RANK

EPOCH = ["epoch", "warmup", "world_size", "loader", "images_per_s"]
EPOCH += ["train_seconds", "eval_seconds", "recorded_at"]
OF_RANKS = ["own_seconds", "data_seconds"]
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
EPOCHS_INCHES, SPEED_INCHES = 0.5, 1.2
MOST_ROWS = 16  # of a panel
MOST_EPOCHS = 60  # whose evaluations are shaded: those of more would leave nothing white
APART = 0.03  # of the width, between the numbers of two epochs
FILLED = 0.86  # of a row; the rest is the space to the next one
STATES = {"T": "stopped", "D": "waits for a disk"}  # of a process, in which it does nothing
# Colour is never the only difference: figures are read on grey paper too.
Look = dict[str, object]
POWER: Look = {"facecolor": "#0072B2"}
SLOWED: Look = {"facecolor": "white", "edgecolor": "#0072B2", "hatch": "||||||", "linewidth": 0}
MEMORY: Look = {"facecolor": "#E69F00"}
CORES: Look = {"facecolor": "#009E73"}
LOADERS: Look = {"facecolor": "white", "edgecolor": "#005C43", "hatch": "/////", "linewidth": 0}
DATA: Look = {"facecolor": "white", "edgecolor": "#D55E00", "hatch": "xxxxx", "linewidth": 0}
OTHERS: Look = {"facecolor": "#F7D9A0", "edgecolor": "#7A5200", "hatch": ".....", "linewidth": 0}
TRAINING: Look = {"facecolor": "#BFE0F5", "edgecolor": "black", "linewidth": 0.4}
EVALUATION: Look = {"facecolor": "#777777", "edgecolor": "black", "linewidth": 0.4}
SHADE: Look = {"facecolor": "#D0D0D0", "linewidth": 0, "zorder": 0.1}
NO_SAMPLES: Look = {"facecolor": "white", "edgecolor": "#BBBBBB", "hatch": "////", "linewidth": 0}
UNUSED: Look = {"facecolor": "#ECECEC", "linewidth": 0, "zorder": 0}
LINE: Look = {"color": "black", "linewidth": 0.9}
SMALL: Look = {"fontsize": 8, "va": "center"}


class Row(NamedTuple):
    """What is drawn of it, by the time in s since 1970, as shares of what it may use at most.

    `areas` are one above the other, `line` is across. `told` stands on the right, in bold if it is a
    `warning`. Of too many rows those of most `weight` are shown.
    """

    label: str
    areas: pd.DataFrame
    told: str
    warning: bool
    weight: float = 0
    line: pd.Series | None = None


class Panel(NamedTuple):
    """`looks` are those of its rows' areas, by what they are; `line` is what their lines are.

    `beside` is what stands on the right of the rows, `chosen` which of too many are shown.
    """

    title: str
    rows: list[Row]
    looks: dict[str, Look]
    beside: str = ""
    chosen: str = ""
    line: str = ""


def draw(folder: Path, out: Path) -> Path:
    """Write the timeline of the job with the samples in `folder` to `out`, a PNG, and return that.

    Raises:
        UserError: if there are no samples, or `out` cannot be written.
    """
    if out.suffix.lower() != ".png":  # what is there may be no picture, and would be replaced
        raise UserError(f"the timeline is a PNG: give a file that ends in .png instead of {out.name!r}.")
    try:
        save({out.name: figure(folder)}, out.parent)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): give another file.") from None
    return out


def figure(folder: Path) -> Figure:
    """The same as a figure, not written yet.

    Raises:
        UserError: if there are no samples.
    """
    plt.rcParams["text.parse_math"] = False  # a dollar sign in the name of a node is one
    job = watched.Job(folder)
    verdict = waste.judge_job(job).lines(f"job {_name(folder)}")
    every = [row["time"] for series in job.rows.values() for rows in series.values() for row in rows]
    start, end = min(every), max(*every, min(every) + 1)
    epochs = _epochs(job)
    epochs = epochs[(epochs.began < end) & (epochs.tested > start)]
    parts: list[tuple[float, Callable[[Axes], None]]] = []
    if len(epochs):
        parts.append((EPOCHS_INCHES, partial(_draw_epochs, epochs, (end - start) * APART)))
        parts.append((SPEED_INCHES, partial(_draw_speed, epochs)))
    panels = [_shares(epochs), _power(job), _cores(job), _memory(job)]
    parts += [(_inches(panel), partial(_draw_rows, panel)) for panel in panels if panel.rows]
    if not parts:
        raise UserError(f"the samples in {folder} tell of no GPU, no rank and no memory: nothing to draw.")
    gaps = _gaps(job, sorted(set(every)))
    heights = [inches for inches, _ in parts]
    drawn = plt.figure(figsize=(10, 1 + sum(heights)), layout="constrained")
    axes_of_parts = drawn.subplots(len(parts), sharex=True, squeeze=False, height_ratios=heights).flat
    for axes, (_, draw_part) in zip(axes_of_parts, parts, strict=True):
        draw_part(axes)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8)
        axes.grid(axis="x", alpha=0.4)
        axes.set_axisbelow(True)
        if len(epochs) <= MOST_EPOCHS:
            _bands(axes, zip(epochs.trained, epochs.tested, strict=True), SHADE)
        _bands(axes, gaps, NO_SAMPLES)
    _draw_time(axes, start, end)
    axes.set_xlabel(f"{axes.get_xlabel()}\n{_wrapped(verdict[-1], 120)}", fontsize=9)
    drawn.suptitle(_wrapped(verdict[0], 95), x=0.01, ha="left", fontsize=11, weight="bold")
    return drawn


def _power(job: watched.Job) -> Panel:
    rows, looks = [], {"power": POWER, "while slowed by heat": SLOWED}
    for label, gpu, of_gpu in _each(job, GPU):
        judged = pd.DataFrame(job.judged[GPU].get(gpu, job.rows[GPU][gpu]))
        limit, median = of_gpu.power_limit_w.max(), _median(judged.power_w)
        told, warning = [_of(median, limit, "W")], job.busy(gpu) < waste.LOW
        if (judged.ranks == "-").mean() >= waste.UNSEEN:
            told.append("no rank")
        if (part := _is_hot(judged).mean()) >= waste.HOT:
            told.append(f"slowed by heat {100 * part:.0f} % of the time")
        share, hot = of_gpu.power_w / (limit if limit > 0 else of_gpu.power_w.max()), _is_hot(of_gpu)
        areas = pd.concat([share.mask(hot, 0), share.mask(~hot, share * 0)], axis=1, keys=looks)
        warning = warning or len(told) > 1
        rows.append(Row(label, areas, ", ".join(told), warning, -median, of_gpu.utilisation / 100))
    title = "power of each GPU, a full row is its limit"
    return Panel(title, rows, looks, "median", "with the least power", "utilisation")


def _memory(job: watched.Job) -> Panel:
    rows, looks = [], {"memory": MEMORY}
    for what, full in ((GPU, waste.GPU_FULL), (NODE, waste.HOST_FULL)):
        for label, _, of_one in _each(job, what):
            share = of_one.memory_mb / of_one.memory_limit_mb
            if share.max() >= 0:
                told = _of(of_one.memory_mb.max() / 1000, of_one.memory_limit_mb.max() / 1000, "GB")
                areas = pd.concat([share], axis=1, keys=looks)
                rows.append(Row(label, areas, told, share.max() >= full, share.max()))
    return Panel("memory, a full row is all of it", rows, looks, "most", "that are fullest")


def _cores(job: watched.Job) -> Panel:
    """In a job with GPUs only if there are loader workers."""
    every, looks = list(_each(job, RANK)), {"own process": CORES, "loader workers": LOADERS}
    if not every or (job.rows[GPU] and not any((rank.loaders > 0).any() for _, _, rank in every)):
        return Panel("", [], {})
    used = pd.concat([rank.cores + rank.loader_cores.fillna(0) for _, _, rank in every])
    most = max(1, math.ceil(used.quantile(0.99) - 0.1)) if used.notna().any() else 1
    rows = []
    for label, place, rank in every:
        judged = pd.DataFrame(job.judged[RANK].get(place, job.rows[RANK][place]))
        median, told = _median(judged.cores), []
        waiting = job.waits_for_core(place)
        if waiting >= waste.CROWDED:
            told.append(f"waits for a core {100 * waiting:.0f} % of the time")
        for state, words in STATES.items():
            if (part := (judged["name"] == state).mean()) >= waste.WORTH:
                told.append(f"{words} {100 * part:.0f} % of the time")
        warning = bool(told)
        if (loaders := _median(judged.loaders)) > 0:
            each = f"{loaders:.0f} loader worker{'' if loaders == 1 else 's'}"
            told.insert(0, f"{each}\xa0{_median(judged.loader_cores):.1f}")
        told.insert(0, f"{median:.1f} cores")
        areas = (rank[["cores", "loader_cores"]] / most).set_axis(list(looks), axis=1)
        line = rank.waiting.where(rank.cores >= waste.NO_CORE)
        rows.append(Row(label, areas, ", ".join(told), warning, -median, line))
    title = f"cores of each rank, a full row is {most}"
    return Panel(title, rows, looks, "median", "that use the fewest", "waiting for a core")


def _shares(epochs: pd.DataFrame) -> Panel:
    """Where the time of the training went, as the ranks told it."""
    known = epochs[epochs.data.notna() & epochs.others.notna()]
    if known.empty:
        return Panel("", [], {})
    looks = {"waiting for data": DATA, "computing": POWER, "exchange and other ranks": OTHERS}
    shares = pd.concat([known.data, 1 - known.data - known.others, known.others], axis=1, keys=looks)
    began, trained = shares.assign(time=known.began), shares.assign(time=known.trained)
    after = trained.assign(**dict.fromkeys(looks, math.nan))  # nothing, until the next epoch
    areas = pd.concat([began, trained, after]).sort_index(kind="stable").set_index("time")
    data, others = ((share * known.train_seconds).sum() for share in (known.data, known.others))
    data, others = data / known.train_seconds.sum(), others / known.train_seconds.sum()
    told = [f"data {100 * data:.0f} %"]
    if (known.world_size > 1).any():
        told.append(f"other ranks {100 * others:.0f} %")
    much = waste.DATA_WAIT if (known.loader == "workers").any() else waste.DATA_WORK
    row = Row("training", areas, ", ".join(told), data >= much or others >= waste.EXCHANGE)
    return Panel("time of each epoch's training", [row], looks, "mean")


def _epochs(job: watched.Job) -> pd.DataFrame:
    """Those of the records that tell when they were: training from `began` to `trained`, then `tested` (s).

    `data` and `others` are shares of the training, as the mean of the ranks: waiting for data, and for
    other ranks and the exchange; NaN where that is not known.
    """
    found = [pd.DataFrame(columns=[*EPOCH, *OF_RANKS], dtype=float)]
    for training in job.trainings:
        of_ranks = pd.DataFrame(training.of_ranks, columns=["epoch", *OF_RANKS]).groupby("epoch").mean()
        found.append(pd.DataFrame(training.epochs)[EPOCH].join(of_ranks, on="epoch"))
    table = pd.concat(found[1:] or found, ignore_index=True)
    table["tested"] = table.recorded_at.map(watched.since_1970).astype(float)
    table["trained"] = table.tested - table.eval_seconds
    table["began"] = table.trained - table.train_seconds
    table["data"] = (table.data_seconds / table.train_seconds).clip(upper=1)
    others = (1 - table.own_seconds / table.train_seconds).where(table.world_size > 1, 0)
    table["others"] = others.clip(0, 1 - table.data.fillna(0))
    return table


def _each(job: watched.Job, what: str) -> Iterator[tuple[str, watched.Place, pd.DataFrame]]:
    """Label, place and samples of each GPU, rank or node, by their time; at the end of a gap, one of NaN."""
    nodes = [node for node, _ in job.rows[NODE]]
    hosts = {node.partition(".")[0] for node in nodes}
    for place in sorted(job.rows[what], key=lambda place: (samples.natural(place[0]), place[1])):
        node, number = place
        words = [] if what == NODE else [f"{'GPU' if what == GPU else what} {number}"]
        if len(nodes) > 1 or what == NODE:
            words.insert(0, _short(node.partition(".")[0] if len(hosts) == len(nodes) else node))
        rows = job.rows[what][place]
        whole = {id(after) for _, after in watched.together(rows)}
        ends = [{"time": row["time"]} for row in rows[1:] if id(row) not in whole]
        frame = pd.DataFrame([*ends, *rows]).sort_values("time", kind="stable")
        yield " ".join(words), place, frame.set_index("time")


def _gaps(job: watched.Job, moments: list[float]) -> list[tuple[float, float]]:
    """When no node was sampled."""
    whole = [pair for rows in job.rows[NODE].values() for pair in watched.together(rows)]
    longest = max((after["time"] - before["time"] for before, after in whole), default=math.inf)
    return [(before, after) for before, after in pairwise(moments) if after - before > longest]


def _median(values: pd.Series) -> float:
    return values.dropna().median()  # numpy warns of one that is only NaN


def _is_hot(rows: pd.DataFrame) -> pd.Series:
    return rows.throttled.str.contains("heat", na=False)


def _inches(panel: Panel) -> float:
    return 0.45 + min(len(panel.rows), MOST_ROWS) * min(0.6, max(0.2, 1.8 / len(panel.rows)))


def _draw_rows(panel: Panel, axes: Axes) -> None:
    by_weight = np.argsort([-row.weight for row in panel.rows], kind="stable")  # NaN comes last
    rows = [panel.rows[i] for i in sorted(by_weight[:MOST_ROWS])]
    handles: dict[str, Artist] = {}
    middles = [number + FILLED / 2 for number in reversed(range(len(rows)))]
    for middle, row in zip(middles, rows, strict=True):
        bottom, top = middle - FILLED / 2, middle + FILLED / 2
        axes.axhspan(bottom, top, **UNUSED)
        times, known = row.areas.index.to_numpy(), row.areas.notna().any(axis=1).to_numpy()
        below = np.full(len(times), bottom)
        for name, look in panel.looks.items():
            share = row.areas[name].fillna(0).to_numpy()
            if (share > 0).any():
                above = np.minimum(below + FILLED * share, top)
                axes.fill_between(times, below, above, where=known, step="pre", **look)
                below, handles[name] = above, Patch(**look)
        if row.line is not None and (row.line > 0).any():
            line = bottom + FILLED * row.line.clip(0, 1).to_numpy()
            axes.plot(times, line, drawstyle="steps-pre", **LINE)
            handles[panel.line] = Line2D([], [], **LINE)
        _beside(axes, middle, _wrapped(row.told, 30), weight="bold" if row.warning else "normal")
    axes.set_yticks(middles, [row.label for row in rows])
    axes.set_ylim(0, len(rows) - 1 + FILLED)
    which = f": the {len(rows)} of {len(panel.rows)} {panel.chosen}" if len(rows) < len(panel.rows) else ""
    _title(axes, panel.title + which, panel.beside)
    if len(handles) > 1:
        _legend(axes, handles)


def _draw_epochs(epochs: pd.DataFrame, apart: float, axes: Axes) -> None:
    _bands(axes, zip(epochs.began, epochs.trained, strict=True), TRAINING)
    _bands(axes, zip(epochs.trained, epochs.tested, strict=True), EVALUATION)
    written = -math.inf
    for epoch in epochs.itertuples():
        middle = (epoch.began + epoch.trained) / 2
        if middle > written + apart:
            axes.text(middle, 0.45, f"{epoch.epoch:.0f}", ha="center", clip_on=True, **SMALL)
            written = middle
    axes.set_yticks([])
    axes.set_ylim(0, 1)
    _title(axes, "epochs")
    _legend(axes, {"training": Patch(**TRAINING), "evaluation": Patch(**EVALUATION)})


def _draw_speed(epochs: pd.DataFrame, axes: Axes) -> None:
    steady = epochs[epochs.warmup == 0]
    median = (epochs if steady.empty else steady).images_per_s.median()
    axes.hlines(epochs.images_per_s, epochs.began, epochs.trained, color="black", linewidth=2.5)
    axes.set_ylim(0, 1.15 * epochs.images_per_s.max())
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.4)
    _beside(axes, median, f"{median:,.0f}")
    _title(axes, "images/s of each epoch's training", "median")


def _draw_time(axes: Axes, start: float, end: float) -> None:
    unit, units = next((unit for unit in UNITS if end - start >= 2 * unit[0]), UNITS[-1])
    ticks = MaxNLocator(8).tick_values(0, (end - start) / unit)
    axes.set_xticks([start + tick * unit for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlim(start, end)
    axes.set_xlabel(f"{units} since {datetime.fromtimestamp(start, timezone.utc):%Y-%m-%d %H:%M:%S} UTC")


def _bands(axes: Axes, spans: Iterable[tuple[float, float]], look: Look) -> None:
    """From the bottom to the top."""
    widths = [(start, end - start) for start, end in spans]
    axes.broken_barh(widths, (0, 1), transform=axes.get_xaxis_transform(), **look)


def _beside(axes: Axes, y: float, text: str, **look: object) -> None:
    axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), **SMALL, **look)


def _title(axes: Axes, text: str, beside: str = "") -> None:
    axes.set_title(text, loc="left", fontsize=9)
    above = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    axes.annotate(beside, (1.01, 1), **above, fontsize=8, style="italic")


def _legend(axes: Axes, handles: dict[str, Artist]) -> None:
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(handles.values(), handles, ncols=len(handles), frameon=False, fontsize=8, **where)


def _of(value: float, limit: float, unit: str) -> str:
    """Such as 290 of 400 W, or 34.1 of 79.6 GB."""
    digits = 1 if unit == "GB" else 0
    known, most = (f"{number:,.{digits}f}" if math.isfinite(number) else "?" for number in (value, limit))
    return f"{known} of {most} {unit}"


def _wrapped(words: str, width: int) -> str:
    words = words.replace(" %", "\xa0%")  # which belongs to its number
    return textwrap.fill(words, width, max_lines=4, break_on_hyphens=False)


def _name(folder: Path) -> str:
    folder = folder.resolve()
    return (folder.parent if folder.name == samples.FOLDER else folder).name


def _short(name: str, most: int = 18) -> str:
    """Without its middle, as the names of nodes differ at their ends."""
    name = printable(name)
    return name if len(name) <= most else f"{name[: most // 3]}..{name[-most // 2 :]}"
