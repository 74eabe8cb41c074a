"""A run that is stopped, killed or moved resumes as if nothing had happened."""

import copy
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from checkout import Checkout, plant
from conftest import (
    STAGES,
    STOPS,
    WITHOUT_DROPOUT,
    Script,
    assert_same_end,
    furthest,
    one_error,
    places,
    rows_of,
    start_stage,
    succeeded,
    weights_of,
)

from manygpus.checkpoint.state_file import load_parts
from manygpus.record import records

pytestmark = pytest.mark.usefixtures("mnist_dir")

EPOCHS = 2
SIZES = ("--train-size", 1920, "--test-size", 200)
TRAINING = ("--epochs", EPOCHS, *SIZES, "--width", 4, "--precision", "fp32", "--save-model")
Finish = Callable[..., str]


def options(folder: Path) -> tuple:
    return (*TRAINING, *places(folder))


def wait_for(what: Callable[[], object], process: subprocess.Popen) -> None:
    while not what():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


# The ranks ask each other every few steps, however fast the machine, and saving takes a moment: so there are
# checkpoints within an epoch, a signal comes within one, and a kill within the saving.
SLOW = """
from manygpus.checkpoint import stop_signal
stop_signal.SECONDS_BETWEEN_MEETINGS = 0.05
save = torch.save
torch.save = lambda *what: (save(*what), __import__("time").sleep(0.1))
"""


@pytest.fixture
def slowly(tmp_path: Path) -> Path:
    """Stage 01, with slow checkpoints."""
    path = tmp_path / "slowly.py"
    path.write_text(STAGES["single"].read_text().replace("\n\n@entrypoint\n", f"{SLOW}\n\n@entrypoint\n"))
    return path


@pytest.fixture(scope="module")
def finish(script: Script) -> Finish:
    """Has stage 01 resume until the end; returns all that it printed."""

    def run(folder: Path, *arguments: object) -> str:
        done = script("single", *options(folder), *arguments)
        assert len(rows_of(folder)) == EPOCHS, done
        return done.stdout + done.stderr

    return run


def check_one_run(folder: Path) -> None:
    """No epoch is lost or there twice, and the clock went on from one process to the next."""
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
    assert len({row["run_id"] for row in rows}) == 1
    elapsed = [row["elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed)


@pytest.fixture(scope="module")
def never_stopped(finish: Finish, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The results of the same training in one go."""
    done = {}

    def run(*arguments: object) -> Path:
        if arguments not in done:
            done[arguments] = tmp_path_factory.mktemp("never-stopped")
            finish(done[arguments], *arguments)
        return done[arguments]

    return run


def test_a_signal_stops_the_run_and_resuming_ends_the_same(
    slowly: Path, tmp_path: Path, finish, never_stopped
) -> None:
    """With all that can be in the middle of an epoch; several ranks are stopped in test_stop_signals.py."""
    job = tmp_path / "job"
    job.mkdir()
    arguments = ("--loader", "workers", "--num-workers", 1, "--recipe", "fast")
    command = (*options(tmp_path), "--checkpoint-minutes", 1e-6, *arguments)
    process = start_stage(slowly, *command, env={"MANYGPUS_JOB_DIR": str(job)})
    wait_for(lambda: list((tmp_path / "checkpoints").glob("epoch-1-step-*.pt")), process)
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "stopped after step" in output
    assert (job / "stopped").read_text() == f"{tmp_path / 'checkpoints'}\n"
    assert not list(tmp_path.glob("runs/*.csv"))

    assert "resumed from" in finish(tmp_path, *arguments)
    check_one_run(tmp_path)
    assert_same_end(tmp_path, never_stopped(*arguments), weight=1e-6)


# A clock that moves only here. On rank 0 a batch takes 2 s, a step 1 s, and a checkpoint, after every step,
# 1,000 s. Rank 1 takes twice as long for each batch and step.
COUNTED = """
from manygpus.data.loaders import ResidentBatches
from manygpus.training import clock, run; from manygpus.checkpoint import stop_signal
from manygpus.checkpoint.checkpointer import Checkpointer

now = 0.0
slowness = 1 + faults.rank()
batches_of, save = ResidentBatches.__iter__, Checkpointer.save


def passes(seconds):
    nonlocal now
    now += seconds


def slowly(self):
    for batch in batches_of(self):
        passes(2 * slowness)
        yield batch


def save_slowly(self, *place):
    passes(1000)
    save(self, *place)


ResidentBatches.__iter__, Checkpointer.save = slowly, save_slowly
clock.time = type(sys)("time")
clock.time.perf_counter = run.perf_counter = lambda: now
faults.before_every_backward(lambda: passes(slowness))
stop_signal.SECONDS_BETWEEN_MEETINGS = 0
"""


def test_the_seconds_of_an_epoch_are_without_its_checkpoints(tmp_path: Path, script: Script) -> None:
    """Also of an epoch that two processes have made, each a part of it."""
    counted = Path(shutil.copy(STAGES["ddp"], tmp_path / "counted.py"))
    plant(counted, COUNTED)
    steps = 4
    few = ("--epochs", 2, "--width", 4, "--precision", "fp32", "--test-size", 60, "--batch-size", 60)
    few += ("--train-size", 60 * steps, "--checkpoint-minutes", 1e-6, *places(tmp_path))
    stopped = succeeded(script(*STOPS, 3, counted, *few, ranks=2))
    assert "stopped after step 3 of epoch 1" in stopped.stdout
    succeeded(script(counted, *few, ranks=2))
    rows = rows_of(tmp_path)
    assert [row["train_seconds"] for row in rows] == [steps * 6] * 2
    assert [row["images_per_s"] for row in rows] == [60 / 6] * 2
    (path,) = (tmp_path / "runs").glob("*.csv")
    waited = [(row["epoch"], row["rank"], row["data_seconds"]) for row in records.read_ranks(path)]
    assert waited == [(1, 0, steps * 2), (1, 1, steps * 4), (2, 0, steps * 2), (2, 1, steps * 4)]


KILLED_BEFORE_A_CHECKPOINT = """
import os
from manygpus.checkpoint.checkpointer import Checkpointer
save = Checkpointer.save


def save_or_die(self, epoch, partial_epoch=None):
    if os.environ.get("KILLED_BEFORE") == str(epoch):
        os.kill(os.getpid(), 9)
    save(self, epoch, partial_epoch)


Checkpointer.save = save_or_die
"""


def test_killed_between_a_row_and_its_checkpoint_it_stays_one_run(
    tmp_path: Path, script: Script, plot: Script
) -> None:
    """Twice at the same place; then it comes to its end. Every epoch counts once, as it was made last."""
    path = tmp_path / "killed.py"
    text = STAGES["single"].read_text()
    path.write_text(text.replace("\n\n@entrypoint\n", f"{KILLED_BEFORE_A_CHECKPOINT}\n\n@entrypoint\n"))
    command = (path, *options(tmp_path), "--epochs", 3)
    for _ in range(2):
        assert script(*command, env={"KILLED_BEFORE": "3"}).returncode == -signal.SIGKILL
    succeeded(script(*command))
    files = sorted((tmp_path / "runs").glob("*.csv"), key=lambda path: path.stat().st_mtime_ns)
    first, second, last = starts = [records.read(path) for path in files]
    assert [[row["epoch"] for row in rows] for rows in starts] == [[1, 2], [2], [2, 3]]
    assert {row["resumed_from"] for row in (*second, *last)} == {first[0]["run_id"]}
    (run,) = records.read_runs(files).values()
    made_by = [first[0]["run_id"], last[0]["run_id"], last[0]["run_id"]]
    assert [(row["epoch"], row["start"]) for row in run] == [*zip((1, 2, 3), made_by, strict=True)]
    assert [row["warmup"] for row in run] == [True, True, False]
    assert run[-1]["elapsed_s"] > first[0]["elapsed_s"] + sum(row["train_seconds"] for row in last)
    succeeded(plot(tmp_path / "runs", "--out", tmp_path / "out"))
    (row,) = pd.read_csv(tmp_path / "out" / "comparison.csv").itertuples()
    assert (row.runs, row.epochs, row.steady_epochs) == (1, 3, 1)
    assert row.elapsed_s == pytest.approx(run[-1]["elapsed_s"])


@pytest.mark.full
def test_a_kill_without_warning_costs_no_epoch(slowly: Path, tmp_path: Path, finish, never_stopped) -> None:
    """Checkpoints within the epoch, as often as possible; the process is killed while it writes one."""
    process = start_stage(slowly, "--checkpoint-minutes", 1e-6, *options(tmp_path))
    within = tmp_path / "checkpoints"
    wait_for(lambda: list(within.glob("epoch-2-step-[1-9]*.pt")), process)
    wait_for(lambda: list(within.glob("*.pt.*.tmp")), process)
    process.kill()
    process.wait()
    output = finish(tmp_path)
    assert "resumed from" in output
    check_one_run(tmp_path)
    assert_same_end(tmp_path, never_stopped(), weight=1e-6)


@pytest.mark.parametrize("damage", ["cut short", "one bit"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    damage: str, tmp_path: Path, script: Script, never_stopped
) -> None:
    reference = never_stopped()
    shutil.copytree(reference / "checkpoints", tmp_path / "checkpoints")
    newest = tmp_path / "checkpoints" / f"epoch-{EPOCHS + 1}-step-0.pt"
    content = bytearray(newest.read_bytes())
    if damage == "cut short":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1  # within a weight: the file still opens
    newest.write_bytes(content)
    done = succeeded(script("single", *options(tmp_path)))
    assert f"warning: the checkpoint {newest} cannot be read" in done.stderr
    assert f"resumed from {tmp_path / 'checkpoints' / f'epoch-{EPOCHS}-step-0.pt'}" in done.stdout
    (row,) = rows_of(tmp_path)
    assert row["epoch"] == EPOCHS
    assert furthest(weights_of(tmp_path), weights_of(reference)) < 1e-6


def test_nothing_is_started_anew_over_checkpoints_that_cannot_be_read(tmp_path: Path, script) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "epoch-2-step-0.pt").write_text("not a checkpoint")
    done = script("single", *options(tmp_path))
    assert done.returncode == 1
    warning, error = done.stderr.splitlines()
    assert warning.startswith("warning: the checkpoint") and error.startswith("error: no checkpoint in")


def test_a_checkpoint_of_another_version_is_one_sentence(tmp_path: Path, script: Script) -> None:
    (tmp_path / "checkpoints").mkdir()
    torch.save({"version": 2, "epoch": 2}, tmp_path / "checkpoints" / "epoch-2-step-0.pt")
    assert "has version 2, and this program reads" in one_error(script("single", *options(tmp_path)))


def test_a_forged_checkpoint_runs_nothing(tmp_path: Path, script: Script) -> None:
    touched = tmp_path / "touched"

    class Forged:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(touched),)

    (tmp_path / "checkpoints").mkdir()
    torch.save({"version": 2, "model": Forged()}, tmp_path / "checkpoints" / "epoch-2-step-0.pt")
    error = script("single", *options(tmp_path)).stderr
    assert "it holds more than tensors and numbers, and that is never loaded" in error
    assert not touched.exists()


def test_what_an_optimizer_keeps_is_laid_out_as_the_weights() -> None:
    """Fused, it pairs their numbers by the place in memory, and stages differ in channels_last."""
    torch.manual_seed(1)
    models = [torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1, fused=True) for model in models]

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.linspace(-1, 1, 75).view(1, 3, 5, 5)).square().sum().backward()
        optimizer.step()

    step(models[0], optimizers[0])
    models[1].load_state_dict(models[0].state_dict())
    load_parts({"optimizer": optimizers[1]}, {"optimizer": copy.deepcopy(optimizers[0].state_dict())})
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        step(model, optimizer)
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_resuming_at_another_world_size(script: Script, tmp_path: Path) -> None:
    """With dropout off, two ranks that become one end where one process ends."""
    exact = ("--lr", 0.1, "--train-size", 1000)
    for folder, ranks, epochs in (("moved", 2, 1), ("moved", 1, EPOCHS), ("stayed", 1, EPOCHS)):
        command = (*options(tmp_path / folder), *exact, "--epochs", epochs)
        succeeded(script(*WITHOUT_DROPOUT, STAGES["ddp"], *command, ranks=ranks))
    moved = rows_of(tmp_path / "moved")
    check_one_run(tmp_path / "moved")
    assert [row["world_size"] for row in moved] == [2, 1]
    stayed = rows_of(tmp_path / "stayed")
    assert [row["train_loss"] for row in moved] == pytest.approx(
        [row["train_loss"] for row in stayed], rel=5e-4
    )


def test_a_finished_run_stays_as_it_is(tmp_path: Path, never_stopped, script: Script) -> None:
    """A start with nothing left to do writes no record, and none of another start is ever written to."""
    shutil.copytree(never_stopped() / "runs", tmp_path / "runs")
    shutil.copytree(never_stopped() / "checkpoints", tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    printed = succeeded(script("single", *options(tmp_path))).stdout
    assert f"all {EPOCHS} epochs were done before: nothing left to do" in printed
    assert {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()} == before


def test_a_copied_checkpoint_makes_a_branch_beside_the_finished_run(
    tmp_path: Path, never_stopped, script: Script, plot: Script
) -> None:
    shutil.copytree(never_stopped() / "runs", tmp_path / "runs")
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(never_stopped() / "checkpoints" / f"epoch-{EPOCHS}-step-0.pt", tmp_path / "checkpoints")
    succeeded(script("single", *options(tmp_path)))
    whole, branch = records.read_runs(sorted((tmp_path / "runs").glob("*.csv"))).values()
    assert len({row["start"] for row in whole}) == 1
    assert [row["start"] for row in branch] == [whole[0]["start"]] * (EPOCHS - 1) + [branch[-1]["run_id"]]
    succeeded(plot(tmp_path / "runs", "--out", tmp_path / "out"))
    (row,) = pd.read_csv(tmp_path / "out" / "comparison.csv").itertuples()
    assert (row.runs, row.epochs, row.steady_epochs) == (2, EPOCHS, EPOCHS - 1)


def test_a_full_disk_keeps_the_checkpoint_before(
    tmp_path: Path, never_stopped, checkout: Checkout, script: Script
) -> None:
    """The limit on the size of a file stands in for the disk: a checkpoint is larger than a CSV."""
    before = f"epoch-{EPOCHS}-step-0.pt"
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    shutil.copy(never_stopped() / "checkpoints" / before, folder)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    checkout.plant("single", f"{limit}; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)")
    done = script(checkout.script("single"), *options(tmp_path), "--save-model")
    assert f"epoch-{EPOCHS + 1}-step-0.pt (File too large): free the space" in one_error(done)
    assert [row["epoch"] for row in rows_of(tmp_path)] == [EPOCHS]  # the epoch that was done is recorded
    assert [path.name for path in folder.glob("*.*pt*")] == [before]
    succeeded(script("single", *options(tmp_path)))  # and what is made again counts once
    assert [row["epoch"] for row in rows_of(tmp_path)] == [EPOCHS]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--resume", "auto"], "--resume auto needs --checkpoint-dir"),
        (["--checkpoint-dir", "/proc/nowhere"], "checkpoints cannot be written to /proc/nowhere"),
        (["--checkpoint-dir", "{}"], "add --resume auto to resume it"),
        (["--checkpoint-dir", "{}", "--resume", "auto", "--seed", "7"], "was made with --seed 1"),
        (["--checkpoint-dir", "{}", "--resume", "auto", "--precision", "bf16"], "with --precision fp32"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, script, never_stopped
) -> None:
    earlier = never_stopped() / "checkpoints"
    # Without the lock, in which the process that has it writes who it is.
    before = {path: path.stat().st_mtime_ns for path in earlier.glob("[!.]*")}
    assert before
    command = (*TRAINING, "--results-dir", tmp_path, *(a.format(earlier) for a in arguments))
    assert sentence in one_error(script("single", *command))
    assert {path: path.stat().st_mtime_ns for path in earlier.glob("[!.]*")} == before
