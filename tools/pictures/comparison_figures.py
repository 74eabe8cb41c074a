"""The figures of `make compare`, of committed runs: drawn by its own code, for the page that explains them.

`make compare` writes PNGs. A page has the same figures as SVGs, which have a light and a dark form in one
file. matplotlib writes different bytes with every version. So each file carries what it shows as text, and
that is what a test compares.
"""

import json
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from manygpus.reports import comparison, figures
from pictures.svg import COLOURS

REPOSITORY = Path(__file__).resolve().parents[2]
RUNS = REPOSITORY / "results" / "sample" / "cpu-2-cores" / "runs.csv"
FOLDER = REPOSITORY / "results" / "pictures"
# Letters as outlines, since a browser's font is wider or narrower than the one that matplotlib has measured.
# The salt keeps the names inside the file the same from one call to the next.
SVG_STYLE = {"svg.fonttype": "path", "svg.hashsalt": "figures of a comparison"}
# The colours of the figures on a dark page, by those on a light one.
ON_A_DARK_PAGE = {
    "#ffffff": COLOURS["paper"][1],
    "#000000": COLOURS["ink"][1],
    "#696969": COLOURS["muted"][1],
    "#b0b0b0": COLOURS["muted"][1],
    "#cccccc": COLOURS["grid"][1],
    "#0072b2": COLOURS["compute"][1],
    "#d55e00": COLOURS["communication"][1],
    "#009e73": COLOURS["memory"][1],
    "#cc79a7": COLOURS["second"][1],
    # Named by marks that are only lines, so it is not seen.
    "#1f77b4": COLOURS["compute"][1],
}


def drawn() -> dict[Path, Figure]:
    """Draw the figures of the committed runs."""
    rows, _ = comparison.load_some([RUNS])
    made = figures.figures_of(comparison.compare(comparison.summarize(rows)), rows)
    return {(FOLDER / name).with_suffix(".svg"): figure for name, figure in made.items() if figure}


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
        with matplotlib.rc_context(SVG_STYLE):
            figure.savefig(
                path,
                metadata={
                    "Title": path.stem.capitalize(),
                    "Description": shown(figure),
                    "Date": None,
                    "Creator": None,
                },
            )
        light = path.read_text()
        before, tag, after = light.partition("<defs>")
        path.write_text(f"{before}{_dark_style()}{tag}{after}")


def _dark_style() -> str:
    """Return the rules that a browser on a dark page applies over the colours that matplotlib has written."""
    # Outlines of letters name no colour: theirs is that of the whole picture.
    rules = [f"svg {{ fill: {ON_A_DARK_PAGE['#000000']} }}"]
    for light, dark in ON_A_DARK_PAGE.items():
        for kind in ("fill", "stroke"):
            rules.append(f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}')
    return "\n".join(["<style>", "@media (prefers-color-scheme: dark) {", *rules, "}", "</style>", " "])


def kept(path: Path) -> str:
    """Return what the committed figure shows, as `shown` wrote it."""
    description = ElementTree.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
    return description.text
