"""The figures of "how many GPUs?": speedup, cost against time, time to accuracy, break-even."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainkit.analysis import comparison
from trainkit.analysis.advice import Option, Training, Wishes, interval
from trainkit.analysis.answer import InWords, number, text
from trainkit.analysis.figures import COLOURS, LINES, MARKERS, logarithmic, save
from trainkit.analysis.scaling import Shape

MOST_LINES = 4  # of a panel
LEGEND = {"fontsize": 8, "title": "filled: measured, empty: predicted", "title_fontsize": 8}
SIZES = 25  # of an epoch, from the smallest to the largest in the figure of the break-even


def draw(words: InWords, wishes: Wishes, out: Path) -> list[str]:
    """Write the figures that the answer supports into `out`, a folder that is there, and return their names.

    A figure of an earlier call that this answer does not support goes.

    Raises:
        OSError: if a file cannot be written.
    """
    plt.rcParams["text.parse_math"] = False  # a dollar sign in the name of an own training is one
    every = {
        "how_many_speedup.png": _speedup(words),
        "how_many_cost.png": _cost(words, wishes),
        "how_many_time_to_accuracy.png": _time_to_accuracy(words),
        "how_many_break_even.png": _break_even(words, wishes),
    }
    return save(every, out, dpi=120)


def _speedup(words: InWords) -> Figure | None:
    """Strong scaling, a line per global batch, and weak scaling, a line per batch of each device."""
    chosen = _of_several(words)
    if not chosen:
        return None
    gained = text(chosen.efficiency * chosen.shape.devices)
    figure, (left, right) = _panels(words, f"{words.choice(chosen)}: {gained} times as fast as one", 2)
    on_one = [shape.batch for shape in words.answer.models[chosen.stage].measured if shape.devices == 1]
    strong = _some(_batches(words.options()), chosen.global_batch)
    weak = _some(sorted(set(on_one)), chosen.shape.batch)
    _lines_by_count(left, words, chosen.stage, strong, weak=False)
    _lines_by_count(right, words, chosen.stage, weak, weak=True)
    left.set_title("strong scaling: the batch stays", fontsize=9)
    right.set_title("weak scaling: the batch of each device stays", fontsize=9)
    return figure


def _lines_by_count(axes: Axes, words: InWords, stage: str, batches: list[int], weak: bool) -> None:
    model, nodes = words.answer.models[stage], {1: 1}
    for option in words.options():
        if option.stage == stage:
            nodes.setdefault(option.shape.devices, option.shape.nodes)
    axes.plot([1, max(nodes)], [1, max(nodes)], color="silver", linewidth=4, label="ideal")
    for i, batch in enumerate(batches):
        alone, points = Shape(1, 1, batch), []
        for devices in nodes:
            shape = Shape(devices, nodes[devices], batch if weak else batch // devices)
            divides = weak or batch % devices == 0
            if divides and not model.unknown(shape) and not model.unknown(alone):
                speedup = model.step_seconds(alone) / model.step_seconds(shape) * (devices if weak else 1)
                points.append((devices, interval(speedup), shape in model.measured))
        _line(axes, points, i, f"batch {batch}{' each' if weak else ''}")
    axes.set(xlabel=words.units, ylabel="speedup over one (x)", xlim=(0.9, None), ylim=(0, None))
    axes.set_xticks([count for count in nodes if count == 1 or count >= max(nodes) / 8])  # others overlap
    axes.legend(**LEGEND)


def _cost(words: InWords, wishes: Wishes) -> Figure | None:
    """Device-hours against minutes of each option that gets there."""
    options, best = _able(words), words.answer.best
    if not options:
        return None
    message = "No choice keeps to what was asked for"
    if best:
        minutes, hours = (number(interval(draws)[1]) for draws in (best.seconds / 60, best.hours))
        message = f"{words.choice(best)}: {minutes} min, {hours} {words.hours}"
    figure, (axes,) = _panels(words, message)
    for i, (layout, group) in enumerate(_by_layout(words, options).items()):
        for option in group:
            x, y = interval(option.seconds / 60), interval(option.hours)
            lengths = [[[middle - low], [high - middle]] for low, middle, high in (y, x)]
            axes.errorbar(x[1], y[1], *lengths, elinewidth=0.6, **_look(i, bool(option.runs)))
        axes.plot([], [], **_look(i) | {"linestyle": ""}, label=layout)
    points = sorted((np.median(option.seconds) / 60, np.median(option.hours)) for option in options)
    front = [point for i, point in enumerate(points) if all(point[1] < cost for _, cost in points[:i])]
    thin = {"color": "black", "linewidth": 0.8}
    axes.plot(*zip(*front, strict=True), zorder=0, label="nothing is sooner and cheaper", **thin)
    if best:
        here = interval(best.seconds / 60)[1], interval(best.hours)[1]
        ring = {"marker": "o", "markersize": 15, "fillstyle": "none", "linestyle": ""}
        axes.plot(*here, color="black", label="recommended", **ring)
    if wishes.deadline_s:
        axes.axvline(wishes.deadline_s / 60, linestyle="--", label="deadline", **thin)
    if wishes.budget_hours:
        axes.axhline(wishes.budget_hours, linestyle=":", label="budget", **thin)
    axes.set(xlabel=f"minutes ({words.answer.goal})", ylabel=words.hours, xlim=(0, None), ylim=(0, None))
    axes.legend(**LEGEND)
    return figure


def _time_to_accuracy(words: InWords) -> Figure | None:
    """Minutes by batch; one that did not get there has no point."""
    options = _able(words)
    batches = _batches(options)
    if "accuracy" not in words.answer.goal or len(batches) < 2:
        return None
    best = words.answer.best
    alike = [option for option in options if best and option.shape.devices == best.shape.devices] or options
    first = min(alike, key=lambda option: np.median(option.seconds))
    on = words.devices(first.shape.devices)
    figure, (axes,) = _panels(words, f"On {on} batch {first.global_batch} gets there soonest")
    for i, (layout, group) in enumerate(_by_layout(words, options).items()):
        points = [(option.global_batch, interval(option.seconds / 60), bool(option.runs)) for option in group]
        _line(axes, points, i, layout)
    never = ", ".join(map(str, sorted(set(_batches(words.options())) - set(batches))))
    axes.set(xscale="log", ylim=(0, None), ylabel=f"minutes to {words.answer.goal}")
    axes.set_xlabel(f"global batch (not there at: {never})" if never else "global batch")
    axes.set_xticks(batches, list(map(str, batches)))
    axes.minorticks_off()
    axes.legend(**LEGEND)
    return figure


def _break_even(words: InWords, wishes: Wishes) -> Figure | None:
    """Minutes of a run by the size of its data, on one device and on several, with the same batch."""
    chosen = _of_several(words)
    if not chosen:
        return None
    training, batch = Training(words.rows, wishes), chosen.global_batch
    low, even, high = interval(chosen.break_even)
    between = [training.images, *(size for size in (low, even, high) if batch <= size < math.inf)]
    sizes = np.geomspace(max(min(between) / 10, batch), max(between) * 10, SIZES).astype(int)
    alike = [o.shape for o in words.options() if o.stage == chosen.stage and o.global_batch == batch]
    shapes = [Shape(1, 1, batch), *_some([shape for shape in alike if shape.devices > 1], chosen.shape)]
    figure, (axes,) = _panels(words, _pays(words, chosen))
    for i, shape in enumerate(shapes):
        points = []
        for training.images in sizes // batch * batch:
            run = training.option(chosen.stage, shape, words.answer.models[chosen.stage])
            points.append((training.images, interval(run.seconds / 60), None))
        _line(axes, points, i, words.devices(shape.devices))
    if 0 < even < math.inf:
        within = max(low, sizes[0]), min(high, sizes[-1])
        axes.axvspan(*within, color="silver", alpha=0.5, label="break-even, 90 % interval")
        axes.axvline(even, color="black", linewidth=0.8)
    logarithmic(axes)
    axes.set(xlabel=f"images of an epoch, batch {batch}", ylabel="minutes of a run, start included")
    axes.legend(fontsize=8)
    return figure


def _of_several(words: InWords) -> Option | None:
    """The recommended choice on several devices; else the fastest one, of the same batch if there is any."""
    best = words.answer.best
    several = [o for o in _able(words) if o.shape.devices > 1 and np.isfinite(o.efficiency).all()]
    if any(option is best for option in several):
        return best
    same = [option for option in several if best and option.global_batch == best.global_batch]
    return max(same or several, key=lambda option: np.median(option.images_per_s), default=None)


def _able(words: InWords) -> list[Option]:
    """Those that get there in nearly all cases."""
    return [option for option in words.options() if np.isfinite(interval(option.seconds)).all()]


def _batches(options: Iterable[Option]) -> list[int]:
    return sorted({option.global_batch for option in options})


def _some(values: Sequence, needed: object) -> list:
    """No more than a panel has room for: the first, the last, some between, and `needed`."""
    if len(values) <= MOST_LINES:
        return list(values)
    chosen = {round(i * (len(values) - 1) / (MOST_LINES - 2)) for i in range(MOST_LINES - 1)}
    return [value for i, value in enumerate(values) if i in chosen or value == needed]


def _by_layout(words: InWords, options: Iterable[Option]) -> dict[str, list[Option]]:
    """The options by training, devices and nodes, in words."""
    groups: dict[str, list[Option]] = {}
    for option in options:
        place = words.choice(option).rpartition(",")[0]
        groups.setdefault(place, []).append(option)
    return groups


def _pays(words: InWords, chosen: Option) -> str:
    several, (low, _, high) = words.devices(chosen.shape.devices), interval(chosen.break_even)
    if math.isinf(low):
        return f"{several} are later done than one, however much data there is"
    if high == 0:
        return f"{several} are sooner done than one, however little data there is"
    return f"{several} are sooner done than one from {text(chosen.break_even)} images on"


def _panels(words: InWords, message: str, count: int = 1) -> tuple[Figure, list[Axes]]:
    row = words.rows.iloc[0]
    figure = plt.figure(figsize=(8, 4.5), layout="constrained")
    about = f"{row.device_name}; {comparison.with_model(row.dataset, row.model)}"
    figure.suptitle("\n".join([textwrap.fill(message, 85), textwrap.fill(about, 85)]), fontsize=10)
    panels = list(figure.subplots(1, count, squeeze=False).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _line(axes: Axes, points: list[tuple[float, list[float], bool | None]], i: int, label: str) -> None:
    """A point is x, its interval, and whether it was measured (None: no marker)."""
    if not points:
        return
    look = _look(i) | {"marker": ""}
    x, intervals, measured = zip(*points, strict=True)
    low, middle, high = zip(*intervals, strict=True)
    axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    marked = measured[0] is not None
    axes.plot(x, middle, **look, label=None if marked else label)
    for at, value, known in zip(x, middle, measured, strict=True):
        if marked:
            axes.plot(at, value, **_look(i, known))
    if marked:
        axes.plot([], [], **_look(i), label=label)


def _look(i: int, measured: bool = True) -> dict[str, object]:
    colour = COLOURS[i % len(COLOURS)]
    return {
        "color": colour,
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINES[i % len(LINES)],
        "markerfacecolor": colour if measured else "white",
    }
