r"""The number by which the runs of a sweep are compared (`sweep.py --metric`).

`--metric val_loss` is the column `val_loss` of a run's record, or the number that stands behind `val_loss` in
its log. `--metric 'val_loss=([\d.]+)'` is a regular expression for its log, whose group marks the place of
the number: the whole number there counts, as 1.2e-05, -3 or nan, of which `[\d.]+` alone would read a part,
or leave an earlier number as the last one. In a log the last match counts.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from manygpus.errors import UserError
from manygpus.jobs import job_log
from manygpus.jobs.sweeps.recorded_runs import RecordedRun, recorded_runs
from manygpus.record import records

MINIMIZE, MAXIMIZE = "minimize", "maximize"
# Begins where no other number goes on, so that `loss.*([\d.]+)` finds a whole one.
_BEGINS = r"(?<![\d.])(?<!\d[eE])(?<!\d[eE][-+])"
_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
NUMBER = rf"[-+]?(?:{_BEGINS}{_DIGITS}|\b(?i:nan|inf(?:inity)?)\b)"
# A text that is no regular expression.
WORDS = re.compile(r"[\w ./:=%@-]+")
# What a regular expression consists of, as far as it matters where a group begins and ends.
PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


@dataclass(frozen=True)
class Metric:
    """The number by which runs are compared.

    Attributes:
        text: how its user names it.
        pattern: what finds it in a line of a log, as its only group.
        goal: `MINIMIZE` if the lowest is the best, or `MAXIMIZE`.
    """

    text: str
    pattern: re.Pattern[str]
    goal: str

    @property
    def order(self) -> str:
        """Return in words how a table is sorted by it."""
        best = "lowest" if self.goal == MINIMIZE else "highest"
        return f"sorted by {self.text}, {best} first"

    def sort_key(self, value: float | None) -> tuple[bool, float]:
        """Return by what runs are sorted, the best first; behind them nan, infinity and no number."""
        if value is None or not math.isfinite(value):
            return True, 0
        return False, value if self.goal == MINIMIZE else -value

    def of_run(self, sweep: Path, name: str, log: Path) -> float | None:
        """Return the number of a run; None if it has none.

        Args:
            sweep: the sweep's folder.
            name: the name of the run.
            log: the log of its job.
        """
        recorded = [*recorded_runs(sweep, name)]
        number = _recorded(self.text, recorded[-1]) if recorded else None
        return self._in_log(log) if number is None else number

    def _in_log(self, log: Path) -> float | None:
        if not log.is_file():
            return None
        last = ""
        # Each state of a progress bar is a line.
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not job_log.is_of_the_kit(line):
                    for match in self.pattern.finditer(line):
                        last = match[1] or last
        return float(last.replace(",", "")) if last else None


def metric(text: str, goal: str) -> Metric:
    """Return the metric that a user names by its column, by words of the log or by a regular expression.

    Raises:
        UserError: for a regular expression that cannot be used.
    """
    # Neither val_loss nor loss2 is the loss.
    behind_words = rf"(?<![\w./-]){re.escape(text)}(?!(?<=\w)\w)\W*?({NUMBER})"
    pattern = behind_words if WORDS.fullmatch(text) else _with_number(text)
    return Metric(text, re.compile(pattern), goal)


def _with_number(expression: str) -> str:
    """Return a regular expression whose only group is replaced by one that matches any number.

    Raises:
        UserError: if it is none, or does not have exactly one group.
    """
    try:
        groups = re.compile(expression).groups
    except re.error as error:
        raise UserError(f"--metric {expression}: it is no regular expression ({error}).") from None
    if groups != 1:
        raise UserError(
            f"--metric {expression}: it has {groups} groups, not one: put brackets around the number alone, "
            r"as in 'val_loss=([\d.]+)', and write other brackets as (?:...) or \(."
        )
    start, end = _span_of_group(expression)
    return f"{expression[:start]}({NUMBER}){expression[end:]}"


def _span_of_group(expression: str) -> tuple[int, int]:
    """Return where the only group of a regular expression begins and ends, with its brackets."""
    span = (0, 0)
    opened: list[int] = []
    for part in PART.finditer(expression):
        if part[0] == "(":
            opened.append(part.start())
        elif part[0] == ")":
            start = opened.pop()
            # Others begin with (? and do not keep what they match.
            if re.match(r"\((?!\?)|\(\?P<", expression[start:]):
                span = (start, part.end())
    return span


def _recorded(name: str, recorded: RecordedRun) -> float | None:
    """Return a number of a run's record, of a column or of the training's own metrics, as it ends with it."""
    row = records.ends_with(recorded.rows)
    numbers = {column: cell for column, cell in row.items() if isinstance(cell, (int, float))}
    for csv in recorded.csvs:
        if csv.stem == row["start"]:
            of_epoch = [line for line in records.read_metrics(csv) if line["epoch"] == row["epoch"]]
            numbers |= {f"{line['metric']}/{line['of']}".rstrip("/"): line["value"] for line in of_epoch}
    return numbers.get(name)
