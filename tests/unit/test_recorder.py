"""What a Recorder leaves in a checkpoint, and resumes from: its own state, or that of another training.

It is written and read by the functions that a Checkpointer uses (state_file.py), as its handlers of signals
would stay in this process. train/test_plain.py has trainings of two ranks with a Checkpointer.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from manygpus.checkpoint import state_file
from manygpus.data.datasets import InMemoryDataset
from manygpus.errors import UserError
from manygpus.record import records
from manygpus.reports import comparison
from manygpus.training.recorder import Recorder


def recorder(folder: Path, **options: object) -> tuple[Recorder, dict[str, object]]:
    """A training with another loop, and the parts of it that are saved."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    arguments = {"batch_size": 4, "epochs": 3, "dataset": "d", "results_dir": folder} | options
    run = Recorder("own", model, optimizer, **arguments)
    return run, {"model": model, "optimizer": optimizer, "recorder": run}


def save(path: Path, parts: dict[str, object]) -> None:
    state_file.save("the checkpoint", state_file.states_of(parts), path, "free the space.")


def load(path: Path, parts: dict[str, object]) -> None:
    state_file.load_parts(parts, state_file.load_verified(path))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What a training has saved after its first epoch."""
    before, parts = recorder(tmp_path)
    parts["model"](torch.ones(1, 2)).sum().backward()
    parts["optimizer"].step()
    before.epoch(4, 1.0, 0.5)
    save(tmp_path / "saved.pt", parts)
    return tmp_path / "saved.pt"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda state: state.pop("model"), "model"),
        (lambda state: state.update(scaler={}), "it also has the state of scaler"),
    ],
    ids=["no model", "more parts"],
)
def test_a_state_of_a_script_that_has_changed_since(
    saved: Path, tmp_path: Path, edit: Callable[[dict], object], reason: str
) -> None:
    """It is refused, and the record, which has continued, stays as it is."""
    again, parts = recorder(tmp_path)
    load(saved, parts)
    again.epoch(4, 1.0, 0.25)
    state = torch.load(saved, weights_only=True)
    edit(state)
    torch.save(state, tmp_path / "edited.pt")
    _, parts = recorder(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    with pytest.raises(ValueError, match=reason):
        load(tmp_path / "edited.pt", parts)
    assert {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()} == before


def test_what_a_script_notes_in_a_group_is_no_setting(tmp_path: Path) -> None:
    _, parts = recorder(tmp_path)
    parts["optimizer"].param_groups[0]["frozen"] = True
    save(tmp_path / "saved.pt", parts)
    _, parts = recorder(tmp_path)
    (group,) = parts["optimizer"].param_groups
    group["frozen"] = False
    load(tmp_path / "saved.pt", parts)
    assert parts["optimizer"].param_groups[0]["frozen"] is True


def test_a_start_that_resumes_has_a_record_of_its_own(saved: Path, tmp_path: Path) -> None:
    (record,) = (tmp_path / "runs").glob("*.csv")
    before = record.read_bytes()
    other, parts = recorder(tmp_path)
    load(saved, parts)
    assert other.first_epoch == 2
    other.epoch(4, 1.0, 0.25)
    assert record.read_bytes() == before
    (resumed,) = {*record.parent.glob("*.csv")} - {record}
    (row,) = records.read(resumed)
    assert (row["epoch"], row["resumed_from"]) == (2, record.stem)
    rows, _ = comparison.load([tmp_path / "runs"])
    assert rows.epoch.tolist() == [1, 2] and set(rows.run_id) == {resumed.stem}
    changed = pd.read_csv(resumed, dtype=str, keep_default_na=False).assign(threads_per_worker="99")
    changed.to_csv(resumed, index=False)  # a run on two kinds of machines counts in neither
    rows, (skipped,) = comparison.load([tmp_path / "runs"])
    assert rows.empty and resumed.stem in skipped


def test_an_optimizer_that_was_loaded_before_has_the_rate_that_it_began_with(tmp_path: Path) -> None:
    """Whatever the script says now, its rate is that of the checkpoint, and so is what has changed it."""
    arguments = {"batch_size": 4, "epochs": 3, "dataset": "d", "results_dir": tmp_path}
    for lr, decay in ((0.1, 0.5), (0.2, 0.9)):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        if (tmp_path / "optimizer.pt").exists():
            optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
        # The kit sees it first when it has made steps.
        lr_scheduler = SimpleNamespace(state_dict=lambda decay=decay: {"decay": decay})
        run = Recorder("own", model, optimizer, lr_scheduler=lr_scheduler, **arguments)
        if (tmp_path / "saved.pt").exists():
            load(tmp_path / "saved.pt", {"recorder": run})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        run.epoch(4, 1.0, 0.5)
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        save(tmp_path / "saved.pt", {"recorder": run})
    (rows,) = records.read_runs((tmp_path / "runs").glob("*.csv")).values()
    assert [(row["epoch"], row["lr"], row["schedule"]) for row in rows] == [
        (1, 0.1, "SimpleNamespace decay=0.5"),
        (2, 0.1, "SimpleNamespace decay=0.5"),
    ]


def test_an_epoch_beyond_the_last_is_refused(tmp_path: Path) -> None:
    """As of a framework that starts anew when it is done; also after a resume."""
    run, parts = recorder(tmp_path, epochs=1)
    run.epoch(4, 1.0, 0.5)
    save(tmp_path / "saved.pt", parts)
    again, parts_of_again = recorder(tmp_path, epochs=1)
    load(tmp_path / "saved.pt", parts_of_again)
    for done in (run, again):
        with pytest.raises(UserError, match="first_epoch"):
            done.epoch(4, 1.0, 0.25)
    (path,) = (tmp_path / "runs").glob("*.csv")
    assert [row["train_loss"] for row in records.read(path)] == [0.5]
    longer, parts_of_longer = recorder(tmp_path, epochs=2)
    load(tmp_path / "saved.pt", parts_of_longer)
    longer.epoch(4, 1.0, 0.25)


def test_a_training_has_its_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the screen, and in the record's metrics; also of a start that resumes."""
    for first_epoch in (1, 2):
        run, parts = recorder(tmp_path, unit="tokens", per_sample=8)
        if first_epoch == 2:
            load(tmp_path / "saved.pt", parts)
        run.epoch(4, 2.0, 0.5, perplexity=3)
        save(tmp_path / "saved.pt", parts)
        assert f"epoch {first_epoch}/3: train loss 0.5000, 16 tokens/s" in capsys.readouterr().out
        file = max((tmp_path / "runs").glob("*.csv"), key=lambda path: path.stat().st_mtime_ns)
        assert records.read(file)[0]["images_per_s"] == 2
        metrics = {(row["metric"], row["of"]): row["value"] for row in records.read_metrics(file)}
        assert metrics == {("tokens_per_s", ""): 16, ("perplexity", "epoch"): 3}


def test_an_epoch_that_could_not_be_written_is_written_once(saved: Path, tmp_path: Path) -> None:
    again, parts = recorder(tmp_path)
    load(saved, parts)
    record = again._record.path
    record.mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        again.epoch(4, 1.0, 0.5, perplexity=2)
    record.rmdir()
    again.epoch(4, 1.0, 0.25, perplexity=1)
    assert [(row["epoch"], row["train_loss"]) for row in records.read(record)] == [(2, 0.25)]
    assert [row["epoch"] for row in records.read_ranks(record)] == [2]
    assert [row["value"] for row in records.read_metrics(record)] == [1]


def test_one_saved_training_after_another_in_one_process(saved: Path, tmp_path: Path) -> None:
    """Each keeps its record; one that resumes from another has one of its own."""
    again, parts_of_again = recorder(tmp_path)
    load(saved, parts_of_again)
    other, parts = recorder(tmp_path)
    other.epoch(4, 1.0, 0.75)
    save(tmp_path / "other.pt", parts)
    before = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*.csv")}
    load(tmp_path / "other.pt", parts_of_again)
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
def test_any_optimizer_and_any_name_resume(kind: type, name: str, tmp_path: Path) -> None:
    arguments = {"batch_size": 4, "epochs": 3, "dataset": "d", "results_dir": tmp_path}
    for first_epoch in (1, 2):
        model = torch.nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        run = Recorder(name, model, optimizer, **arguments)
        parts = {"model": model, "optimizer": optimizer, "recorder": run}
        if first_epoch == 2:
            load(tmp_path / "saved.pt", parts)
        assert run.first_epoch == first_epoch
        run.epoch(4, 1.0, 0.5)
        save(tmp_path / "saved.pt", parts)
    load(tmp_path / "saved.pt", parts)  # back to what it saved
    another = Recorder(name, model, optimizer, **arguments | {"batch_size": 8})
    with pytest.raises(ValueError, match="its global_batch is 4, not 8"):
        load(tmp_path / "saved.pt", parts | {"recorder": another})


def test_a_data_set_has_as_many_targets_as_inputs() -> None:
    with pytest.raises(UserError, match="d has 3 inputs and 2 targets"):
        InMemoryDataset("d", torch.zeros(3), torch.zeros(2))
