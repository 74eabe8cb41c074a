"""The exercises themselves: what the untouched starter, typical wrong answers and the solution are told."""

import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, REPOSITORY, STAGES
from forking import Forking

FOLDERS = sorted(path.parent for path in REPOSITORY.glob("0*/exercises/*/check.py"))
CHECKS = {folder: runpy.run_path(str(folder / "check.py")) for folder in FOLDERS}


def name_of(folder: Path) -> str:
    return f"{folder.parents[1].name[:2]}-{folder.name.partition('_')[2]}"


each = pytest.mark.parametrize("folder", FOLDERS, ids=name_of)


class Learner:
    """Somebody at work on one exercise, in a copy of its folder."""

    def __init__(self, folder: Path, tmp_path: Path, forking: Forking) -> None:
        self.exercises = tmp_path / folder.parents[1].name / "exercises"
        left_out = shutil.ignore_patterns("mine", "mine-*", "__pycache__")
        self.folder = shutil.copytree(folder, self.exercises / folder.name, ignore=left_out)
        shutil.copy(folder.parent / "check.py", self.exercises)
        for path in [*REPOSITORY.iterdir(), *folder.parents[1].iterdir()]:
            link = tmp_path / path.relative_to(REPOSITORY)
            if not link.exists():
                link.symlink_to(path)
        self.mine, self.name = self.folder / "mine", folder.name.partition("_")[2]
        self._forking = forking

    def do(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """`python exercises/check.py <arguments>`."""
        return self._forking.run(self.exercises / "check.py", *arguments, env=ENVIRONMENT | environment)

    def check(self) -> tuple[int, str]:
        """Exit code, and what the check says, in one line."""
        done = self.do("check", self.name)
        assert not done.stderr, done.stderr
        return done.returncode, " ".join(done.stdout.split())

    def solve(self) -> None:
        self.do()
        if "RECORDED" in runpy.run_path(str(self.folder / "check.py")):
            assert self.do("recorded", self.name).returncode == 0
        shutil.copytree(self.folder / "solution", self.mine, dirs_exist_ok=True)


@pytest.fixture
def learner(tmp_path: Path, forking: Forking) -> Callable[[Path], Learner]:
    return lambda folder: Learner(folder, tmp_path, forking)


@each
def test_the_untouched_starter_is_told_what_to_do(folder: Path, learner: Callable[[Path], Learner]) -> None:
    code, said = learner(folder).check()
    assert code == 1
    assert said.startswith(f"{name_of(folder)[3:]}: not yet. ")
    assert CHECKS[folder]["STARTS_WITH"] in said


@each
def test_the_solution_passes(folder: Path, learner: Callable[[Path], Learner]) -> None:
    mine = learner(folder)
    mine.solve()
    code, said = mine.check()
    assert (code, said.split(". ")[0]) == (0, f"{mine.name}: done"), said
    assert mine.do().stdout.splitlines()[0].startswith("[x]  1 ")


@pytest.mark.parametrize(
    ("folder", "number"),
    [(folder, number) for folder in FOLDERS for number in range(len(CHECKS[folder]["WRONG"]))],
    ids=lambda value: name_of(value) if isinstance(value, Path) else str(value),
)
def test_a_typical_wrong_answer_gets_its_hint(
    folder: Path, number: int, learner: Callable[[Path], Learner]
) -> None:
    pattern, right, wrong, hint = CHECKS[folder]["WRONG"][number]
    mine = learner(folder)
    mine.solve()
    changed = 0
    for path in mine.mine.glob(pattern):
        text = path.read_text()
        changed += right in text
        path.write_text(text.replace(right, wrong))
    assert changed, f"{right!r} is not in {pattern}"
    code, said = mine.check()
    assert code == 1, said
    assert hint in said
    assert hint != CHECKS[folder]["STARTS_WITH"]


@each
def test_an_exercise_has_all_its_parts(folder: Path) -> None:
    lines = (folder / "README.md").read_text().splitlines()
    assert lines[0].startswith("# ")
    minutes, rest = lines[2].split(" minutes. ")
    assert 3 <= int(minutes) <= 45
    assert rest
    assert [line for line in (folder / "hints.md").read_text().splitlines() if line.startswith("## ")] == [
        "## 1",
        "## 2",
        "## 3",
    ]
    assert len(CHECKS[folder]["WRONG"]) >= 2
    shipped = {path.name for path in (folder / "starter").iterdir()}
    assert {path.name for path in (folder / "solution").iterdir()} <= shipped
    for path in folder.rglob("*.md"):
        path.read_text(encoding="ascii")


def test_every_stage_has_its_exercises() -> None:
    assert {folder.parents[1] for folder in FOLDERS} == {script.parent for script in STAGES.values()}
