"""Lists of numbers as Slurm and Linux write them."""

import pytest

from manygpus.ranges import format_ranges, parse_ranges


@pytest.mark.parametrize(
    ("text", "numbers"), [("", []), ("3", [3]), ("0-1", [0, 1]), ("0,2-4,7", [0, 2, 3, 4, 7])]
)
def test_a_list_is_read_and_written(text: str, numbers: list[int]) -> None:
    assert parse_ranges(text) == numbers
    assert format_ranges(numbers) == text


def test_what_is_no_number_is_left_out() -> None:
    assert parse_ranges("1,?,3-x,5") == [1, 5]


def test_a_number_is_written_once() -> None:
    assert format_ranges([4, 2, 3, 2]) == "2-4"
