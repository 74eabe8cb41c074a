"""The acceptance run of a machine with GPUs: what only they can show.

    .venv/bin/python -m pytest -n0 tests/train/test_gpu.py

One GPU is enough for most of it, two for all. No other test uses them, and of these one at a time.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from checkout import Checkout
from conftest import (
    BY_FEATURE,
    COMPLETE,
    ENVIRONMENT,
    GPUS,
    REPOSITORY,
    WITH_GPUS,
    alone_with_the_gpus,
    failed,
    ran,
    rows_of,
    run_stage,
    stage_command,
    succeeded,
)
from monitoring import NO_RANK, notes_so_far, rows_so_far, running_monitor
from test_slow_ranks import rank_table

from manygpus.monitor import samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU"),
    pytest.mark.usefixtures("alone", "mnist_dir"),
]
several = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, finds {GPUS}")

CAPTURED = BY_FEATURE / "captured.py"
SHORT = ("--epochs", 2, "--train-size", 6400 * max(GPUS, 1), "--batch-size", 64 * max(GPUS, 1))


@pytest.fixture
def alone() -> Iterator[None]:
    with alone_with_the_gpus():
        yield


def run(stage: str | Path, *arguments: object, **how: object) -> subprocess.CompletedProcess:
    """Run a stage on the GPUs to its end."""
    return run_stage(
        stage, *arguments, device=(), **{"env": {}} | how | {"env": WITH_GPUS | how.get("env", {})}
    )


def train(stage: str | Path, folder: Path, *arguments: object, **how: object) -> list[dict]:
    """The rows of a run that has to go well."""
    succeeded(run(stage, *arguments, "--results-dir", folder, **how))
    return rows_of(folder)


# --- one GPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", ["resident", "workers"])
def test_a_record_names_the_gpu(loader: str, tmp_path: Path) -> None:
    row = train("single", tmp_path, *SHORT, "--loader", loader)[-1]
    assert not row["device_name"].startswith("CPU")
    assert row["devices"] == 1
    assert row["cuda_version"] == (torch.version.cuda or f"ROCm {torch.version.hip}")
    assert row["peak_memory_mb"] > 0
    assert row["test_accuracy"] > 90


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(("recipe", "goal"), [("classic", 98), ("fast", 98.5)])
def test_every_precision_and_recipe_learns(precision: str, recipe: str, goal: float, tmp_path: Path) -> None:
    chosen = ("--precision", precision, "--recipe", recipe, "--epochs", 2, "--batch-size", 128)
    done = run("single", *chosen, "--results-dir", tmp_path)
    if "needs an NVIDIA GPU of compute capability 8.0" in done.stderr:
        pytest.skip("this GPU has no TF32")
    assert done.returncode == 0, done.stderr
    last = rows_of(tmp_path)[-1]
    assert last["test_accuracy"] > goal
    assert last["precision"] == precision


@pytest.mark.parametrize("stage", ["single", CAPTURED], ids=["single", "captured"])
def test_a_signal_stops_a_run_and_it_resumes(stage: str | Path, tmp_path: Path) -> None:
    """Long epochs, as a GPU needs no time for one pass; the second process stops in another one."""
    folders = ("--checkpoint-dir", tmp_path / "checkpoints", "--resume", "auto", "--results-dir", tmp_path)
    options = (*folders, "--train-size", 50_000_000, "--batch-size", 1000, "--epochs", 1)
    steps = []
    for _ in range(2):
        with subprocess.Popen(
            stage_command(stage, *options), env=ENVIRONMENT | WITH_GPUS, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline().startswith("stage ")
            time.sleep(3)  # into the epoch, or to its door
            process.send_signal(signal.SIGUSR2)
            printed = process.stdout.read()
        assert process.returncode == 0, printed
        steps.append(int(re.search(r"stopped after step (\d+) of epoch 1 by a signal", printed)[1]))
    assert steps[0] < steps[1]


def test_a_checkpoint_goes_from_the_cpu_to_the_gpu_and_back(tmp_path: Path) -> None:
    options = ("--checkpoint-dir", tmp_path / "checkpoints", "--resume", "auto", "--precision", "fp32")
    options += ("--train-size", 12_800, "--results-dir", tmp_path)
    for epochs, device in ((1, ("--no-cuda",)), (2, ()), (3, ("--no-cuda",))):
        succeeded(run_stage("single", *options, "--epochs", epochs, device=device, env=WITH_GPUS))
    rows = rows_of(tmp_path)
    assert [bool(row["cuda_version"]) for row in rows] == [False, True, False]
    assert rows[0]["train_loss"] > rows[1]["train_loss"] > rows[2]["train_loss"]


@pytest.mark.parametrize("recipe", ["classic", "fast"])
def test_the_cpu_runs_ahead_of_the_gpu(recipe: str, tmp_path: Path, checkout: Checkout) -> None:
    """Ten times the steps synchronise no more often, but for the meetings, of which there is one a second."""
    checkout.plant(
        "single", "faults.before_step(1, lambda optimizer: torch.cuda.set_sync_debug_mode('warn'))"
    )
    waits = []
    for steps in (100, 1000):
        sizes = ("--epochs", 1, "--batch-size", 60, "--train-size", 60 * steps, "--precision", "fp32")
        settings = {"env": {"PYTHONWARNINGS": "always"}}
        done = run(
            checkout.script("single"), *sizes, "--recipe", recipe, "--results-dir", tmp_path, **settings
        )
        assert done.returncode == 0, done.stderr
        waits.append(done.stderr.count("called a synchronizing CUDA operation"))
    few, many = waits
    assert few > 0
    assert many < few + 100


def planted(folder: Path, script: Path, *lines: tuple[str, str]) -> Path:
    """Return a copy of the script with more lines, each before the line with the given beginning."""
    checkout = Checkout(folder)
    for line, before in lines:
        checkout.insert(script.relative_to(REPOSITORY), line, before)
    return folder / script.relative_to(REPOSITORY)


@pytest.mark.parametrize("how", ["captured", "graphed"])
@pytest.mark.parametrize(
    "shape",
    [
        ("--batch-size", 1024, "--precision", "bf16"),
        ("--batch-size", 128, "--precision", "tf32", "--recipe", "fast"),
    ],
    ids=["bf16", "fast"],
)
def test_a_captured_step_trains_as_the_eager_one(shape: tuple, how: str, tmp_path: Path) -> None:
    """Where cuDNN has one way to compute each layer, every digit is equal."""
    one_way = "torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True"
    script = planted(tmp_path / "a checkout", CAPTURED, (one_way, "run = Run("))
    sizes = ("--epochs", 2, "--train-size", 20_480, *shape)
    eager, other = (train(script, tmp_path / way, *sizes, "--how", way) for way in ("eager", how))
    for loss in ("train_loss", "test_loss"):
        assert [row[loss] for row in other] == [row[loss] for row in eager]
    assert other[0]["stage"] == f"ddp-{how}"


def test_a_captured_step_is_three_times_as_fast(tmp_path: Path) -> None:
    """At batch 128, where the GPU mostly waits in an eager step. Side by side, the best epoch of each."""
    sizes = ("--batch-size", 128, "--precision", "tf32", "--epochs", 4)
    runs = [train(CAPTURED, tmp_path / way, *sizes, "--how", way) for way in ("eager", "captured")]
    eager, captured = (max(row["images_per_s"] for row in rows) for rows in runs)
    assert captured > 3 * eager


def test_a_compiled_network_is_captured(tmp_path: Path) -> None:
    rows = train(CAPTURED, tmp_path, "--compile", "--batch-size", 1024, "--epochs", 2)
    assert rows[-1]["stage"] == "ddp-captured-compiled"
    assert rows[-1]["test_accuracy"] > 95


@pytest.mark.parametrize(
    ("line", "before", "why"),
    [
        ("loss.item()", "loss.backward()", "within its graph nothing may read a tensor's value"),
        (
            "if schedule.last_epoch == 12: images = images[1:]",
            "loss = step(",
            "one size, not (64, 1, 28, 28)",
        ),
    ],
    ids=["reads a value", "changes its size"],
)
def test_what_cannot_be_captured_is_one_sentence(line: str, before: str, why: str, tmp_path: Path) -> None:
    script = planted(tmp_path / "a checkout", CAPTURED, (line, before))
    assert why in failed(run(script, "--results-dir", tmp_path))


@pytest.mark.parametrize(("script", "name"), [("gpt.py", "gpt-ddp"), ("gpt_fsdp.py", "gpt-fsdp")])
def test_a_gpt_in_bf16_and_compiled_trains_as_in_fp32(script: str, name: str, tmp_path: Path) -> None:
    gpt = COMPLETE / script
    small = ("--width", 128, "--context", 128, "--shards", 1, "--data-dir", tmp_path)
    # At the usual rate it leaps, and where to depends on the last digit.
    small += ("--train-size", 640, "--test-size", 64, "--epochs", 2, "--lr-warmup-images", 320, "--lr", 0.001)
    plain = train(gpt, tmp_path / "plain", *small)[-1]
    fast = train(gpt, tmp_path / "fast", *small, "--precision", "bf16", "--compile")[-1]
    assert (fast["precision"], fast["stage"], plain["stage"]) == ("bf16", f"{name}-compiled", name)
    assert fast["test_loss"] == pytest.approx(plain["test_loss"], rel=0.005)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["classic", "fast"])
def test_data_parallel_on_one_gpu_twice(recipe: str, precision: str, tmp_path: Path) -> None:
    """Each of two replicas computes in the precision asked for, drops neurons of its own, and both learn."""
    wrap = (
        "model = nn.DataParallel(model, device_ids=[0, 0]); kinds = set(); model.module.dropout1."
        "register_forward_hook(lambda _, inputs, __: kinds.add(str(inputs[0].dtype))); model.module."
        "register_forward_pre_hook(lambda *_: torch.set_autocast_dtype('cuda', torch.bfloat16))"
    )
    twice = "model.train(); halves = autocast(lambda x: model(x))(torch.cat([images, images])).chunk(2)"
    tell = f"{twice}; print('seen', *kinds, torch.equal(*halves))"
    stage = REPOSITORY / "02_multigpu_dp" / "mnist_multigpu.py"
    script = planted(tmp_path / "a checkout", stage, (wrap, "run = Run("), (tell, "run.finish()"))
    done = run(script, *SHORT, "--recipe", recipe, "--precision", precision, "--results-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path)[-1]["test_accuracy"] > 85
    kind = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    assert f"seen torch.{kind} False" in done.stdout


def test_memory_that_is_full_is_one_sentence(tmp_path: Path, checkout: Checkout) -> None:
    checkout.plant("single", "torch.cuda.set_per_process_memory_fraction(1e-3)")
    options = ("--batch-size", 20_000, "--precision", "fp32", "--results-dir", tmp_path)
    done = run(checkout.script("single"), *options)
    assert "the memory of this process's GPU is full: lower --batch-size" in failed(done)


@pytest.mark.parametrize("processes", [1, pytest.param(GPUS, marks=several)])
def test_ddp_by_nccl(processes: int, tmp_path: Path) -> None:
    row = train("ddp", tmp_path, *SHORT, processes=processes)[-1]
    assert (row["devices"], row["world_size"]) == (processes, processes)
    assert row["cuda_version"]
    assert row["test_accuracy"] > 85
    last = rank_table(tmp_path).query("epoch == 2")
    assert len(last) == processes and last.peak_memory_mb.max() == row["peak_memory_mb"]
    assert last.own_seconds.between(0, row["train_seconds"], inclusive="right").all()


def test_the_monitor_sees_what_every_gpu_does(tmp_path: Path) -> None:
    """While they train for some seconds. In a container NVML may not show whose processes it sees."""
    sizes = ("--epochs", 1, "--train-size", 5_000_000 * GPUS, "--batch-size", 512 * GPUS)
    with running_monitor(tmp_path, period=0.5, **WITH_GPUS):
        train("ddp", tmp_path, *sizes, processes=GPUS, env={"MANYGPUS_JOB_DIR": str(tmp_path)})
    rows = pd.DataFrame(rows_so_far(tmp_path, samples.GPU))
    for number, gpu in rows.groupby("number"):
        assert gpu["name"].str.len().gt(0).all()
        assert gpu.utilisation.max() > 0
        assert gpu.memory_mb.gt(0).all() and gpu.memory_mb.lt(gpu.memory_limit_mb).all()
        assert gpu.power_w.max() > gpu.power_w.min() > 0, notes_so_far(tmp_path)
        assert gpu.power_limit_w.gt(0).all()
        assert gpu.clock_mhz.max() <= gpu.clock_limit_mhz.max()
        assert gpu.temperature_c.between(5, 110).all()
        joules = gpu.energy_j.iloc[-1] - gpu.energy_j.iloc[0]  # NaN before Volta
        seconds = gpu.time.iloc[-1] - gpu.time.iloc[0]
        assert not joules <= 0.5 * gpu.power_w.min() * seconds, number
        assert not joules >= 2 * gpu.power_w.max() * seconds, number
    assert rows.number.nunique() == GPUS
    assert NO_RANK == "?" or {*rows.ranks} >= {str(rank) for rank in range(GPUS)}


def test_debug_has_nccl_write_what_it_does(tmp_path: Path) -> None:
    train("ddp", tmp_path, *SHORT, "--debug", processes=1)
    (by_nccl,) = (tmp_path / "debug").glob("debug-rank-0-nccl-*.txt")
    assert "NCCL INFO" in by_nccl.read_text()


def test_more_processes_than_gpus_is_one_sentence(tmp_path: Path) -> None:
    batch = ("--batch-size", 60 * (GPUS + 1))
    done = run("ddp", *batch, "--results-dir", tmp_path, processes=GPUS + 1)
    error = done.stderr.partition("Traceback")[0]  # behind our sentence, torchrun may have one of its own
    assert done.returncode != 0
    assert "has the GPU of rank 0" in error
    assert f"{GPUS} visible GPU(s)" in error


def test_what_one_gpu_can_show_is_compared(tmp_path: Path) -> None:
    options = ("--workers", 1, "--batch-size", 256, "--train-size", 60_000, "--epochs", 2, "--repeats", 1)
    compare = (sys.executable, REPOSITORY / "results" / "compare.py", "--local", *options)
    done = succeeded(ran(*compare, "--out", tmp_path, env=ENVIRONMENT | WITH_GPUS, timeout=900))
    assert "One GPU shows what DDP itself costs" in done.stdout
    table = pd.read_csv(tmp_path / "comparison.csv")
    assert sorted(table.stage) == ["ddp", "dp", "single"]
    assert not table.device_name.str.startswith("CPU").any()


# --- two GPUs ---------------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("recipe", ["classic", "fast"])
def test_data_parallel_uses_every_gpu(recipe: str, tmp_path: Path) -> None:
    row = train("dp", tmp_path, *SHORT, "--recipe", recipe)[-1]
    assert (row["devices"], row["world_size"]) == (GPUS, 1)
    assert row["test_accuracy"] > 85
    last = rank_table(tmp_path).query("epoch == 2")
    assert list(last.device) == [f"cuda:{index}" for index in range(GPUS)]
    assert last.peak_memory_mb.idxmax() == last.index[0]  # the data, the outputs and the optimizer's state


@several
@pytest.mark.parametrize(
    ("fate", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 ended silently"),
        ("time.sleep(600)", "NCCL gave up after --timeout: rank 0 waited for rank 1, which hung or was lost"),
    ],
    ids=["is lost", "hangs"],
)
def test_a_peer_that(fate: str, why: str, tmp_path: Path, checkout: Checkout) -> None:
    """Killed within an epoch, or asleep for longer than the timeout; `submit.py` reports it."""
    checkout.plant("ddp", f"if faults.rank() == 1: faults.after_epoch(1, lambda: {fate})")
    options = ("--gpus", 2, "--wait", "--timeout", 20, "--epochs", 3, "--results-dir", tmp_path)
    done = checkout.submit_py("ddp", *options, **WITH_GPUS)
    assert done.returncode == 1
    assert why in done.stderr
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1]


def test_the_phases_of_a_step_on_gpus(tmp_path: Path) -> None:
    script = REPOSITORY / "03_multigpu_ddp" / "breakdown.py"
    done = run(script, "--batch-size", 256 * GPUS, "--results-dir", tmp_path, "--trace", processes=GPUS)
    assert done.returncode == 0, done.stderr
    assert f"{GPUS} x NVIDIA" in done.stdout
    (file,) = (tmp_path / "breakdown").glob("*.tsv")
    rows = pd.read_csv(file, sep="\t")
    assert (rows[rows.phase.isin(["forward", "backward", "optimizer", "step"])].seconds > 0).all()
    assert len(list((tmp_path / "breakdown").glob("*.json"))) == GPUS
