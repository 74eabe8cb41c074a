"""What TensorBoard, Weights & Biases and MLflow show of a training, read with the packages themselves."""

import struct
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import BY_FEATURE, ENVIRONMENT, Script, rows_of, succeeded
from forking import Forking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manygpus.errors import UserError
from manygpus.record import loggers
from manygpus.record.columns import COLUMNS
from manygpus.record.records import RecordWriter
from manygpus.training.recorder import Recorder

Curves = dict[str, list[tuple[int, float]]]
# Two starts: the first logs epochs 1 and 2, and its checkpoint is of epoch 1; the second logs 2 and 3.
LOGGED = """\
import sys, torch, torch.distributed as dist
from manygpus.record.loggers import MLflowLogger, TensorBoardLogger, WandbLogger
from manygpus.checkpoint.checkpointer import Checkpointer
from manygpus.training.recorder import Recorder
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
model.weight.data.zero_()
model.bias.data.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watched = [TensorBoardLogger("tensorboard"), WandbLogger("mine", "."), MLflowLogger("mlflow", "mine")]
arguments = {"batch_size": 10, "epochs": 3, "dataset": "d", "settings": {"hidden": 256}}
recorder = Recorder("mine", model, optimizer, loggers=watched, **arguments)
checkpointer = Checkpointer({"model": model, "optimizer": optimizer, "recorder": recorder})
first, _ = checkpointer.resume()
for epoch in range(first, first + 2):
    recorder.epoch(10, 1.0, first + epoch / 10, **{"recall@5": epoch / 10})
    if epoch == 1:
        checkpointer.save(2)
if first == 2:
    recorder.finish()"""


def of_tensorboard(folder: Path) -> Curves:
    (run,) = (folder / "tensorboard").iterdir()
    events = EventAccumulator(str(run)).Reload()
    config = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| settings | hidden=256 |" in config
    names = events.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def of_wandb(folder: Path) -> Curves:
    """From the files that `wandb sync` uploads, one of each start."""
    from wandb.proto.wandb_internal_pb2 import Record

    curves: Curves = {}
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    ids = set()
    for file in files:
        for message in _messages(file.read_bytes()):
            record = Record.FromString(message)
            if record.HasField("run"):
                ids.add((record.run.run_id, record.run.project))
                settings = [item for item in record.run.config.update if item.key == "settings"]
                assert [item.value_json for item in settings] == ['"hidden=256"']
            values = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            for name in values.keys() - {"epoch"}:
                curves.setdefault(name, []).append((int(values["epoch"]), float(values[name])))
    assert len(ids) == 1
    return curves


def _messages(content: bytes) -> list[bytes]:
    """The records of a .wandb file: blocks of 32 KiB of chunks, as in a log of LevelDB."""
    messages, message, at = [], b"", 7  # after its header
    while at < len(content):
        left_in_block = 2**15 - at % 2**15
        if left_in_block < 7:
            at += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            messages.append(message)
            message = b""
    return messages


def of_mlflow(folder: Path) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient(str(folder / "mlflow"))
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["settings"] == "hidden=256" and run.info.status == "FINISHED"
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


@pytest.fixture(scope="module")
def logged(forking: Forking, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of two ranks and two starts, with all loggers."""
    folder = tmp_path_factory.mktemp("logged")
    program = folder / "mine.py"
    program.write_text(LOGGED)
    env = ENVIRONMENT | {"MANYGPUS_RESULTS_DIR": str(folder)}
    for _ in range(2):
        done = succeeded(forking.run(program, ranks=2, env=env, cwd=folder))
        assert "warning" not in done.stderr, done.stderr
    return folder


@pytest.mark.parametrize(
    ("read", "metric"),
    [(of_tensorboard, "recall@5/epoch"), (of_wandb, "recall@5/epoch"), (of_mlflow, "recall_5/epoch")],
)
def test_a_training_that_resumes_is_one_run(
    read: Callable[[Path], Curves], metric: str, logged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the epochs as in the record, also one that the second start has made again."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    curves = read(logged)
    rows = rows_of(logged)
    assert [row["train_loss"] for row in rows] == [1.1, 2.2, 2.3]
    for name in ("train_loss", "images_per_s", "learning_rate"):
        expected = {row["epoch"]: pytest.approx(row[name]) for row in rows}
        assert dict(curves[name]) == expected
    assert dict(curves[metric]) == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert "test_loss" not in curves  # there was no test
    if read == of_tensorboard:
        assert len(curves["train_loss"]) == 3  # it hides the second epoch of the first start


class Fails:
    """A logger whose disk is full from the second epoch on."""

    def __init__(self, fail_in: str) -> None:
        self.calls: list[str] = []
        self._fail_in = fail_in

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fail_in:
            raise OSError(28, "No space left on device")

    def start(self, run_id: str, config: dict[str, object], first_epoch: int) -> None:
        self._called("start")

    def log(self, epoch: int, metrics: dict[str, float]) -> None:
        self._called(f"log {epoch}")

    def finish(self) -> None:
        self._called("finish")


def test_a_training_continues_without_a_logger_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one warning, and the other loggers get all."""
    model = torch.nn.Linear(2, 2)
    watched = {name: Fails(name) for name in ("start", "log 2", "finish", "")}
    recorder = Recorder(
        "mine",
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=4,
        epochs=3,
        dataset="d",
        results_dir=tmp_path,
        loggers=[*watched.values()],
    )
    for _ in range(3):
        recorder.epoch(4, 1.0, 0.5)
    recorder.finish()
    everything = ["start", "log 1", "log 2", "log 3", "finish"]
    assert watched["start"].calls == ["start"]
    assert watched["log 2"].calls == ["start", "log 1", "log 2"]
    assert watched["finish"].calls == watched[""].calls == everything
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 3 and all("Fails" in line and "No space left" in line for line in warnings)
    rows = rows_of(tmp_path)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    of_dry_run = Fails("")
    row = {name: rows[0][name] for name in COLUMNS}
    RecordWriter(None, row, [of_dry_run]).add(row)
    assert not of_dry_run.calls


def test_a_server_that_is_down_is_given_up_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other ranks wait meanwhile, and MLflow itself would ask 8 times, for 4 minutes."""
    requests = []

    class Down(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            pass

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ThreadingHTTPServer(("127.0.0.1", 0), Down) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        watched = [loggers.MLflowLogger(f"http://127.0.0.1:{server.server_port}", "mine")]
        arguments = {"batch_size": 4, "epochs": 1, "dataset": "d", "results_dir": tmp_path}
        recorder = Recorder("mine", model, optimizer, loggers=watched, **arguments)
        recorder.epoch(4, 1.0, 0.5)
        server.shutdown()
    assert len(requests) == 2
    assert "MLflowLogger gets no more epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("tensorboard", loggers.TensorBoardLogger),
        ("wandb", loggers.WandbLogger),
        ("mlflow", lambda name: loggers.MLflowLogger(name, "mine")),
    ],
)
def test_a_package_that_is_missing_is_missed_before_the_training(
    module: str, make: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"not installed here: pip install {module}"):
        make("mine")


def test_the_example_resumes_its_run(script: Script, tmp_path: Path) -> None:
    """A Run, stopped between two epochs."""
    small = ("--train-size", 128, "--test-size", 64, "--width", 4, "--results-dir", tmp_path)
    small += ("--checkpoint-dir", tmp_path / "checkpoints", "--resume", "auto")
    for epochs in (1, 2):
        succeeded(script(BY_FEATURE / "loggers.py", *small, "--epochs", epochs, ranks=2))
    (run,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(run)).Reload().Scalars("test_accuracy")
    expected = {row["epoch"]: pytest.approx(row["test_accuracy"]) for row in rows_of(tmp_path)}
    assert {event.step: event.value for event in events} == expected and len(expected) == 2
