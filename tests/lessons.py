"""The READMEs: the commands they give, and the diffs of the stages and tables of runs that they quote.

A quote stands between `<!-- quote: SOURCE -->` and `<!-- end quote -->`, where SOURCE is `diff A B`,
`table FILE.md` or `table FILE.md columns A, B, ...`, with paths relative to the README. Run this file
(`make lessons`) to bring all up to date.
"""

import difflib
import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS_SLURM = re.compile(
    r"\b(sbatch|squeue|srun|scontrol|sstat|sacct|submit\.py|doctor\.py|sweep\.py|jobs\.py|cluster)\b"
)
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
    return [found for found in blocks if bool(NEEDS_SLURM.search(found[1])) == on_a_cluster]


def up_to_date(readme: Path) -> str:
    """The text of `readme` with every quote as its source has it now."""

    def quoted(match: re.Match) -> str:
        source, _, columns = match[2].partition(" columns ")
        kind, *names = source.split()
        paths = [readme.parent / name for name in names]
        text = _diff(*paths) if kind == "diff" else _table(*paths, columns.split(", ") if columns else [])
        return f"{match[1]}{text}\n{match[3]}"

    return QUOTE.sub(quoted, readme.read_text())


def _diff(before: Path, after: Path) -> str:
    lines = difflib.unified_diff(
        before.read_text().splitlines(),
        after.read_text().splitlines(),
        before.name,
        after.name,
        n=1,
        lineterm="",
    )
    return "\n".join(["```diff", *lines, "```"])


def _table(comparison: Path, columns: list[str]) -> str:
    """All columns of the tables of a comparison, or those named."""
    rows = [line[2:-2].split(" | ") for line in comparison.read_text().splitlines() if line.startswith("|")]
    chosen = [rows[0].index(name) for name in columns or rows[0]]
    return "\n".join(f"| {' | '.join(row[i] for i in chosen)} |" for row in rows)


if __name__ == "__main__":
    for path in files("*.md"):
        path.write_text(up_to_date(path))
