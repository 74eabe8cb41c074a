"""The sections of the pages that an exercise needs."""

import re
from pathlib import Path
from typing import NamedTuple

HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FOLDED = re.compile(r"<details>.*?</details>|<!--.*?-->", re.DOTALL)
WORDS_PER_MINUTE = 200


class Section(NamedTuple):
    """A section of a page, by the anchor of its heading."""

    page: Path
    anchor: str
    title: str

    @property
    def text(self) -> str:
        """Return what there is to read, without what is folded.

        Raises:
            LookupError: if the page has no such section.
        """
        page = self.page.read_text()
        # In code, a line that begins with `#` is a comment.
        headings = list(HEADING.finditer(CODE.sub(lambda code: " " * len(code[0]), page)))
        for number, heading in enumerate(headings):
            if anchor_of(heading[2]) == self.anchor:
                ends = (end.start() for end in headings[number + 1 :] if len(end[1]) <= len(heading[1]))
                return FOLDED.sub("", page[heading.start() : next(ends, len(page))])
        raise LookupError(f"{self.page} has no section #{self.anchor}")


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
