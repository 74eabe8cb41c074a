"""Tables and sentences as text: for a terminal, for a page of Markdown, for a spreadsheet.

page.write(out / "comparison.md", Page("Comparison", [conclusion, shown]))
"""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from tabulate import tabulate

from manygpus.files import explained, replacing

LEFT_ALIGNED = ("folder", "device", "stage", "variant", "note", "doubt")
# Characters of a line that every terminal shows.
TERMINAL_WIDTH = 110
# Characters of a line in the column `variant`, whose cells may have several lines.
VARIANT_WIDTH = 24
NO_BREAK_SPACE = "\xa0"


@dataclass(frozen=True)
class Heading:
    """The title of a part of a page."""

    text: str


# A string is a paragraph, a list has a sentence for each point, and the cells of a table are texts.
Block = str | list[str] | pd.DataFrame | Heading


@dataclass(frozen=True)
class Page:
    """A title, the blocks below it, and then the figures: the names of files in the folder of the page."""

    title: str
    blocks: list[Block]
    figures: list[str] = field(default_factory=list)


def write(path: Path, page: Page) -> None:
    """Write the page as Markdown. For HTML there is `html_page.write`.

    Raises:
        OSError: if `path` cannot be written.
    """
    pictures = [f"![{name}]({name})" for name in page.figures]
    text = "\n\n".join([f"# {page.title}", *map(markdown, page.blocks), *pictures])
    with replacing(path) as file:
        file.write(f"{text}\n")


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Make the folder `out`; turn an error in making it, or in the block, into one sentence.

    Raises:
        UserError: if something cannot be written.
    """
    with explained(f"{out} cannot be written to", "give a different --out."):
        out.mkdir(parents=True, exist_ok=True)
        yield


def wrapped(note: str) -> str:
    """Wrap the sentence to lines that fit every terminal."""
    return textwrap.fill(note, TERMINAL_WIDTH, subsequent_indent="    ")


def plain(shown: pd.DataFrame) -> str:
    """Lay out a table of texts for a terminal; a long `variant` has more lines than one."""
    if "variant" in shown:
        shown = shown.assign(variant=shown.variant.map(_in_lines))
    # As a row: tabulate makes each column wider than its header.
    header = list(shown)
    return tabulate(
        [header, *shown.to_numpy().tolist()],
        tablefmt="plain",
        disable_numparse=True,
        colalign=["left" if name in LEFT_ALIGNED else "right" for name in header],
    )


def _in_lines(variant: str) -> str:
    """Wrap a variant between two of its settings, not within one."""
    unbroken = variant.replace(" ", NO_BREAK_SPACE).replace(f",{NO_BREAK_SPACE}", ", ")
    wrapped_variant = textwrap.fill(unbroken, VARIANT_WIDTH, break_on_hyphens=False)
    return wrapped_variant.replace(NO_BREAK_SPACE, " ")


def markdown(block: Block) -> str:
    """Lay out a block for Markdown."""
    if isinstance(block, pd.DataFrame):
        # A bar would end the cell, which tabulate does not escape.
        cells = block.replace(r"\|", r"\\|", regex=True)
        return cells.to_markdown(index=False, tablefmt="github", disable_numparse=True)
    if isinstance(block, Heading):
        return f"## {block.text}"
    if isinstance(block, list):
        return "\n".join(f"- {sentence}" for sentence in block)
    return block


def on_terminal(block: Block) -> str:
    """Lay out a block for a terminal."""
    if isinstance(block, pd.DataFrame):
        return plain(block)
    if isinstance(block, Heading):
        return block.text
    return "\n".join(map(wrapped, block if isinstance(block, list) else [block]))


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write the table for a spreadsheet.

    Raises:
        OSError: if `path` cannot be written.
    """
    with replacing(path) as file:
        table.to_csv(file, index=False)
