"""A terminal session as a picture that plays: each line appears when it was printed, with shorter pauses.

The session is a recording of asciinema (https://docs.asciinema.org/manual/asciicast/v2/): a first line that
describes the terminal, then a line for each output with the second at which it came. Whoever asks their
machine for less motion sees the last screen, which stands still.
"""

import json
from pathlib import Path
from typing import NamedTuple

from pictures.svg import WIDTH, Picture

REPOSITORY = Path(__file__).resolve().parents[2]
SESSION = REPOSITORY / "results/sample/cpu-xeon-amx-2-cores/recording/compare.cast"
# The time of the whole picture, before it begins again, and the longest pause between two outputs in it.
LOOP_SECONDS = 15
LONGEST_PAUSE_SECONDS = 0.4
LEFT = 16
TOP = 24
LINE_HEIGHT = 15
FONT_SIZE = 11
NO_BREAK_SPACE = "\xa0"


class Line(NamedTuple):
    """A line of the terminal, and the second of the picture at which it appears."""

    text: str
    second: float


def session() -> Picture:
    """`make compare` on two CPU cores."""
    header, *outputs = map(json.loads, SESSION.read_text().splitlines())
    lines = [Line(f"$ {header['command']}", 0), *_lines(outputs, header["width"])]
    rows = header["height"]
    picture = Picture(
        "make compare in a terminal, from the command to the table", 2 * TOP + rows * LINE_HEIGHT
    )
    picture.rect(4, 4, WIDTH - 8, picture.height - 8, "paper", "grid")
    area = f'<rect x="0" y="{TOP - FONT_SIZE}" width="{WIDTH}" height="{rows * LINE_HEIGHT}"/>'
    picture.elements.append(f'<clipPath id="screen">{area}</clipPath>')
    moved = f'transform="translate(0 {_moved(len(lines), rows)})"'
    picture.elements.append(f'<g clip-path="url(#screen)"><g class="lines" {moved}>')
    column = (WIDTH - 2 * LEFT) / header["width"]
    moments = sorted({line.second for line in lines})
    for number, moment in enumerate(moments):
        picture.elements.append(f'<g class="at{number}">')
        for row, line in enumerate(lines):
            if line.second == moment and line.text:
                # SVG draws several spaces as one.
                text = line.text.replace(" ", NO_BREAK_SPACE)
                y = TOP + row * LINE_HEIGHT
                length = len(text) * column
                picture.text(LEFT, y, text, FONT_SIZE, bold=row == 0, code=True, length=length)
        picture.elements.append("</g>")
    picture.elements.append("</g></g>")
    picture.rules += _rules(lines, moments, rows)
    return picture


def _lines(outputs: list[tuple[float, str, str]], columns: int) -> list[Line]:
    """Cut the outputs into lines, and those that are longer than the terminal is wide into several."""
    lines = []
    before = outputs[0][0]
    second = 1.0
    begun = ""
    for time, _, text in outputs:
        second += min(time - before, LONGEST_PAUSE_SECONDS)
        before = time
        *ended, begun = (begun + text).split("\r\n")
        for line in ended:
            pieces = [line[start : start + columns] for start in range(0, len(line), columns)]
            lines += [Line(piece, round(second, 2)) for piece in pieces or [""]]
    return lines


def _rules(lines: list[Line], moments: list[float], rows: int) -> list[str]:
    """Return the animation: when each line appears, and how far the lines have moved up by then."""
    moving = []
    steps = []
    for number, moment in enumerate(moments):
        percent = f"{100 * moment / LOOP_SECONDS:.1f}%"
        there = sum(line.second <= moment for line in lines)
        steps.append(f"{percent} {{ transform: translateY({_moved(there, rows)}px) }}")
        if number:
            moving.append(f"@keyframes at{number} {{ 0% {{ opacity: 0 }} {percent} {{ opacity: 1 }} }}")
            moving.append(f".at{number} {{ animation: at{number} {LOOP_SECONDS}s step-end infinite }}")
    moving.append(f"@keyframes lines {{ {' '.join(steps)} }}")
    moving.append(f".lines {{ animation: lines {LOOP_SECONDS}s step-end infinite }}")
    return ["@media (prefers-reduced-motion: no-preference) {", *moving, "}"]


def _moved(there: int, rows: int) -> int:
    return -LINE_HEIGHT * max(0, there - rows)
