"""A network that is split over the ranks, by fsdp.py or by pipeline.py, trains and goes on as a whole one."""

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import (
    BEYOND,
    STAGES,
    WITHOUT_DROPOUT,
    Script,
    assert_same_end,
    failed,
    places,
    rows_of,
    succeeded,
    weights_of,
)

from trainkit.rank import sharded
from trainkit.rank.model import Net

pytestmark = pytest.mark.skipif(
    torch.__version__ < sharded.NEEDED, reason=f"needs PyTorch {sharded.NEEDED} or newer"
)
FSDP, PIPELINE = (BEYOND / f"{name}.py" for name in ("fsdp", "pipeline"))
# SGD, as Adam and Adadelta take a large step along a gradient that is nearly 0, whatever its sign.
SMALL = ("--train-size", 180, "--test-size", 101, "--batch-size", 60, "--width", 4, "--epochs", 2)
SMALL += ("--recipe", "sgd", "--precision", "fp32", "--timeout", 60, "--save-model")
PARAMETERS = 149_210  # of Net at this width
Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(script: Script) -> Train:
    """Train two epochs without dropout, which has to go well; return the output of all ranks."""

    def run(path: Path, folder: Path, *arguments: object, ranks: int) -> str:
        given = (path, *SMALL, *places(folder), *arguments)
        done = succeeded(script(*WITHOUT_DROPOUT, *given, ranks=ranks))
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def by_two(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of fsdp.py have left, which saved as often as they could."""
    folder = tmp_path_factory.mktemp("by-two")
    train(FSDP, folder, "--checkpoint-minutes", 1e-6, ranks=2)
    return folder


def checkpoints_in(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted((folder / "checkpoints").glob("*.pt"))


def test_split_over_1_2_or_4_ranks_it_trains_as_with_ddp(by_two: Path, train: Train, tmp_path: Path) -> None:
    train(STAGES["ddp"], tmp_path / "ddp", ranks=2)
    for ranks in (1, 4):
        told = train(FSDP, tmp_path / f"{ranks}", ranks=ranks)
        assert held(ranks, ranks, of_optimizer=1) in told
    for folder in (tmp_path / "1", by_two, tmp_path / "4"):
        assert_same_end(folder, tmp_path / "ddp", loss=1e-4)
        facts = {tuple(row[name] for name in ("stage", "model", "parameters")) for row in rows_of(folder)}
        assert facts == {("fsdp", "Net", PARAMETERS)}
        Net(4).load_state_dict(weights_of(folder))


@pytest.mark.parametrize(("how", "share"), [("shard", 2), ("ddp", 1)])
def test_each_rank_holds_its_share_and_with_ddp_all(
    how: str, share: int, train: Train, tmp_path: Path
) -> None:
    """With Adam, which keeps two numbers for each weight."""
    told = train(FSDP, tmp_path, "--how", how, "--recipe", "fast", "--dry-run", ranks=2)
    assert held(2, share, of_optimizer=2) in told


def held(ranks: int, share: int, of_optimizer: int) -> str:
    megabytes = 4 * PARAMETERS / share / 1e6
    each = ", ".join([f"{megabytes:.2f} + {megabytes:.2f} + {of_optimizer * megabytes:.2f}"] * ranks)
    return f"MB of weights + gradients + optimizer on each rank: {each}\n"


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_go_on_from_the_newest_checkpoint_that_is_whole(
    ranks: int, by_two: Path, train: Train, tmp_path: Path
) -> None:
    """From one in the middle of the second epoch, as the newest is damaged."""
    shutil.copytree(by_two / "checkpoints", tmp_path / "checkpoints")
    whole, damaged = checkpoints_in(tmp_path)
    assert "epoch-2-step-" in whole.name and damaged.name == "epoch-3-step-0.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1  # within a weight
    damaged.write_bytes(content)

    told = train(FSDP, tmp_path, ranks=ranks)
    assert f"warning: the checkpoint {damaged} cannot be read (wrong checksum of " in told
    assert f"resumed from {whole}" in told
    assert_same_end(tmp_path, by_two, loss=1e-4)
    assert checkpoints_in(tmp_path) == [whole, damaged]  # that was written anew


@pytest.mark.parametrize(
    ("change", "reason", "how"),
    [
        ({}, "its network is split over ranks", "ddp"),
        ({"model": {"conv1.bias": torch.zeros(1)}}, "its weights have other names or shapes", "shard"),
        (
            {"optimizer": {"param_groups.conv1.weight.lr": "much"}},
            "could not convert string to float",
            "shard",
        ),
    ],
)
def test_what_cannot_go_on_is_one_sentence(
    change: dict, reason: str, how: str, by_two: Path, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    state = torch.load(checkpoints_in(by_two)[-1])
    changed = {name: state.get(name, {}) | part for name, part in change.items()}
    torch.save(state | changed, tmp_path / "checkpoints" / "epoch-3-step-0.pt")
    told = failed(script(FSDP, *SMALL, *places(tmp_path), "--how", how))
    assert f"epoch-3-step-0.pt does not fit this training ({reason}" in told


def test_a_pipeline_trains_as_one_process_and_goes_on_with_another_number(
    train: Train, tmp_path: Path
) -> None:
    one, two, four = (tmp_path / f"{ranks}" for ranks in (1, 2, 4))
    train(PIPELINE, one, "--micro-batches", 1, ranks=1)
    train(PIPELINE, two, "--micro-batches", 6, ranks=2)
    shutil.copytree(two / "checkpoints", four / "checkpoints")
    checkpoints_in(four)[-1].unlink()
    train(PIPELINE, four, "--micro-batches", 3, ranks=4)
    deep = runpy.run_path(str(PIPELINE))["Deep"](4, 0, 1)
    for folder in (two, four):
        assert_same_end(folder, one, loss=1e-4)
        deep.load_state_dict(weights_of(folder))
    facts = [tuple(row[name] for name in ("stage", "devices", "accumulate")) for row in rows_of(four)]
    assert facts == [("pipeline", 2, 6), ("pipeline", 4, 3)]
    parameters = sum(weights.numel() for weights in deep.parameters())
    assert {(row["parameters"], row["test_images"]) for row in rows_of(four)} == {(parameters, 101)}
