"""A program that does not use the kit: what a job starts, from the words of a command line."""

import os
from pathlib import Path

import pytest

from manygpus.config.command_line import Parser
from manygpus.jobs import user_program

SAVED = ("model-9.pt", "model-10.pt", "best.pt")  # the newest last


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job that has saved, with characters that are special elsewhere; work is beside it."""
    job = tmp_path / "[jobs]" / "7?"
    for seconds, name in enumerate(SAVED, start=1):
        for place in (job, tmp_path / "lr=1"):
            place.mkdir(parents=True, exist_ok=True)
            (place / name).touch()
            os.utime(place / name, (seconds, seconds))
    (job / ".being-saved.pt").touch()
    monkeypatch.chdir(tmp_path)
    return job


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--resume {folder}/model-*.pt --again", "--resume {folder}/model-10.pt --again"),
        ("--resume={folder}/*.pt", "--resume={folder}/best.pt"),
        ("--resume {folder}/best.pt", "--resume {folder}/best.pt"),
        ("--resume ./lr=1/m*.pt", "--resume lr=1/model-10.pt"),
        # What was never saved is not handed over, nor the option in front of it.
        ("--again --resume {folder}/last.pt", None),
        ("--resume out/checkpoint-*.pth", None),
        ("--resume={folder}/model-1*.pth", None),
        # No path.
        ("--resume 1", "--resume 1"),
        ("--resume s3://bucket/x.pt -1/2", "--resume s3://bucket/x.pt -1/2"),
        ("", None),
    ],
)
def test_words_for_a_start_after_the_first(words: str, expected: str | None, folder: Path) -> None:
    """None: it starts anew."""
    named, arguments = user_program.parse(["--when-requeued", words, "--plain", "-m", "train", "--lr", "1"])
    assert named.in_start(0, arguments, folder) == ["--lr", "1"]
    added = [word.replace("{folder}", str(folder)) for word in (expected or "").split()]
    assert named.in_start(1, arguments, folder) == ["--lr", "1", *added]
    assert named.when_requeued is not None
    # A job script gets them as words.
    assert user_program.parse([*named.words, *arguments]) == (named, arguments)


@pytest.mark.parametrize(
    ("words", "own", "of_the_program"),
    [
        ("--out=a train.py --out b --time 7", "--out=a --plain=train.py", "--out b --time 7"),
        ("--time 5 --dry-run train.py", "--time 5 --dry-run --plain=train.py", ""),
        ("--when-requeued --resume x --plain y", "--when-requeued=--resume --plain=x", "--plain y"),
        ("--python a x -- --plain y", "--python a --plain=x", "-- --plain y"),
        ("--plain -m a.b -m c", "--plain=-m a.b", "-m c"),
        # No option, and so no value.
        ("--tim 5 x", "--tim --plain=5", "x"),
    ],
)
def test_where_a_program_begins_without_stages(
    words: str, own: str, of_the_program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manygpus.project.IS_CHECKOUT", False)
    parser = Parser()
    user_program.add_options(parser)
    for option in ("--out", "--time"):
        parser.add_argument(option)
    parser.add_argument("--dry-run", action="store_true")
    own_words, arguments = user_program.split(words.split(), parser)
    assert (" ".join(own_words), arguments) == (own, of_the_program.split())


def test_an_installed_program_is_found_as_by_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PATH, beside --python, or beside the kit's own Python; its whole path is in the job."""
    places = {name: tmp_path / name / "bin" for name in ("mine", "path", "kit")}
    for place in places.values():
        place.mkdir(parents=True)
        for name in ("python", "torchrun"):
            (place / name).write_text("#!/bin/sh\n")
            (place / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(places["path"]))
    monkeypatch.setattr("sys.executable", str(places["kit"] / "python"))

    def found(*words: str) -> Path:
        return user_program.parse([*words, "--plain", "torchrun", "x.py"])[0].path

    assert found() == places["path"] / "torchrun"
    assert found("--python", "mine/bin/python") == places["mine"] / "torchrun"
    monkeypatch.setenv("PATH", "/nowhere")
    named, arguments = user_program.parse(["--plain", "torchrun", "x.py"])
    assert named.name == [str(places["kit"] / "torchrun")] and arguments == ["x.py"]
    # Its user's code is where that stands.
    assert named.folder == tmp_path
