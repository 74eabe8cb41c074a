"""A network that is split over the ranks, by fsdp.py or by pipeline.py, trains and resumes as a whole one."""

import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import (
    BY_FEATURE,
    ENVIRONMENT,
    STAGES,
    WITHOUT_DROPOUT,
    Script,
    assert_same_end,
    failed,
    furthest,
    places,
    rows_of,
    succeeded,
    weights_of,
)
from forking import Forking

from manygpus.checkpoint import sharded
from manygpus.network.model import Net

pytestmark = pytest.mark.skipif(
    torch.__version__ < sharded.NEEDED, reason=f"needs PyTorch {sharded.NEEDED} or newer"
)
FSDP, PIPELINE = (BY_FEATURE / f"{name}.py" for name in ("fsdp", "pipeline"))
# SGD, as Adam and Adadelta take a large step along a gradient that is nearly 0, whatever its sign.
SMALL = ("--train-size", 180, "--test-size", 101, "--batch-size", 60, "--width", 4, "--epochs", 2)
SMALL += ("--recipe", "sgd", "--precision", "fp32", "--timeout", 60, "--save-model")
PARAMETERS = 149_210  # of Net at this width
Train = Callable[..., str]

# A training of a user who splits the network in one of several ways, and keeps it with Run.
BY_RUN = """
import os, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from manygpus.training.run import Run
from manygpus import errors
from manygpus.config.options import parse_options
from manygpus.data.datasets import InMemoryDataset
from manygpus.data.loaders import train_loader
from manygpus.distributed import process_group
from manygpus.launchers import DistEnv
from manygpus.distributed.process_group import destroy_distributed
from manygpus.checkpoint.sharded import Sharded

SPLIT, GIVEN = os.environ["SPLIT"], os.environ.get("GIVEN")

def split(model, mesh):
    if SPLIT in ("fully_shard", "later"):
        fully_shard(model, mesh=mesh)
    elif SPLIT == "parallelize_module":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif SPLIT == "FullyShardedDataParallel":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif SPLIT == "layers":
        return model[: 1 + 2 * process_group.rank()]
    return model

@errors.entrypoint
def main():
    opts = parse_options("")
    dist_env = process_group.init_distributed(use_gpu=False, timeout_seconds=60)
    torch.manual_seed(opts.seed)
    mesh = init_device_mesh("cpu", (dist_env.world_size,))
    critic = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = model if SPLIT in ("later", "critic") else split(model, mesh)
    critic = fully_shard(critic, mesh=mesh) if SPLIT == "critic" else critic
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    samples = InMemoryDataset("own", inputs, inputs.flip(1))
    # All of it on each rank, as tensor parallel wants it.
    train = train_loader(samples, opts, DistEnv(device=dist_env.device))
    sharded = Sharded(model, optimizer) if GIVEN else None
    how = {"extra_state": {"critic": critic}, "sharded": sharded}
    run = Run("own", opts, dist_env, samples, model, optimizer, None, **how)
    if SPLIT == "later":
        split(model, mesh)
        optimizer.param_groups[0]["params"] = list(model.parameters())
    run.resume()
    for epoch in run.epochs():
        for inputs, targets in run.steps(epoch, train):
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        run.end_of_epoch(epoch)
    run.finish()
    destroy_distributed()

main()
"""

# A loop with a Recorder, which a Checkpointer saves with the rest.
BY_RECORDER = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from manygpus.checkpoint.checkpointer import Checkpointer
from manygpus.training.recorder import Recorder
from manygpus.checkpoint.sharded import Sharded
from manygpus import errors

@errors.entrypoint
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Linear(6, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    recorder = Recorder("own", model, optimizer, batch_size=8, epochs=2, dataset="own", results_dir=".")
    trained = {"model": model, "optimizer": optimizer}
    if "Sharded" in sys.argv:
        trained = {"split": Sharded(model, optimizer)}
    checkpointer = Checkpointer(trained | {"recorder": recorder}, "checkpoints")
    first_epoch, _ = checkpointer.resume()
    for epoch in range(first_epoch, int(os.environ["EPOCHS"]) + 1):
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 6)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        recorder.epoch(8, 1.0, loss.item())
        checkpointer.save(epoch + 1)
    checkpointer.finish()
    recorder.finish()
    dist.destroy_process_group()

main()
"""


@pytest.fixture(scope="module")
def train(script: Script) -> Train:
    """Train two epochs without dropout, which has to go well; return the output of all ranks."""

    def run(path: Path, folder: Path, *arguments: object, ranks: int) -> str:
        command = (path, *SMALL, *places(folder), *arguments)
        done = succeeded(script(*WITHOUT_DROPOUT, *command, ranks=ranks))
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
    return sorted((folder / "checkpoints").glob("epoch-*"))


def test_split_over_1_or_2_ranks_or_twice_over_2_it_trains_as_with_ddp(
    by_two: Path, train: Train, tmp_path: Path
) -> None:
    train(STAGES["ddp"], tmp_path / "ddp", ranks=2)
    for ranks, replicas in ((1, 1), (4, 2)):
        printed = train(FSDP, tmp_path / f"{ranks}", "--replicas", replicas, ranks=ranks)
        assert held(ranks, ranks // replicas, of_optimizer=1) in printed
    for folder in (tmp_path / "1", by_two, tmp_path / "4"):
        assert_same_end(folder, tmp_path / "ddp", loss=1e-4)
        facts = {tuple(row[name] for name in ("stage", "model", "parameters")) for row in rows_of(folder)}
        assert facts == {("fsdp", "Net", PARAMETERS)}
        Net(4).load_state_dict(weights_of(folder))


@pytest.mark.parametrize(("how", "shards"), [("shard", 2), ("ddp", 1)])
def test_each_rank_holds_its_shard_and_with_ddp_all(
    how: str, shards: int, train: Train, tmp_path: Path
) -> None:
    """With Adam, which keeps two numbers for each weight."""
    printed = train(FSDP, tmp_path, "--how", how, "--recipe", "fast", "--dry-run", ranks=2)
    assert held(2, shards, of_optimizer=2) in printed


def held(ranks: int, shards: int, of_optimizer: int) -> str:
    megabytes = 4 * PARAMETERS / shards / 1e6
    each = ", ".join([f"{megabytes:.2f} + {megabytes:.2f} + {of_optimizer * megabytes:.2f}"] * ranks)
    return f"MB of weights + gradients + optimizer on each rank: {each}\n"


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_other_ranks_resume_from_the_newest_checkpoint_that_is_whole(
    ranks: int, replicas: int, by_two: Path, train: Train, tmp_path: Path
) -> None:
    """From one in the middle of the second epoch, as the newest is damaged."""
    shutil.copytree(by_two / "checkpoints", tmp_path / "checkpoints")
    whole, damaged = checkpoints_in(tmp_path)
    assert "epoch-2-step-" in whole.name and damaged.name == "epoch-3-step-0"
    of_rank_1 = damaged / "sharded" / "__1_0.distcp"
    content = bytearray(of_rank_1.read_bytes())
    content[len(content) // 2] ^= 1  # within a weight
    of_rank_1.write_bytes(content)

    printed = train(FSDP, tmp_path, "--replicas", replicas, ranks=ranks)
    assert f"warning: the checkpoint {damaged} cannot be read (wrong checksum of " in printed
    assert f"resumed from {whole}" in printed
    assert_same_end(tmp_path, by_two, loss=1e-4)
    aside = damaged.with_suffix(".damaged")
    assert checkpoints_in(tmp_path) == [whole, damaged, aside]  # that was written anew


def test_one_that_is_split_resumes_split_only(by_two: Path, script: Script, tmp_path: Path) -> None:
    shutil.copytree(by_two / "checkpoints", tmp_path / "checkpoints")
    error = failed(script(FSDP, *SMALL, *places(tmp_path), "--how", "ddp"))
    assert "is split over ranks" in error


def test_replicas_that_do_not_divide_the_ranks_are_refused(script: Script, tmp_path: Path) -> None:
    error = failed(script(FSDP, *SMALL, "--replicas", 2, "--results-dir", tmp_path))
    assert "the number of ranks 1 does not divide" in error


def test_a_pipeline_trains_as_one_process_and_resumes_with_another_number(
    train: Train, tmp_path: Path
) -> None:
    one, two, four = (tmp_path / f"{ranks}" for ranks in (1, 2, 4))
    train(PIPELINE, one, "--micro-batches", 1, ranks=1)
    train(PIPELINE, two, "--micro-batches", 6, ranks=2)
    shutil.copytree(two / "checkpoints", four / "checkpoints")
    shutil.rmtree(checkpoints_in(four)[-1])
    train(PIPELINE, four, "--micro-batches", 3, ranks=4)
    deep = runpy.run_path(str(PIPELINE))["Deep"](4, 0, 1)
    for folder in (two, four):
        assert_same_end(folder, one, loss=1e-4)
        deep.load_state_dict(weights_of(folder))
    facts = [tuple(row[name] for name in ("stage", "devices", "accumulate")) for row in rows_of(four)]
    assert facts == [("pipeline", 4, 3)]
    parameters = sum(weights.numel() for weights in deep.parameters())
    assert {(row["parameters"], row["test_images"]) for row in rows_of(four)} == {(parameters, 101)}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("split", "part"),
    [
        ("fully_shard", "model"),
        ("parallelize_module", "model"),
        ("FullyShardedDataParallel", "model"),
        ("layers", "model"),
        ("critic", "critic"),
        ("later", "model"),
    ],
)
def test_a_shard_of_a_network_is_never_saved_as_all_of_it(
    split: str, part: str, script: Script, tmp_path: Path
) -> None:
    """`Run` says so before the training, and after its first step of what was split later."""
    (own_script := tmp_path / "own.py").write_text(BY_RUN)
    arguments = ("--epochs", 1, "--batch-size", 32, "--save-model", *places(tmp_path))
    error = failed(script(own_script, *arguments, ranks=2, env={"SPLIT": split}))
    assert f"error on rank 0: {part} " in error and "give Run sharded=Sharded(model, optimizer)" in error
    assert not [*tmp_path.glob("checkpoints/epoch-*"), *tmp_path.glob("models/*.pt")]
    assert not [*tmp_path.glob("runs/*.csv")]


@pytest.mark.parametrize("split", ["fully_shard", "parallelize_module"])
def test_what_is_given_as_sharded_is_saved_whole(split: str, script: Script, tmp_path: Path) -> None:
    """And resumes where it was, as one process that has all of it would."""
    (own_script := tmp_path / "own.py").write_text(BY_RUN)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, ranks, split_by, epochs in ((one, 1, "", 2), (two, 2, split, 1), (two, 2, split, 2)):
        arguments = (own_script, "--epochs", epochs, "--batch-size", 32, "--save-model", *places(folder))
        succeeded(script(*arguments, ranks=ranks, env={"SPLIT": split_by, "GIVEN": split_by}))
    losses, expected = ([row["train_loss"] for row in rows_of(folder)] for folder in (two, one))
    assert len(losses) == 2 and losses == pytest.approx(expected, rel=1e-5)
    assert furthest(weights_of(two), weights_of(one)) < 1e-5


@pytest.fixture
def by_recorder(tmp_path: Path) -> Path:
    """A training that keeps all that it has in `tmp_path`."""
    text = BY_RECORDER
    for place in (".", "checkpoints"):
        text = text.replace(f'"{place}"', repr(str(tmp_path / place)))
    (own_script := tmp_path / "own.py").write_text(text)
    return own_script


def test_a_checkpointer_never_saves_a_shard_as_all(by_recorder: Path, script: Script, tmp_path: Path) -> None:
    error = failed(script(by_recorder, "whole", ranks=2, env={"EPOCHS": "2"}))
    assert "error on rank 0: model is split over the ranks" in error
    assert "Checkpointer that in place of both" in error
    assert not (tmp_path / "checkpoints").exists()


def test_a_recorder_resumes_beside_a_split_network(by_recorder: Path, script: Script, tmp_path: Path) -> None:
    for epochs in "12":
        succeeded(script(by_recorder, "Sharded", ranks=2, env={"EPOCHS": epochs}))
    before, after = rows_of(tmp_path)
    assert after["train_loss"] < before["train_loss"]
    assert [before["epoch"], after["epoch"]] == [1, 2] and after["resumed_from"] == before["start"]


# The memory of each rank: with a small network first, so that all of PyTorch that it takes is loaded.
MEMORY = """
import re, sys, torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from manygpus.checkpoint.checkpointer import Checkpointer
from manygpus.checkpoint.sharded import Sharded

def resident(which):
    return int(re.search(rf"{which}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def resume(folder, width):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(32)])
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    for weights in model.parameters():
        nn.init.zeros_(weights.to_local())
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer({"split": Sharded(model, optimizer)}, folder)
    if checkpointer.resume() == (1, 0):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        checkpointer.save(2)
        checkpointer.finish()
    return sum(weights.to_local().nbytes for weights in model.parameters()) * 3

dist.init_process_group("gloo")
for _ in range(2):
    resume("small", 16)
before = resident("VmRSS")
shard = resume("large", 724)
print("shards at the peak:", (resident("VmHWM") - before) / shard)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_a_rank_that_resumes_needs_little_more_memory_than_its_own_shard(
    forking: Forking, tmp_path: Path
) -> None:
    """With Adam 100 MB on each of two ranks."""
    (tmp_path / "memory.py").write_text(MEMORY)
    for _ in range(2):
        done = succeeded(forking.run(tmp_path / "memory.py", ranks=2, env=ENVIRONMENT, cwd=tmp_path))
    shards = [float(number) for number in re.findall(r"shards at the peak: (\S+)", done.stdout)]
    assert len(shards) == 2 and min(shards) >= 1 and max(shards) <= 1.5, shards
