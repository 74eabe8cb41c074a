"""The three stages, run as their users run them: what they record, and that N ranks equal one."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import STAGES, WITHOUT_DROPOUT, Script, rows_of, run_stage, succeeded, weights_of

from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.config.options import parse_options
from manygpus.data.datasets import InMemoryDataset, load_dataset
from manygpus.data.loaders import DistributedBatchSampler, UnpaddedEvalSampler, eval_loader, train_loader
from manygpus.data.samplers import ResumableSampler
from manygpus.launchers import DistEnv
from manygpus.network.model import Net
from manygpus.training.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("mnist_dir")

SMALL = ("--train-size", 1250, "--test-size", 500, "--batch-size", 60, "--precision", "fp32", "--width", 8)
EXACT = (*SMALL, "--lr", 0.1)


@pytest.mark.parametrize(("stage", "processes"), [("single", None), ("dp", None), ("ddp", None), ("ddp", 2)])
def test_a_stage_learns_and_records_every_epoch(
    stage: str, processes: int | None, script: Script, tmp_path: Path
) -> None:
    arguments = (stage, "--epochs", 2, *SMALL, "--results-dir", tmp_path)
    succeeded(run_stage(*arguments, processes=processes) if processes else script(*arguments))
    rows = rows_of(tmp_path)
    world = processes or 1
    assert [row["epoch"] for row in rows] == [1, 2]
    assert [row["warmup"] for row in rows] == [True, False]
    assert rows[1]["test_accuracy"] > 75  # chance is 10
    assert rows[1]["train_loss"] < rows[0]["train_loss"]
    assert rows[0]["elapsed_s"] < rows[1]["elapsed_s"]
    for row in rows:
        assert row["stage"] == stage
        assert row["world_size"] == row["devices"] == world
        assert row["launcher"] == ("torchrun" if processes else "python")
        assert (row["steps"], row["images"]) == (20, 1200)  # the last 50 images do not fill a batch
        assert row["global_batch"] == row["batch_per_device"] * world == 60
        # All ranks' images over the slowest rank's time.
        assert row["images_per_s"] == pytest.approx(row["images"] / row["train_seconds"], rel=1e-4)
        assert row["device_name"].startswith("CPU: ")
        assert row["threads_per_worker"] == 1
        assert row["precision"] == "fp32"
    assert [row["learning_rate"] for row in rows] == [1.0, 0.7]


def test_the_classic_loader_sees_the_same_images(script: Script, tmp_path: Path) -> None:
    """Resident bytes and the DataLoader feed the same numbers, so the losses agree up to rounding."""
    losses = {}
    for loader in (("--loader", "resident"), ("--loader", "workers", "--num-workers", 1)):
        folder = tmp_path / loader[1]
        options_ = (*EXACT, "--epochs", 1, *loader, "--results-dir", folder)
        succeeded(script("single", *options_))
        losses[loader[1]] = [row["train_loss"] for row in rows_of(folder)]
    assert losses["workers"] == pytest.approx(losses["resident"], rel=1e-4)


def test_n_ranks_train_as_one(script: Script, tmp_path: Path) -> None:
    """With dropout off, 1, 2 and 3 processes give the same losses and weights up to float rounding.

    N ranks add the same numbers in another order, which rounds differently by some 1e-7 of each.
    Over 66 steps that once grew to 1e-4 of a weight here and to 1e-4 of a loss; the tolerances are five
    times that.
    """
    options_ = (*EXACT, "--epochs", 2, "--save-model")
    runs = {}
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        succeeded(script(*WITHOUT_DROPOUT, STAGES["ddp"], *options_, "--results-dir", folder, ranks=ranks))
        runs[ranks] = rows_of(folder), weights_of(folder)
    one, one_weights = runs.pop(1)
    for many, many_weights in runs.values():
        for column in ("train_loss", "test_loss"):
            assert [row[column] for row in many] == pytest.approx([row[column] for row in one], rel=5e-4)
        assert many_weights.keys() == one_weights.keys() == Net(8).state_dict().keys()
        for name, weights in one_weights.items():
            torch.testing.assert_close(many_weights[name], weights, rtol=0, atol=5e-4, msg=name)


def test_three_ranks_evaluate_as_one(script: Script, tmp_path: Path) -> None:
    """10,000 test images do not divide by 3; padding a shard would count some of them twice."""
    arguments = (*EXACT, "--test-size", 10_000, "--epochs", 1, "--save-model", "--results-dir", tmp_path)
    succeeded(script("ddp", *arguments, ranks=3))
    (row,) = rows_of(tmp_path)
    model = Net(8)
    model.load_state_dict(weights_of(tmp_path))
    opts = parse_options("", arguments=[])
    _, test_set = load_dataset("mnist", DEFAULT_DATA_DIR)
    tested = evaluate(model, eval_loader(test_set, opts, DistEnv(device=torch.device("cpu"))), F.nll_loss)
    assert row["test_images"] == tested.samples == 10_000
    assert row["test_accuracy"] == pytest.approx(tested.accuracy, abs=1e-6)
    assert row["test_loss"] == pytest.approx(tested.loss, rel=1e-5)


@pytest.mark.parametrize("loader", ["resident", "workers"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_image_once_per_epoch_over_all_ranks(loader: str, world_size: int) -> None:
    count, batch = 240, 24
    opts = parse_options("", arguments=["--batch-size", str(batch), "--loader", loader])
    split = InMemoryDataset("numbers", torch.zeros(count, 1, 28, 28, dtype=torch.uint8), torch.arange(count))
    one = train_loader(split, opts, DistEnv(device=torch.device("cpu")))
    ranks = [
        train_loader(split, opts, DistEnv(rank=rank, world_size=world_size, device=torch.device("cpu")))
        for rank in range(world_size)
    ]
    orders = []
    for epoch in (1, 2, 3):
        for loaded in (one, *ranks):
            loaded.set_epoch(epoch)
        whole = [labels for _, labels in one]
        shards = [[labels for _, labels in rank] for rank in ranks]
        for step, expected in enumerate(whole):
            assert torch.equal(torch.cat([shard[step] for shard in shards]), expected)
        seen = torch.cat(whole)
        assert torch.equal(seen.sort().values, torch.arange(count))
        orders.append(seen)
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[1], orders[2])


@pytest.mark.parametrize("images", [96, 97, 100, 101, 103])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_test_shards_cover_the_test_set_once(images: int, world_size: int) -> None:
    """In as many steps on every rank, as they may communicate in each."""
    samplers = [UnpaddedEvalSampler(images, 8, rank, world_size) for rank in range(world_size)]
    shards = [list(sampler) for sampler in samplers]
    seen = [index for shard in shards for indices in shard for index in indices]
    assert seen == list(range(images))
    # Numbers, and no tensors: those would be fetched by a loader process, which may be killed meanwhile.
    assert {type(index) for index in seen} == {int}
    assert len({len(shard) for shard in shards}) == 1
    assert [len(sampler) for sampler in samplers] == [len(shard) for shard in shards]
    assert max(len(indices) for shard in shards for indices in shard) <= 8


def test_a_sampler_resumes_within_an_epoch_in_the_same_order() -> None:
    sampler = ResumableSampler(range(20), num_replicas=2, rank=1)
    sampler.set_epoch(3)
    whole = list(sampler)
    assert whole != sorted(whole)
    sampler.done = 4
    assert list(sampler) == whole[4:]
    # Loops count their steps by it.
    assert len(sampler) == len(whole) == 10


def test_another_seed_is_another_order_and_the_same_seed_the_same() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = DistributedBatchSampler(100, 100, seed)
        sampler.epoch = epoch
        return [index for indices in sampler for index in indices]

    assert order(1, 1) == order(1, 1)
    # Seed and epoch are both heard, though the generator reads 32 bits only.
    assert len({tuple(order(seed, epoch)) for seed in (1, 2, 3) for epoch in (1, 2, 3)}) == 9


def test_a_dry_run_writes_nothing(script: Script, tmp_path: Path) -> None:
    done = succeeded(
        script("ddp", *SMALL, "--dry-run", "--save-model", "--results-dir", tmp_path / "new", ranks=2)
    )
    assert "dry run" in done.stdout
    assert not (tmp_path / "new").exists()


def test_only_rank_0_prints_and_one_line_per_epoch(script: Script, tmp_path: Path) -> None:
    done = script("ddp", *SMALL, "--epochs", 2, "--results-dir", tmp_path, ranks=2)
    # But for PyTorch 2.9's own, and for what a busy machine adds: that a rank was slow.
    lines = [line for line in done.stdout.splitlines() if "[Gloo]" not in line and " takes " not in line]
    assert [line.split(":")[0] for line in lines if line.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    # What runs and how, two epochs, the memory of each, where the results are.
    assert len(lines) == 6


def test_data_parallel_without_gpus_says_so_and_records_one_device(script: Script, tmp_path: Path) -> None:
    done = script("dp", *SMALL, "--epochs", 1, "--results-dir", tmp_path)
    assert "DataParallel needs at least 2 GPUs and finds 0" in done.stdout
    (row,) = rows_of(tmp_path)
    assert (row["stage"], row["devices"]) == ("dp", 1)
