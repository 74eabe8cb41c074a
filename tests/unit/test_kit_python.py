"""The kit's programs with any Python: they go on with that of .venv, or say in a sentence why they cannot."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, REPOSITORY, one_error

KIT_PYTHON = REPOSITORY / "manygpus" / "kit_python.py"
# Not that of an environment: it also reads ~/.local.
BASE_PYTHON = sys._base_executable
IMPORTS_TORCH = f"""
import runpy
try:
    import torch
except ImportError:
    runpy.run_path({str(KIT_PYTHON)!r})["refuse_packages_of_others"]()
    raise
"""


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A checkout in which no environment has been made yet."""
    for name in ("01_singlegpu/submit.py", "slurm/sweep.py", "slurm/doctor.py", "manygpus/kit_python.py"):
        path = tmp_path / "kit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, path)
    return tmp_path / "kit"


def run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    without = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        list(map(str, command)), env=without | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("half_made", [False, True])
@pytest.mark.parametrize("script", ["01_singlegpu/submit.py", "slurm/sweep.py"])
def test_before_and_while_the_environment_is_made(script: str, half_made: bool, kit: Path) -> None:
    if half_made:
        subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", kit / ".venv"], check=True)
    done = run(BASE_PYTHON, kit / script, "--help")
    assert done.returncode == 1 and "make data" in one_error(done)


def test_an_old_python_runs_the_doctor_with_that_of_the_kit(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused in a sentence if there is none."""
    doctor = str(kit / "slurm" / "doctor.py")
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setattr(sys, "argv", [doctor, "--job"])
    with pytest.raises(SystemExit, match=r"^error: .* older than Python 3\.10.*make data"):
        runpy.run_path(doctor, run_name="__main__")
    python = kit / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()

    def execute(path: str, arguments: list[str]) -> None:
        assert (path, arguments) == (str(python), [str(python), doctor, "--job"])
        raise InterruptedError

    monkeypatch.setattr(os, "execv", execute)
    with pytest.raises(InterruptedError):
        runpy.run_path(doctor, run_name="__main__")


def test_the_command_goes_on_with_the_python_of_the_kit(tmp_path: Path) -> None:
    """From another folder, with a Python that has no packages."""
    program = "import os; os.chdir('/'); from manygpus.__main__ import main; main()"
    done = run(BASE_PYTHON, "-S", "-c", program, "jobs", "--help", PYTHONPATH=str(REPOSITORY))
    assert "usage: manygpus jobs " in done.stdout, done.stderr


def test_an_old_python_is_named_wherever_it_imports_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last line of its traceback."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(ImportError, match=rf"3\.10 .*{sys.executable}"):
        runpy.run_path(str(REPOSITORY / "manygpus" / "__init__.py"))


@pytest.mark.parametrize(
    ("variable", "remedy"), [("PYTHONPATH", "unset PYTHONPATH"), ("PYTHONUSERBASE", "PYTHONNOUSERSITE=1")]
)
def test_packages_from_outside_are_named(variable: str, remedy: str, tmp_path: Path) -> None:
    """As a module of the cluster, or `pip install --user`, leaves them."""
    base = tmp_path / "a base"
    folder = base
    if variable == "PYTHONUSERBASE":
        shown = run(BASE_PYTHON, "-m", "site", "--user-site", **{variable: str(base)})
        folder = Path(shown.stdout.strip())
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from typing import deprecated_name\n")
    error = one_error(run(BASE_PYTHON, "-c", IMPORTS_TORCH, **{variable: str(base)}))
    assert error.startswith(f"error: {folder} has packages ") and remedy in error
