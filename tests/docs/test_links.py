"""The links between the documents, and the glossary to which many of them lead."""

import re
from pathlib import Path

import lessons
import pytest
from conftest import REPOSITORY

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TEST = re.compile(r"\[(test_\w+)\]\(([^)#]+)\)")
CODE = re.compile(r"`[^`\n]*`")


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", lessons.files("*.md"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(CODE.sub("", BLOCK.sub("", page.read_text()))):
        target = page.parent / name if name else page
        assert target.exists(), name
        if anchor:
            assert anchor in anchors(target), f"{name}#{anchor}"
    for test, file in TEST.findall(page.read_text()):
        assert f"\ndef {test}(" in (page.parent / file).read_text(), test


def test_the_glossary_is_in_order() -> None:
    terms = re.findall(r"^## (.+)$", (REPOSITORY / "GLOSSARY.md").read_text(), re.MULTILINE)
    assert len(terms) > 50 and terms == sorted(terms, key=str.lower)
