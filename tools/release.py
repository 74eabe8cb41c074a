"""Check that a version can be released, and print what has changed in it, as CHANGELOG.md says.

    python tools/release.py v0.1.0

`.github/workflows/release.yml` runs it for each tag `v...`, without packages. docs/dev/README.md says how a
version is made.
"""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Where the version stands -> what precedes it there.
PLACES = {"pyproject.toml": r'^version = "(.+)"$', "CITATION.cff": r"^version: (.+)$"}
# The mark of what its maintainers have to fill in, as nobody else knows it.
TO_FILL = "FILL" + " IN"


def main() -> None:
    tag = sys.argv[1]
    problems = what_is_missing(tag.removeprefix("v"), REPOSITORY)
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))
    print(changes(tag.removeprefix("v"), REPOSITORY))


def what_is_missing(version: str, folder: Path) -> list[str]:
    """Return in sentences why the files in `folder` cannot be released as this version."""
    problems = []
    for name, stated in versions(folder).items():
        if stated != version:
            problems.append(f"{name} has the version {stated}, and the tag {version}")
    if not changes(version, folder):
        problems.append(f'CHANGELOG.md has no section "## {version} (date)"')
    problems += [f"{name} has a place to fill in" for name in to_fill(folder)]
    return problems


def versions(folder: Path) -> dict[str, str]:
    """Return the version that each of `PLACES` states."""
    return {
        name: re.search(pattern, (folder / name).read_text(), re.MULTILINE)[1]
        for name, pattern in PLACES.items()
    }


def changes(version: str, folder: Path) -> str:
    """Return the section of the changelog about this version, without its heading; "" if there is none."""
    heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    _, *section = re.split(heading, (folder / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return section[0].partition("\n## ")[0].strip() if section else ""


def to_fill(folder: Path) -> list[str]:
    """Return the files in which the maintainers have to fill something in."""
    done = subprocess.run(
        ["git", "grep", "--files-with-matches", "--fixed-strings", TO_FILL],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


if __name__ == "__main__":
    main()
