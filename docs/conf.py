"""The site, made by Sphinx of the READMEs as they are: `make site`.

What differs from the pages on GitHub: a table of contents (`CONTENTS`), a search, the slides, and a list for
programs (llms.txt). Links are
followed as GitHub follows them: that to a folder leads to its README. What is no page of the site, such as a
script, stays in the repository.
"""

import importlib.metadata
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.matching import patfilter

sys.path.insert(0, str(Path(__file__).parent))
import llms
import slides

REPOSITORY = Path(__file__).resolve().parents[1]

# Below each page those that belong to it, in the order of the course: their addresses from that page. A `*`
# stands for all that are named nowhere here, so that a new page has a place.
CONTENTS = {
    "README": {
        "The course": ["01_singlegpu/README", "02_multigpu_dp/README", "03_multigpu_ddp/README"],
        "Your own jobs": ["YOUR_TRAINING", "slurm/README", "results/README"],
        "For instructors": ["INSTRUCTORS"],
        "Reference": [
            "CHEATSHEET",
            "GLOSSARY",
            "03_multigpu_ddp/DOS_AND_DONTS",
            "ALTERNATIVES",
            "SUPPORT",
            "SECURITY",
            "CHANGELOG",
        ],
        "For developers": ["CONTRIBUTING", "*"],
    },
    "01_singlegpu/README": {"": ["FAST", "*", "exercises/README"]},
    "03_multigpu_ddp/README": {
        "": ["LAUNCHING", "HANGS", "SCALING", "*", "beyond/README", "exercises/README"]
    },
    "03_multigpu_ddp/beyond/README": {"": ["DOES_NOT_FIT", "GPT", "*", "complete/*/README"]},
    "01_singlegpu/exercises/README": {"": ["*/README"]},
    "03_multigpu_ddp/exercises/README": {"": ["*/README"]},
    "YOUR_TRAINING": {
        "": ["03_multigpu_ddp/CHECKPOINTS", "03_multigpu_ddp/CHECKPOINTER", "03_multigpu_ddp/OUR_LOOP"]
    },
    "slurm/README": {
        "": [
            "SITE",
            "RESUME",
            "SWEEP",
            "MONITORING",
            "DATA",
            "REFERENCE",
            "*",
            "practice_cluster/README",
            "*/README",
        ]
    },
    "results/sample/README": {"": ["h100/README", "h100/one_gpu/README", "*/README"]},
    "CONTRIBUTING": {"": ["docs/dev/README"]},
    "docs/dev/README": {"": ["PACKAGE", "TESTS", "PROMISES", "*", "../../results/sample/README"]},
}


def _docname(below: str, entry: str) -> str:
    """The page that an entry of the contents names, or the pattern that it is."""
    address = entry.partition("<")[2].rstrip(">") or entry
    return posixpath.normpath(posixpath.join(posixpath.dirname(below), address))


NAMED = {
    _docname(below, entry) for below, parts in CONTENTS.items() for part in parts.values() for entry in part
}
IMAGE = re.compile(r"!\[[^]]*\]\(")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.strip()


def _pages() -> list[str]:
    """All Markdown of the repository, but for tables that programs have written.

    And but for the page that `manygpus new` copies.
    """
    not_the_template = ":!manygpus/template"
    files = _git("ls-files", "-co", "--exclude-standard", "*.md", not_the_template).splitlines()
    return [name for name in files if not name.startswith("results/sample/") or name.endswith("/README.md")]


def _repository() -> str:
    """The address of the repository, of which this clone knows it; "" if it is of none."""
    host = r"(?:https://(?:[^/@]*@)?|ssh://git@|git@)([^/:]+)[/:]"
    remote = re.fullmatch(rf"{host}(.+?)(?:\.git)?", _git("remote", "get-url", "origin"))
    return f"https://{remote[1]}/{remote[2]}" if remote else ""


def _address(path: Path) -> str:
    """Where a file or folder of the repository is: at the remote of this clone, or on this disk."""
    if not _repository():
        return path.as_uri()
    kind = "tree" if path.is_dir() else "blob"
    return f"{_repository()}/{kind}/HEAD/{path.relative_to(REPOSITORY)}"


def _last_changes() -> dict[str, str]:
    """The day of the last commit that changed each file, by its path in the repository."""
    changes: dict[str, str] = {}
    for commit in _git("log", "--format=%x00%cs", "--name-only").split("\0"):
        day, *names = commit.split("\n")
        for name in filter(None, names):
            changes.setdefault(name, day)
    return changes


project = "From one GPU to many"
release = importlib.metadata.version("manygpus")
html_title = f"{project} {release}"
copyright = "the manygpus contributors, CC BY 4.0; code: MIT license"
# Where the site is published; the workflow that publishes it knows that.
published_at = os.environ.get("PAGES_ADDRESS", "").rstrip("/")
html_baseurl = f"{published_at}/" if published_at else ""
root_doc = "README"
include_patterns = _pages()
source_suffix = {".md": "markdown"}
extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 6
# Signs as they are typed, as on GitHub.
smartquotes = False
# A block without a language is the output of a command.
highlight_language = "text"
html_theme = "furo"
# The link that edits a page.
html_theme_options = {"source_repository": _repository(), "source_branch": "main"} if _repository() else {}
templates_path = ["."]
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
# No button on what a command prints.
copybutton_selector = "div.highlight-bash pre, div.highlight-sh pre, div.highlight-python pre"


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    """End a page with the list of those below it, for the sidebar."""
    if docname == "INSTRUCTORS":
        source[0] = source[0].replace("`site/slides.html`", f'<a href="{slides.PAGE}.html">the slides</a>')
    # MyST joins the lines of a picture's description without a space.
    source[0] = IMAGE.sub(lambda image: image[0].replace("\n", "&#32;\n"), source[0])
    for caption, entries in CONTENTS.get(docname, {}).items():
        title = [f":caption: {caption}"] if caption else []
        pages = [page for entry in entries for page in _expanded(app, docname, entry)]
        source[0] += "\n".join(["\n\n```{toctree}", ":hidden:", *title, "", *pages, "```\n"])


def _expanded(app: Sphinx, below: str, entry: str) -> list[str]:
    if "*" not in entry:
        return [entry]
    matching = patfilter(app.env.found_docs, _docname(below, entry))
    return [f"/{page}" for page in sorted({*matching} - NAMED - {below, app.config.root_doc})]


def _follow_links(app: Sphinx, page: nodes.document) -> None:
    """Resolve a link to a folder, and one to a file that is no page, which MyST would not find, or copy."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for link in [*page.findall(addnodes.pending_xref), *page.findall(addnodes.download_reference)]:
        if link.get("reftype") != "myst":
            continue
        name, _, anchor = link["reftarget"].partition("#")
        path = Path(app.env.doc2path(name)) if link.get("refdomain") == "doc" else (folder / name).resolve()
        readme = app.env.path2doc(path / "README.md")
        if path.is_dir() and readme in app.env.found_docs:
            link.attributes |= {"refdomain": "doc", "reftarget": readme, "reftargetid": anchor or None}
        elif path.exists() and app.env.path2doc(path) not in app.env.found_docs:
            link.replace_self(nodes.reference("", "", *link.children, refuri=_address(path)))


LAST_CHANGES = _last_changes()


def _tell_page(app: Sphinx, page: str, template: str, context: dict, doctree: object) -> None:
    """Give a page the day of its last change, and one address, where a README has also that of its folder."""
    if page in app.env.found_docs:
        name = app.env.doc2path(page).relative_to(REPOSITORY)
        context["last_updated"] = LAST_CHANGES.get(str(name))
    if context.get("pageurl"):
        context["pageurl"] = re.sub(r"README\.html$", "", context["pageurl"])


def _list_for_programs(app: Sphinx, error: Exception | None) -> None:
    if not error:
        root = app.config.root_doc
        contents = {
            caption: [
                _docname(root, page).lstrip("/") for entry in entries for page in _expanded(app, root, entry)
            ]
            for caption, entries in CONTENTS[root].items()
        }
        llms.write(app, contents)


def _open_folders(app: Sphinx, error: Exception | None) -> None:
    """Let the address of a folder show its README, as on GitHub."""
    for page in Path(app.outdir).rglob("README.html"):
        shutil.copy(page, page.with_name("index.html"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
    # Before Sphinx collects the files to copy.
    app.connect("doctree-read", _follow_links, priority=100)
    app.connect("html-collect-pages", slides.pages)
    app.connect("html-page-context", _tell_page)
    app.connect("build-finished", _list_for_programs)
    app.connect("build-finished", _open_folders)
