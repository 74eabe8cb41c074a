"""Weights go to the classic MNIST network and back, and mean the same there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import weights_of
from torch import nn

from trainkit import data
from trainkit.model import Net

SMALL = ("--train-size", 640, "--test-size", 100, "--precision", "fp32")


class Classic(nn.Module):
    """The network of the PyTorch example (pytorch/examples, mnist/main.py), in the words of that file."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


@pytest.fixture(scope="module")
def images(mnist_dir: Path) -> torch.Tensor:
    _, test = data.load("mnist", mnist_dir)
    return test.prepare(test.inputs[:500])


@torch.no_grad()
def outputs(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return network.eval()(images)


def test_saved_weights_mean_the_same_in_the_classic_network(
    images: torch.Tensor, script: Callable, tmp_path: Path
) -> None:
    done = script("single", *SMALL, "--epochs", 1, "--save-model", "--results-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    weights = weights_of(tmp_path)
    classic, ours = Classic(), Net()
    classic.load_state_dict(weights)
    ours.load_state_dict(weights)
    torch.testing.assert_close(outputs(classic, images), outputs(ours, images))
    assert outputs(classic, images).argmax(1).unique().numel() > 5  # it has learned to tell digits apart
