"""A step captured in a CUDA graph, as far as a machine without a GPU shows it; test_gpu.py has the rest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, Script, rows_of
from torch import nn

from trainkit import capture
from trainkit.errors import UserError

CAPTURED = REPOSITORY / "03_multigpu_ddp" / "beyond" / "captured.py"
SMALL = ("--train-size", 250, "--test-size", 100, "--batch-size", 60, "--epochs", 2, "--precision", "fp32")


@pytest.mark.parametrize("how", ["captured", "graphed"])
def test_without_a_gpu_it_is_one_sentence(how: str, script: Script, tmp_path: Path) -> None:
    done = script(CAPTURED, "--how", how, *SMALL, "--results-dir", tmp_path)
    assert done.returncode == 1
    assert "a CUDA graph needs a GPU" in done.stderr and "--how eager" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize("ranks", [None, 2])
def test_eager_it_is_stage_03(ranks: int | None, script: Script, tmp_path: Path) -> None:
    rows = []
    for stage in ("ddp", CAPTURED):
        how = ("--how", "eager") if stage == CAPTURED else ()
        folder = tmp_path / Path(stage).stem
        done = script(stage, *how, *SMALL, "--results-dir", folder, ranks=ranks)
        assert done.returncode == 0, done.stderr
        rows.append(rows_of(folder))
    plain, captured = rows
    for loss in ("train_loss", "test_loss"):
        assert [row[loss] for row in plain] == [row[loss] for row in captured]
    assert {row["stage"] for row in captured} == {"ddp-eager"}


class Stream:
    """In place of a GPU's: here everything is done in the order in which it is asked for."""

    def wait_stream(self, other: object) -> None:
        pass


class Graph:
    """In place of a GPU's: replays what was called between its beginning and its end."""

    @contextmanager
    def recording(self, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        yield

    def replay(self) -> None:
        self.again()


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """A CapturedStep that works on the CPU; returns the graphs it has made."""
    made = []

    def new_graph() -> Graph:
        made.append(Graph())
        return made[-1]

    @contextmanager
    def nothing(stream: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: graph.recording(**how))
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nothing)
    return made


def training(graphs: list[Graph] | None) -> tuple[nn.Module, Callable[[torch.Tensor, torch.Tensor], float]]:
    """A network, and a training step of it that returns the loss: captured, or eager without `graphs`."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fixed = torch.zeros(())

    def computed(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        return loss.detach()

    def forward_backward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not graphs:
            return computed(inputs, targets)
        # While it is captured nothing is computed; a replay does, with what is in the same tensors then.
        graphs[0].again = lambda: fixed.copy_(computed(inputs, targets))
        return fixed

    step = forward_backward if graphs is None else capture.CapturedStep(forward_backward, model, Stream())

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = step(inputs, targets).item()
        optimizer.step()
        return loss

    return model, train


def test_every_batch_is_trained_on_once_in_its_turn(without_a_gpu: list[Graph]) -> None:
    batches = torch.randn(8, 16, 5, generator=torch.Generator().manual_seed(2)).split((4, 1), dim=2)
    losses = []
    for graphs in (None, without_a_gpu):
        model, train = training(graphs)
        losses.append([train(*batch) for batch in zip(*batches, strict=True)])
    assert losses[0] == losses[1]
    assert len(without_a_gpu) == 1


def test_data_parallel_cannot_be_captured() -> None:
    with pytest.raises(UserError, match="DataParallel copies the network"):
        capture.check(nn.DataParallel(nn.Linear(1, 1)))
