"""A page as one file of HTML, to send to others: its figures are inside, and it loads nothing.

html_page.write(out / "comparison.html", [Page("Comparison", [conclusion, shown], ["speedup.png"])])
"""

import base64
import shlex
import sys
from pathlib import Path

import jinja2
import pandas as pd

from manygpus.files import replacing
from manygpus.reports.page import Page

# A table that is wider than the window scrolls in its own box.
TEMPLATE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ pages[0].title }}</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
p, li { max-width: 50rem }
div { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.9rem; white-space: nowrap }
td { font-variant-numeric: tabular-nums }
th, td { padding: 0.2rem 0.4rem; border-bottom: 1px solid #8886; text-align: right }
th:first-child, td:first-child { text-align: left }
img { width: 44rem; max-width: 100%; border-radius: 4px }
figure { margin: 1.5rem 0 }
pre { overflow-x: auto; padding: 0.6rem; background: #8882 }
</style>
</head>
<body>
{% for page in pages %}
<h1>{{ page.title }}</h1>
{% for block in page.blocks %}
{% if block is string %}
<p>{{ block }}</p>
{% elif block.to_html is defined %}
<div>{{ table(block) | safe }}</div>
{% elif block.text is defined %}
<h2>{{ block.text }}</h2>
{% else %}
<ul>
{% for sentence in block %}
<li>{{ sentence }}</li>
{% endfor %}
</ul>
{% endif %}
{% endfor %}
{% for name in page.figures %}
<figure><img alt="{{ name.removesuffix('.png') }}" src="data:image/png;base64,{{ data(name) }}"></figure>
{% endfor %}
{% endfor %}
<hr>
<p>Made by this command:</p>
<pre>{{ command }}</pre>
</body>
</html>
""")


def write(path: Path, pages: list[Page]) -> None:
    """Write the pages one below the other, with the command that this process was started by.

    Raises:
        OSError: if `path` cannot be written, or a figure in its folder cannot be read.
    """
    text = TEMPLATE.render(
        pages=pages,
        table=_table,
        data=lambda name: base64.b64encode((path.parent / name).read_bytes()).decode(),
        command=_own_command(),
    )
    with replacing(path) as file:
        file.write(f"{text}\n")


def _table(shown: pd.DataFrame) -> str:
    # Or pandas would cut off what is longer than 50 characters.
    with pd.option_context("display.max_colwidth", None):
        return shown.to_html(index=False, border=0)


def _own_command() -> str:
    program, *arguments = sys.argv
    if program.endswith(".py"):
        return shlex.join(["python", program, *arguments])
    # `manygpus compare`.
    return f"{program} {shlex.join(arguments)}"
