"""manygpus/checkpoint/state_file.py: what a checkpoint can hold, and what it cannot."""

from argparse import Namespace
from collections import deque, namedtuple
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from manygpus.checkpoint.state_file import check_parts, load_parts, load_verified, save, states_of
from manygpus.errors import UserError

Point = namedtuple("Point", "x y")


class Scaled(torch.Tensor):
    pass


NEVER_LOADED = [
    Path("/data"),
    Namespace(lr=0.1),
    np.ones(2),
    deque([1.0]),
    Point(1, 2),
    date(2026, 1, 1),
    lambda: 0,
]


def kind(value: object) -> str:
    return type(value).__name__


def of_object(value: object) -> SimpleNamespace:
    """What has a state of its own, as a user's tracker of the best epoch."""
    return SimpleNamespace(state_dict=lambda: {"best": (1, value)}, load_state_dict=None)


def save_and_load(path: Path, saved: dict[str, object], loaded: dict[str, object]) -> None:
    save("the checkpoint", states_of(saved), path, "free the space.")
    load_parts(loaded, load_verified(path))


@pytest.mark.parametrize("value", [0.5, "text", None, True, (1, 2), np.float64(1), *NEVER_LOADED], ids=kind)
def test_a_part_whose_later_values_could_not_be_saved_is_refused_by_name(value: object) -> None:
    with pytest.raises(UserError, match=f"^best is a {kind(value)}, "):
        check_parts({"history": [1.0], "best": value})


@pytest.mark.parametrize("value", NEVER_LOADED, ids=kind)
def test_what_would_not_be_loaded_again_is_named_with_its_place(value: object) -> None:
    with pytest.raises(UserError, match=rf"^history\[1\]\['data'\] is a {kind(value)}, "):
        check_parts({"history": [1.0, {"data": value}]})
    with pytest.raises(UserError, match=rf"^tracker\['best'\]\[1\] is a {kind(value)}, "):
        states_of({"tracker": of_object(value)})


def test_lists_and_dictionaries_are_restored_in_place(tmp_path: Path) -> None:
    """Also what is in them: the loop may hold the tensors of averaged weights by other names."""
    saved = {
        "history": [np.float64(0.5), 2, "three"],
        "averages": {"weight": torch.full((2,), 7.0), "later": torch.ones(1), "seen": [(1, 2.5)]},
    }
    weight, seen = torch.zeros(2), []
    history, averages = [9, 9, 9, 9], {"gone": 1, "weight": weight, "seen": seen}
    check_parts(saved)
    save_and_load(tmp_path / "saved.pt", saved, {"history": history, "averages": averages})
    assert history == [0.5, 2, "three"] and [type(value) for value in history] == [float, int, str]
    assert averages.keys() == saved["averages"].keys()
    assert averages["weight"] is weight and weight.tolist() == [7, 7]
    assert averages["seen"] is seen == [(1, 2.5)]


def test_a_schedule_by_numpy_is_saved_and_keeps_its_rate(tmp_path: Path) -> None:
    """Its rates are NumPy's numbers, in the optimizer's state, too."""

    def trained() -> dict[str, object]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + np.cos(step))
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler}

    saved, loaded = trained(), trained()
    saved["optimizer"].step()
    saved["lr_scheduler"].step()
    save_and_load(tmp_path / "saved.pt", saved, loaded)
    for parts in (saved, loaded):
        parts["optimizer"].step()
        parts["lr_scheduler"].step()
    rates = [parts["optimizer"].param_groups[0]["lr"].hex() for parts in (saved, loaded)]
    assert rates[0] == rates[1] == (0.1 * (1 + np.cos(2))).hex()


def test_a_network_keeps_the_versions_of_its_layers(tmp_path: Path) -> None:
    """PyTorch notes them beside the weights, and loads by them."""
    states = states_of({"model": nn.BatchNorm1d(2)})
    save("the checkpoint", states, tmp_path / "saved.pt", "free the space.")
    loaded = load_verified(tmp_path / "saved.pt")
    assert loaded["model"]._metadata == nn.BatchNorm1d(2).state_dict()._metadata


@pytest.mark.skipif(torch.__version__ < "2.6", reason="an older PyTorch cannot tell what it would not load")
def test_a_tensor_of_a_class_of_its_own_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Scaled"):
        save("the checkpoint", {"model": torch.ones(2).as_subclass(Scaled)}, tmp_path / "saved.pt", "")
    assert not list(tmp_path.iterdir())
