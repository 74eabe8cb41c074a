"""`llms.txt` of the site (llmstxt.org): a list of its pages, each with its first sentence and its Markdown.

It is for programs that read the pages: Markdown is what their writers wrote, without the frame of a site.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

PAGE = "llms.txt"


def write(app: Sphinx, contents: dict[str, list[str]]) -> None:
    """Write the list, and the Markdown of each page beside it.

    Args:
        contents: the names of the pages below the front page, by the caption under which they are.
    """
    root = app.config.root_doc
    lines = [
        f"# {app.config.project}",
        "",
        f"> {_first_sentence(app, root)}",
        "",
        f"Version {app.config.release}.",
    ]
    for caption, pages in contents.items():
        lines += ["", f"## {caption}", ""]
        lines += [_line(app, page) for top in pages for page in _with_those_below(app, top)]
    (Path(app.outdir) / PAGE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for page in app.env.found_docs:
        shutil.copy(app.env.doc2path(page), Path(app.outdir) / f"{page}.md")


def _with_those_below(app: Sphinx, page: str) -> Iterator[str]:
    yield page
    for below in app.env.toctree_includes.get(page, []):
        yield from _with_those_below(app, below)


def _line(app: Sphinx, page: str) -> str:
    title = app.env.titles[page].astext()
    return f"- [{title}]({app.config.html_baseurl}{page}.md): {_first_sentence(app, page)}"


def _first_sentence(app: Sphinx, page: str) -> str:
    for paragraph in app.env.get_doctree(page).findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if text:
            return re.split(r"(?<=[.!?:]) (?=[A-Z])", text)[0]
    return ""
