"""`make site`: every page is there, with its links, and a link that leads nowhere ends the build."""

import base64
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import lessons
import pytest
import release
from conftest import REPOSITORY, ran, succeeded

pytestmark = pytest.mark.full
# Tables that programs have written are no pages, nor is what `manygpus new` copies.
PAGES = [
    page
    for page in (path.relative_to(REPOSITORY) for path in lessons.files("*.md"))
    if ("sample" not in page.parts or page.name == "README.md") and "template" not in page.parts
]
ADDRESS = "https://github.com/somebody/course"
PUBLISHED = "https://somebody.github.io/course/"
CHANGED = "2026-01-02"
AS_PUBLISHED = os.environ | {"PAGES_ADDRESS": PUBLISHED}


class Page(HTMLParser):
    """What a page of the site links to, shows and names."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.images: list[dict[str, str]] = []
        self.names: set[str] = set()
        self.canonical = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str]]) -> None:
        attributes = dict(attrs)
        self.names.add(attributes.get("id"))
        if tag == "a":
            self.addresses.append(attributes.get("href", ""))
        if tag == "link" and attributes.get("rel") == "canonical":
            self.canonical = attributes["href"]
        if tag == "img":
            self.images.append(attributes)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which `make site` was called."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in lessons.files():
        copied = folder / path.relative_to(REPOSITORY)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    succeeded(ran("git", "init", "--quiet", cwd=folder))
    succeeded(ran("git", "remote", "add", "origin", f"{ADDRESS}.git", cwd=folder))
    succeeded(ran("git", "add", ".", cwd=folder))
    somebody = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    day = os.environ | {"GIT_COMMITTER_DATE": f"{CHANGED}T12:00:00"}
    succeeded(ran("git", *somebody, "commit", "--quiet", "--message=all", cwd=folder, env=day))
    # With the environment of the tests, which has the packages of the site.
    (folder / ".venv").symlink_to(sys.prefix)
    succeeded(ran("make", "--assume-old=.venv/ready-docs", "site", cwd=folder, env=AS_PUBLISHED))
    return folder


def test_every_page_is_there_and_in_the_table_of_contents(checkout: Path) -> None:
    site = checkout / "site"
    for page in PAGES:
        assert (site / page).with_suffix(".html").exists(), page
        if page.name == "README.md":
            assert (site / page).with_name("index.html").exists()
    addresses = Page(site / "search.html").addresses
    (exercise,) = (site / "03_multigpu_ddp/exercises").glob("*_hang/README.html")
    assert str(exercise.relative_to(site)) in addresses


def test_every_link_leads_somewhere(checkout: Path) -> None:
    """To a page and a heading in it; to a picture; or to a file in the repository."""
    site = checkout / "site"
    pages = {path: Page(path) for path in site.rglob("*.html")}
    in_the_repository = set()
    for path, page in pages.items():
        for address in [*page.addresses, *(image["src"] for image in page.images)]:
            name, _, anchor = address.partition("#")
            if address.startswith(ADDRESS):
                in_the_repository.add(address)
            elif not re.match(r"https?:|data:", address):
                target = (path.parent / unquote(name)).resolve() if name else path
                assert target.exists(), f"{path}: {address}"
                assert not anchor or anchor in pages[target].names, f"{path}: {address}"
    assert f"{ADDRESS}/blob/HEAD/01_singlegpu/plain.py" in in_the_repository
    assert f"{ADDRESS}/tree/HEAD/slurm/sites" in in_the_repository
    for address in in_the_repository:
        name = re.sub(r"^/(blob|tree|edit)/(HEAD|main)/|\?.*$", "", address.removeprefix(ADDRESS))
        assert (REPOSITORY / name).exists()
    assert "01_singlegpu/README.html" in pages[site / "README.html"].addresses


def test_a_page_tells_its_version_its_last_change_where_to_edit_it_and_its_address(checkout: Path) -> None:
    (version,) = {*release.versions(REPOSITORY).values()}
    for name in PAGES:
        shown = (checkout / "site" / name).with_suffix(".html")
        page = Page(shown)
        assert version in shown.read_text() and CHANGED in shown.read_text(), name
        assert f"{ADDRESS}/edit/main/{name}" in page.addresses
        assert page.canonical == PUBLISHED + str(name.with_suffix(".html")).removesuffix("README.html")


def test_programs_have_a_list_of_all_pages_with_their_markdown(checkout: Path) -> None:
    listed = (checkout / "site" / "llms.txt").read_text()
    addresses = {
        address.removeprefix(PUBLISHED)
        for address in re.findall(r"^- \[.+\]\((.+?)\): .+", listed, re.MULTILINE)
    }
    assert addresses == {str(page) for page in PAGES} - {"README.md"}
    for name in addresses:
        assert (checkout / "site" / name).is_file()


def test_what_github_shows_the_site_shows(checkout: Path) -> None:
    """Folded text, pictures with a description, and no Markdown left over."""
    for page in PAGES:
        shown = (checkout / "site" / page).with_suffix(".html").read_text()
        text = (REPOSITORY / page).read_text()
        assert shown.count("<details>") == text.count("<details>"), page
        # A comment, for MyST.
        assert not re.search(r"^ *%", text, re.MULTILINE), page
        words = re.sub(r"<(pre|code|script|style)\b.*?</\1>|<!--.*?-->", "", shown, flags=re.DOTALL)
        assert not re.search(r"\]\(|\*\*|```|quote: |\|---", words), page


def test_a_slide_for_each_question_to_ask(checkout: Path) -> None:
    text = (checkout / "site" / "slides.html").read_text()
    slides = re.findall(r"<section.*?</section>", text, re.DOTALL)
    table = (REPOSITORY / "INSTRUCTORS.md").read_text().partition("| lesson | show | ask |")[2]
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert len(slides) == len(rows) >= 10
    for slide, (_, shown, question, _) in zip(slides, rows, strict=True):
        assert f"<h1>{question}</h1>" in slide.replace("\N{NO-BREAK SPACE}", " ")
        picture = REPOSITORY / re.search(r"\((.+)\)", shown)[1]
        assert base64.b64encode(picture.read_bytes()).decode() in slide


def test_a_broken_link_ends_the_build(checkout: Path) -> None:
    """One to a file that is not there, and one to a heading that is not.

    With the settings of the build before it Sphinx reads again only the page that has changed.
    """
    with (checkout / "CHANGELOG.md").open("a") as page:
        page.write("\n[a page](nowhere.md), [a heading](README.md#not-there), [a section](#neither)\n")
    build = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--conf-dir", "docs"]
    done = ran(*build, ".", "site", cwd=checkout, env=AS_PUBLISHED)
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 3 and all("CHANGELOG.md" in line for line in warnings), done.stderr
    assert all(name in done.stderr for name in ("nowhere.md", "not-there", "neither"))
