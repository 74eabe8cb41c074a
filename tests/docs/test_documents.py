"""The project as a whole: style, dependencies, and documents that are true."""

import argparse
import csv
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import lessons
import numpy as np
import pandas as pd
import pictures
import project_template
import pytest
import torch
from conftest import BEYOND, ENVIRONMENT, REPOSITORY, ran, succeeded
from forking import Forking
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pictures import recording
from setuptools.config.pyprojecttoml import load_file
from test_packages import imports
from torch.utils.data import DataLoader

from manygpus.checkpoint import sharded
from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.record import records
from manygpus.workshop.sections import anchor_of

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
# Commands that other tests run, or that are the test itself.
RUN_ELSEWHERE = {
    'make compare ARGS="--epochs 10 --batch-size 512"',  # test_make_compare.py
    "make test",
    "make test-all",
    "torchrun --standalone --nproc-per-node=2 plain_ddp.py --epochs 1",  # test_plain.py
    # test_plain.py
    "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 beyond/by_feature/recorded.py --epochs 2",
    # test_own_loop.py
    "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 beyond/by_feature/own_loop.py --epochs 2",
    # A part of `make test`; a copy of the project has no environment of its own.
    ".venv/bin/python -m pytest -n0 tests/unit/test_records.py",
    "make bench",  # test_bench_measures_the_ladder, on one rung
    "make lessons",  # test_quotes_are_up_to_date
    "conda env create -f environment.yml",
    "conda activate tutorial",
}


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command: list[str]) -> None:
    succeeded(ran(sys.executable, "-m", "ruff", *command, ".", cwd=REPOSITORY))


def test_shellcheck() -> None:
    scripts = lessons.files("*.sh", ".ci/run")
    assert REPOSITORY / ".ci" / "run" in scripts
    succeeded(ran(Path(sys.executable).parent / "shellcheck", *scripts, cwd=REPOSITORY))


def test_conda_installs_what_make_installs() -> None:
    """Both take the package list of pyproject.toml: neither has one of its own to drift."""
    conda = (REPOSITORY / "environment.yml").read_text()
    make = (REPOSITORY / "Makefile").read_text()
    assert "name: tutorial" in conda
    assert "--editable .[course]" in conda
    assert "$(INSTALL) '.[course]'" in make
    lowest = re.search(r'requires-python = ">=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())[1]
    assert f"python>={lowest}" in conda
    listed = [line.strip("- ") for line in conda.splitlines() if line.startswith("  - ")]
    assert [name.split(">")[0] for name in listed] == ["conda-forge", "python", "pip", "pip:"]


def test_each_package_has_a_version_for_all_who_want_the_same() -> None:
    """Of what pyproject.toml allows, for each release of Python; from whichever index."""
    project = load_file(REPOSITORY / "pyproject.toml")["project"]
    pins = (REPOSITORY / "constraints.txt").read_text()
    assert "://" not in pins
    pinned = [Requirement(line) for line in pins.splitlines() if not line.startswith("#")]
    declared = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    for requirement in map(Requirement, declared):
        if requirement.name == project["name"]:
            continue
        for release in ("3.10", "3.11", "3.12", "3.13", "3.14"):
            here = {"python_version": release, "python_full_version": f"{release}.0", "sys_platform": "linux"}
            versions = [
                next(iter(pin.specifier)).version
                for pin in pinned
                if canonicalize_name(pin.name) == canonicalize_name(requirement.name)
                and (pin.marker is None or pin.marker.evaluate(here))
            ]
            assert len(versions) == 1, (requirement, release, "run `make constraints`")
            assert requirement.specifier.contains(versions[0]), (requirement, "run `make constraints`")


@pytest.mark.parametrize(
    ("made", "changed", "target", "installed"),
    [
        ([], "", "learn", ["course"]),
        ([], "", "compare", ["course"]),
        ([], "", "test", ["course", "test"]),
        (["ready"], "", "learn", []),
        (["ready"], "", "lessons", ["test"]),
        (["ready"], "", "site", ["docs"]),
        (["ready"], "pyproject.toml", "data", ["course"]),
        (["ready", "ready-test"], "", "test-all", []),
        (["ready", "ready-test"], "pyproject.toml", "test", ["course", "test"]),
    ],
)
def test_make_installs_what_a_target_needs(
    made: list[str], changed: str, target: str, installed: list[str], tmp_path: Path
) -> None:
    """Once, and anew when the list of dependencies changes; what only tests need comes with the tests."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    files = [Path(shutil.copy(REPOSITORY / name, tmp_path)) for name in ("Makefile", "pyproject.toml")]
    for number, file in enumerate([*files, *(python.parents[1] / name for name in made)]):
        file.touch()
        os.utime(file, (number, number))
    if changed:
        (tmp_path / changed).touch()
    done = succeeded(ran("make", "--dry-run", "-C", tmp_path, target, cwd="/"))
    assert re.findall(r"install\.py '\.\[(\w+)\]'", done.stdout) == installed


# A project that pip can install without any package from elsewhere.
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "kit"
version = "1"
optional-dependencies = {course = []}
"""
BACKEND = """
import zipfile
from pathlib import Path

def build_editable(folder, *_):
    with zipfile.ZipFile(Path(folder, "kit-1-py3-none-any.whl"), "w") as wheel:
        metadata = "Metadata-Version: 2.1\\nName: kit\\nVersion: 1\\nProvides-Extra: course\\n"
        wheel.writestr("kit-1.dist-info/METADATA", metadata)
        wheel.writestr("kit-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("kit-1.dist-info/RECORD", "")
    return "kit-1-py3-none-any.whl"
"""


# One that notes how it is called, and can install nothing.
UV = """#!/bin/sh
[ "$1" = --version ] && exit
echo "$*, $UV_CONSTRAINT" >called
exit 2
"""


@pytest.mark.parametrize("setting", ["constraint", "no-index"])
def test_make_installs_into_its_environment_whatever_pip_is_told(setting: str, tmp_path: Path) -> None:
    """By the user's own settings, of which each alone would do harm.

    Where uv fails, pip installs; where uv does not know a setting, it is not asked.
    """
    project = tmp_path / "a project"
    (project / "tools").mkdir(parents=True)
    for name in ("Makefile", "tools/install.py"):
        shutil.copy(REPOSITORY / name, project / name)
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "backend.py").write_text(BACKEND)
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    conf, constraint, elsewhere = (tmp_path / name for name in ("pip.conf", "constraint", "elsewhere"))
    constraint.touch()
    conf.write_text("[install]\nuser = true\n")
    settings = {"PIP_CONFIG_FILE": str(conf), "PIP_TARGET": str(elsewhere), "PIP_PREFIX": str(elsewhere)}
    settings |= {"PIP_CONSTRAINT": str(constraint)} if setting == "constraint" else {"PIP_NO_INDEX": "1"}
    environment = ENVIRONMENT | settings | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    succeeded(ran("make", "-C", project, f"PYTHON={sys.executable}", ".venv/ready", env=environment))
    assert list(project.glob(".venv/lib/python*/site-packages/kit-1.dist-info"))
    called = project / "called"
    if setting == "constraint":
        words = called.read_text()
        assert words.startswith("pip install ") and "--editable .[course]" in words
        assert words.endswith(f", {constraint}\n")
    else:
        assert not called.exists()


def test_what_a_learner_runs_is_installed_by_make() -> None:
    """All that the lessons, exercises and commands import, but for what their pages tell to install."""
    told_to_install = {"lightning", "accelerate", "transformers", "hydra", "omegaconf", "wandb", "mlflow"}
    project = load_file(REPOSITORY / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    assert "manygpus[train,reports]" in extras["course"]
    needed = [*project["dependencies"], *extras["train"], *extras["reports"], *extras["course"]]
    declared = {"manygpus", *(re.match(r"[\w-]+", requirement)[0] for requirement in needed)}
    # jinja2 calls itself Jinja2.
    distributions = {
        module: {name.lower() for name in names}
        for module, names in importlib.metadata.packages_distributions().items()
    }
    assert "py-spy" in declared
    for path in lessons.files("0*/*.py", "manygpus/*.py", "slurm/*.py", "results/*.py"):
        for module in {name.split(".")[0] for name in imports(path)} - told_to_install:
            # The project's own modules, and Python's, are of no distribution.
            assert declared.intersection(distributions.get(module, declared)), f"{path}: {module}"


@pytest.mark.parametrize("readme", lessons.files("*.md"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_quotes_are_up_to_date(readme: Path) -> None:
    assert readme.read_text() == lessons.up_to_date(readme), "run `make lessons`"


@pytest.mark.parametrize("page", lessons.files("*.md"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(CODE.sub("", BLOCK.sub("", page.read_text()))):
        target = page.parent / name if name else page
        assert target.exists(), name
        if anchor:  # GitHub makes them of the headings
            titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", target.read_text()), re.MULTILINE)
            assert anchor in map(anchor_of, titles), f"{name}#{anchor}"


def test_the_speed_of_a_training_is_that_of_long_epochs() -> None:
    """In one of 14 steps, how it begins and ends is a part of the result."""
    folder = REPOSITORY / "results" / "sample" / "h100" / "one_gpu"
    runs = records.by_run(records.read(folder / "kit_runs.csv")).values()
    past_warmup = [[row for row in run if not row["warmup"]] for run in runs]
    assert all(row["train_seconds"] > 3 for rows in past_warmup for row in rows)
    with (folder / "steps.csv").open() as file:
        speeds = sorted(int(row["images_per_s"]) for row in csv.DictReader(file) if row["loop"] == "kit")
    assert speeds == sorted(round(median(row["images_per_s"] for row in rows)) for rows in past_warmup)


def test_the_table_of_steps_compares_rows_of_one_session() -> None:
    """Where the GPU waits for the CPU, two sessions differ by more than most ways of making the step."""
    folder = REPOSITORY / "results" / "sample" / "h100" / "one_gpu"
    page = (folder / "README.md").read_text()
    table = page.partition("<!-- quote: bench on_a_gpu")[2].partition("<!-- end quote")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in table[3:]]
    with (folder / "steps.csv").open() as file:
        session = {
            (row["shape"], row["way"], f"{int(row['images_per_s']):,}"): row["session"]
            for row in csv.DictReader(file)
            if row["loop"] == "one batch"
        }
    sessions = {(shape, session[f"{shape} Adadelta", way, speed]) for shape, way, speed, *_ in cells}
    assert len(sessions) == len({shape for shape, *_ in cells}) == 3


def test_the_files_to_open_for_a_change_are_there() -> None:
    page = (REPOSITORY / "docs" / "dev" / "README.md").read_text()
    table = page.partition("## To change X")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w.-]+/[\w./-]+\.\w+)`", table)
    assert len(named) >= 20
    assert not [name for name in named if not (REPOSITORY / name).exists()]


def test_from_one_stage_to_the_next_little_changes() -> None:
    def changed(before: str, after: str) -> int:
        return sum(line.startswith(">") for line in ran("diff", before, after).stdout.splitlines())

    stages = [str(path) for path in sorted(REPOSITORY.glob("0*/mnist_*.py"))]
    assert changed(stages[0], stages[1]) <= 20
    assert changed(stages[1], stages[2]) <= 20


PROGRAM = re.compile(
    r"(OMP_NUM_THREADS=1 )?(python|torchrun --standalone --nproc-per-node=(?P<ranks>\d)) "
    r"(?P<words>\S+\.py( (?!-- )[^ *]+)*)"
)


def _commands() -> list[tuple[Path, str]]:
    """One by one; those that need a Slurm are test_slurm_documents.py's."""
    blocks = lessons.commands(on_a_cluster=False)
    lines = [(readme, line) for readme, block in blocks for line in block.splitlines()]
    return [(readme, line) for readme, line in lines if line and line[0] != "#"]


@pytest.mark.usefixtures("mnist_dir")
@pytest.mark.full
@pytest.mark.parametrize(
    ("readme", "command"),
    [(readme, command) for readme, command in _commands() if command not in RUN_ELSEWHERE],
    ids=lambda value: value if isinstance(value, str) else value.parent.name,
)
def test_a_command_of_the_documents_runs(
    readme: Path, command: str, forking: Forking, tmp_path: Path
) -> None:
    """As it is written, from the folder of its reader, only on less data and into another folder.

    Where it is a program and its options, a process that has PyTorch loaded stands in for the shell, and for
    torchrun.
    """
    if re.search(r"\b(fsdp|gpt_fsdp|pipeline)\.py", command) and torch.__version__ < sharded.NEEDED:
        pytest.skip(f"needs PyTorch {sharded.NEEDED} or newer")
    shorter = command
    if "--epochs" in command and "mixed_precision" not in command:
        shorter += " --precision fp32"
    if "--epochs" in command:
        shorter += f" --train-size 600 --test-size 200 --results-dir {shlex.quote(str(tmp_path))}"
    if "--lr-warmup-images" in command:
        shorter += " --lr-warmup-images 600"  # no more than are trained
    if "--checkpoint-dir" in command:
        shorter += f" --checkpoint-dir {shlex.quote(str(tmp_path / 'checkpoints'))}"
    if command == "python fast.py":
        shorter += " --batch-size 16"
    if "breakdown.py" in command:
        shorter += f" --repeats 1 --train-size 600 --width 4 --results-dir {shlex.quote(str(tmp_path))}"
    if "mnist_" in command or ("beyond" in str(readme) and "gpt" not in command):
        shorter += " --width 4"
    if "plot_results" in command or "how_many_gpus" in command:
        shorter += f" --out {shlex.quote(str(tmp_path))}"  # the later of two counts
    if "looks_busy" in command:
        shorter += " --seconds 0.5"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folder = REPOSITORY / lessons.starts_in(readme)
    environment = ENVIRONMENT | {"PATH": path, "SITE_SCRATCH_DIR": str(tmp_path / "jobs")}
    if program := PROGRAM.fullmatch(shorter):
        ranks = program["ranks"] and int(program["ranks"])
        done = forking.run(*shlex.split(program["words"]), env=environment, ranks=ranks, cwd=folder)
    else:
        done = ran("bash", "-euc", shorter, cwd=folder, env=environment)
    succeeded(done)


def test_every_document_command_list_is_used() -> None:
    """A command that no document has any more leaves the list above."""
    assert set(RUN_ELSEWHERE) <= {command for _, command in _commands()}


@pytest.mark.usefixtures("mnist_dir")
@pytest.mark.full
def test_bench_measures_the_ladder(forking: Forking) -> None:
    ladder = REPOSITORY / "tools" / "bench" / "ladder.py"
    done = succeeded(forking.run(ladder, 5, "--steps", 2, env=ENVIRONMENT, cwd=REPOSITORY))
    assert float(done.stdout) > 0


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_what_was_measured(name: str) -> None:
    assert str(pictures.PICTURES[name]()) == (REPOSITORY / name).read_text(), "run `make lessons`"


def test_a_new_project_is_made_of_the_lesson() -> None:
    for name, text in project_template.up_to_date().items():
        assert (project_template.TEMPLATE / name).read_text() == text, "run `make lessons`"


def test_the_recorded_session_shows_the_committed_runs(plot: Callable, tmp_path: Path) -> None:
    """Its table is that of the runs. Whoever asks for less motion sees it stand still."""
    outputs = [json.loads(line) for line in recording.SESSION.read_text().splitlines()[1:]]
    printed = "".join(text for _, _, text in outputs).replace("\r\n", "\n")
    again = succeeded(plot(recording.SESSION.parent / "runs.csv", "--out", tmp_path)).stdout
    shown, of_runs = (
        re.findall(r"^(?:stage|single|dp|ddp) .*$", text, re.MULTILINE) for text in (printed, again)
    )
    assert shown == of_runs and len(shown) == 5
    drawn = ElementTree.fromstring((REPOSITORY / "results/pictures/compare.svg").read_text())
    still, moving = drawn.find("{*}style").text.split("@media (prefers-reduced-motion: no-preference)")
    assert "animation" not in still and "animation" in moving


old = pytest.mark.skipif(torch.__version__ < sharded.NEEDED, reason="gpt.py needs a newer PyTorch")


@pytest.mark.full
@pytest.mark.parametrize("page", ["DOES_NOT_FIT.md", pytest.param("GPT.md", marks=old)])
def test_the_program_of_a_page_prints_what_it_says(page: str, forking: Forking, tmp_path: Path) -> None:
    text = (BEYOND / page).read_text()
    program, printed = re.search(r"```python\n(import.*?)```\n\n```\n(.*?)```", text, re.DOTALL).groups()
    here = "import sys; sys.path[0] = ''  # as with python -c\n"
    (tmp_path / "program.py").write_text(here + program)
    done = forking.run(tmp_path / "program.py", env=ENVIRONMENT, cwd=BEYOND)
    assert done.stdout == printed, done.stderr


def test_the_shards_of_a_page_are_each_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two ranks with two workers each, which make the same number of steps."""
    page = (REPOSITORY / "slurm" / "DATA.md").read_text()
    (program,) = re.findall(r"```python\n(import random.*?)```", page, re.DOTALL)
    (tmp_path / "shards.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    import shards

    files = [tmp_path / f"{number}.npy" for number in range(9)]
    for number, file in enumerate(files):
        np.save(file, np.arange(10 * number, 10 * number + 10))
    ranks = [shards.Shards(files, rank, 2) for rank in range(2)]
    everything = [row for rank in ranks for row in DataLoader(rank, batch_size=None, num_workers=2)]
    assert sorted(map(int, everything)) == list(range(90))
    epochs = []
    for epoch in range(2):
        for rank in ranks:
            rank.epoch = epoch
        steps = [torch.stack(list(shards.batches(rank, 10, batch_size=5, workers=2))) for rank in ranks]
        assert [len(of_rank) for of_rank in steps] == [8, 8]
        assert len(torch.cat(steps).unique()) == 80
        epochs.append(torch.cat(steps))
    assert not torch.equal(*epochs)


@pytest.mark.usefixtures("mnist_dir")
@pytest.mark.full
def test_a_part_that_runs_on_the_cpu_does_not_name_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the rows of the benchmark, next to those of the GPU, which is simulated here."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools" / "bench")
    import bench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    def part(args: argparse.Namespace) -> bench.Rows:
        small = ("--epochs=1", "--train-size=128", "--test-size=100", "--precision=fp32", "--no-cuda")
        yield from bench._stage(args, "ddp", 0, "ddp", *small, threads=1)
        yield {"case": "ladder"}

    path = tmp_path / "part.csv"
    bench._measure(part, argparse.Namespace(data_dir=DEFAULT_DATA_DIR), path)
    on_cpu, on_gpu = pd.read_csv(path).device_name
    assert on_cpu.startswith("CPU: ") and on_gpu == "a GPU"
