"""The GPTs on generated text: 1 and 2 ranks, whole and split, train alike; no loss is below its floor."""

import itertools
import math
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch
from conftest import (
    BEYOND,
    COMPLETE,
    ENVIRONMENT,
    REPOSITORY,
    STOPS,
    Script,
    assert_same_end,
    rows_of,
    succeeded,
    weights_of,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from manygpus.checkpoint import sharded
from manygpus.config.options import parse_options
from manygpus.errors import UserError
from manygpus.record import records

pytestmark = pytest.mark.skipif(
    torch.__version__ < sharded.NEEDED, reason=f"needs PyTorch {sharded.NEEDED} or newer"
)
WHOLE, SPLIT = COMPLETE / "gpt.py", COMPLETE / "gpt_fsdp.py"
# Two epochs of 10 steps.
SMALL = ("--width", 16, "--heads", 2, "--context", 16, "--shards", 1, "--batch-size", 12, "--train-size", 120)
SMALL += ("--test-size", 31, "--epochs", 2, "--lr-warmup-images", 48, "--timeout", 60, "--save-model")
RECOMPUTE = ("--checkpoint-activations",)
TRAININGS = list(itertools.product((WHOLE, SPLIT), (1, 2), ((), RECOMPUTE)))[1:]  # the first is `whole`
Train = Callable[..., str]
# Adam makes a step of full length of any gradient, however small.
ROUNDING = {"loss": 1e-4, "weight": 1e-3}


@pytest.fixture
def beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPLETE)


@pytest.fixture
def gpt_data(beyond: None) -> ModuleType:
    import gpt_data

    return gpt_data


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def train(script: Script, texts: Path) -> Train:
    """Trains, which has to go well; returns what all ranks have told."""

    def run(folder: Path, *arguments: object, ranks: int, path: Path = WHOLE, around: tuple = ()) -> str:
        arguments_of_run = (*SMALL, "--data-dir", texts, "--results-dir", folder, *arguments)
        done = succeeded(script(*around, path, *arguments_of_run, ranks=ranks))
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def whole(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank has left that trained with DistributedDataParallel and kept all activations."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, ranks=1)
    return folder


@pytest.mark.parametrize(("path", "ranks", "recompute"), TRAININGS)
def test_whole_or_split_with_activations_kept_or_not_it_trains_alike(
    path: Path, ranks: int, recompute: tuple, whole: Path, train: Train, tmp_path: Path
) -> None:
    """Only the memory differs: of what is split, each rank keeps its shard."""
    train(tmp_path, *recompute, ranks=ranks, path=path)
    assert_same_end(tmp_path, whole, **ROUNDING)
    facts = {tuple(row[name] for name in ("model", "images", "test_images")) for row in rows_of(tmp_path)}
    assert facts == {("GPT", 120, 31 * 16)}
    shards = ranks if path == SPLIT else 1
    assert kept_mb(tmp_path) == pytest.approx({name: mb / shards for name, mb in kept_mb(whole).items()})


def kept_mb(folder: Path) -> dict[str, float]:
    """What rank 0 kept of weights, gradients and optimizer state, in the last epoch."""
    (path,) = (folder / "runs").glob("*.csv")
    return {
        metric["of"]: metric["value"]
        for metric in records.read_metrics(path)
        if metric["metric"] == "kept_mb"
    }


def test_split_in_bf16_it_learns_as_in_fp32_and_keeps_weights_in_fp32(
    whole: Path, train: Train, tmp_path: Path
) -> None:
    train(tmp_path, "--precision", "bf16", ranks=2, path=SPLIT)
    losses, in_fp32 = ([row["train_loss"] for row in rows_of(folder)] for folder in (tmp_path, whole))
    assert losses == pytest.approx(in_fp32, rel=1e-3) and losses != pytest.approx(in_fp32, rel=1e-6)
    assert kept_mb(tmp_path) == pytest.approx({name: mb / 2 for name, mb in kept_mb(whole).items()})


@pytest.mark.parametrize(("path", "ranks"), [(WHOLE, 2), (SPLIT, 1)])
def test_a_run_that_was_stopped_ends_as_one_in_one_go(
    path: Path, ranks: int, whole: Path, train: Train, tmp_path: Path
) -> None:
    """After its first step with two ranks; the weights that were best are those of the end here."""
    checkpoints = tmp_path / "checkpoints"
    resuming = ("--checkpoint-dir", checkpoints, "--resume", "auto")
    printed = train(tmp_path, *resuming, ranks=2, path=path, around=(*STOPS, 1))
    assert "stopped after step 1 of epoch 1" in printed
    printed = train(tmp_path, *resuming, ranks=ranks, path=path)
    assert f"resumed from {checkpoints / 'epoch-1-step-1'}" in printed
    assert_same_end(tmp_path, whole, **ROUNDING)
    best = torch.load(checkpoints / "best.pt", weights_only=True)
    torch.testing.assert_close(best, weights_of(tmp_path), rtol=0, atol=0)


def test_the_best_weights_stay_when_the_loss_rises_again(train: Train, tmp_path: Path) -> None:
    """With a learning rate that wrecks what was learned; a run that resumes knows how good the best were."""
    checkpoints = tmp_path / "checkpoints"
    wrecking = ("--checkpoint-dir", checkpoints, "--epochs", 4, "--lr", 3, "--lr-warmup-images", 470)
    train(tmp_path, *wrecking, ranks=1)
    losses = [row["test_loss"] for row in rows_of(tmp_path)]
    assert min(losses) < losses[-1]
    best = torch.load(checkpoints / "best.pt", weights_only=True)
    assert any(not best[name].equal(last) for name, last in weights_of(tmp_path).items())
    (checkpoints / "epoch-5-step-0.pt").unlink()
    before = (checkpoints / "best.pt").stat()
    assert "resumed from" in train(tmp_path, *wrecking, "--resume", "auto", ranks=1)
    assert (checkpoints / "epoch-5-step-0.pt").exists()
    assert (checkpoints / "best.pt").stat().st_mtime_ns == before.st_mtime_ns


def test_the_loss_comes_down_to_its_floor_and_not_below(
    train: Train, gpt_data: ModuleType, tmp_path: Path
) -> None:
    train(
        tmp_path, "--width", 32, "--context", 32, "--train-size", 8000, "--test-size", 1000,
        "--batch-size", 16, "--lr", 0.01, "--lr-warmup-images", 320, "--epochs", 1, ranks=2,
    )  # fmt: skip
    (row,) = rows_of(tmp_path)
    assert row["settings"] == "layers=2 heads=2 context=32 vocabulary=128 shards=1"
    assert row["optimizer"].startswith("AdamW betas=0.9,0.95 ") and row["recipe"] == "adamw"
    floor = gpt_data.entropy_rate()
    assert floor < row["test_loss"] < floor + 0.2
    (path,) = (tmp_path / "runs").glob("*.csv")
    metrics = {metric["metric"]: metric["value"] for metric in records.read_metrics(path)}
    assert metrics["lowest_possible_loss"] == pytest.approx(floor, rel=1e-5)
    assert metrics["tokens_per_s"] == pytest.approx(32 * row["images_per_s"], rel=1e-5)
    assert math.isnan(metrics["mfu_percent"])  # of a CPU no peak is known


@pytest.mark.parametrize("harm", [lambda t: t[1:], lambda t: b"\xff" * len(t), lambda t: bytes(len(t)), None])
def test_a_shard_of_another_program_is_refused(
    harm: Callable[[bytes], bytes] | None, gpt_data: ModuleType, tmp_path: Path
) -> None:
    """One that is cut, tokens that are no words, zeros, and a pipe, which would be waited for."""
    _, shard = gpt_data.write(tmp_path, 1)
    text = shard.read_bytes()
    shard.unlink()
    if harm:
        shard.write_bytes(harm(text))
    else:
        os.mkfifo(shard)
    with pytest.raises(UserError, match=f"{shard} is no text of this program: remove it"):
        gpt_data.Text(gpt_data.write(tmp_path, 1)[1:], context=64).windows([0])


def test_the_text_costs_what_its_grammar_says(gpt_data: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost follows from the choices for a text; no text can come of two different rows of choices."""
    made = []

    class Noting(random.Random):
        def choices(self, texts: list, *, cum_weights: list) -> list:
            (place,) = super().choices(range(len(texts)), cum_weights=cum_weights)
            below = cum_weights[place - 1] if place else 0
            made.append((place, -math.log(cum_weights[place] - below)))
            return [texts[place]]

    monkeypatch.setattr(gpt_data, "Random", Noting)
    stop, count, costs, choices_of = gpt_data.WORDS.index("."), 0, [], {}
    sentence = []
    for token in itertools.islice(gpt_data.tokens("a test"), 200_000):
        sentence.append(token)
        if token == stop:
            places, nats = zip(*made, strict=True)
            assert choices_of.setdefault(tuple(sentence), places) == places
            costs.append(sum(nats))
            count += len(sentence)
            made.clear()
            sentence.clear()
    assert len(choices_of) > 10_000
    assert sum(costs) / count == pytest.approx(gpt_data.entropy_rate(), rel=0.01)


def test_windows_cover_each_shard_and_share_one_token(gpt_data: ModuleType, tmp_path: Path) -> None:
    paths = gpt_data.write(tmp_path, shards=2)
    made = [path.stat().st_mtime_ns for path in paths]
    assert gpt_data.write(tmp_path, shards=2) == paths and made == [path.stat().st_mtime_ns for path in paths]
    assert [path.stat().st_size for path in paths] == [2 * 2**16, 2 * 2**18, 2 * 2**18]
    text = gpt_data.Text(paths[1:], context=100)
    one_shard = (2**18 - 1) // 100
    assert len(text) == 2 * one_shard
    first, second, of_other = text.windows([0, 1, one_shard])
    assert first.shape == (101,) and first[-1] == second[0]
    for window, path, start in ((first, paths[1], 0), (second, paths[1], 100), (of_other, paths[2], 0)):
        content = path.read_bytes()[2 * start : 2 * (start + 101)]
        assert window.tolist() == torch.frombuffer(bytearray(content), dtype=torch.int16).tolist()


def test_operations_are_counted_as_pytorch_counts_them(beyond: None) -> None:
    import gpt_metrics
    import gpt_model

    model = gpt_model.GPT(vocabulary=256, context=64, width=128, layers=2, heads=4)
    tokens = torch.zeros(2, 64).long()
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    assert gpt_metrics.flops_per_token(model) == pytest.approx(counted.get_total_flops() / 128, rel=0.01)


@pytest.mark.parametrize("arguments", [(), ("--bf16-residuals",)])
def test_the_blocks_add_up_in_bf16_only_if_asked_to(arguments: tuple, beyond: None) -> None:
    """Under autocast the results of their layers are bf16 in any case."""
    import gpt_model

    opts = parse_options("", gpt_model.GPTOptions, arguments=["--precision", "bf16", *arguments])
    model = gpt_model.build_model(opts)
    with torch.autocast("cpu", torch.bfloat16):
        added_up = model.hidden(torch.zeros(2, opts.context).long())
    assert added_up.dtype == (torch.bfloat16 if arguments else torch.float32)


def test_the_optimizer_pulls_matrices_only(beyond: None) -> None:
    import gpt_model

    opts = parse_options("", gpt_model.GPTOptions, arguments=["--batch-size", "64", "--lr", "1"])
    model = gpt_model.GPT(vocabulary=256, context=64, width=128, layers=2, heads=4)
    optimizer, lr_scheduler = gpt_model.build_optimizer(opts, model, steps=100)
    decays = {
        weights.dim(): group["weight_decay"]
        for group in optimizer.param_groups
        for weights in group["params"]
    }
    assert decays == {2: 0.1, 1: 0.0}
    rates = []
    for _ in range(101):
        rates += lr_scheduler.get_last_lr()[:1]
        optimizer.step()
        lr_scheduler.step()
    assert rates[0] == pytest.approx(1 / 16) and max(rates) == rates[16] == 1
    assert rates[16:] == sorted(rates[16:], reverse=True) and rates[-1] == pytest.approx(0.1)


def test_the_memory_that_the_page_counts_was_measured() -> None:
    page = (BEYOND / "GPT.md").read_text()
    counted = [float(gb) for gb in re.findall(r"^\w+ (?:True|False) .* = ([\d.]+) GB$", page, re.MULTILINE)]
    rows = pd.read_csv(REPOSITORY / "results" / "sample" / "h100" / "gpt_ladder.csv").set_index("section")
    measured = rows.peak_memory_mb[["fp32", "bf16", "bf16, checkpointing"]] / 1000
    assert counted == pytest.approx(list(measured), rel=0.01)


@pytest.mark.full
def test_the_ladder_continues_after_a_section_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """tf32 needs a GPU. The network is smaller than the ladder's, to be quick."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools" / "bench")
    import gpt_ladder

    *_, split = gpt_ladder.ON_A_CPU.sections
    sections = [split._replace(name="tf32", arguments="--precision tf32"), split._replace(steps=3)]
    small = "--context 16 --test-size 32 --no-cuda"
    ladder = gpt_ladder.ON_A_CPU._replace(arguments=small, sections=sections)
    monkeypatch.setattr(gpt_ladder, "ON_A_CPU", ladder)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    table = tmp_path / "ladder.csv"
    monkeypatch.setattr(sys, "argv", ["gpt_ladder.py", "--cpu", "--out", str(table)])
    gpt_ladder.main.__wrapped__()
    of_tf32, of_split = pd.read_csv(table).to_dict("records")
    assert f"| tf32 | {of_tf32['error']} |" in capsys.readouterr().out
    assert of_split["tokens_per_s"] > 0 and of_split["peak_memory_mb"] > 0


@pytest.mark.parametrize(
    ("device_name", "precision", "promised"),
    [
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "bf16", None),  # which has none
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),  # a part of one
        ("NVIDIA A10G", "bf16", None),
    ],
)
def test_what_a_datasheet_promises(
    beyond: None, device_name: str, precision: str, promised: float | None
) -> None:
    import gpu_peaks

    assert gpu_peaks.peak(device_name, precision) == pytest.approx(promised or float("nan"), nan_ok=True)
