"""The figures of `make compare`, of committed runs: drawn by its own code, for the page that explains them.

A PNG has different pixels with every matplotlib. So each one carries what it shows as text, and that is what
a test compares.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from trainkit.compare import comparison, figures

REPOSITORY = Path(__file__).resolve().parents[2]
RUNS = REPOSITORY / "results" / "sample" / "cpu-2-cores" / "runs.csv"
FOLDER = REPOSITORY / "results" / "pictures"


def drawn() -> dict[Path, Figure]:
    """Draw the figures of the committed runs."""
    rows, _ = comparison.load_some([RUNS])
    made = figures.figures_of(comparison.compare(comparison.summarize(rows)), rows)
    return {FOLDER / name: figure for name, figure in made.items() if figure}


def shown(figure: Figure) -> str:
    """Return the words, bars and lines of a figure as text."""
    words = [text.get_text() for part in figure.subfigs for text in part.texts]
    panels = [
        {
            "labels": [axes.get_xlabel(), axes.get_ylabel(), *axes.get_legend_handles_labels()[1]],
            "values": [text.get_text() for text in axes.texts],
            "bars": [f"{bar.get_width():.6g}" for bar in axes.patches],
            "lines": [[f"{x:.6g} {y:.6g}" for x, y in line.get_xydata()] for line in axes.lines],
        }
        for axes in figure.axes
    ]
    return json.dumps([words, panels])


def write() -> None:
    for path, figure in drawn().items():
        figure.savefig(path, dpi=150, metadata={"Description": shown(figure), "Software": None})


def kept(path: Path) -> str:
    """Return what the committed figure shows, as `shown` wrote it."""
    with Image.open(path) as image:
        return image.info["Description"]
