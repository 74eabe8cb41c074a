"""One page to share: an HTML file that a browser shows without a server and without a network.

page.write(out / "report.html", "Comparison", [page.Text(verdict), page.Table(shown)])
"""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jinja2
import pandas as pd

TEMPLATE = Path(__file__).with_name("report.html.j2")


class Heading(NamedTuple):
    """The title of a section."""

    text: str


class Text(NamedTuple):
    """A paragraph."""

    text: str


class Notes(NamedTuple):
    """A list of sentences."""

    lines: list[str]


class Command(NamedTuple):
    """What the reader may paste into a shell."""

    text: str


class Figure(NamedTuple):
    """A PNG, which becomes a part of the page; `text` says what it shows."""

    png: Path
    text: str

    @property
    def address(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png.read_bytes()).decode()}"


class Table(NamedTuple):
    """A table of texts, sorted by a click on a header.

    With `runs`, texts too, a row opens to the runs behind it: to those that have its index.
    """

    cells: pd.DataFrame
    runs: pd.DataFrame | None = None

    def rows(self) -> list[tuple[list[str], list[list[str]]]]:
        """The texts of each row, and those of the runs behind it."""
        behind: dict[object, list[list[str]]] = {}
        if self.runs is not None:
            for i, *texts in self.runs.itertuples(name=None):
                behind.setdefault(i, []).append(texts)
        return [(texts, behind.get(i, [])) for i, *texts in self.cells.itertuples(name=None)]

    def numeric(self) -> list[bool]:
        """Of each column, whether it holds numbers, which stand better on the right."""
        return [bool(column.str.match(r"$|-$|-?\d").all()) for _, column in self.cells.items()]


Block = Heading | Text | Notes | Command | Figure | Table


def write(path: Path, title: str, blocks: Iterable[Block]) -> None:
    """Write the blocks, one below the other, as a page of its own.

    Whatever is in their texts shows as it is written: no name can bring markup or a script into the page.

    Raises:
        OSError: if `path` cannot be written, or a figure cannot be read.
    """
    # Blocks and loops leave no blank lines in the page.
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    kinds = [(type(block).__name__, block) for block in blocks]
    # A file name may not be UTF-8.
    path.write_text(template.render(title=title, blocks=kinds) + "\n", encoding="utf-8", errors="replace")
