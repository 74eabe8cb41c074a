"""The papers of the repository: workflows and citation are valid, and a version is released whole or not."""

import json
import re
import sys
from pathlib import Path

import lessons
import pytest
import release
import yaml
from conftest import REPOSITORY, ran, succeeded

MAKEFILE = REPOSITORY / "Makefile"
WORKFLOWS = lessons.files(".github/workflows/*.yml")


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        (["--builtin-schema", "vendor.github-workflows"], WORKFLOWS),
        (["--builtin-schema", "vendor.github-issue-forms"], lessons.files(".github/ISSUE_TEMPLATE/*.yml")),
        (["--builtin-schema", "vendor.citation-file-format"], [REPOSITORY / "CITATION.cff"]),
        (["--check-metaschema"], lessons.files("manygpus/schemas/*.json")),
    ],
    ids=lambda value: value[-1] if isinstance(value[0], str) else "",
)
def test_it_follows_its_schema(schema: list[str], files: list[Path]) -> None:
    assert files
    succeeded(ran(Path(sys.executable).parent / "check-jsonschema", *schema, *files))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_calls_is_there(workflow: Path) -> None:
    targets = re.findall(r"^([\w-]+):", MAKEFILE.read_text(), re.MULTILINE)
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    commands = [step["run"].split() for job in jobs for step in job["steps"] if "run" in step]
    for program, *words in commands:
        if program == "make":
            assert words[0] in targets
        elif program == "python" and words[0] != "-m":
            assert (REPOSITORY / words[0]).is_file()


def test_what_a_container_of_a_learner_calls_is_there() -> None:
    text = (REPOSITORY / ".devcontainer" / "devcontainer.json").read_text()
    container = json.loads(re.sub(r"^ *//.*$", "", text, flags=re.MULTILINE))
    commands = [value.split() for name, value in container.items() if name.endswith("Command")]
    assert len(commands) >= 2
    for program, target in commands:
        assert program == "make" and re.search(rf"^{target}:", MAKEFILE.read_text(), re.MULTILINE)


def test_all_places_state_one_version() -> None:
    assert len({*release.versions(REPOSITORY).values()}) == 1


def test_a_version_is_released_when_nothing_is_missing(tmp_path: Path) -> None:
    (version,) = {*release.versions(REPOSITORY).values()}
    for name in release.PLACES:
        text = (REPOSITORY / name).read_text()
        (tmp_path / name).write_text(text.replace(release.TO_FILL, "filled in"))
    (tmp_path / "SUPPORT.md").write_text(f"{release.TO_FILL}: an address\n")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## Unreleased\n\n- later\n")
    succeeded(ran("git", "init", "--quiet", cwd=tmp_path))
    succeeded(ran("git", "add", ".", cwd=tmp_path))
    unreleased, to_fill = release.what_is_missing(version, tmp_path)
    assert version in unreleased and "SUPPORT.md" in to_fill
    with changelog.open("a") as file:
        file.write(f"\n## {version} (2026-12-01)\n\n- new\n\n## 0.0.1 (2026-01-01)\n\n- old\n")
    (tmp_path / "SUPPORT.md").write_text("somebody@example.org\n")
    assert release.what_is_missing(version, tmp_path) == []
    assert release.changes(version, tmp_path) == "- new"
    other = release.what_is_missing("9.9.9", tmp_path)
    assert len(other) == 3 and all("9.9.9" in problem for problem in other)
