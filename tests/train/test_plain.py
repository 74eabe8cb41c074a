"""The two scripts in plain PyTorch, as a learner runs them, on the first images of MNIST."""

import difflib
import re
import struct
from pathlib import Path

import pytest
import torch
from checkout import Checkout
from cluster import RunningCluster
from conftest import ENVIRONMENT, REPOSITORY, succeeded
from forking import Forking

PLAIN = REPOSITORY / "01_singlegpu" / "plain.py"
PLAIN_DDP = REPOSITORY / "03_multigpu_ddp" / "plain_ddp.py"
TESTED = 501  # so that two ranks have unequal shares


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `make data` makes it, with 1,000 images to train and `TESTED` to test."""
    folder = tmp_path_factory.mktemp("data")
    few = folder / "MNIST" / "raw"
    few.mkdir(parents=True)
    for name, count in (("train", 1000), ("t10k", TESTED)):
        for kind, header, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            whole = (REPOSITORY / "data" / "MNIST" / "raw" / f"{name}-{kind}-ubyte").read_bytes()
            cut = whole[:4] + struct.pack(">i", count) + whole[8 : header + size * count]
            (few / f"{name}-{kind}-ubyte").write_bytes(cut)
    return folder


@pytest.mark.parametrize(("program", "ranks"), [(PLAIN, None), (PLAIN_DDP, 2)])
def test_it_trains_and_counts_every_test_image_once(
    program: Path, ranks: int | None, forking: Forking, few_images: Path, tmp_path: Path
) -> None:
    arguments = ("--epochs", 2, "--batch-size", 100, "--data-dir", few_images)
    env = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    done = succeeded(forking.run(program, *arguments, ranks=ranks, env=env, cwd=tmp_path))
    lines = re.findall(r"^epoch (\d): loss (\S+), (\d+) of (\d+) right, \d+ images/s$", done.stdout, re.M)
    epochs, losses, right, tested = zip(*lines, strict=True)
    assert epochs == ("1", "2") and tested == (str(TESTED),) * 2
    assert float(losses[1]) < float(losses[0]) < 3
    assert int(right[1]) > 0.75 * TESTED  # chance is a tenth
    weights = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert sum(values.numel() for values in weights.values()) == 1_199_882 and "conv1.weight" in weights


def test_the_difference_is_short_enough_to_learn() -> None:
    before, after = (path.read_text().splitlines() for path in (PLAIN, PLAIN_DDP))
    changed = [line for line in difflib.unified_diff(before, after, n=0) if re.match(r"[+-](?![+-])", line)]
    assert len(changed) <= 30
    assert len(before) <= 80 and len(after) <= 95
    assert "trainkit" not in "".join(before + after)


def test_a_job_with_nothing_of_the_kit(few_images: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    place = Checkout(tmp_path / "a checkout", cluster)
    folder = place.folder / "03_multigpu_ddp"
    sizes = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=2G")
    options = ("--epochs", 1, "--batch-size", 100, "--data-dir", few_images)
    command = ("sbatch", "--parsable", "--output=told.log", *sizes, "plain_slurm.sh", *options)
    job = int(place.run(*command, cwd=folder, CUDA_VISIBLE_DEVICES="").stdout)
    state, told = cluster.wait(job), (folder / "told.log").read_text()
    assert state["JobState"] == "COMPLETED", told
    assert len(re.findall(rf"^epoch 1: .* of {TESTED} right", told, re.M)) == 1
