"""Lists of whole numbers as Slurm and Linux write them, such as 0,2-4: of ranks, or of cores."""

from collections.abc import Iterable
from contextlib import suppress


def parse_ranges(text: str) -> list[int]:
    """Return the numbers of a list such as 0,2-4; what is no number is left out."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        with suppress(ValueError):
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as a list such as 0,2-4, each once."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
