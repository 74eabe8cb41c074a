"""The variants of stage 03, and stage 02 by hand: each computes what it says, with one rank and with two."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY, STAGES, free_port, rows_of

BEYOND = REPOSITORY / "03_multigpu_ddp" / "beyond"
SMALL = ("--train-size", 250, "--test-size", 100, "--batch-size", 60, "--lr", 0.1, "--no-cuda")
EXACT = (*SMALL, "--precision", "fp32", "--epochs", 2, "--save-model", "--timeout", 60)
# name: script and options; each is trained by one rank and by two, without dropout.
TRAININGS = {
    "ddp": (STAGES["ddp"],),
    "each": (BEYOND / "by_hand.py",),
    "flat": (BEYOND / "by_hand.py", "--flat"),
    "forget": (BEYOND / "by_hand.py", "--forget"),
}


class Trained:
    """What a training has left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = (folder / "rank-0.txt").read_text()
        assert "results: " in self.text, "".join(path.read_text() for path in folder.glob("rank-*.txt"))

    @property
    def rows(self) -> list[dict]:
        return rows_of(self.folder)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        (path,) = (self.folder / "models").glob("*.pt")
        return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, mnist_dir: Path) -> Callable[[str, int], Trained]:
    """A training of `TRAININGS`, by its name and the number of ranks."""
    folder = tmp_path_factory.mktemp("beyond")
    for ranks in (1, 2):
        trainings = {
            str(folder / f"{name}-{ranks}"): [free_port(), *map(str, (*command, *EXACT))]
            for name, command in TRAININGS.items()
        }
        _train(ranks, trainings, folder / f"{ranks}.json")
    return lambda name, ranks: Trained(folder / f"{name}-{ranks}")


def _train(ranks: int, trainings: dict[str, list[str]], plan: Path) -> None:
    plan.write_text(json.dumps(trainings))
    shared = ENVIRONMENT | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    command = [sys.executable, REPOSITORY / "tests" / "trainings.py", plan]
    processes = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0] * ranks


def assert_equal(one: Trained, other: Trained, tolerance: float = 5e-4) -> None:
    """Both have trained the same, up to rounding; test_stages.py tells where the tolerance comes from."""
    losses = [[row["train_loss"] for row in rows] for rows in (one.rows, other.rows)]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=tolerance)


@pytest.mark.parametrize("way", ["each", "flat"])
def test_gradients_averaged_by_hand_train_as_ddp_does(way: str, trained: Callable) -> None:
    for ranks in (1, 2):
        by_hand = trained(way, ranks)
        assert_equal(by_hand, trained("ddp", ranks), tolerance=1e-6)
        assert {row["stage"] for row in by_hand.rows} == {f"ddp-by-hand-{way}"}
        assert len(set(checksums(by_hand)[-1])) == 1


def test_ranks_that_do_not_average_drift_apart(trained: Callable) -> None:
    first, last = (abs(a - b) for a, b in checksums(trained("forget", 2)))
    assert 0 < first < last


def checksums(by_hand: Trained) -> list[list[float]]:
    """Of every epoch, those of the ranks."""
    lines = [line for line in by_hand.text.splitlines() if line.startswith("sum of the weights")]
    return [json.loads(line.partition(":")[2]) for line in lines]
