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
VARIANT = 24  # characters of a cell that has more lines than one


def write(path: Path, title: str, blocks: Iterable[str], figures: Iterable[str] = ()) -> None:
    """Write the blocks of Markdown, one below the other, then the figures, files next to `path`.

    Raises:
        OSError: if `path` cannot be written.
    """
    with replacing(path) as file:
        file.write("\n\n".join([f"# {title}", *blocks, *(f"![{name}]({name})" for name in figures)]) + "\n")


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Make the folder `out`; turn an error in making it, or in the block, into one sentence.

    Raises:
        UserError: if something cannot be written.
    """
    with explained(f"{out} cannot be written to", "give another --out."):
        out.mkdir(parents=True, exist_ok=True)
        yield


def listed(sentences: Iterable[str]) -> str:
    """Return a list of sentences."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


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
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write the table for a spreadsheet.

    Raises:
        OSError: if `path` cannot be written.
    """
    with replacing(path) as file:
        table.to_csv(file, index=False)
