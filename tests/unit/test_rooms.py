"""The rooms of trainkit, and what they may import (trainkit/README.md)."""

import ast
import sys
from pathlib import Path

import lessons
import pytest
from conftest import REPOSITORY, ran, succeeded

# Room -> the rooms, or modules of them, that it may import.
MAY_IMPORT = {
    "runtime": (),
    "schema": ("runtime",),
    "rank": ("runtime", "schema"),
    "jobs": ("runtime", "schema", "rank.options", "rank.staging", "advice"),
    "doctor": ("runtime", "schema", "jobs", "rank.data", "rank.run", "monitor.processes"),
    "compare": ("runtime", "schema"),
    "advice": ("runtime", "schema", "compare"),
    "monitor": ("runtime", "schema", "jobs"),
    "workshop": ("runtime", "schema", "compare", "jobs.site", "jobs.slurm", "jobs.stages", "rank.staging"),
}
# What the doctor and the login node need before an environment exists.
BARE = ("jobs.slurm", "jobs.site", "jobs.stages", "jobs.why")
BARE += tuple(f"doctor.{name}" for name in ("checkup", "cli", "login_node"))
# What makes a login node slow.
HEAVY = {"torch", "torchvision", "numpy", "pandas", "matplotlib"}
FRONT_DOORS = {path.stem for folder in ("slurm", "results") for path in (REPOSITORY / folder).glob("*.py")}


def imports(path: Path, at_the_top: bool = False) -> set[str]:
    """The modules that a file imports, `from trainkit import jobs` as trainkit.jobs."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


PACKAGE = [path for path in lessons.files("trainkit/*.py") if path.parent.name != "trainkit"]


def test_every_room_is_there() -> None:
    assert {path.parent.name for path in PACKAGE} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_room_imports_what_it_may(path: Path) -> None:
    room = path.parent.name
    ours = {name.removeprefix("trainkit.") for name in imports(path) if name.startswith("trainkit.")}
    of_others = {name for name in ours if name.split(".")[0] != room} - set(MAY_IMPORT)
    assert not {name for name in of_others if not name.startswith(MAY_IMPORT[room])}


def test_the_login_node_stays_light() -> None:
    """Nothing heavy on the way to a submission, down to the modules that those modules import."""
    program = (
        "import sys; from trainkit.jobs import submission, sweep; print('submitit' in sys.modules)\n"
        "submission.submitter(submission.STAGES['ddp'])\n"
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    done = ran(sys.executable, "-c", program, cwd=REPOSITORY)
    assert done.stdout == "False\n[]\n", done.stdout + done.stderr


def test_the_doctor_needs_no_packages() -> None:
    """In a Python without site-packages, as a login node has."""
    modules = ", ".join(f"trainkit.{name}" for name in BARE)
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {modules}"
    succeeded(ran(sys.executable, "-I", "-S", "-c", program))


@pytest.mark.parametrize("path", lessons.files("*.py"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_imports_from_a_front_door(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in FRONT_DOORS}


@pytest.mark.parametrize("name", sorted(FRONT_DOORS))
def test_a_front_door_patches_nothing(name: str) -> None:
    (path,) = (path for folder in ("slurm", "results") for path in (REPOSITORY / folder).glob(f"{name}.py"))
    assert "sys.path" not in path.read_text()
