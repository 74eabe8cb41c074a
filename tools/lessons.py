"""The READMEs: the commands they give, and the diffs of the stages and tables of runs that they quote.

A quote stands between `<!-- quote: SOURCE -->` and `<!-- end quote -->`, where SOURCE is `diff A B`, `lines
FILE "FIRST" "LAST"` (of a .py or .sh: from the line that contains FIRST to the next that contains LAST),
`table FILE` (.md or .csv), `comparison RUNS.csv`, either with `"A, B, ..."` of these columns, of one column
of that comparison `pivot RUNS.csv ROWS COLUMNS VALUES "CONDITION"`, of a job's samples `verdict FOLDER`, what
a program has printed `output FILE.txt`, the `exercises` of the page's folder, those of the core path as `make
learn` lists them (`learn`), the core `path PAGE` through a page, the `timetable` of a course, or `bench TOOL
FILE.csv ...`, the table that a tool in tools/bench makes of what it has written, by its function `table` or,
with `TOOL.FUNCTION`, by another. Paths are relative to the README. Run this file (`make lessons`) to bring
all up to date, the pictures that tools/pictures draws, and what `manygpus new` copies (project_template.py).
"""

import ast
import csv
import difflib
import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pictures
import project_template

from manygpus.monitor import wording
from manygpus.monitor.verdict import judge
from manygpus.reports import comparison, comparison_report
from manygpus.workshop.exercises import Course, Exercise, Workbook

REPOSITORY = Path(__file__).resolve().parents[1]
BENCH = REPOSITORY / "tools" / "bench"
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS_SLURM = re.compile(
    r"\b(sbatch|squeue|sinfo|srun|scontrol|sstat|sacct|submit\.py|doctor\.py|sweep\.py|jobs\.py|cluster)\b|<job>"
)
# Their commands start in the top folder, those of the others in their own.
FROM_THE_TOP = tuple(
    f"slurm/{page}.md"
    for page in (
        "README",
        "DATA",
        "MONITORING",
        "REFERENCE",
        "RESUME",
        "SITE",
        "SWEEP",
        "practice_cluster/README",
    )
)
# After these exercises a course has a break: minutes, and what.
BREAKS = {"waiting_loader": [(10, "break")], "repair": [(30, "lunch")], "time_limit": [(10, "break")]}
QUOTE = re.compile(r"(<!-- quote: (.*?) -->\n).*?(<!-- end quote -->)", re.DOTALL)


def files(*patterns: str) -> list[Path]:
    """The files of the repository that match, whether committed yet or not."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return [REPOSITORY / name for name in listed.stdout.splitlines()]


def commands(on_a_cluster: bool) -> list[tuple[Path, str]]:
    """Every block of commands of every README, either those that need a Slurm or the others."""
    blocks = [(readme, block) for readme in files("*.md") for block in COMMANDS.findall(readme.read_text())]
    return [(readme, block) for readme, block in blocks if bool(NEEDS_SLURM.search(block)) == on_a_cluster]


def starts_in(readme: Path) -> Path:
    """The folder in which the reader of `readme` is, relative to the top folder."""
    name = readme.relative_to(REPOSITORY)
    return Path() if str(name) in FROM_THE_TOP else name.parent


def up_to_date(readme: Path) -> str:
    """The text of `readme` with every quote as its source has it now."""

    def quoted(match: re.Match) -> str:
        kind, *words = shlex.split(match[2])
        kinds = {
            "diff": _diff,
            "lines": _lines,
            "table": _table,
            "comparison": _comparison,
            "pivot": _pivot,
            "verdict": _verdict,
            "output": _output,
            "exercises": _exercises,
            "learn": _learn,
            "path": _path,
            "timetable": _timetable,
            "bench": _bench,
        }
        text = kinds[kind](readme.parent, *words)
        return f"{match[1]}{text}\n{match[3]}"

    return QUOTE.sub(quoted, readme.read_text())


def _diff(folder: Path, *names: str) -> str:
    """What changes between two files, from their first line of code: what each says of itself is left out."""
    before, after = (folder / name for name in names)
    lines = list(
        difflib.unified_diff(
            before.read_text().splitlines(),
            after.read_text().splitlines(),
            before.name,
            after.name,
            n=1,
            lineterm="",
        )
    )
    header, body = lines[:2], lines[2:]
    starts = [number for number, line in enumerate(body) if line.startswith("@@")]
    hunks = [body[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    first_code_line = _first_code_line(before)
    kept = [hunk for hunk in hunks if _last_line_before(hunk[0]) >= first_code_line]
    # A reader of the page has no use for line numbers, only for the mark that lines are left out.
    shown = [line for _, *changes in kept for line in ("@@", *changes)]
    return "\n".join(["```diff", *header, *shown, "```"])


def _first_code_line(path: Path) -> int:
    """The number of the first line after the docstring of a Python file; 1 in other files."""
    if path.suffix != ".py":
        return 1
    return ast.parse(path.read_text()).body[0].end_lineno + 1


def _last_line_before(hunk_header: str) -> int:
    """The number of the last line of the older file that a hunk such as `@@ -5,3 +5,3 @@` shows."""
    start, count = re.match(r"@@ -(\d+)(?:,(\d+))?", hunk_header).groups()
    return int(start) + int(count or 1) - 1


def _lines(folder: Path, name: str, first: str, last: str) -> str:
    lines = (folder / name).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if first in line)
    end = next(number for number, line in enumerate(lines) if number >= start and last in line)
    # A block called bash would be run as a command of the page.
    language = "sh" if name.endswith(".sh") else "python"
    return "\n".join([f"```{language}", textwrap.dedent("\n".join(lines[start : end + 1])), "```"])


def _table(folder: Path, name: str, columns: str = "") -> str:
    """All columns of a CSV or of the table in a Markdown file, or those named."""
    lines = (folder / name).read_text().splitlines()
    if name.endswith(".csv"):
        head, *body = csv.reader(lines)
        return _markdown([head, ["---"] * len(head), *body], columns)
    head, _, *body = [line for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in line[2:-1].split(" | ")] for line in (head, *body)]
    return _markdown([cells[0], ["---"] * len(cells[0]), *cells[1:]], columns)


def _comparison(folder: Path, name: str, columns: str = "") -> str:
    """All columns of the comparison of runs, as results/plot_results.py makes it, or those named."""
    shown, _ = comparison_report.as_text(_compared(folder / name))
    return _markdown([[*shown], ["---"] * len(shown.columns), *shown.to_numpy().tolist()], columns)


def _markdown(rows: list[list[str]], columns: str) -> str:
    chosen = [rows[0].index(column) for column in columns.split(", ")] if columns else range(len(rows[0]))
    return "\n".join(f"| {' | '.join(row[i] for i in chosen)} |" for row in rows)


def _compared(runs: Path) -> pd.DataFrame:
    rows, _ = comparison.load_some([runs])
    return comparison.compare(comparison.summarize(rows))


def _pivot(folder: Path, name: str, rows: str, columns: str, values: str, condition: str) -> str:
    """A table of one column of the comparison of runs, by two others."""
    table = _compared(folder / name).query(condition).pivot_table(values, rows, columns)
    lines = [[table.index.name.replace("_", " "), *map(str, table.columns)]]
    lines.append(["---"] * len(lines[0]))
    for row, cells in zip(table.index, table.to_numpy(), strict=True):
        lines.append([str(row), *("" if pd.isna(cell) else f"{cell:.2f}" for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verdict(folder: Path, name: str) -> str:
    """Return the verdict as a job's log has it."""
    lines = wording.verdict_lines(judge(folder / name), "job 12")
    return "\n".join(["```", *(f"watch   {line}" for line in lines), "```"])


def _output(folder: Path, name: str) -> str:
    """Return what a program has printed, as it is."""
    return f"```\n{(folder / name).read_text().rstrip()}\n```"


def _exercises(folder: Path) -> str:
    """List the exercises of a stage: the core ones, then the extra ones."""
    lists = {"core": [], "extra": []}
    for exercise in Workbook(folder).exercises:
        link = f"[{exercise.name}]({exercise.folder.name})"
        lists[exercise.kind].append(
            f"{exercise.number}. {link}, {exercise.minutes} minutes: {exercise.title}"
        )
    parts = [f"**{kind.capitalize()}**\n\n" + "\n".join(lines) for kind, lines in lists.items() if lines]
    return "\n\n".join(parts)


def _learn(folder: Path) -> str:
    """List the core path as `make learn` does for a beginner."""
    return f"```\n{Course(REPOSITORY).core_path().replace('[x]', '[ ]')}\n```"


def _path(folder: Path, name: str) -> str:
    """List what the core path reads of a page, and the exercise that comes after it."""
    rows = ["| read | then do |", "| --- | --- |"]
    for exercise in Course(REPOSITORY).core:
        titles = [f"[{it.title}](#{it.anchor})" for it in exercise.sections if it.page == folder / name]
        if titles:
            rows.append(f"| {', '.join(titles)} | {_numbered(exercise, folder)} |")
    return "\n".join(rows)


def _timetable(folder: Path) -> str:
    """Lay out a day: to read and to do each exercise of the core path, with breaks."""
    course = Course(REPOSITORY)
    planned = [(15, "log in, and `python -m manygpus.workshop.learn`")]
    for exercise in course.core:
        links = [f"[{it.title}]({os.path.relpath(it.page, folder)}#{it.anchor})" for it in exercise.sections]
        planned.append((exercise.minutes_to_read, f"read {', '.join(links)}"))
        planned.append((exercise.minutes, f"exercise {_numbered(exercise, folder)}"))
        planned += BREAKS.get(exercise.name, [])
    planned.append((5, f"each says one of the {len(course.core)} sentences aloud"))
    rows = ["| from | minutes | what |", "| --- | --- | --- |"]
    begin = 0
    for minutes, activity in planned:
        rows.append(f"| {begin // 60}:{begin % 60:02} | {minutes} | {activity} |")
        begin += minutes
    return "\n".join([*rows, f"| {begin // 60}:{begin % 60:02} | | the end |"])


def _numbered(exercise: Exercise, folder: Path) -> str:
    return f"[{exercise.number} {exercise.name}]({os.path.relpath(exercise.folder, folder)})"


def _bench(folder: Path, tool: str, *names: str) -> str:
    if str(BENCH) not in sys.path:  # for what a tool imports from beside it
        sys.path.append(str(BENCH))
    module, _, function = tool.partition(".")
    make = getattr(importlib.import_module(module), function or "table")
    return make(*(folder / name for name in names))


if __name__ == "__main__":
    for path in files("*.md"):
        path.write_text(up_to_date(path))
    pictures.write()
    project_template.write()
