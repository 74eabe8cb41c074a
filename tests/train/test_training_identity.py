"""Trainings that differ are no repeats: the table says in what; and ranks that train alone are told."""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import ENVIRONMENT, STAGES, Script, succeeded
from forking import Forking
from test_drift import ON_RANKS
from torch import nn

from manygpus.network import training_identity
from manygpus.record import records
from manygpus.reports import comparison

SMALL = ("--epochs", 2, "--batch-size", 50, "--no-cuda", "--precision", "fp32")
TOY = """
import argparse, sys, torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from manygpus.training.recorder import Recorder

parser = argparse.ArgumentParser()
parser.add_argument("--how", nargs="*", default=["SGD"])
parser.add_argument("--noise", type=float, default=0.5)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--save-dir")
parser.add_argument("--logdir")
parser.add_argument("--seed", type=int)
parser.add_argument("--run-id")
parser.add_argument("to", nargs="?")
parser.add_argument("--genes", nargs="*")
options = parser.parse_args()
plain = lambda model: model.parameters()
split = lambda model: [{"params": [*model[0].parameters()], "weight_decay": 0}, {"params": model[2].weight}]
WAYS = {
    "SGD": (SGD, {}),
    "momentum": (SGD, {"momentum": 0.9}),
    "AdamW": (AdamW, {"weight_decay": 0}),
    "decay": (AdamW, {"weight_decay": 0.1}),
    "groups": (AdamW, {"weight_decay": 0.1}, split),
    "tanh": (SGD, {}, plain, nn.Tanh()),
    "slope": (SGD, {}, plain, nn.LeakyReLU(0.1)),
    "other slope": (SGD, {}, plain, nn.LeakyReLU(0.2)),
    "schedule": (SGD, {}, plain, nn.ReLU(), 0.5),
    "told": (SGD, {}, plain, nn.ReLU(), 0.25),
}

def train(name, kind, how, groups=plain, layer=nn.ReLU(), decay=1.0):
    model = nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 1))
    optimizer = kind(groups(model), lr=options.lr, **how)
    lr_scheduler = StepLR(optimizer, 1, decay)
    arguments = {"lr_scheduler": lr_scheduler} if name == "told" else {}
    seen = Recorder("toy", model, optimizer, batch_size=4, epochs=3, dataset="noise", **arguments)
    for epoch in range(3):
        optimizer.step()
        seen.epoch(8, 1.0, options.noise)
        lr_scheduler.step()

for name in options.how:
    train(name, *WAYS[name])
"""


@pytest.fixture
def toy(forking: Forking, tmp_path: Path) -> Callable[..., None]:
    """Runs the toy script with these arguments, and `changed` for one of its words."""

    def run(*arguments: object, changed: tuple[str, str] = ("", "")) -> None:
        (tmp_path / "toy.py").write_text(TOY.replace(*changed) if changed[0] else TOY)
        env = ENVIRONMENT | {"MANYGPUS_RESULTS_DIR": str(tmp_path)}
        succeeded(forking.run(tmp_path / "toy.py", *arguments, env=env, cwd=tmp_path))

    return run


def table_of(folder: Path) -> pd.DataFrame:
    rows, skipped = comparison.load_some([folder / "runs"])
    assert not skipped
    return comparison.compare(comparison.summarize(rows))


def test_another_optimizer_schedule_or_network_is_another_row_that_says_so(
    toy: Callable, tmp_path: Path
) -> None:
    """Unasked, and whether the schedule is told or not; only what is equal is a repeat."""
    ways = ("SGD", "SGD", "momentum", "AdamW", "decay", "groups", "tanh", "slope", "other slope")
    toy("--how", *ways, "schedule", "schedule", "told")
    # Its folder is in no repository, and the kit's commit is not the script's.
    assert not any(comparison.load_some([tmp_path / "runs"])[0]["git_commit"])
    table = table_of(tmp_path).set_index("variant")
    repeats = {variant: runs for variant, runs in table.runs.items() if runs > 1}
    assert repeats == {
        "SGD momentum 0, 1 ReLU, rates 0.01,0.01,0.01": 2,
        "SGD momentum 0, 1 ReLU, rates 0.01,0.005,0.0025": 2,
    }
    others = {variant for variant, runs in table.runs.items() if runs == 1}
    slopes = {variant for variant in others if variant.startswith("SGD momentum 0, 1 LeakyReLU structure ")}
    assert len(slopes) == 2
    assert others - slopes == {
        "SGD momentum 0.9, 1 ReLU",
        "SGD momentum 0, 1 Tanh",
        "SGD momentum 0, 1 ReLU, StepLR",
        "AdamW weight_decay 0, 1 ReLU",
        "AdamW weight_decay 0.1, 1 ReLU",
        "AdamW weight_decay 0|0.1 tensors 2|1, 1 ReLU",
    }
    assert not table.doubt.str.contains("c").any()


def test_a_long_list_of_arguments_is_told_in_short(toy: Callable, tmp_path: Path) -> None:
    toy()
    toy("--genes", *(f"GENE{number}" for number in range(100)))
    plain, listed = sorted(table_of(tmp_path).variant)
    assert plain == "" and re.fullmatch(r"--genes [0-9a-f]{8}", listed)


def test_other_arguments_are_another_row_and_another_text_is_a_doubt(toy: Callable, tmp_path: Path) -> None:
    """Arguments by which repeats differ are none: which repeat it is, and where its files are."""
    toy()
    toy(tmp_path / "new", "--save-dir", tmp_path / "here", "--logdir", "logs/2", "--seed", 2, "--run-id=b")
    toy("--noise=0.25")
    table = table_of(tmp_path).set_index("variant")
    assert dict(table.runs) == {"": 2, "--noise 0.25": 1}
    assert set(table.doubt) == {""}
    toy(changed=("step_size", "step_size"))
    toy(changed=("8, 1.0, options", "8, 0.5, options"))
    table = table_of(tmp_path).set_index("variant")
    assert dict(table.runs) == {"": 4, "--noise 0.25": 1}
    assert dict(table.doubt) == {"": "c", "--noise 0.25": ""}


# It loads its optimizer before it makes the Recorder. The two groups have learning rates of their own.
RESUMED = """
import sys, torch
from manygpus.training.recorder import Recorder
body, head = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
model = torch.nn.Sequential(body, head)
groups = [{"params": body.parameters(), "lr": 0.05}, {"params": head.parameters(), "lr": 0.01}]
optimizer = torch.optim.AdamW(groups)
saved = torch.load("saved.pt") if "again" in sys.argv else None
if saved:
    optimizer.load_state_dict(saved["optimizer"])
seen = Recorder("toy", model, optimizer, batch_size=4, epochs=2, dataset="noise")
if saved:
    seen.load_state_dict(saved["record"])
model(torch.randn(4, 2)).square().mean().backward()
optimizer.step()
seen.epoch(8, 1.0, 0.5)
torch.save({"optimizer": optimizer.state_dict(), "record": seen.state_dict()}, "saved.pt")
"""


def test_an_optimizer_that_is_loaded_before_the_recorder_resumes(forking: Forking, tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(RESUMED)
    env = ENVIRONMENT | {"MANYGPUS_RESULTS_DIR": str(tmp_path)}
    for word in ("first", "again"):
        succeeded(forking.run(tmp_path / "toy.py", word, env=env, cwd=tmp_path))
    (rows,) = records.read_runs((tmp_path / "runs").glob("*.csv")).values()
    assert [row["lr"] for row in rows] == [0.05, 0.05]
    assert len({row["optimizer"] for row in rows}) == 1 and "lr=x1|x0.2" in rows[0]["optimizer"]


class Activated(nn.Module):
    """Its function is part of its text, as in many networks, and would be there with its address."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.Linear(2, 2)

    def extra_repr(self) -> str:
        return f"function={self.function}"


def test_a_network_is_the_same_in_another_process_and_in_a_wrapper() -> None:
    networks = [Activated(lambda inputs: inputs) for _ in range(5)]
    networks[1].inner = nn.DataParallel(networks[1].inner)
    networks[2].inner = torch.compile(networks[2].inner)
    networks[3] = nn.DataParallel(networks[3])
    assert len({training_identity.of_network({"model": network}) for network in networks}) == 1
    networks[4].inner = nn.Linear(2, 2, bias=False)
    assert len({training_identity.of_network({"model": network}) for network in networks}) == 2


# A copy of a stage with an optimizer, a schedule or a network of its own.
MADE = "optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))"
SGD = "optimizer, lr_scheduler = torch.optim.SGD(model.parameters(), lr=opts.scaled_lr, momentum=0.9), None"
STEP = "lr_scheduler.step()"
SCHEDULE = """optimizer, _ = build_optimizer(opts, model, steps_per_epoch=len(train_batches))
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)"""


def copy_of(stage: str, folder: Path, *changes: tuple[str, str]) -> Path:
    text = STAGES[stage].read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "my_copy.py").write_text(text)
    return folder / "my_copy.py"


def test_a_copy_with_its_own_optimizer_is_recorded_as_what_it_is(script: Script, tmp_path: Path) -> None:
    few = (*SMALL, "--dataset", "synthetic", "--train-size", 100, "--test-size", 50, "--width", 4)
    for momentum in (0.9, 0.0):
        own_script = copy_of("single", tmp_path, (MADE, SGD.replace("0.9", str(momentum))), (STEP, "pass"))
        done = succeeded(script(own_script, *few, "--lr", 0.05, "--results-dir", tmp_path))
        assert "recipe" not in done.stdout and "optimizer SGD" in done.stdout
    rows = [row for path in (tmp_path / "runs").glob("*.csv") for row in records.read(path)]
    assert {(row["recipe"], row["lr"]) for row in rows} == {("own optimizer", 0.05)}
    table = table_of(tmp_path)
    assert sorted(table.variant) == ["momentum 0", "momentum 0.9"] and set(table.runs) == {1}


@pytest.mark.parametrize(
    ("changes", "option", "warned"),
    [
        (((MADE, SGD), (STEP, "pass")), ("--recipe", "fast"), True),
        (((MADE, SGD), (STEP, "pass")), ("--gamma", 0.1), True),
        (((MADE, SGD), (STEP, "pass")), ("--lr", 0.1), False),
        (((MADE, SCHEDULE),), ("--recipe", "sgd"), False),
        (((MADE, SCHEDULE),), ("--gamma", 0.1), True),
        ((), ("--gamma", 0.1), False),
    ],
    ids=["recipe", "gamma", "lr", "recipe of its optimizer", "gamma of its schedule", "unchanged"],
)
def test_an_option_of_a_recipe_that_the_copy_may_not_use_is_a_warning(
    changes: tuple, option: tuple, warned: bool, script: Script, tmp_path: Path
) -> None:
    own_script = copy_of("single", tmp_path, *changes)
    few = (*SMALL, "--dataset", "synthetic", "--train-size", 100, "--test-size", 50, "--dry-run")
    done = succeeded(script(own_script, *few, *option))
    assert (f"warning: {option[0]} " in done.stderr) == warned


def test_other_learning_rates_on_more_ranks_are_a_doubt(forking: Forking, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(ON_RANKS)
    env = ENVIRONMENT | {"MANYGPUS_RESULTS_DIR": str(tmp_path)}
    for ranks in (1, 2):
        succeeded(forking.run(tmp_path / "ranks.py", "wrapped", ranks=ranks, env=env))
    table = table_of(tmp_path)
    assert dict(zip(table.devices, table.doubt, strict=True)) == {1: "", 2: "r"}
    assert table.speedup.notna().all()
