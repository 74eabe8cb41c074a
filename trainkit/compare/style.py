"""The style of all figures: colours, hatches, markers and lines; and writing them.

Colour is never the only difference: figures are also printed in grey.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # compute nodes have no screen

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from trainkit.files import replacing
from trainkit.record.columns import DDP, DP, SINGLE

Look = dict[str, object]  # keywords of matplotlib's artists
# The palette of Okabe and Ito, made for all kinds of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS, LINES = "osD^vPX*", ("-", "--", ":", "-.")
# Colour and hatch of the bars of each stage, and of a user's own training.
STAGE_BARS = {SINGLE: ("#999999", ""), DP: ("#F7D9A0", "xx"), DDP: ("#BFE0F5", "//")}
OWN_BAR = ("#C5E8DA", "..")
THIN: Look = {"color": "black", "linewidth": 0.9}
IDEAL: Look = {"color": "silver", "linewidth": 4, "zorder": 1}


def line_look(number: int) -> Look:
    """Return the colour, marker and dash of line `number`."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
    }


def save(figures: dict[str, Figure | None], out: Path, dpi: float = 150) -> list[str]:
    """Write the figures to `out` by their names, and return the names of those written.

    A figure of an earlier call that this one lacks is removed: it would seem to show these runs.

    Raises:
        OSError: if a file cannot be written.
    """
    for name, figure in figures.items():
        if figure:
            with replacing(out / name, "wb") as file:
                figure.savefig(file, dpi=dpi)
            plt.close(figure)
        else:
            (out / name).unlink(missing_ok=True)
    return [name for name, figure in figures.items() if figure]
