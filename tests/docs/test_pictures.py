"""The pictures are those of tests/pictures.py, and nothing in them is cut off."""

from xml.etree import ElementTree

import pictures
import pytest
from conftest import REPOSITORY


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_up_to_date(name: str) -> None:
    assert (REPOSITORY / name).read_text() == pictures.PICTURES[name](), "run `make lessons`"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_has_a_title_and_nothing_outside(name: str) -> None:
    root = ElementTree.fromstring((REPOSITORY / name).read_text())
    height = int(root.get("height"))
    assert root.find("{*}title").text
    for rect in root.findall("{*}rect"):
        x, y, wide, high = (float(rect.get(side, 0)) for side in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= pictures.WIDTH and 0 <= y <= y + high <= height
    for words in root.findall("{*}text"):
        # 0.55 of its size: more than a letter takes in DejaVu Sans, the widest of the fonts.
        x, y, size = (float(words.get(name)) for name in ("x", "y", "font-size"))
        long = 0.55 * size * len(words.text)
        left = x if words.get("text-anchor") == "start" else x - long / 2
        assert left >= 0 and left + long <= pictures.WIDTH and size <= y <= height - 4, words.text


def test_the_ring_adds_up() -> None:
    *_, scattered, _, gathered = pictures.ring_steps([[1, 2, 3], [10, 20, 30], [100, 200, 300]])
    assert gathered == 3 * [[111, 222, 333]]
    assert [held.count(total) for held, total in zip(scattered, (222, 333, 111), strict=True)] == [1, 1, 1]
