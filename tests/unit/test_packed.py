"""Many runs in one CSV, by tools/pack_runs.py: read as the folder was, and taken apart again to the byte."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, REPOSITORY, Script, one_error
from forking import Forking

from trainkit.compare import comparison, packed
from trainkit.schema import records

SAMPLE = REPOSITORY / "results" / "sample" / "cpu-2-cores" / "runs.csv"
JOULES = {"one": 40.0, "two": None}


@pytest.fixture
def pack(forking: Forking) -> Script:
    return partial(forking.run, REPOSITORY / "tools" / "pack_runs.py", env=ENVIRONMENT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs: with a verdict that has the energy, with one that has not, and with a slow rank."""
    (row, *_) = records.read(SAMPLE)
    for run_id, slowest in {"one": 1.0, "two": 1.1, "slow": 2.0}.items():
        recorder = records.RunFiles(tmp_path, row | {"run_id": run_id})
        for epoch in (1, 2):
            ranks = [{"rank": rank, "own_seconds": seconds} for rank, seconds in enumerate([1.0, slowest])]
            of_all = {"epoch": epoch, "host": "n1", "device": "cpu", "device_name": "CPU"}
            of_all["peak_memory_mb"] = 1
            metric = {"epoch": epoch, "metric": "recall", "of": "cats", "value": 0.5}
            recorder.add([of_all | rank for rank in ranks], [metric], epoch=epoch, warmup=epoch == 1)
        if run_id in JOULES:
            verdict = json.dumps({"findings": [], "joules_per_1000_images": JOULES[run_id]}, indent=1)
            records.verdict_file(recorder.path).write_text(verdict)
    return tmp_path / "runs"


def test_packed_runs_are_read_as_the_folder(pack: Script, folder: Path) -> None:
    """Also which ranks and which verdict belong to which run."""
    done = pack(folder)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    single, no = comparison.load([folder])
    many, none = comparison.load([folder.with_suffix(".csv")])
    assert (no, none) == ([], [])
    assert many.drop(columns="file").equals(single.drop(columns="file"))
    last = many.groupby("run_id").last()
    assert last.slow_rank.astype(bool).to_dict() == {"one": False, "two": False, "slow": True}
    assert last.joules_per_1000_images.dropna().to_dict() == {"one": 40.0}


@pytest.mark.parametrize("chosen", [[], ["two"]])
def test_taken_apart_the_files_are_those_of_before(
    pack: Script, folder: Path, tmp_path: Path, chosen: list[str]
) -> None:
    pack(folder)
    apart = tmp_path / "apart"
    apart.mkdir()
    packed.unpack(folder.with_suffix(".csv"), apart, chosen)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    kept = {name: text for name, text in before.items() if not chosen or name.partition(".")[0] in chosen}
    assert {file.name: file.read_bytes() for file in apart.iterdir()} == kept
    assert len(kept) == (4 if chosen else 11)


def test_a_folder_without_runs(pack: Script, tmp_path: Path) -> None:
    assert re.fullmatch(rf"error: {tmp_path} has no runs.*\n", pack(tmp_path).stderr)


def test_ranks_that_cannot_be_read_are_named_and_the_runs_stay(pack: Script, folder: Path) -> None:
    pack(folder)
    ranks = folder.with_suffix(".ranks.tsv")
    ranks.write_text(ranks.read_text().replace("\tn1\t", "\t"))
    rows, (sentence,) = comparison.load([folder.with_suffix(".csv")])
    assert rows.run_id.nunique() == 3 and sentence.startswith(f"{ranks}: not read, ")


HOSTILE = {
    "odd.csv": [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), Path.touch],
    "one.ranks.tsv": [
        os.mkfifo,
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.write_text("a\n1\t2"),
    ],
    "one.metrics.tsv": [Path.mkdir],
    "one.monitor.json": [os.mkfifo, lambda path: path.write_text("[" * 100_000)],
}
HOSTILE["odd.csv"] += [lambda path: path.symlink_to("odd.csv"), lambda path: path.symlink_to("/nowhere")]


@pytest.mark.parametrize(("name", "put"), [(name, put) for name, puts in HOSTILE.items() for put in puts])
def test_what_no_run_has_written_is_not_packed(
    pack: Script, folder: Path, name: str, put: Callable[[Path], object]
) -> None:
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    assert str(folder) in one_error(pack(folder))
    assert [*folder.parent.iterdir()] == [folder]


def test_no_file_is_replaced_nor_one_behind_a_link_written(pack: Script, folder: Path) -> None:
    for suffix in (".csv", ".monitor.json"):
        folder.with_suffix(suffix).symlink_to("mine")
        assert "is there already" in one_error(pack(folder))
        folder.with_suffix(suffix).unlink()
    assert [*folder.parent.iterdir()] == [folder]


def test_a_folder_by_a_dot_is_packed_next_to_it(pack: Script, folder: Path) -> None:
    assert pack(".", cwd=folder).returncode == 0
    assert folder.with_suffix(".csv").exists()
    assert "/ has no runs" in one_error(pack("/"))
