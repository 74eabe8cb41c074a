"""The network: its weights mean the same in the classic one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, succeeded, weights_of
from torch import nn

from manygpus.data.datasets import load_dataset
from manygpus.network.model import Net

SMALL = ("--train-size", 640, "--test-size", 100, "--precision", "fp32")


@pytest.fixture(scope="module")
def images(mnist_dir: Path) -> torch.Tensor:
    _, test = load_dataset("mnist", mnist_dir)
    return test.prepare(test.inputs[:500])


@torch.no_grad()
def outputs(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return network.eval()(images)


def test_saved_weights_mean_the_same_in_the_classic_network(
    images: torch.Tensor, script: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classic one is in pytorch/examples, mnist/main.py; the benchmark's baseline has it."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools" / "bench")
    from classic_mnist import Net as Classic

    succeeded(script("single", *SMALL, "--epochs", 1, "--save-model", "--results-dir", tmp_path))
    weights = weights_of(tmp_path)
    classic, ours = Classic(), Net()
    classic.load_state_dict(weights)
    ours.load_state_dict(weights)
    torch.testing.assert_close(outputs(classic, images), outputs(ours, images))
    assert outputs(classic, images).argmax(1).unique().numel() > 5  # it has learned to tell digits apart
