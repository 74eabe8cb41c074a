"""A small canvas that writes SVG.

The pages need three things that matplotlib's SVG has not: a light and a dark form in one file, text that
stays text, and the same bytes whatever version draws, so that a test can tell a picture that is out of date.

A colour stands for one thing in all pictures. They are those of Okabe and Ito, made for all kinds of colour
vision, and lighter on a dark page. Lengths are in units of the picture, of which a page shows 800 or fewer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 800
FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"
SMALL = 13
NORMAL = 15

# Each colour on a light page, and on a dark one.
COLOURS = {
    # The backgrounds are those of GitHub's pages.
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "grid": ("#d8dce1", "#30363d"),
    "neutral": ("#eceef1", "#21262d"),
    # What a GPU or a core computes.
    "compute": ("#0072b2", "#56b4e9"),
    "compute-tint": ("#d3e8f5", "#12405f"),
    # Bytes between GPUs, or between nodes.
    "communication": ("#d55e00", "#ff9a52"),
    "communication-tint": ("#fbdfcc", "#5c2d0d"),
    # What fills the memory of a GPU, or a disk.
    "memory": ("#009e73", "#35cba0"),
    "memory-tint": ("#cdeee2", "#0c4636"),
    # Time that is paid for, and in which nothing is computed.
    "waiting": ("#e69f00", "#f2b737"),
    "waiting-tint": ("#fdedc6", "#574207"),
    # A second series without such a meaning; the first one has the colour of the ink.
    "second": ("#a3457c", "#e59cc4"),
}


@dataclass(frozen=True)
class Scale:
    """Places the values of an axis: the value `low` at `start`, and `high` at `end`."""

    low: float
    high: float
    start: float
    end: float
    form: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        low, high = self.form(self.low), self.form(self.high)
        return self.start + (self.end - self.start) * (self.form(value) - low) / (high - low)


class Picture:
    """A picture to which shapes are added, the later ones in front."""

    def __init__(self, title: str, height: float) -> None:
        self.title = title
        self.height = height
        self.elements: list[str] = []
        self.classes: set[str] = set()
        # More CSS, for what moves.
        self.rules: list[str] = []
        self.rect(0, 0, WIDTH, height, "paper", radius=0)

    def __str__(self) -> str:
        rules = []
        for name in sorted(self.classes):
            kind, _, colour = name.partition("-")
            rules.append(f".{name} {{ {kind}: {COLOURS[colour][1]} }}")
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{_number(self.height)}" '
            f'viewBox="0 0 {WIDTH} {_number(self.height)}" font-family="{FONT}" role="img">'
        )
        style = ["<style>", "@media (prefers-color-scheme: dark) {", *rules, "}", *self.rules, "</style>"]
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *style, *self.elements, "</svg>", ""])

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str | None,
        stroke: str | None = None,
        thick: float = 1.5,
        dashed: bool = False,
        radius: float = 4,
    ) -> None:
        self._add(
            "rect",
            {"x": x, "y": y, "width": width, "height": height, "rx": radius},
            fill,
            stroke,
            thick,
            "6 4" if dashed else "",
        )

    def circle(self, x: float, y: float, radius: float, fill: str, stroke: str | None = None) -> None:
        self._add("circle", {"cx": x, "cy": y, "r": radius}, fill, stroke, 1.5)

    def line(
        self, points: Iterable[tuple[float, float]], colour: str, thick: float = 2, dashes: str = ""
    ) -> None:
        self._add("polyline", {"points": _points(points)}, None, colour, thick, dashes)

    def polygon(self, points: Iterable[tuple[float, float]], fill: str, stroke: str | None = None) -> None:
        self._add("polygon", {"points": _points(points)}, fill, stroke, 1.5)

    def arrow(
        self,
        *points: tuple[float, float],
        colour: str = "ink",
        thick: float = 2,
        dashes: str = "",
        both: bool = False,
    ) -> None:
        """Draw an arrow along points whose last two, and first two, share a row or a column."""
        self.line(points, colour, thick, dashes)
        self._head(points[-2], points[-1], colour)
        if both:
            self._head(points[1], points[0], colour)

    def _head(self, before: tuple[float, float], tip: tuple[float, float], colour: str) -> None:
        length = abs(tip[0] - before[0]) + abs(tip[1] - before[1])
        across, down = ((tip[0] - before[0]) / length, (tip[1] - before[1]) / length)
        sides = [(tip[0] - 10 * across + 5 * s * down, tip[1] - 10 * down + 5 * s * across) for s in (1, -1)]
        self.polygon([tip, *sides], colour)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = SMALL,
        anchor: str = "start",
        bold: bool = False,
        colour: str = "ink",
        code: bool = False,
        on_lines: bool = False,
        length: float | None = None,
    ) -> None:
        """Write one line whose foot is at `y`; `anchor` says which end of it is at `x`.

        With `on_lines` it has an edge of the colour of the page, so that lines behind it do not cross it.
        With a `length` it has that width in any font.
        """
        attributes = {"x": x, "y": y, "font-size": size, "text-anchor": anchor}
        if bold:
            attributes["font-weight"] = "bold"
        if code:
            attributes["font-family"] = "Menlo, Consolas, DejaVu Sans Mono, monospace"
        if on_lines:
            attributes["paint-order"] = "stroke"
        if length:
            attributes["textLength"] = length
        edge = "paper" if on_lines else None
        self._add("text", attributes, colour, edge, 5, content=escape(words))

    def lines(self, x: float, y: float, texts: Sequence[str], size: float = SMALL, **style: object) -> None:
        """Write lines one below the other, around the middle `y`."""
        step = size + 4
        first = y - step * (len(texts) - 1) / 2 + 0.35 * size
        for number, words in enumerate(texts):
            self.text(x, first + number * step, words, size, **style)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *texts: str,
        fill: str = "paper",
        stroke: str = "ink",
        thick: float = 1.5,
        size: float = SMALL,
        code: bool = False,
        bold: bool = False,
    ) -> None:
        """Draw a box with lines in its middle."""
        self.rect(x, y, width, height, fill, stroke, thick)
        middle = (x + width / 2, y + height / 2)
        self.lines(*middle, texts, size, anchor="middle", code=code, bold=bold)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]], step: float) -> None:
        """Write a row of squares with their meanings, `step` apart."""
        for number, (colour, words) in enumerate(entries):
            left = x + number * step
            self.rect(left, y - 11, 14, 14, colour, radius=2)
            self.text(left + 20, y, words)

    def marker(self, x: float, y: float, kind: str, colour: str) -> None:
        """Mark a measured point: a different shape for each line, also for those who see no colour."""
        if kind == "circle":
            self.circle(x, y, 5, colour)
        elif kind == "square":
            self.rect(x - 4.5, y - 4.5, 9, 9, colour, radius=0)
        elif kind == "triangle":
            self.polygon([(x, y - 6), (x - 5.5, y + 4), (x + 5.5, y + 4)], colour)
        elif kind == "ring":
            self.circle(x, y, 5, "paper", colour)

    def x_axis(self, scale: Scale, ticks: Sequence[float], y: float, name: str) -> None:
        """Draw the axis at the foot of a panel, with its ticks and its name."""
        self.line([(scale.start, y), (scale.end, y)], "ink", 1)
        for tick in ticks:
            self.line([(scale(tick), y), (scale(tick), y + 4)], "ink", 1)
            self.text(scale(tick), y + 18, f"{tick:,}", anchor="middle")
        self.text((scale.start + scale.end) / 2, y + 38, name, anchor="middle")

    def y_axis(self, scale: Scale, ticks: Sequence[float], left: float, right: float, name: str = "") -> None:
        """Draw lines across a panel at the ticks; the name stands above the axis."""
        for tick in ticks:
            self.line([(left, scale(tick)), (right, scale(tick))], "grid", 1)
            self.text(left - 9, scale(tick) + 4.5, f"{tick:,}", anchor="end", colour="muted")
        if name:
            self.text(left - 7, scale(max(ticks)) - 14, name, colour="muted")

    def _add(
        self,
        tag: str,
        attributes: dict[str, object],
        fill: str | None,
        stroke: str | None = None,
        thick: float = 0,
        dashes: str = "",
        content: str = "",
    ) -> None:
        classes = []
        values = {name: _number(value) for name, value in attributes.items()}
        for kind, colour in (("fill", fill), ("stroke", stroke)):
            if colour:
                classes.append(f"{kind}-{colour}")
                values[kind] = COLOURS[colour][0]
        if not fill:
            values["fill"] = "none"
        if stroke:
            values["stroke-width"] = _number(thick)
        if dashes:
            values["stroke-dasharray"] = dashes
        self.classes.update(classes)
        written = " ".join(
            f'{name}="{value}"' for name, value in {"class": " ".join(classes), **values}.items()
        )
        self.elements.append(f"<{tag} {written}>{content}</{tag}>" if content else f"<{tag} {written}/>")


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: object) -> str:
    """Write a number with one decimal at most: a tenth of a unit is too small to be seen."""
    return str(value) if isinstance(value, str) else f"{round(float(value), 1):g}"
