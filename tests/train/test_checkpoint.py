"""A run that is stopped, killed or moved goes on as if nothing had happened."""

import copy
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkout import Checkout
from conftest import (
    STAGES,
    WITHOUT_DROPOUT,
    Script,
    assert_same_end,
    one_error,
    places,
    rows_of,
    start_stage,
    succeeded,
)

from trainkit.rank.state_file import load_parts
from trainkit.schema import records

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
from trainkit.rank import run as running
running.SECONDS_BETWEEN = 0.05
save = torch.save
torch.save = lambda *what: (save(*what), __import__("time").sleep(0.1))
"""


@pytest.fixture
def slowly(tmp_path: Path) -> Path:
    """Stage 01, with slow checkpoints."""
    path = tmp_path / "slowly.py"
    path.write_text(STAGES["single"].read_text().replace("\n\ndef main(", f"{SLOW}\n\ndef main("))
    return path


@pytest.fixture(scope="module")
def finish(script: Script) -> Finish:
    """Has stage 01 go on until the end; returns all that it printed."""

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
    """With all that can be in the middle of an epoch; several ranks are stopped in test_signals.py."""
    job = tmp_path / "job"
    job.mkdir()
    arguments = ("--loader", "workers", "--num-workers", 1, "--recipe", "fast")
    given = (*options(tmp_path), "--checkpoint-minutes", 1e-6, *arguments)
    process = start_stage(slowly, *given, env={"TRAINKIT_JOB_DIR": str(job)})
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
    damage: str, tmp_path: Path, finish, never_stopped
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
    output = finish(tmp_path)
    assert f"warning: the checkpoint {newest} cannot be read" in output
    assert f"resumed from {tmp_path / 'checkpoints' / f'epoch-{EPOCHS}-step-0.pt'}" in output
    check_one_run(tmp_path)
    assert_same_end(tmp_path, reference, weight=1e-6)


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
    told = script("single", *options(tmp_path)).stderr
    assert "it holds more than tensors and numbers, and that is never loaded" in told
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
        given = (*options(tmp_path / folder), *exact, "--epochs", epochs)
        succeeded(script(*WITHOUT_DROPOUT, STAGES["ddp"], *given, ranks=ranks))
    moved = rows_of(tmp_path / "moved")
    check_one_run(tmp_path / "moved")
    assert [row["world_size"] for row in moved] == [2, 1]
    stayed = rows_of(tmp_path / "stayed")
    assert [row["train_loss"] for row in moved] == pytest.approx(
        [row["train_loss"] for row in stayed], rel=5e-4
    )


@pytest.mark.parametrize("case", ["copied", "moved", "of another run"])
def test_a_record_of_another_run_is_never_written_to(
    case: str, tmp_path: Path, never_stopped: Callable[..., Path], script: Script
) -> None:
    """Checkpoints that stay in another folder, too; whose run went on without them; that name another run."""
    shutil.copytree(never_stopped() / "runs", tmp_path / "runs")
    shutil.copytree(never_stopped() / "checkpoints", tmp_path / "checkpoints")
    before, last = sorted((tmp_path / "checkpoints").glob("epoch-*.pt"))
    (record,) = (tmp_path / "runs").glob("*.csv")
    state = torch.load(before if case == "moved" else last)
    if case == "moved":
        last.unlink()
        torch.save(state | {"folder": "/gone"}, before)
    elif case == "of another run":
        state["run"]["facts"] |= {"started_at": "2020-01-01T00:00:00Z"}
        torch.save(state, last)
    before = record.read_bytes()
    done = succeeded(script("single", *options(tmp_path)))
    assert record.stem in done.stdout and ": this one is recorded as " in done.stdout
    assert record.read_bytes() == before
    (own,) = set((tmp_path / "runs").glob("*.csv")) - {record}
    rows = records.read(own)
    assert [(row["epoch"], row["run_id"]) for row in rows] == [(n, own.stem) for n in range(1, EPOCHS + 1)]


def test_a_finished_run_stays_as_it_is(tmp_path: Path, finish, never_stopped) -> None:
    reference = never_stopped()
    shutil.copytree(reference / "checkpoints", tmp_path / "checkpoints")
    printed = finish(tmp_path)
    assert f"all {EPOCHS} epochs were done before: nothing left to do" in printed
    (row, *_), rows = rows_of(tmp_path), rows_of(reference)
    assert f"this one is recorded as {row['run_id']}." in printed  # as it is a copy
    assert rows_of(tmp_path) == [one | {"run_id": row["run_id"]} for one in rows]


def test_a_full_disk_keeps_the_checkpoint_before(
    tmp_path: Path, never_stopped, checkout: Checkout, script: Script
) -> None:
    """The limit on the size of a file stands in for the disk: a checkpoint is larger than a CSV."""
    before = f"epoch-{EPOCHS}-step-0.pt"
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    state = torch.load(never_stopped() / "checkpoints" / before)
    torch.save(state | {"folder": str(folder)}, folder / before)  # as if it had been written here
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    checkout.plant("single", f"{limit}; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)")
    done = script(checkout.script("single"), *options(tmp_path), "--save-model")
    assert f"epoch-{EPOCHS + 1}-step-0.pt (File too large): free the space" in one_error(done)
    assert len(rows_of(tmp_path)) == EPOCHS  # the epoch that was done is recorded
    assert [path.name for path in folder.glob("*.*pt*")] == [before]
    (record,) = (tmp_path / "runs").glob("*.csv")
    written = record.read_bytes()
    assert "and stays: this one is recorded as" in succeeded(script("single", *options(tmp_path))).stdout
    assert record.read_bytes() == written


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--resume", "auto"], "--resume auto needs --checkpoint-dir"),
        (["--checkpoint-dir", "/proc/nowhere"], "checkpoints cannot be written to /proc/nowhere"),
        (["--checkpoint-dir", "{}"], "add --resume auto to go on with it"),
        (["--checkpoint-dir", "{}", "--resume", "auto", "--seed", "7"], "was made with --seed 1"),
        (["--checkpoint-dir", "{}", "--resume", "auto", "--precision", "bf16"], "with --precision fp32"),
    ],
)
def test_one_sentence(arguments: list[str], sentence: str, tmp_path: Path, script, never_stopped) -> None:
    earlier = never_stopped() / "checkpoints"
    # Without the lock, in which the process that has it writes who it is.
    before = {path: path.stat().st_mtime_ns for path in earlier.glob("[!.]*")}
    assert before
    given = (*TRAINING, "--results-dir", tmp_path, *(a.format(earlier) for a in arguments))
    assert sentence in one_error(script("single", *given))
    assert {path: path.stat().st_mtime_ns for path in earlier.glob("[!.]*")} == before
