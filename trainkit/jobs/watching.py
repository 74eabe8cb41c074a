"""A live view of a job, from its samples as they come: a line for each node, GPU and rank.

On a terminal it is kept up to date in place; elsewhere, as in a file, a block of lines comes now and then.
"""

import csv
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from trainkit import samples
from trainkit.errors import UserError
from trainkit.samples import GPU, NODE, RANK

PAUSE, LONG_PAUSE = 1, 2  # s between two looks; after one in which nothing came, Slurm is asked
BLOCK_SECONDS = 10  # between two blocks of lines in a file
LATE_SECONDS = 10  # that samples may be late before it is told
GONE_SECONDS = 3  # what has no sample for so long, while others of its node have, is gone
MOST_BYTES = 2**18  # that are read of a file in one look: its last ones
BAR, NAME = 10, 24  # characters
NEARLY_FULL, CROWDED = 0.95, 0.2  # of a memory; of the time that a rank waits for a core
STATES = {"R": "runs", "S": "sleeps", "D": "waits for a disk", "T": "is stopped"}
NO_RANK = "no rank"  # a warning only while there are ranks
Cells = dict[str, str]
Bar = Callable[[float], str]


class Line(NamedTuple):
    name: str
    text: str
    warning: str

    def fit(self, columns: int) -> str:
        """The warning is what there has to be room for."""
        order = [self.name, self.text, self.warning]
        if self.warning and len("  ".join(order)) + 2 > columns:
            order = [self.name.rstrip(), self.warning, self.text]
        return f"{'!' if self.warning else ' '} {'  '.join(order).rstrip()}"[:columns]


def watch(folder: Path, ended: Callable[[], bool], out: TextIO | None = None) -> None:
    """Show the job with its samples in `folder` until it has `ended`, or until nobody reads `out` any more.

    `ended` is asked when no new samples came.

    Raises:
        UserError: if the job has ended without a sample, or `out` cannot be written.
        KeyboardInterrupt: for Ctrl-C. The job goes on.
    """
    out = out or sys.stdout
    in_place = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    view, job, bar = (_Terminal if in_place else _Log)(out), _Job(folder), _bar(out)
    over = new = False
    try:
        while not over:
            over = not new and ended()
            new = job.look()
            if over and not job.there:
                samples.read(folder)  # tells that there are none
            view.show(job.head(over), job.lines(bar), over)
            if not over:
                time.sleep(PAUSE if new else LONG_PAUSE)
    except KeyboardInterrupt:
        print(file=out)  # after the ^C
        raise
    except BrokenPipeError:  # `| head` has enough
        return
    except OSError as error:
        raise UserError(f"the view cannot be written ({error.strerror}): give it another place.") from None


class _Job:
    """What is in the last samples of each node, by node, kind and number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _Growing] = {}
        self.there: dict[tuple[str, str, str], Cells] = {}

    def look(self) -> bool:
        """Read what came since the last look, and tell whether anything did."""
        new = False
        for path in self._folder.glob("*.csv"):
            rows = self._files.setdefault(path, _Growing(path)).rows()
            self.there |= {(path.stem, row["what"], row["number"]): row for row in rows}
            new = new or bool(rows)
        last: dict[str, float] = {}
        for (node, _, _), row in self.there.items():
            last[node] = max(_number(row, "time"), last.get(node, 0))
        self.there = {
            thing: row
            for thing, row in self.there.items()
            if _number(row, "time") > last[thing[0]] - GONE_SECONDS
        }
        return new

    def head(self, over: bool) -> list[str]:
        """The time, and the last epoch."""
        late = time.time() - max((_number(row, "time") for row in self.there.values()), default=math.inf)
        told = ""
        if over:
            told = "  the job has ended; its last samples:"
        elif not self.there:
            told = "  no samples yet"
        elif late > LATE_SECONDS:
            told = f"  no new samples for {late:,.0f} s"
        return [time.strftime("%H:%M:%S") + told, *self._epoch()]

    def _epoch(self) -> list[str]:
        """Of the last training that has written one."""
        for path in reversed(samples.runs(self._folder)):
            with suppress(OSError, ValueError, LookupError, csv.Error):
                row = _last_row(path)
                speed, seconds = float(row["images_per_s"]), float(row["train_seconds"])
                return [f"epoch {int(row['epoch'])}: {speed:,.0f} images/s, {seconds:.1f} s of training"]
        return []

    def lines(self, bar: Bar) -> list[Line]:
        """The nodes in their order, each with its GPUs and its ranks."""
        several = len({node for node, _, _ in self.there}) > 1
        begun = any(what == RANK for _, what, _ in self.there)
        found = []
        for thing in sorted(self.there, key=_in_order):
            node, what, number = map(_plain, thing)
            words = [node] if several or what == NODE else []
            words += [] if what == NODE else [what.replace(GPU, "GPU"), number]
            text, warnings = TOLD[what](self.there[thing], bar)
            warnings = [warning for warning in warnings if begun or warning != NO_RANK]
            found.append((" ".join(words), text, ", ".join(warnings)))
        width = max((len(name) for name, _, _ in found), default=0)
        return [Line(f"{name:<{width}}", text, warning) for name, text, warning in found]


class _Growing:
    """A file of samples, to which others write."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def rows(self) -> list[Cells]:
        """Those that came since the last look, but of a long file no more than those of its end."""
        with suppress(OSError), self._path.open("rb") as file:
            names = _cells(file.readline())
            first, size = file.tell(), os.fstat(file.fileno()).st_size
            if first <= self._read <= size <= self._read + MOST_BYTES:
                file.seek(self._read)
            elif size > first + MOST_BYTES:
                file.seek(size - MOST_BYTES)
                file.readline()  # it may be the rest of one
            self._read = file.tell()
            whole, end, _ = file.read(MOST_BYTES).rpartition(b"\n")
            self._read += len(whole + end)
            found = [dict(zip(names, _cells(line), strict=False)) for line in whole.splitlines()]
            return [row for row in found if row.keys() >= samples.COLUMNS.keys() and _is_known(row)]
        return []


class _Terminal:
    """Lines that are drawn over those before."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._size, self._drawn = out, None, 0

    def show(self, head: list[str], lines: list[Line], over: bool) -> None:
        size = os.get_terminal_size(self._out.fileno())
        # A line that wraps, or is scrolled away, cannot be drawn over.
        columns, rows = (size.columns or 80) - 1, (size.lines or 24) - 1
        back = f"\x1b[{self._drawn}A" if self._drawn else ""
        if self._drawn and size != self._size:  # the terminal has put the lines elsewhere
            back = "\x1b[H"
        shown = [line[:columns] for line in head[:rows]]
        shown += [line.fit(columns) for line in _fold(lines, rows - len(shown))]
        text = "".join(f"{line}\x1b[K\n" for line in shown)
        print(f"\r{back}{text}\x1b[J", end="", file=self._out, flush=True)
        self._size, self._drawn = size, len(shown)


class _Log:
    """Blocks of lines, one after the other: at each epoch, when anything comes or goes, and now and then."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._shown, self._at = out, None, -math.inf

    def show(self, head: list[str], lines: list[Line], over: bool) -> None:
        now, what = time.monotonic(), (head[1:], [line.name for line in lines])
        if over or what != self._shown or now - self._at >= BLOCK_SECONDS:
            print(*head, *(line.fit(1000) for line in lines), "", sep="\n", file=self._out, flush=True)
            self._shown, self._at = what, now


def _fold(lines: list[Line], room: int) -> list[Line]:
    """As many as there is room for: those with a warning, then the first."""
    if len(lines) <= room:
        return lines
    by_need = sorted(range(len(lines)), key=lambda i: not lines[i].warning)
    kept = [lines[i] for i in sorted(by_need[: max(room - 1, 0)])]
    return [*kept, Line(f"and {len(lines) - len(kept)} more lines, in a higher window", "", "")][:room]


def _node(row: Cells, bar: Bar) -> tuple[str, list[str]]:
    text = f"{_gb(row)}  {_told(row, 'cores', 1)} cores of {_plain(row['core_list']) or '-'}"
    text += f"  network {_told(row, 'network_mb_s')} MB/s  disk {_told(row, 'disk_mb_s')} MB/s"
    return text, _full(row)


def _gpu(row: Cells, bar: Bar) -> tuple[str, list[str]]:
    limit = _number(row, "power_limit_w") or math.nan
    power = (
        f"{bar(_number(row, 'power_w') / limit)} {_told(row, 'power_w'):>4} of {_told(row, 'power_limit_w')}"
    )
    text = f"{_told(row, 'utilisation'):>3} % busy  {power} W  {_gb(row)}  {_told(row, 'temperature_c')} C"
    if row["ranks"].strip("-?"):
        text += f"  ranks {_plain(row['ranks'])}"
    warnings = [NO_RANK] if row["ranks"] == "-" else []
    if "heat" in row["throttled"]:  # at the limit of its power it only does what it can
        warnings.append("slowed by heat")
    return text, warnings + _full(row)


def _rank(row: Cells, bar: Bar) -> tuple[str, list[str]]:
    text = f"{_told(row, 'cores', 1)} cores  {_told(row, 'memory_mb', 1, 1000)} GB"
    if (loaders := _number(row, "loaders")) > 0:
        workers = "loader worker" if loaders == 1 else "loader workers"
        text += f"  {loaders:.0f} {workers}, {_told(row, 'loader_cores', 1)} cores"
    waiting = _number(row, "waiting")
    warnings = [f"waits for a core {100 * waiting:.0f} % of the time"] if waiting > CROWDED else []
    state = STATES.get(row["name"], "")
    if row["name"] in ("D", "T"):
        return text, [*warnings, state]
    return f"{text}  {state}", warnings


TOLD: dict[str, Callable[[Cells, Bar], tuple[str, list[str]]]] = {NODE: _node, GPU: _gpu, RANK: _rank}


def _full(row: Cells) -> list[str]:
    full = _number(row, "memory_mb") >= NEARLY_FULL * _number(row, "memory_limit_mb")
    return ["its memory is nearly full"] if full else []


def _gb(row: Cells) -> str:
    return f"{_told(row, 'memory_mb', 1, 1000):>5} of {_told(row, 'memory_limit_mb', 1, 1000)} GB"


def _bar(out: TextIO) -> Bar:
    """What draws a share of 1, in ASCII where the locale has no more."""
    locale = next(filter(None, (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    blocks = "UTF" in locale.upper() and "utf" in (out.encoding or "").lower()

    def draw(share: float) -> str:
        eighths = round(8 * BAR * min(share, 1)) if share >= 0 else 0
        if not blocks:
            return ("#" * round(eighths / 8)).ljust(BAR, "-")
        parts = ["", *"▏▎▍▌▋▊▉"][eighths % 8]
        return ("█" * (eighths // 8) + parts).ljust(BAR, "░")

    return draw


def _last_row(path: Path) -> Cells:
    """Of a CSV that is replaced as a whole."""
    with path.open("rb") as file:
        names = _cells(file.readline())
        file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - MOST_BYTES))
        return dict(zip(names, _cells(file.read().splitlines()[-1]), strict=True))


def _cells(line: bytes) -> list[str]:
    with suppress(csv.Error):
        return next(csv.reader([line.decode(errors="replace")]), [])
    return []


def _is_known(row: Cells) -> bool:
    return row["what"] in TOLD and _number(row, "time") > 0


def _in_order(thing: tuple[str, str, str]) -> tuple[list, int, list]:
    """By node, and there the node itself, its GPUs, its ranks."""
    node, what, number = thing
    return samples.natural(node), list(TOLD).index(what), samples.natural(number)


def _plain(name: str) -> str:
    """Of names that others gave: no more than a line has room for, and nothing that a terminal would obey."""
    return ascii(name)[1:-1][:NAME]


def _number(row: Cells, name: str) -> float:
    with suppress(ValueError):
        return float(row[name])
    return math.nan


def _told(row: Cells, name: str, digits: int = 0, unit: float = 1) -> str:
    value = _number(row, name) / unit
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"
