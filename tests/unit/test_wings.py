"""The three wings of trainkit, and what they may import (DESIGN: in a rank, around a job, afterwards)."""

import ast
import subprocess
import sys
from pathlib import Path

import lessons
import pytest
from conftest import REPOSITORY

# What the doctor and the login node need before an environment exists.
BARE = ("slurm", "site", "stages", "finding", "checkup", "doctor", "login_node")
# What makes a login node slow.
HEAVY = {"torch", "torchvision", "numpy", "pandas", "matplotlib"}
OF_ANALYSIS = ("records", "samples", "peaks", "files", "errors")
# What an exercise may need, and learn.py to tell of the machine.
OF_THE_WORKSHOP = (
    "workshop",
    "analysis.comparison",
    "analysis.packed",
    "command_line",
    "errors",
    "files",
    "machine",
)
OF_THE_WORKSHOP += ("staging", "jobs.site", "jobs.slurm", "jobs.stages")
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


def wing(path: Path) -> str:
    return path.parent.name


PACKAGE = lessons.files("trainkit/*.py")


def test_every_wing_is_there() -> None:
    assert {wing(path) for path in PACKAGE} == {"trainkit", "jobs", "analysis", "workshop"}


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_wing_imports_what_it_may(path: Path) -> None:
    ours = {name for name in imports(path) if name.split(".")[0] == "trainkit" and name != "trainkit"}
    others = {name for name in ours if name.split(".")[1] in ("jobs", "analysis", "workshop")}
    if wing(path) == "trainkit":
        assert not others
    if wing(path) == "analysis":
        allowed = tuple(f"trainkit.{name}" for name in ("analysis", *OF_ANALYSIS))
        assert all(name.startswith(allowed) for name in ours)
    if wing(path) == "workshop":
        allowed = tuple(f"trainkit.{name}" for name in OF_THE_WORKSHOP)
        assert all(name.startswith(allowed) for name in ours - {"trainkit.jobs", "trainkit.analysis"})
    else:
        assert not any(name.startswith("trainkit.workshop") for name in ours)


def test_the_login_node_stays_light() -> None:
    """Nothing heavy on the way to a submission, down to the modules that those modules import."""
    program = (
        "import sys; from trainkit.jobs import submission, sweep\n"
        f"print(sorted({HEAVY!r} & sys.modules.keys()), 'submitit' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "[] False\n", done.stdout + done.stderr


def test_the_doctor_and_the_verdict_need_no_packages() -> None:
    """In a Python without site-packages, as a login node has; the verdict's process is to be small."""
    modules = ", ".join(["trainkit.analysis.waste", *(f"trainkit.jobs.{name}" for name in BARE)])
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {modules}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", lessons.files("*.py"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_imports_from_a_front_door(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in FRONT_DOORS}


@pytest.mark.parametrize("name", sorted(FRONT_DOORS))
def test_a_front_door_patches_nothing(name: str) -> None:
    (path,) = (path for folder in ("slurm", "results") for path in (REPOSITORY / folder).glob(f"{name}.py"))
    assert "sys.path" not in path.read_text()
