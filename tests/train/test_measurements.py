"""What is measured, and on which ranks: promises that no other test would see broken."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkout import Checkout
from conftest import Script, places, rows_of, succeeded, weights_of

from manygpus import devices as device
from manygpus.distributed import process_group
from manygpus.network.model import Dropout
from manygpus.reports import comparison
from manygpus.training import clock

SMALL = ("--train-size", 128, "--test-size", 101, "--batch-size", 64, "--width", 4, "--precision", "fp32")


# --- what N ranks record ----------------------------------------------------------------------------

# Every look at a rank's clock finds it so many seconds later than the look before.
SECONDS, MEMORY = (10, 32), (500, 700)
PLANTED = f"""
import itertools, types
from manygpus.training import clock, run_facts as facts

ticks = itertools.count(0, {SECONDS}[faults.rank()])
clock.time = types.SimpleNamespace(perf_counter=lambda: next(ticks))
facts.peak_memory_mb = lambda device: {MEMORY}[faults.rank()]

def save(optimizer):
    weights = [weight.detach() for group in optimizer.param_groups for weight in group["params"]]
    dropped = F.dropout(torch.ones(1000))
    torch.save((weights, dropped), f"rank-{{faults.rank()}}.pt")

faults.after_step(2, save)
"""


@pytest.fixture(scope="module")
def two_ranks(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two ranks, the second of them slower and fuller, and after the last step of each its
    weights and what dropout makes of ones."""
    place = Checkout(tmp_path_factory.mktemp("two-ranks") / "a checkout")
    place.plant("ddp", PLANTED.replace('f"rank-', f'f"{place.folder}/rank-'))
    succeeded(script(place.script("ddp"), *SMALL, "--epochs", 1, "--results-dir", place.folder, ranks=2))
    return place.folder


def test_times_and_memory_are_those_of_the_slowest_and_the_fullest_rank(two_ranks: Path) -> None:
    (row,) = rows_of(two_ranks)
    assert (row["train_seconds"], row["eval_seconds"], row["peak_memory_mb"]) == (32, 32, 700)
    assert row["images_per_s"] == row["images"] / 32 == 4


def test_peak_memory_is_that_of_the_epoch(script: Script, tmp_path: Path, checkout: Checkout) -> None:
    """A GPU holds 700 MB in a step of the warm-up, when cuDNN tries out what is fastest, then 300."""
    checkout.plant(
        "single",
        """
        from manygpus.training import run_facts as facts, run

        peak, held = 900, 700

        def reset():
            nonlocal peak
            peak = 0

        def hold(optimizer):
            nonlocal peak
            peak = max(peak, held)

        def hold_less():
            nonlocal held
            held = 300

        run.reset_peak_memory = reset
        facts.peak_memory_mb = lambda device: peak
        faults.before_every_step(hold)
        faults.after_epoch(1, hold_less)
        """,
    )
    results = tmp_path / "results"
    succeeded(script(checkout.script("single"), *SMALL, "--epochs", 3, "--results-dir", results))
    assert [row["peak_memory_mb"] for row in rows_of(results)] == [700, 300, 300]
    for epochs, peak in ((3, 300), (1, 700)):
        rows, _ = comparison.load([results])
        (largest,) = comparison.summarize(rows[rows.epoch <= epochs]).peak_memory_mb
        assert largest == peak  # that of the warm-up only where there is nothing else


def test_ranks_drop_other_neurons_and_keep_equal_weights(two_ranks: Path) -> None:
    (weights, dropped), (other_weights, other_dropped) = (
        torch.load(two_ranks / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)
    )
    assert not torch.equal(dropped, other_dropped)
    for values, others in zip(weights, other_weights, strict=True):
        assert torch.equal(values, others)


def test_a_gpus_queue_is_empty_when_its_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended GPU the work is done, and not merely queued, at both ends."""
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("waited"))
    look = SimpleNamespace(perf_counter=lambda: seen.append("looked") or len(seen))
    monkeypatch.setattr(clock, "time", look)
    device = torch.device("cuda", 0)
    assert clock.stop(device, clock.start(device)) == 2
    assert seen == ["waited", "looked"] * 2


TWO_NODES = {
    "srun": {"SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_NUM_NODES": 2, "SLURM_PROCID": 3, "SLURM_LOCALID": 1},
    "torchrun": {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2},
}
TWO_NODES["torchrun"]["TORCHELASTIC_RUN_ID"] = "none"


@pytest.mark.parametrize("launcher", TWO_NODES)
def test_a_rank_counts_over_all_nodes_and_its_gpu_on_its_own(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of two ranks on each of two nodes, as if it had two GPUs and met the others."""
    met = []
    for name, value in (TWO_NODES[launcher] | {"MASTER_ADDR": "n1", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device, "try_gpu", lambda device: met.append(device.index))
    monkeypatch.setattr(process_group, "card", lambda device: "")
    store = torch.distributed.HashStore()  # the others have come
    named = "torchrun none, 4 processes" if launcher == "torchrun" else "4 processes"
    for key, value in {"training": named, "card of 0": "", "card of 1": "", "card of 2": ""}.items():
        store.set(key, value)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_, **__: iter([(store, 3, 4)]))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **how: met.append(how["rank"]))
    dist_env = process_group.init_distributed(use_gpu=True, timeout_seconds=30)
    assert (dist_env.rank, dist_env.local_rank, dist_env.world_size, dist_env.num_nodes) == (3, 1, 4, 2)
    assert met == [1, 3]
    assert dist_env.device == torch.device("cuda", 1)


# --- what a process computes ------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.25, 0.5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_dropout_keeps_the_mean(p: float, layout: torch.memory_format) -> None:
    """A share p of the elements is dropped, and the others grow by 1 / (1 - p): as nn.Dropout does."""
    torch.manual_seed(1)
    dropout, ones = Dropout(p), torch.ones(100, 64, 12, 12).to(memory_format=layout)
    once, again = dropout(ones), dropout(ones)
    assert once.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    assert (once == 0).float().mean().item() == pytest.approx(p, abs=0.002)  # four standard deviations
    assert once.mean().item() == pytest.approx(1, abs=0.005)
    assert not torch.equal(once, again)
    assert torch.equal(dropout.eval()(ones), ones)


def test_the_seed_decides_on_the_weights(script: Script, tmp_path: Path) -> None:
    """In every stage the same. They hardly move at this learning rate, whatever the order of the images."""
    weights = {}
    for stage, seed in (("single", 7), ("dp", 7), ("ddp", 7), ("single", 8)):
        folder = tmp_path / f"{stage}-{seed}"
        arguments = (*SMALL, "--epochs", 1, "--lr", 1e-30, "--seed", seed, "--save-model")
        succeeded(script(stage, *arguments, "--results-dir", folder))
        weights[stage, seed] = weights_of(folder)["conv1.weight"]
    assert torch.equal(weights["single", 7], weights["dp", 7])
    assert torch.equal(weights["single", 7], weights["ddp", 7])
    assert not torch.equal(weights["single", 7], weights["single", 8])


def test_the_clock_of_a_run_continues_and_every_process_warms_up(script: Script, tmp_path: Path) -> None:
    assert script("single", *SMALL, *places(tmp_path), "--epochs", 1).returncode == 0
    (path,) = (tmp_path / "checkpoints").glob("*.pt")
    state = torch.load(path, weights_only=True)
    assert state["parts"]["record"]["elapsed_s"] > 0
    state["parts"]["record"]["elapsed_s"] = 1e6
    torch.save(state, path)
    assert script("single", *SMALL, *places(tmp_path), "--epochs", 3).returncode == 0
    rows = rows_of(tmp_path)
    assert [row["warmup"] for row in rows] == [True, True, False]
    assert rows[0]["elapsed_s"] < 1e6 <= rows[1]["elapsed_s"] <= rows[2]["elapsed_s"]
