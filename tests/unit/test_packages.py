"""The packages of manygpus, and what they may import (manygpus/README.md)."""

import ast
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import lessons
import pytest
from conftest import ENVIRONMENT, REPOSITORY, one_error, ran, succeeded
from setuptools.config.pyprojecttoml import load_file

# Package -> the packages, or modules of them, that it may import besides itself and the modules at the top.
MAY_IMPORT = {
    "config": ("data.staging", "record"),
    "data": ("config", "distributed"),
    "distributed": (),
    "record": ("distributed",),
    "training": ("config", "data", "distributed", "record"),
    # The folder of samples is all that a job and its monitor know of each other, and needs no other package.
    "jobs": ("config", "data.staging", "distributed", "monitor.samples", "record"),
    "doctor": ("config", "data", "distributed", "jobs", "record", "training"),
    "compare": ("record",),
    "advice": ("compare", "record"),
    "monitor": ("distributed", "record"),
    "workshop": ("compare", "config", "distributed", "record", "jobs", "data.staging"),
    # They join the others, and no other package may import them.
    "commands": ("advice", "compare", "config", "data", "distributed", "jobs", "monitor", "record"),
}
OPTIONAL = ("monitor", "advice", "workshop")
_WHAT_TRAINS = ("jobs", "doctor", "training", "config", "data")
# Package -> packages without which it can be imported: it needs a folder of CSVs alone.
DOES_WITHOUT = {
    "compare": (*_WHAT_TRAINS, "advice", "monitor", "workshop"),
    "advice": (*_WHAT_TRAINS, "monitor", "workshop"),
    "monitor": (*_WHAT_TRAINS, "compare", "advice", "workshop"),
}
# What the doctor, the login node and a job script need before an environment exists, or outside of it.
BARE = ("jobs.slurm", "jobs.site", "jobs.stages", "jobs.why", "jobs.in_job")
BARE += tuple(f"doctor.{name}" for name in ("checkup", "cli", "login_node"))
# What makes a login node slow.
HEAVY = {"torch", "torchvision", "numpy", "pandas", "matplotlib"}
SCRIPTS = [path for folder in ("slurm", "results") for path in sorted((REPOSITORY / folder).glob("*.py"))]
COMMANDS = {path.stem for path in SCRIPTS}


def imports(path: Path, at_the_top: bool = False) -> set[str]:
    """The modules that a file imports, `from manygpus import jobs` as manygpus.jobs."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def package_of(path: Path) -> str:
    """The package of a module, of which it may lie in a subfolder; for one at the top, manygpus itself."""
    return path.relative_to(REPOSITORY).parent.parts[:2][-1]


PACKAGES = [path for path in lessons.files("manygpus/*.py") if package_of(path) != "manygpus"]
CORE = [path for path in lessons.files("manygpus/*.py") if package_of(path) not in (*OPTIONAL, "commands")]
AT_THE_TOP = {path.stem for path in (REPOSITORY / "manygpus").glob("*.py")}


def test_every_package_is_there() -> None:
    assert {package_of(path) for path in PACKAGES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_package_imports_what_it_may(path: Path) -> None:
    package = package_of(path)
    ours = {name.removeprefix("manygpus.") for name in imports(path) if name.startswith("manygpus.")}
    others = {name for name in ours if name.split(".")[0] not in {package, *AT_THE_TOP}} - set(MAY_IMPORT)
    assert not {name for name in others if not name.startswith(MAY_IMPORT[package])}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_the_core_does_without_the_optional_packages(path: Path) -> None:
    """All that they know of each other is a folder of CSVs (record/records.py, monitor/samples.py)."""
    optional = tuple(f"manygpus.{name}" for name in OPTIONAL)
    imported = {name for name in imports(path) if name.startswith(optional)}
    if package_of(path) == "jobs":
        imported -= {"manygpus.monitor", "manygpus.monitor.samples"}
    assert not imported


@pytest.mark.parametrize("package", DOES_WITHOUT)
def test_a_package_that_reads_csvs_needs_no_training_and_no_jobs(package: str) -> None:
    """It can be imported where the packages that it must not need are not there."""
    paths = [path for path in PACKAGES if package_of(path) == package and path.stem != "__init__"]
    modules = ", ".join(".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in paths)
    absent = {f"manygpus.{name}": None for name in DOES_WITHOUT[package]}
    program = f"import sys; sys.modules |= {absent!r}; import {modules}"
    succeeded(ran(sys.executable, "-c", program, cwd=REPOSITORY))


def test_the_login_node_stays_light() -> None:
    """Nothing heavy on the way to a submission, down to the modules that those modules import."""
    program = (
        "import sys; from manygpus.commands import compare, monitor, sweep\n"
        "from manygpus.jobs.submit import submission; print('submitit' in sys.modules)\n"
        "submission.submitter(submission.STAGES['ddp'])\n"
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    done = ran(sys.executable, "-c", program, cwd=REPOSITORY)
    assert done.stdout == "False\n[]\n", done.stdout + done.stderr


def test_the_doctor_needs_no_packages() -> None:
    """In a Python without site-packages, as a login node has."""
    modules = ", ".join(f"manygpus.{name}" for name in BARE)
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {modules}"
    succeeded(ran(sys.executable, "-I", "-S", "-c", program))


@pytest.mark.parametrize("path", lessons.files("*.py"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_imports_from_a_command(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in COMMANDS}


@pytest.mark.parametrize(
    "path",
    [*SCRIPTS, *lessons.files("manygpus/commands/*.py")],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_a_command_patches_nothing(path: Path) -> None:
    assert "sys.path" not in path.read_text()


def test_every_entry_point_is_there() -> None:
    entry_points = load_file(REPOSITORY / "pyproject.toml")["project"]["scripts"]
    functions = [EntryPoint(name, value, "console_scripts").load() for name, value in entry_points.items()]
    assert functions and all(map(callable, functions))


def test_an_entry_point_is_a_command(tmp_path: Path) -> None:
    """In a script as pip writes it, from another folder."""
    entry_point = load_file(REPOSITORY / "pyproject.toml")["project"]["scripts"]["manygpus-monitor"]
    module, function = entry_point.split(":")
    script = tmp_path / "manygpus-monitor"
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    command = partial(ran, sys.executable, script, cwd=tmp_path, env=ENVIRONMENT)
    assert "usage: manygpus-monitor " in succeeded(command("--help")).stdout
    assert "--verdict" in one_error(command())
