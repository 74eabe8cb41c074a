"""Write blocks as a page of HTML to share, which needs no server and no network, or as Markdown.

Also tables and sentences as text: for a terminal, for Markdown, for a spreadsheet.

blocks = [page.Text(verdict), page.Table(shown)]
page.write(out / "report.html", "Comparison", blocks)
"""

import base64
import html
import re
import textwrap
from collections import namedtuple
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jinja2
import pandas as pd

from trainkit.runtime.files import explained, replacing
from trainkit.schema.records import no_formula

TEMPLATE = Path(__file__).with_name("report.html.j2")
LEFT_ALIGNED = ("folder", "device", "stage", "variant", "note", "doubt")
VARIANT = 24  # characters of a cell that has more lines than one


Heading = namedtuple("Heading", "text")  # the title of a section
Text = namedtuple("Text", "text")  # a paragraph
Notes = namedtuple("Notes", "lines")  # a list of sentences
Command = namedtuple("Command", "text")  # what the reader may paste into a shell


class Figure(NamedTuple):
    """A PNG, which is embedded in the page."""

    png: Path

    @property
    def address(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png.read_bytes()).decode()}"


class Table(NamedTuple):
    """A table of texts, sorted by a click on a header.

    With `runs`, also texts, a row opens to its runs: those with its index.
    """

    cells: pd.DataFrame
    runs: pd.DataFrame | None = None

    def rows(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        """Yield the texts of each row, and those of its runs."""
        for i, *texts in self.cells.itertuples(name=None):
            behind = [] if self.runs is None else self.runs[self.runs.index == i].to_numpy().tolist()
            yield texts, behind

    def numeric(self) -> list[bool]:
        """Return for each column whether it holds numbers, which are right-aligned."""
        return [bool(column.str.match(r"$|-$|-?\d").all()) for _, column in self.cells.items()]


Block = Heading | Text | Notes | Command | Figure | Table


def write(path: Path, title: str, blocks: Iterable[Block]) -> None:
    """Write the blocks, one below the other: as HTML, or as Markdown to a `path` that ends in .md.

    All their texts are escaped: no name can bring markup or a script into the page.

    Raises:
        OSError: if `path` cannot be written, or a figure cannot be read.
    """
    if path.suffix == ".md":
        text = "\n\n".join([f"# {title}", *map(_as_markdown, blocks)])
    else:
        # Blocks and loops leave no blank lines in the page.
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
        text = template.render(title=title, blocks=[(type(block).__name__, block) for block in blocks])
    with replacing(path) as file:
        file.write(text + "\n")


@contextmanager
def writing_to(out: Path, fix: str = "give another --out") -> Iterator[None]:
    """Make the folder `out`; turn an error in making it, or in the block, into one sentence.

    Raises:
        UserError: if something cannot be written.
    """
    with explained(f"{out} cannot be written to", f"{fix}."):
        out.mkdir(parents=True, exist_ok=True)
        yield


def _as_markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {escaped(text)}"
        case Text(text):
            return escaped(text)
        case Notes(lines):
            return "\n".join(f"- {escaped(line)}" for line in lines)
        case Command(text):
            return f"```\n{text}\n```"
        case Figure(png):
            return f"![{png.name}]({png.name})"
        case Table(cells, _):
            return markdown(cells)


def wrapped(note: str) -> str:
    """Wrap the sentence to lines that fit every terminal."""
    return textwrap.fill(note, 110, subsequent_indent="    ")


def plain(shown: pd.DataFrame) -> str:
    """Lay out a table of texts for a terminal; a long `variant` has more lines than one."""
    lines = []
    for row in shown.to_dict("records"):
        # A no-break space in every setting: a line ends between two of them.
        settings = row.get("variant", "").replace(" ", "\xa0").replace(",\xa0", ", ")
        first, *more = textwrap.wrap(settings, VARIANT, break_on_hyphens=False) or [""]
        lines += [row | {"variant": first}, *({"variant": text} for text in more)]
    columns = []
    for name in shown:
        cells = [name, *(line.get(name, "") for line in lines)]
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if name in LEFT_ALIGNED else cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True)).replace("\xa0", " ")


def markdown(shown: pd.DataFrame) -> str:
    """Lay out a table of texts for Markdown."""
    lines = [list(shown), ["---"] * len(shown.columns), *shown.values.tolist()]
    return "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in lines)


def escaped(text: str) -> str:
    """Escape the text for Markdown: no name may open a tag, a link, a code span or a cell."""
    return re.sub(r"[\\`|*$]|(?<=\])\(", r"\\\g<0>", html.escape(text, quote=False))


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write the table for a spreadsheet.

    Raises:
        OSError: if `path` cannot be written.
    """
    with replacing(path) as file:
        table.apply(lambda column: column.map(no_formula)).to_csv(file, index=False)
