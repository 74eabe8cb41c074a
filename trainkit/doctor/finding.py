"""What a check found, and the lines in which a job's ranks tell the doctor about it.

Only the standard library is needed.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

OK, WARNING, FAULT = "ok", "warning", "fault"
MARK = "checkup "  # begins every line for the doctor
NOTE = ".doctor-{job}-{node}"  # a file that shows whether a folder is shared


class Finding(NamedTuple):
    """What one check found: `level` is `OK`, `WARNING` or `FAULT`; `fix` says what to do, if anything."""

    check: str
    level: str
    message: str
    fix: str = ""
    node: str | None = None
    rank: int | None = None


def has_fault(findings: Iterable[Finding]) -> bool:
    return any(finding.level == FAULT for finding in findings)


def fault_from(check: str, error: str, fix: str = "") -> Finding:
    """Make a fault of an error's text; `fix` is for one that does not say itself what to do.

    A `UserError` mostly does: "what is wrong (why): what to do".
    """
    what, _, own_fix = error.removeprefix("error: ").partition("): ")
    return Finding(check, FAULT, f"{what})" if own_fix else what, own_fix or fix)


def read_messages(log: str) -> Iterator[dict]:
    """Yield the messages in a job's log; other lines, and those that are cut short, are passed over."""
    for text in re.findall(MARK + r'(\{"rank": .*)', log):
        with suppress(ValueError):
            yield json.loads(text)


def findings_in(messages: Iterable[dict]) -> list[Finding]:
    return [Finding(**one["finding"]) for one in messages if "finding" in one]
