"""What a check found, and the lines in which a job's ranks tell the doctor what they measured.

Only the standard library is needed.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

OK, WARNING, FAULT = "ok", "warning", "fault"
MARK = "checkup "  # begins every line that carries facts
NOTE = ".doctor-{job}-{node}"  # a file that shows whether a folder is shared
Ranks = dict[int, dict[str, dict]]  # rank -> topic -> facts


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


def fault_of(
    check: str, error: str, fix: str = "", node: str | None = None, rank: int | None = None
) -> Finding:
    """The fault that an error's text tells; `fix` is for one that does not say itself what to do.

    A `UserError` mostly does: "what is wrong (why): what to do".
    """
    what, _, own_fix = error.removeprefix("error: ").partition("): ")
    return Finding(check, FAULT, f"{what})" if own_fix else what, own_fix or fix, node, rank)


def facts_line(rank: int, topic: str, **facts: object) -> str:
    """The line in which a rank tells its facts about `topic`."""
    return MARK + json.dumps({"rank": rank, "topic": topic, **facts})


def read_facts(log: str) -> Ranks:
    """What the ranks told, from a job's log; lines that are not theirs, or cut short, are passed over."""
    ranks: Ranks = {}
    for line in log.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            with suppress(ValueError, KeyError):
                told = json.loads(text)
                ranks.setdefault(told.pop("rank"), {})[told.pop("topic")] = told
    return {rank: told for rank, told in sorted(ranks.items()) if "place" in told}
