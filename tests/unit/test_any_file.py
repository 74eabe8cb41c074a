"""Files of ours that hold anything: each reader takes them, or says in one sentence why not."""

import fcntl
import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import REPOSITORY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.compare import comparison
from trainkit.jobs.why import Evidence
from trainkit.monitor import waste
from trainkit.rank.data import Split
from trainkit.rank.recorder import Recorder
from trainkit.runtime import errors, job_folder
from trainkit.runtime.errors import STOP_SIGNALS, UserError, hear_stop
from trainkit.runtime.files import locked, read_text
from trainkit.schema import records, samples
from trainkit.workshop.exercises import PROGRESS, Workbook
from trainkit.workshop.work import Workspace

RECORD = (REPOSITORY / "results" / "sample" / "cpu-2-cores" / "runs.csv").read_bytes()[:8000]
SAMPLES = b"\n".join([samples.HEADER.strip().encode(), *[b"7,node" + b"," * (len(samples.COLUMNS) - 2)] * 3])
PIECES = [b"", b",", b"\n", b'"', b"\0", b"-", b"e99", b"nan", b"\xff", b"=1", b"\x1b[2J"]
PIECES += [b"9" * 5000, b"[" * 9999]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
many = settings(
    max_examples=120,
    derandomize=True,  # a test that fails once, fails again
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def damaged(draw: Callable, good: bytes) -> bytes:
    """Replace up to three pieces of a good file by junk, or take other bytes altogether."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = start + draw(st.sampled_from([0, 1, 5, len(good)]))
        content[start:end] = draw(st.sampled_from(PIECES) | st.binary(max_size=9))
    return bytes(content)


def in_one_line(read: Callable[[], object]) -> None:
    """Read; what cannot be read has one sentence, without what a terminal would obey."""
    try:
        read()
    except UserError as error:
        assert str(error).isprintable(), str(error)


@many
@given(damaged(RECORD))
def test_a_record(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    rows, skipped = comparison.load([path])
    assert len(rows) or skipped
    assert all(sentence.isprintable() for sentence in skipped)


def test_a_file_without_a_size_and_an_end() -> None:
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_text(Path("/proc/self/pagemap"), most=1000)


@many
@given(damaged(SAMPLES))
def test_samples(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "n1.csv").write_bytes(content)
    in_one_line(lambda: waste.judge(tmp_path))


def test_zeros_that_a_power_cut_left_in_samples(tmp_path: Path) -> None:
    (tmp_path / "n1.csv").write_bytes(SAMPLES + b"\n" + b"\0" * 300_000)
    assert len(samples.read(tmp_path)) == 3


@many
@given(damaged(b'{"done": ["clock"], "hints": {"loader": 1}}') | ANYTHING.map(json.dumps).map(str.encode))
def test_the_progress_of_a_learner(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PROGRESS).write_bytes(content)
    in_one_line(lambda: Workbook(tmp_path))


@many
@given(damaged(b"prediction = high  # a word\nseconds = 1.5\n"))
def test_answers(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "answers.txt").write_bytes(content)
    answers = Workspace(tmp_path)
    in_one_line(lambda: answers.answers().word("prediction", "high", "low"))
    in_one_line(lambda: answers.answers().number("seconds"))


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"\xff\x1b[2J")])
def test_a_note_that_no_rank_has_left(tmp_path: Path, put: Callable[[Path], object]) -> None:
    """A pipe would be waited for."""
    for name in ("rank-0.started", "rank-1.failed", "stopped"):
        put(tmp_path / name)
    assert Evidence(tmp_path, []).reasons()
    assert job_folder.stopped(tmp_path) is not None


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("../mine")])
def test_a_note_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path], object]
) -> None:
    """It is left out, and nothing is written behind a link."""
    (tmp_path / "job" / samples.FOLDER).mkdir(parents=True)
    for name, value in {"RANK": "0", job_folder.VARIABLE: str(tmp_path / "job")}.items():
        monkeypatch.setenv(name, value)
    for name in ("rank-0.started", "stopped", f"{samples.FOLDER}/{samples.RUNS}"):
        put(tmp_path / "job" / name)
    job_folder.note("started")
    samples.note_run(tmp_path / "run.csv")
    with pytest.raises(OSError, match="stopped"):
        job_folder.note_stop(tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / "job"]


def test_a_log_with_the_rank_of_no_job(tmp_path: Path) -> None:
    """Python refuses numbers of so many digits."""
    rank = "9" * 5000
    lines = ["  host : n1", f"  rank : {rank}", f"  exitcode : -{rank}"]
    lines += [f"[Rank {rank}] Watchdog caught collective operation timeout"]
    assert isinstance(Evidence(tmp_path, lines, "torchrun").reasons(), list)


def test_what_is_told_commands_no_terminal(capsys: pytest.CaptureFixture) -> None:
    errors.tell("results: \x1b[2J\n\tnext")
    assert capsys.readouterr().out == "results: \\x1b[2J\n        next\n"


def recorder(folder: Path) -> tuple[Recorder, dict[str, object]]:
    """A training with another loop, and the parts of it that are saved."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    told = {"batch_size": 4, "epochs": 3, "dataset": "d", "results_dir": folder}
    return Recorder("own", model, optimizer, **told), {"model": model, "optimizer": optimizer}


@pytest.fixture
def saved(tmp_path: Path) -> dict:
    """What a Recorder saves after an epoch, in `saved.pt`."""
    before, parts = recorder(tmp_path)
    parts["model"](torch.ones(1, 2)).sum().backward()
    parts["optimizer"].step()
    before.epoch(4, 1.0, 0.5)
    before.save(tmp_path / "saved.pt", parts)
    after, parts = recorder(tmp_path)
    after.load(tmp_path / "saved.pt", parts)
    assert after.first_epoch == 2
    return torch.load(tmp_path / "saved.pt", weights_only=True)


def test_what_a_script_notes_in_a_group_is_no_setting(tmp_path: Path) -> None:
    before, parts = recorder(tmp_path)
    parts["optimizer"].param_groups[0]["frozen"] = True
    before.save(tmp_path / "saved.pt", parts)
    after, parts = recorder(tmp_path)
    (group,) = parts["optimizer"].param_groups
    group["frozen"] = False
    after.load(tmp_path / "saved.pt", parts)
    assert parts["optimizer"].param_groups[0]["frozen"] is True


def go_on_beside(file: Path) -> None:
    """Go on from `file`: the record of the first training stays, and this one has its own."""
    (record,) = (file.parent / "runs").glob("*.csv")
    before = record.read_bytes()
    other, parts = recorder(file.parent)
    other.load(file, parts)
    other.epoch(4, 1.0, 0.25)
    assert record.read_bytes() == before
    assert sorted(len(records.read(path)) for path in record.parent.glob("*.csv")) == [1, 2]


def test_a_copy_of_a_saved_training_leaves_the_record_of_the_first(saved: dict, tmp_path: Path) -> None:
    go_on_beside(shutil.copy(tmp_path / "saved.pt", tmp_path / "copy.pt"))
    rows, _ = comparison.load([tmp_path / "runs"])
    assert rows.epoch.tolist() == [1, 2]  # the first epoch counts once
    (copy,) = (path for path in (tmp_path / "runs").glob("*.csv") if len(records.read(path)) == 2)
    copied = pd.read_csv(copy, dtype=str).assign(threads_per_worker=["1", "2"])
    copied.to_csv(copy, index=False)  # a run that counts in no table takes no other out of it
    rows, (skipped,) = comparison.load([tmp_path / "runs"])
    assert len(rows) == 1 and copy.stem in skipped and copy.stem not in set(rows.run_id)


def test_an_epoch_that_could_not_be_written_is_written_once(saved: dict, tmp_path: Path) -> None:
    again, parts = recorder(tmp_path)
    again.load(tmp_path / "saved.pt", parts)
    (record,) = (tmp_path / "runs").glob("*.csv")
    record.unlink()
    record.mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        again.epoch(4, 1.0, 0.5, perplexity=2)
    record.rmdir()
    again.epoch(4, 1.0, 0.25, perplexity=1)
    assert [(row["epoch"], row["train_loss"]) for row in records.read(record)] == [(1, 0.5), (2, 0.25)]
    assert [row["epoch"] for row in records.read_ranks(record)] == [1, 2]
    assert [row["value"] for row in records.read_metrics(record)] == [1]


def test_a_lock_of_another_user(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch(mode=0o444)
    me = os.geteuid()
    os.seteuid(me or 65534)
    try:
        with pytest.raises(UserError, match="is another user's: give a folder of your own"):
            locked(tmp_path / ".lock", "held")
    finally:
        os.seteuid(me)


def test_a_process_that_a_training_has_forked_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    fork = multiprocessing.get_context("fork")
    started = fork.Event()
    try:
        hear_stop(lambda *_: None)
        child = fork.Process(target=lambda: started.set() or time.sleep(600))
        child.start()
        assert started.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM
    finally:
        child.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_record_that_another_process_writes_is_left_to_it(saved: dict, tmp_path: Path) -> None:
    """Though it may have saved to any file since."""
    (record,) = (tmp_path / "runs").glob("*.csv")
    gc.collect()  # of this process, which has ended that training
    with record.with_name(f".{record.stem}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        go_on_beside(tmp_path / "saved.pt")
        record.unlink()  # or has not written its first epoch
        other, parts = recorder(tmp_path)
        other.load(tmp_path / "saved.pt", parts)
    assert not record.exists()


def test_one_saved_training_after_another_in_one_process(saved: dict, tmp_path: Path) -> None:
    """Each keeps its record; a copy of a third has one of its own."""
    again, parts = recorder(tmp_path)
    again.load(tmp_path / "saved.pt", parts)
    other, parts = recorder(tmp_path)
    other.epoch(4, 1.0, 0.75)
    other.save(tmp_path / "other.pt", parts)
    shutil.copy(tmp_path / "other.pt", tmp_path / "copy.pt")
    before = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*.csv")}
    again.load(tmp_path / "copy.pt", parts)
    again.epoch(4, 1.0, 0.25)
    after = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*.csv")}
    assert len(before) == 2 and before.items() <= after.items() and len(after) == 3


@pytest.mark.parametrize(
    "kind",
    [
        getattr(torch.optim, "Adafactor", torch.optim.Rprop),  # of PyTorch 2.5 and newer
        torch.optim.LBFGS,
        type("Own", (torch.optim.SGD,), {}),
    ],
)
@pytest.mark.parametrize("name", ["[test] mine", "../up", "-", ""])
def test_any_optimizer_and_any_name_go_on(kind: type, name: str, tmp_path: Path) -> None:
    told = {"batch_size": 4, "epochs": 3, "dataset": "d", "results_dir": tmp_path}
    for first_epoch in (1, 2):
        model = torch.nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        run = Recorder(name, model, optimizer, **told)
        run.load(tmp_path / "saved.pt", {"model": model, "optimizer": optimizer})
        assert run.first_epoch == first_epoch
        run.epoch(4, 1.0, 0.5)
        run.save(tmp_path / "saved.pt", {"model": model, "optimizer": optimizer})
    run.load(tmp_path / "saved.pt", {"model": model, "optimizer": optimizer})  # back to what it saved
    del run
    with pytest.raises(UserError, match="its global_batch is 4, not 8"):
        Recorder(name, model, optimizer, **told | {"batch_size": 8}).load(tmp_path / "saved.pt", {})
    with pytest.raises(UserError, match="it also has the state of model"):
        Recorder(name, model, optimizer, **told).load(tmp_path / "saved.pt", {"optimizer": optimizer})


@pytest.mark.skipif(torch.__version__ < "2.6", reason="an older PyTorch cannot tell what it would not load")
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    run, parts = recorder(tmp_path)
    part = SimpleNamespace(state_dict=lambda: {"scale": np.float64(2)})
    with pytest.raises(UserError, match="can be saved, not all here .numpy"):
        run.save(tmp_path / "saved.pt", parts | {"scaler": part})
    deep: dict = {}
    for _ in range(sys.getrecursionlimit()):
        deep = {"in": deep}
    with pytest.raises(UserError, match="can be saved, not all here .maximum recursion"):
        run.save(tmp_path / "saved.pt", parts | {"deep": SimpleNamespace(state_dict=lambda: deep)})
    assert not list(tmp_path.glob("*.pt"))
    with pytest.raises(UserError, match="d has 3 inputs and 2 targets"):
        Split("d", torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize(
    "put",
    [lambda path: path.write_bytes(b"PK"), lambda path: torch.save(Path("a program"), path)],
)
def test_a_saved_training_that_is_none(tmp_path: Path, put: Callable[[Path], object]) -> None:
    put(tmp_path / "saved.pt")
    after, parts = recorder(tmp_path)
    with pytest.raises(UserError, match="saved.pt does not fit this training"):
        after.load(tmp_path / "saved.pt", parts)
