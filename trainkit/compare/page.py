"""Tables and sentences as text: for a terminal, for a page of Markdown, for a spreadsheet.

page.write(out / "comparison.md", "Comparison", [verdict, page.markdown(shown)])
"""

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from trainkit.files import explained, replacing

LEFT_ALIGNED = ("folder", "device", "stage", "variant", "note", "doubt")
# Characters of a line that every terminal shows.
TERMINAL_WIDTH = 110
# Characters of a line in the column `variant`, whose cells may have several lines.
VARIANT_WIDTH = 24
NO_BREAK_SPACE = "\xa0"


def write(path: Path, title: str, blocks: Iterable[str], figures: Iterable[str] = ()) -> None:
    """Write the blocks of Markdown, one below the other, then the figures, files next to `path`.

    Raises:
        OSError: if `path` cannot be written.
    """
    pictures = [f"![{name}]({name})" for name in figures]
    text = "\n\n".join([f"# {title}", *blocks, *pictures])
    with replacing(path) as file:
        file.write(f"{text}\n")


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Make the folder `out`; turn an error in making it, or in the block, into one sentence.

    Raises:
        UserError: if something cannot be written.
    """
    with explained(f"{out} cannot be written to", "give another --out."):
        out.mkdir(parents=True, exist_ok=True)
        yield


def bullets(sentences: Iterable[str]) -> str:
    """Return a list of sentences in Markdown."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def wrapped(note: str) -> str:
    """Wrap the sentence to lines that fit every terminal."""
    return textwrap.fill(note, TERMINAL_WIDTH, subsequent_indent="    ")


def plain(shown: pd.DataFrame) -> str:
    """Lay out a table of texts for a terminal; a long `variant` has more lines than one."""
    lines = []
    for row in shown.to_dict("records"):
        first, *more = _variant_lines(row.get("variant", ""))
        lines.append(row | {"variant": first})
        lines += [{"variant": text} for text in more]
    columns = []
    for name in shown:
        cells = [name, *(line.get(name, "") for line in lines)]
        width = max(map(len, cells))
        if name in LEFT_ALIGNED:
            columns.append([cell.ljust(width) for cell in cells])
        else:
            columns.append([cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _variant_lines(variant: str) -> list[str]:
    """Wrap a variant between two of its settings, not within one."""
    unbroken = variant.replace(" ", NO_BREAK_SPACE).replace(f",{NO_BREAK_SPACE}", ", ")
    lines = textwrap.wrap(unbroken, VARIANT_WIDTH, break_on_hyphens=False)
    return [line.replace(NO_BREAK_SPACE, " ") for line in lines] or [""]


def markdown(shown: pd.DataFrame) -> str:
    """Lay out a table of texts for Markdown."""
    rows = [list(shown), ["---"] * len(shown.columns), *shown.values.tolist()]
    lines = []
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write the table for a spreadsheet.

    Raises:
        OSError: if `path` cannot be written.
    """
    with replacing(path) as file:
        table.to_csv(file, index=False)
