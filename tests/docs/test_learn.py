"""`make learn`: the first steps of somebody who has just cloned the project, and the way on from there."""

import json
from pathlib import Path

import pytest
from conftest import succeeded
from test_compare import make_project, run

STAGES = ("01_singlegpu", "02_multigpu_dp", "03_multigpu_ddp")


def learn(project: Path, done: dict[str, list[str]]) -> list[str]:
    """What it prints when these exercises are done."""
    for stage in STAGES:
        progress = {"done": done.get(stage, []), "hints": {}}
        (project / stage / "exercises" / "progress.json").write_text(json.dumps(progress))
    learned = succeeded(run(["make", "--no-print-directory", "-C", project, "learn"]))
    return learned.stdout.splitlines()


def exercises(project: Path, stage: str) -> list[str]:
    return [path.parent.name[3:] for path in sorted((project / stage / "exercises").glob("*/check.py"))]


@pytest.mark.full
def test_first_steps(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    (project / ".venv" / "bin" / "activate").touch()
    told = learn(project, {})
    assert "GPUs    none: the CPU stands in" in told
    assert f"MNIST   in {project / 'data'}" in told
    assert sum(line.startswith("Slurm   ") for line in told) == 1
    names = {stage: exercises(project, stage) for stage in STAGES}
    assert sum(line.startswith("[ ] ") for line in told) == sum(map(len, names.values()))
    bar = f"[{'.' * len(names[STAGES[0]])}] 0 of {len(names[STAGES[0]])} done. Next: clock (core), "
    assert any(line.startswith(bar) for line in told)
    assert told[-4:] == [
        "The lesson around it: 01_singlegpu/README.md. Go on with:",
        "  source .venv/bin/activate",
        "  cd 01_singlegpu",
        "  python exercises/check.py",
    ]

    (project / "data").unlink()
    told = learn(project, {STAGES[0]: names[STAGES[0]]})
    assert sum(line.startswith("[x] ") for line in told) == len(names[STAGES[0]])
    assert "MNIST   missing or damaged" in told
    assert told[-4] == "  make data" and told[-2] == "  cd 02_multigpu_dp"
    assert not (project / "data").exists()
    assert learn(project, names)[-1].startswith("All done.")
