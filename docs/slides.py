"""The slides: one for each row of the table of INSTRUCTORS.md, with its picture and its question."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from sphinx.application import Sphinx

PAGE = "slides"
LINK = r"\[(.+?)\]\((.+?)\)"
ROW = re.compile(rf"^\| {LINK} \| {LINK} \| (.+?) \| .+ \|$", re.MULTILINE)


def pages(app: Sphinx) -> Iterator[tuple[str, dict, str]]:
    """Make the page of the slides. It has its pictures in itself: one file to carry into a room."""
    table = (Path(app.srcdir) / "INSTRUCTORS.md").read_text()
    slides = [_slide(app, *row) for row in ROW.findall(table)]
    yield PAGE, {"slides": slides}, "slides.html"


def _slide(app: Sphinx, lesson: str, section: str, shown: str, picture: str, question: str) -> dict[str, str]:
    name, _, anchor = section.partition("#")
    docname = app.env.path2doc(Path(app.srcdir) / name)
    # MyST's own names of the headings differ from GitHub's where two hyphens meet.
    _, identifier, _ = app.env.metadata[docname]["myst_slugs"][anchor]
    drawing = (Path(app.srcdir) / picture).read_bytes()
    return {
        "lesson": lesson,
        "address": f"{app.builder.get_relative_uri(PAGE, docname)}#{identifier}",
        "title": ElementTree.fromstring(drawing).findtext("{*}title", shown),
        "picture": f"data:image/svg+xml;base64,{base64.b64encode(drawing).decode()}",
        "question": question.replace(" %", "\N{NO-BREAK SPACE}%"),
    }
