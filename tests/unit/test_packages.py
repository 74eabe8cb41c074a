"""The subpackages of the package, and what they may import (docs/dev/PACKAGE.md)."""

import ast
import sys
from functools import partial
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import lessons
import pytest
from conftest import ENVIRONMENT, REPOSITORY, one_error, ran, succeeded
from setuptools.config.pyprojecttoml import load_file

import manygpus
from manygpus.__main__ import COMMANDS

_REPORTS = ("reports", "reports.advice")
_JOBS = ("jobs", "jobs.inside", "jobs.watch", "jobs.submit")
# Subpackage -> the others, or modules of them, that it may import besides the modules at the top. Each stands
# above those that import it.
MAY_IMPORT = {
    "record": (),
    "config": ("record",),
    "distributed": (),
    "data": ("config", "distributed"),
    "network": ("config", "distributed", "record"),
    "checkpoint": ("distributed", "network"),
    "training": ("checkpoint", "config", "data", "distributed", "network", "record"),
    "monitor": ("distributed", "record"),
    "jobs": ("config", "monitor.samples", "record"),
    "jobs.inside": ("jobs", "monitor.samples"),
    "jobs.watch": ("jobs", "jobs.inside", "monitor.samples"),
    "jobs.submit": (*_JOBS[:-1], "config", "data.staging", "monitor.samples", "record"),
    "jobs.sweeps": (*_JOBS, "config", "monitor.samples", "record"),
    "jobs.doctor": (*_JOBS, "config", "data", "distributed", "record", "training"),
    "reports": ("record",),
    "reports.advice": ("record", "reports"),
    "workshop": ("config", "data.staging", "distributed", "jobs", "record", "reports"),
    # It joins the others, and no other subpackage may import it.
    "commands": (
        *_JOBS,
        "jobs.sweeps",
        "jobs.doctor",
        "config",
        "data",
        "distributed",
        "monitor",
        "record",
        *_REPORTS,
    ),
}
# All that the others know of them is a folder of CSVs (record/records.py, monitor/samples.py).
OPTIONAL = ("monitor", "reports.advice", "workshop")
WHAT_OTHERS_MAY_KNOW = ("monitor.samples",)
_WHAT_TRAINS = ("jobs", "training", "checkpoint", "config", "data")
# Subpackage -> subpackages without which it can be imported.
DOES_WITHOUT = {
    "reports": (*_WHAT_TRAINS, "reports.advice", "monitor", "workshop"),
    "reports.advice": (*_WHAT_TRAINS, "monitor", "workshop"),
    "monitor": (*_WHAT_TRAINS, "reports", "workshop"),
}
# What the doctor, the login node and a job script need before an environment exists, or outside of it.
BARE = ("jobs.slurm", "jobs.site", "jobs.stages", "jobs.inside.failure_reason", "jobs.inside.in_job")
BARE += ("jobs.inside.stage_env",)
BARE += tuple(f"jobs.doctor.{name}" for name in ("checkup", "cli", "login_node"))
# What makes a login node slow.
HEAVY = {"torch", "torchvision", "numpy", "pandas", "matplotlib"}
SCRIPTS = [path for folder in ("slurm", "results") for path in sorted((REPOSITORY / folder).glob("*.py"))]
PACKAGE = REPOSITORY / "manygpus"


def subpackage_of(module: str) -> str:
    """The folder of a module, `jobs.inside` for jobs.inside.in_job; "" at the top."""
    folder = module.rpartition(".")[0]
    # A list of the monitor's own, with a file for each.
    return "monitor" if folder == "monitor.findings" else folder


# `jobs.inside.in_job` -> its file; without the files that only say what a subpackage is for, and without what
# `manygpus new` copies.
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in lessons.files("manygpus/*.py", ":!manygpus/template")
    if path.name != "__init__.py"
}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, also within its functions, and what it takes from each."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imports_of_ours(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    return {name.removeprefix("manygpus.") for name in imports(path)} & MODULES.keys()


def is_in(module: str, subpackages: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or lies in one: jobs.slurm lies in jobs, jobs.inside.in_job not."""
    return module in subpackages or subpackage_of(module) in subpackages


def test_every_subpackage_is_in_the_table() -> None:
    assert {subpackage_of(module) for module in MODULES} - {""} == MAY_IMPORT.keys()


def test_a_subpackage_stands_above_those_that_import_it() -> None:
    for number, (subpackage, may_import) in enumerate(MAY_IMPORT.items()):
        above = tuple(MAY_IMPORT)[:number]
        assert all(name in above or subpackage_of(name) in above for name in may_import), subpackage


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_its_subpackage_may(module: str) -> None:
    """A module at the top imports others at the top only."""
    subpackage = subpackage_of(module)
    allowed = ("", subpackage, *MAY_IMPORT.get(subpackage, ()))
    if module == "__main__":
        allowed += ("config",)
    assert not {name for name in imports_of_ours(MODULES[module]) if not is_in(name, allowed)}


def test_no_modules_import_each_other() -> None:
    """Neither directly nor in a circle, nor within a function."""
    TopologicalSorter({name: imports_of_ours(path) for name, path in MODULES.items()}).prepare()


@pytest.mark.parametrize(
    "subpackage", [subpackage for subpackage in MAY_IMPORT if subpackage not in (*OPTIONAL, "commands")]
)
def test_the_core_does_without_the_optional_subpackages(subpackage: str) -> None:
    for module, path in MODULES.items():
        if subpackage_of(module) == subpackage and not subpackage.startswith(OPTIONAL):
            optional = {name for name in imports_of_ours(path) if name.startswith(OPTIONAL)}
            assert not optional - set(WHAT_OTHERS_MAY_KNOW), module


@pytest.mark.parametrize("subpackage", DOES_WITHOUT)
def test_a_subpackage_that_reads_csvs_needs_no_training_and_no_jobs(subpackage: str) -> None:
    """It can be imported where the subpackages that it must not need are not there."""
    modules = ", ".join(f"manygpus.{module}" for module in MODULES if subpackage_of(module) == subpackage)
    absent = {f"manygpus.{name}": None for name in DOES_WITHOUT[subpackage]}
    program = f"import sys; sys.modules |= {absent!r}; import {modules}"
    succeeded(ran(sys.executable, "-c", program, cwd=REPOSITORY))


def test_the_login_node_stays_light() -> None:
    """Nothing heavy on the way to a submission, down to the modules that those modules import."""
    program = (
        "import sys; from manygpus.commands import compare_stages, monitor, sweep\n"
        "from manygpus.jobs.submit import executor; print('submitit' in sys.modules)\n"
        "executor.submitter(executor.submission.STAGES['ddp'])\n"
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    done = ran(sys.executable, "-c", program, cwd=REPOSITORY)
    assert done.stdout == "False\n[]\n", done.stdout + done.stderr


def test_the_doctor_needs_no_packages() -> None:
    """In a Python without site-packages, as a login node has."""
    modules = ", ".join(f"manygpus.{name}" for name in BARE)
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {modules}"
    succeeded(ran(sys.executable, "-I", "-S", "-c", program))


def test_every_public_name_is_there_for_scripts_and_for_editors() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    assert {statement.names[0].asname: statement.module for statement in stub} == {
        name: f"manygpus.{module}" for name, module in manygpus._MODULE_OF.items()
    }
    assert all(hasattr(manygpus, name) for name in manygpus.__all__)


def test_importing_the_package_loads_nothing() -> None:
    program = "import sys, manygpus; print([name for name in sys.modules if name.startswith('manygpus.')], "
    program += f"sorted({HEAVY!r} & sys.modules.keys()))"
    assert ran(sys.executable, "-c", program, cwd=REPOSITORY).stdout == "[] []\n"


@pytest.mark.parametrize("path", lessons.files("*.py"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_imports_from_a_command(path: Path) -> None:
    names = imports(path)
    assert not {name for name in names if name.split(".")[0] in {script.stem for script in SCRIPTS}}
    is_a_door = path in SCRIPTS or path.parent.name == "commands" or "tests" in path.parts
    assert is_a_door or not {name for name in names if name.startswith("manygpus.commands")}


@pytest.mark.parametrize(
    "path",
    [*SCRIPTS, *lessons.files("manygpus/commands/*.py")],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_a_command_patches_nothing(path: Path) -> None:
    assert "sys.path" not in path.read_text()


def test_the_entry_point_is_there() -> None:
    entry_points = load_file(REPOSITORY / "pyproject.toml")["project"]["scripts"]
    (function,) = [EntryPoint(name, value, "console_scripts").load() for name, value in entry_points.items()]
    assert function is import_module("manygpus.__main__").main


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name: str, tmp_path: Path) -> None:
    """In a script as pip writes it, from another folder."""
    script = tmp_path / "manygpus"
    script.write_text("import sys\nfrom manygpus.__main__ import main\nsys.exit(main())\n")
    command = partial(ran, sys.executable, script, cwd=tmp_path, env=ENVIRONMENT)
    assert f"usage: manygpus {name} " in succeeded(command(name, "--help")).stdout
    assert one_error(command(name, "--no-such-option", "17"))


def test_an_old_python_is_one_sentence(tmp_path: Path) -> None:
    """As runpy imports the package for `python -m manygpus`."""
    old = "import sys; sys.version_info = (3, 9, 18); sys.argv[0] = '-m'; import manygpus"
    assert "Python 3.10 or newer" in one_error(ran(sys.executable, "-c", old, cwd=tmp_path, env=ENVIRONMENT))


def test_in_a_deleted_folder_a_command_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = ("sh", "-c", 'rmdir ../gone; exec "$0" "$@"', sys.executable, "-m", "manygpus", "jobs")
    assert "deleted" in one_error(ran(*command, cwd=folder, env=ENVIRONMENT))


def test_the_list_of_commands(tmp_path: Path) -> None:
    command = partial(ran, sys.executable, "-m", "manygpus", cwd=tmp_path, env=ENVIRONMENT)
    for arguments in ([], ["--help"]):
        listed = succeeded(command(*arguments)).stdout
        assert all(f"  {name} " in listed for name in COMMANDS)
    assert "'joubs'" in one_error(command("joubs"))
