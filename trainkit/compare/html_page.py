"""A page as one file of HTML, to send to others: its figures are inside, and it loads nothing.

html_page.write(out / "comparison.html", [Page("Comparison", [verdict, shown], ["speedup.png"])])
"""

import base64
import shlex
import sys
from html import escape
from pathlib import Path
from string import Template

import pandas as pd

from trainkit.compare.page import LEFT_ALIGNED, Block, Command, Heading, Page
from trainkit.files import replacing

TEMPLATE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
p, li { max-width: 50rem }
div { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.9rem; white-space: nowrap }
td { font-variant-numeric: tabular-nums }
th, td { padding: 0.2rem 0.4rem; border-bottom: 1px solid #8886; text-align: right }
.left { text-align: left }
img { width: 44rem; max-width: 100%; border-radius: 4px }
figure { margin: 1.5rem 0 }
pre { overflow-x: auto; padding: 0.6rem; background: #8882 }
</style>
</head>
<body>
$body
<hr>
<p>Made by this command:</p>
$command
</body>
</html>
""")


def write(path: Path, pages: list[Page]) -> None:
    """Write the pages one below the other, with the command that this process was started by.

    Raises:
        OSError: if `path` cannot be written, or a figure in its folder cannot be read.
    """
    parts = []
    for page in pages:
        parts.append(f"<h1>{escape(page.title)}</h1>")
        parts += map(_block, page.blocks)
        parts += [_figure(path.parent / name) for name in page.figures]
    text = TEMPLATE.substitute(
        title=escape(pages[0].title), body="\n".join(parts), command=_block(Command(_own_command()))
    )
    with replacing(path) as file:
        file.write(text)


def _block(block: Block) -> str:
    if isinstance(block, pd.DataFrame):
        return _table(block)
    if isinstance(block, Heading):
        return f"<h2>{escape(block.text)}</h2>"
    if isinstance(block, Command):
        return f"<pre>{escape(block.line)}</pre>"
    if isinstance(block, list):
        return "\n".join(["<ul>", *(f"<li>{escape(sentence)}</li>" for sentence in block), "</ul>"])
    return f"<p>{escape(block)}</p>"


def _table(shown: pd.DataFrame) -> str:
    styles = [' class="left"' if name in LEFT_ALIGNED else "" for name in shown]
    lines = [_row("th", list(shown), styles), *(_row("td", row, styles) for row in shown.values.tolist())]
    # A table that is wider than the window scrolls in its own box.
    return "\n".join(["<div><table>", *lines, "</table></div>"])


def _row(tag: str, cells: list[str], styles: list[str]) -> str:
    written = [f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True)]
    return f"<tr>{''.join(written)}</tr>"


def _figure(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    name = escape(path.stem)
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>'


def _own_command() -> str:
    program, *arguments = sys.argv
    if program.endswith(".py"):
        return shlex.join(["python", program, *arguments])
    # A command that pip has installed.
    return shlex.join([Path(program).name, *arguments])
