"""manygpus/jobs/submit/freezing.py: what of a checkout is copied, and what the copy only has a link to."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import commit_of
from conftest import ran, succeeded

from manygpus.frozen_code import FrozenCode
from manygpus.jobs.stages import STAGES
from manygpus.jobs.submit import freezing
from manygpus.jobs.submit.freezing import NotFrozenError, PlannedCopy
from manygpus.jobs.user_program import Program


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a commit, and the current folder."""
    project = tmp_path / "the project"
    write(project, "train.py", "package/part.py", "configs/a.yaml", "metrics.json")
    (project / ".gitignore").write_text("ignored/\n*.log\n")
    commit_of(project)
    monkeypatch.chdir(project)
    return project


def plan(script: Path, to: Path) -> PlannedCopy:
    program = Program(script, user_folder=Path.cwd())
    stage = replace(STAGES["ddp"], script=script).with_program(program)
    return freezing.plan(stage, to, jobs_dir=script.parent.parent / "jobs")


def frozen(script: Path, to: Path) -> Path:
    """The copy of the checkout of a script."""
    copy = plan(script, to)
    copy.write()
    return copy.code.folder


def links(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): str(path.readlink()) for path in folder.rglob("*") if path.is_symlink()
    }


def test_sources_are_copied_as_they_are_now_and_data_are_linked(project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text("changed")
    (project / "configs" / "a.yaml").unlink()
    write(project, "new/module.py", "new/weights.pt", "ignored/data.py", "package/run.log", "images/1.png")
    write(project, "images/deep/2.png", "package/__pycache__/part.pyc")
    write(project, "start")
    (project / "start").chmod(0o755)
    copy = plan(project / "train.py", tmp_path)
    copy.write()
    folder = copy.code.folder
    assert (copy.code.changed_files, copy.code.commit[-6:]) == (4, "-dirty")
    assert (folder / "train.py").read_text() == "changed" and os.access(folder / "start", os.X_OK)
    expected = {"train.py", "package/part.py", "metrics.json", ".gitignore", "new/module.py", "start"}
    assert {*copy.code.files()} == expected
    linked = ("ignored", "images", "new/weights.pt", "package/run.log")
    assert links(folder) == {name: str(project / name) for name in linked}
    assert {*copy.left_out} == {*linked}
    # The copy is a checkout of the same commit, with the same changes.
    for question in (("rev-parse", "HEAD"), ("diff", "--stat"), ("describe", "--always", "--dirty")):
        answers = [succeeded(ran("git", "-C", where, *question)).stdout for where in (project, folder)]
        assert answers[0] == answers[1] != ""


def test_what_is_large_is_linked_and_all_stays_within_the_bounds(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (project / "committed.bin").open("wb") as file:
        file.truncate(11_000_000)
    (project / "new.py").write_text("#" * 2_000_000)
    succeeded(ran("git", "add", "committed.bin"))
    monkeypatch.setattr(freezing, "MOST_MB", 1)
    copy = plan(project / "train.py", tmp_path)
    assert {*copy.links} == {"committed.bin", "new.py"} and copy.size < 1_000_000
    assert copy.left_out[0] == "committed.bin"
    monkeypatch.setattr(freezing, "MOST_FILES", 3)
    assert len(plan(project / "train.py", tmp_path).files) == 3


def test_a_submodule_and_another_checkout_are_copied_with_their_changes(
    project: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write(other, "module.py", "config.yaml")
    commit_of(other)
    allow = ("-c", "protocol.file.allow=always")
    succeeded(ran("git", *allow, "submodule", "--quiet", "add", other, "sub"))
    (project / "sub" / "module.py").write_text("changed")
    write(project / "sub", "new.py", "new.pt")
    write(project / "nested", "tool.py")
    commit_of(project / "nested")
    folder = frozen(project / "sub" / "module.py", tmp_path)
    assert (folder / "sub" / "module.py").read_text() == "changed"
    assert (folder / "train.py").exists() and (folder / "nested" / "tool.py").exists()
    assert links(folder) == {"sub/new.pt": str(project / "sub" / "new.pt")}


def test_a_project_that_has_the_kit_within(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs run the kit from the copy, too, whose stages would refuse another one."""
    write(project, "kit/manygpus/jobs/scripts/job_env.sh", "kit/stage.py")
    commit_of(project / "kit")
    monkeypatch.setattr(freezing, "JOB_ENV", project / "kit/manygpus/jobs/scripts/job_env.sh")
    copy = plan(project / "train.py", tmp_path)
    assert (copy.kit, copy.job_env.name) == (copy.code.folder / "kit", "job_env.sh")


def test_links_stay_in_the_copy_or_lead_where_they_led(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write(outside, "data.txt")
    for name, target in {
        "configs/current.yaml": "a.yaml",
        "whole": str(project / "package"),
        "data": "../outside",
        "broken": "nowhere",
    }.items():
        (project / name).symlink_to(target)
    commit_of(project)
    folder = frozen(project / "train.py", tmp_path / "job")
    expected = {
        "configs/current.yaml": "a.yaml",
        "whole": "package",
        "data": str(outside),
        "broken": "nowhere",
    }
    assert links(folder) == expected


def test_any_name_is_copied(project: Path, tmp_path: Path) -> None:
    names = ["two\nlines.py", "a \"quote\" and 'another'.py", os.fsdecode(b"latin-\xe9.py"), "ü.py"]
    write(project, *(name for name in names if name.isprintable() or "\n" in name))
    (project / names[2]).write_bytes(b"")
    commit_of(project)
    copy = plan(project / "train.py", tmp_path)
    copy.write()
    assert {*names} <= {*copy.code.files()} and all((copy.code.folder / name).exists() for name in names)
    assert FrozenCode.read(tmp_path) == copy.code


def test_a_worktree_and_a_checkout_without_a_commit(project: Path, tmp_path: Path) -> None:
    succeeded(ran("git", "worktree", "add", "--quiet", tmp_path / "worktree"))
    copy = plan(tmp_path / "worktree" / "train.py", tmp_path)
    assert copy.code.checkout == tmp_path / "worktree" and copy.code.changed_files == 0
    empty = tmp_path / "empty"
    write(empty, "train.py")
    succeeded(ran("git", "init", "--quiet", empty))
    copy = plan(empty / "train.py", tmp_path)
    assert (copy.code.commit, copy.code.changed_files, {*copy.files}) == ("", 1, {"train.py"})


def test_a_copy_in_its_own_checkout_contains_neither_itself_nor_those_before(project: Path) -> None:
    """Also where git ignores the folder of the sweeps."""
    for folder in (project / "sweeps" / "1", project / "sweeps" / "2", project / "ignored" / "1"):
        frozen(project / "train.py", folder)
    last = plan(project / "train.py", project / "sweeps" / "3")
    assert last.files == {"train.py", "package/part.py", "configs/a.yaml", "metrics.json", ".gitignore"}
    assert {*last.links} == {"ignored"}


def test_sources_that_have_not_changed_are_shared_with_the_copy_before(project: Path, tmp_path: Path) -> None:
    first = frozen(project / "train.py", tmp_path / "1")
    (project / "train.py").write_text("changed")
    second = frozen(project / "train.py", tmp_path / "2")
    shared = {"package/part.py", "configs/a.yaml"}
    files = FrozenCode.read(tmp_path / "2").files()
    assert {name for name in files if (first / name).samefile(second / name)} == shared
    assert (first / "train.py").read_text() == "train.py" and (second / "train.py").read_text() == "changed"
    assert not any((second / name).samefile(project / name) for name in files)
    # The user may delete a copy.
    shutil.rmtree(tmp_path / "2")
    assert len(FrozenCode.read(frozen(project / "train.py", tmp_path / "3").parent).files()) == len(files)


@pytest.mark.parametrize("reached_by", ["folder", "file"])
def test_a_script_that_is_reached_by_a_link(project: Path, tmp_path: Path, reached_by: str) -> None:
    if reached_by == "folder":
        (tmp_path / "link").symlink_to(project)
        script = tmp_path / "link" / "train.py"
    else:
        script = tmp_path / "link.py"
        script.symlink_to(project / "train.py")
    copy = plan(script, tmp_path)
    stage = replace(STAGES["ddp"], script=script).with_program(Program(script))
    assert copy.stage(stage).script == copy.code.folder / "train.py"


def test_arguments_that_name_sources_lead_to_the_copy(project: Path, tmp_path: Path) -> None:
    write(project, "new.yaml", "new.json", "out.csv")
    copy = plan(project / "train.py", tmp_path)
    folder = copy.code.folder
    typed = ["--config", "configs/a.yaml", "--c=./new.yaml", str(project / "train.py"), "metrics.json"]
    assert copy.arguments(typed) == (
        "--config",
        f"{folder}/configs/a.yaml",
        f"--c={folder}/new.yaml",
        f"{folder}/train.py",
        f"{folder}/metrics.json",
    )
    # What a script may write to, and what is no file, stays.
    others = ["new.json", "out.csv", "configs", "a.yaml", "--lr=0.1", "train.py,package", "print('x.py')"]
    assert copy.arguments(others) == tuple(others)
    assert [copy.code.as_typed(word) for word in copy.arguments(typed[:2])] == typed[:2]


def test_where_no_copy_is_made(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "train.py")
    write(project, "ignored/train.py")
    for script in (tmp_path / "train.py", project / "ignored" / "train.py"):
        with pytest.raises(NotFrozenError):
            plan(script, tmp_path / "job")
    monkeypatch.setenv("HOME", str(project))
    with pytest.raises(NotFrozenError):
        plan(project / "train.py", tmp_path / "job")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotFrozenError):
        plan(project / "train.py", tmp_path / "job")
    assert not (tmp_path / "job").exists()
