"""The network: its weights mean the same in the classic one, and its operations are counted right."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, succeeded, weights_of
from torch import nn

from trainkit.rank import data, model
from trainkit.rank.data import Split
from trainkit.rank.model import Net

SMALL = ("--train-size", 640, "--test-size", 100, "--precision", "fp32")


@pytest.fixture(scope="module")
def images(mnist_dir: Path) -> torch.Tensor:
    _, test = data.load("mnist", mnist_dir)
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


IMAGES = Split("noise", torch.randn(8, 1, 28, 28), torch.zeros(8))


class Attention(nn.Module):
    """Self-attention over the 28 rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(28, 1, bias=False, batch_first=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.attention(images[:, 0], images[:, 0], images[:, 0], need_weights=False)[0]


class TwoOutputs(nn.PReLU):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return images, images


ROWS = 2 * 28 * 28 * 28  # a product of two matrices of 28 x 28


@pytest.mark.parametrize(
    ("network", "operations_"),
    [
        (Net, 71_565_312),
        (lambda: Net(precision="bf16"), 71_565_312),
        (lambda: nn.DataParallel(Net()), 71_565_312),
        # Forward, and backward to the weights; there is no gradient of images.
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), 2 * 2 * 784 * 10),
        # Four layers and two products between them forward; backward twice, but for the gradients of images.
        (Attention, 3 * 6 * ROWS - 3 * ROWS),
        (TwoOutputs, math.nan),
        (lambda: nn.PReLU(), math.nan),  # nothing that has a formula
    ],
)
def test_what_an_image_takes(network: Callable[[], nn.Module], operations_: float) -> None:
    assert model.operations_per_image(network(), IMAGES) == pytest.approx(operations_, nan_ok=True)


def test_nothing_of_it_is_left() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten()).eval()
    before, random_numbers = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    assert model.operations_per_image(network, IMAGES) > 0
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert not network.training
    assert all(weights.grad is None for weights in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
