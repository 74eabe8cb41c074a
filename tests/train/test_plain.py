"""The scripts in plain PyTorch, and one of them with a Recorder, on the first images of MNIST."""

import difflib
import re
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkout import Checkout
from cluster import RunningCluster
from conftest import AROUND, BEYOND, ENVIRONMENT, REPOSITORY, STOPS, TESTED, rows_of, succeeded
from forking import Forking

from trainkit.advice.answer import AnswerText
from trainkit.compare import comparison
from trainkit.compare.report import verdict
from trainkit.record import records

PLAIN = REPOSITORY / "01_singlegpu" / "plain.py"
PLAIN_DDP = REPOSITORY / "03_multigpu_ddp" / "plain_ddp.py"
PLAIN_RESUME = REPOSITORY / "03_multigpu_ddp" / "plain_resume.py"
# What rank 0 and rank 1 have of an epoch, and a number that a test chooses.
UNEQUAL = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
from trainkit.training.recorder import Recorder
model = torch.nn.Linear(2, 1)
one = dist.get_rank()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = Recorder("mine", model, optimizer, batch_size=10, epochs=2, dataset="d")
tests = {"test_samples": (1, 3)[one], "test_loss": (4, 0)[one], "accuracy": (100, 0)[one]}
seen.epoch((30, 10)[one], (1, 3)[one], (1.0, 5.0)[one], **tests, perplexity=(2, 6)[one])
seen.epoch(*sys.argv[1:])"""
LEAVES = """\
class Part:
    state_dict = dict
    load_state_dict = lambda self, _: one and os._exit(3)
seen.save(sys.argv[1], {"part": Part()})
seen.load(sys.argv[1], {"part": Part()})"""
ANOTHER = """\
other = Recorder("mine", model, optimizer, batch_size=10, epochs=2, dataset="d")
other.load(sys.argv[1], {})"""

BRANCHING = """\
import sys, torch
from trainkit.training.recorder import Recorder
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = Recorder("mine", model, optimizer, batch_size=10, epochs=3, dataset="d")
for saved in sys.argv[4:]:
    seen.load_state_dict(torch.load(saved))
for epoch in range(seen.first_epoch, int(sys.argv[2]) + 1):
    seen.epoch(10, 1.0, 1.0)
    torch.save(seen.state_dict(), f"epoch-{epoch}.pt")
if int(sys.argv[2]) >= 3:
    seen.finish()"""


@pytest.mark.parametrize(("program", "ranks"), [(PLAIN, None), (PLAIN_DDP, 2)])
def test_it_trains_and_counts_every_test_image_once(
    program: Path, ranks: int | None, forking: Forking, few_images: Path, tmp_path: Path
) -> None:
    arguments = ("--epochs", 2, "--batch-size", 100, "--data-dir", few_images)
    env = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    done = succeeded(forking.run(program, *arguments, ranks=ranks, env=env, cwd=tmp_path))
    lines = re.findall(r"^epoch (\d): loss (\S+), (\d+) of (\d+) right, \d+ images/s$", done.stdout, re.M)
    epochs, losses, right, tested = zip(*lines, strict=True)
    assert epochs == ("1", "2") and tested == (str(TESTED),) * 2
    assert float(losses[1]) < float(losses[0]) < 3
    assert int(right[1]) > 0.75 * TESTED  # chance is a tenth
    weights = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert sum(values.numel() for values in weights.values()) == 1_199_882 and "conv1.weight" in weights


@pytest.mark.parametrize(
    "program", [PLAIN_DDP, PLAIN_RESUME, BEYOND / "recorded.py"], ids=lambda path: path.stem
)
@pytest.mark.parametrize(("visible", "taken"), [(4, "cuda:1"), (1, "cuda:0")])
def test_a_process_takes_its_gpu_before_it_meets_the_others(
    program: Path, visible: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rank 5, the second of its node, which sees all GPUs of the node, or only its own (--gpus-per-task).

    There is no GPU here, so PyTorch's calls are noted, not made.
    """
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # plain_resume.py takes signals at its import
    calls, main = [], runpy.run_path(str(program))["main"]

    def meet(backend: str, device_id: torch.device) -> None:
        calls.append((backend, device_id))
        raise StopIteration

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    monkeypatch.setattr(sys, "argv", [program.name])
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StopIteration):
        main()
    assert calls == [("set_device", torch.device(taken)), ("nccl", torch.device(taken))]


def test_the_difference_is_short_enough_to_learn() -> None:
    before, after = (path.read_text().splitlines() for path in (PLAIN, PLAIN_DDP))
    changed = [line for line in difflib.unified_diff(before, after, n=0) if re.match(r"[+-](?![+-])", line)]
    assert len(changed) <= 40
    assert "trainkit" not in "".join(before + after)


def test_a_job_with_nothing_of_the_kit(few_images: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    place = Checkout(tmp_path / "a checkout", cluster)
    folder = place.folder / "03_multigpu_ddp"
    script, end = folder / "plain_ddp.py", "    dist.destroy_process_group()\n"
    assert end in script.read_text()
    # As a rank that is killed, it does not empty Python's buffer: what it has printed is there all the same.
    script.write_text(script.read_text().replace(end, f"{end}    __import__('os')._exit(0)\n"))
    sizes = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=2G")
    options = ("--epochs", 1, "--batch-size", 100, "--data-dir", few_images)
    command = ("sbatch", "--parsable", "--output=told.log", *sizes, "plain_slurm.sh", *options)
    job = int(place.run(*command, cwd=folder, CUDA_VISIBLE_DEVICES="").stdout)
    state, told = cluster.wait(job), (folder / "told.log").read_text()
    assert state["JobState"] == "COMPLETED", told
    assert len(re.findall(rf"^epoch 1: .* of {TESTED} right", told, re.M)) == 1


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=pytest.mark.full)])
def test_a_script_that_is_killed_and_one_that_is_stopped_go_on(
    ranks: int | None, forking: Forking, few_images: Path, tmp_path: Path
) -> None:
    """By hand without a process group, and as two ranks of a job: to the losses and weights of one start."""
    once, again = tmp_path / "once", tmp_path / "again"
    for folder in (once, again):
        folder.mkdir()
    script = (
        PLAIN_RESUME,
        "--batch-size",
        50,
        "--save-every",
        4,
        "--num-workers",
        1,
        "--data-dir",
        few_images,
    )
    env = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    losses = succeeded(forking.run(*script, ranks=ranks, env=env, cwd=once)).stdout.splitlines()
    assert [line.split(":")[0] for line in losses] == ["epoch 1", "epoch 2"]
    if ranks:
        env |= {"TRAINKIT_JOB_DIR": str(again)}
    killed = forking.run(AROUND, "kill-in-step", 27, *script, ranks=ranks, env=env, cwd=again)
    assert killed.returncode and killed.stdout.splitlines() == losses[:1]
    stopped = succeeded(forking.run(*STOPS, 2, *script, ranks=ranks, env=env, cwd=again))
    of_epoch_2 = "in epoch 2 after step {} of 20"
    told = [f"resumed {of_epoch_2.format(4)}", f"saved and stopped {of_epoch_2.format(10)}"]
    assert stopped.stdout.splitlines() == told
    assert (again / "stopped").exists() == (ranks == 2)
    done = succeeded(forking.run(*script, ranks=ranks, env=env, cwd=again))
    assert done.stdout.splitlines() == [f"resumed {of_epoch_2.format(10)}", losses[1]]
    one, other = (torch.load(folder / "plain.pt", weights_only=True) for folder in (once, again))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_its_own_loop_is_recorded_stops_and_goes_on_and_is_compared(
    forking: Forking, few_images: Path, tmp_path: Path
) -> None:
    env = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "", "TRAINKIT_RESULTS_DIR": str(tmp_path)}
    script = (BEYOND / "recorded.py", "--epochs", 3, "--batch-size", 100, "--data-dir", few_images)
    for ranks in (1, 2):
        job = tmp_path / f"job-{ranks}"
        job.mkdir()
        here = env | {"TRAINKIT_JOB_DIR": str(job), "RANK": "0"}
        if ranks == 2:
            done = succeeded(forking.run(*STOPS, 14, *script, ranks=2, env=here))
            assert "epoch 1/3" in done.stdout and "epoch 2/3" not in done.stdout
            assert (job / "stopped").read_text().strip() == str(job / "checkpoints" / "recorded.pt")
        done = succeeded(forking.run(*script, ranks=ranks, env=here))
        assert ("epoch 1/3" in done.stdout) == (ranks == 1) and "epoch 3/3" in done.stdout
    rows, skipped = comparison.load_some([tmp_path / "runs"])
    table = comparison.compare(comparison.summarize(rows))
    assert not skipped and list(table.devices) == [1, 2] and list(table.epochs) == ["3", "3"]
    assert verdict(table).startswith("recorded on 2 CPU workers trained ")
    assert set(zip(rows.images, rows.test_images, rows.settings, strict=True)) == {
        (1000, TESTED, "dropout=0.5")
    }
    assert set(rows.optimizer) == {"Adadelta rho=0.9 eps=1e-06 weight_decay=0"}
    assert set(rows.arguments) == {""}  # they say where, how long, and how many in a batch
    run = SimpleNamespace(stage="recorded", shape=(4, 1, 25), epochs=3)
    command = AnswerText.command(SimpleNamespace(rows=rows, on_cpu=False), run)
    assert command == "python 03_multigpu_ddp/submit.py --gpus 4 --plain YOUR_SCRIPT.py"
    losses = [group.train_loss.iloc[-1] for _, group in rows.groupby("devices")]
    assert losses == pytest.approx([0.5, 0.5], abs=0.2)


def test_a_recorder_goes_on_from_the_file_of_rank_0(forking: Forking, tmp_path: Path) -> None:
    """Another node may not see it yet, or have one of that name on a disk of its own."""
    program, env = tmp_path / "apart.py", ENVIRONMENT | {"TRAINKIT_RESULTS_DIR": str(tmp_path)}
    text = UNEQUAL.rpartition("seen.epoch")[0].replace(
        "seen.epoch", "seen.load(sys.argv[1 + one], {}); seen.epoch"
    )
    program.write_text(
        text + "seen.save(sys.argv[1], {}); print('after epoch', seen.first_epoch, flush=True)"
    )
    succeeded(forking.run(program, tmp_path / "saved.pt", tmp_path / "none.pt", ranks=2, env=env))
    done = succeeded(forking.run(program, tmp_path / "saved.pt", tmp_path / "none.pt", ranks=2, env=env))
    assert done.stdout.count("after epoch 2") == 2
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("after", "wrong"),
    [
        ("seen.save(sys.argv[1], {'record': model})", "`record` is the name of the Recorder's own part"),
        ("seen.save(sys.argv[1], {'o': optimizer})\noptimizer.param_groups[0]['lr'] = 0.5\n" + ANOTHER,
         "does not fit this training (its lr is 0.1, not 0.5): move it away"),
        (LEAVES, "Traceback"),  # PyTorch's own, of a rank that another has left: the file is good
    ],
    ids=["record", "lr", "peer"],
)  # fmt: skip
def test_a_recorder_goes_on_with_its_own_training_only(
    after: str, wrong: str, forking: Forking, tmp_path: Path
) -> None:
    program, env = tmp_path / "mine.py", ENVIRONMENT | {"TRAINKIT_RESULTS_DIR": str(tmp_path)}
    program.write_text(UNEQUAL.rpartition("seen.epoch")[0] + after)
    done = forking.run(program, tmp_path / "saved.pt", ranks=2, env=env)
    assert done.returncode == 1 and wrong in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("epochs", "runs"), [(3, 2), (2, 1)], ids=["one that is finished", "one that was killed"]
)
def test_a_record_with_later_epochs_stays(epochs: int, runs: int, forking: Forking, tmp_path: Path) -> None:
    """A framework loads the state of an older folder: a branch of a training that has ended, or its rest."""
    program, env = tmp_path / "mine.py", ENVIRONMENT | {"TRAINKIT_RESULTS_DIR": str(tmp_path)}
    program.write_text(BRANCHING)
    succeeded(forking.run(program, "--epochs", epochs, env=env, cwd=tmp_path))
    (record,) = (tmp_path / "runs").glob("*.csv")
    before = {path: path.read_bytes() for path in record.parent.glob("mine-*")}
    succeeded(forking.run(program, "--epochs", 3, "--resume", "epoch-1.pt", env=env, cwd=tmp_path))
    assert {path: path.read_bytes() for path in before} == before
    (branch,) = {*record.parent.glob("*.csv")} - {record}
    assert [row["epoch"] for row in records.read(branch)] == [2, 3]
    rows, _ = comparison.load_some([record.parent])
    assert list(comparison.summarize(rows).runs) == [runs]
    again = ("--epochs", 4, "--resume", "epoch-3.pt")  # the newest, as after a requeue
    succeeded(forking.run(program, *again, env=env, cwd=tmp_path))
    rows, _ = comparison.load_some([record.parent])
    (row,) = comparison.summarize(rows).itertuples()
    assert row.runs == runs and row.epochs == ("3..4" if runs == 2 else "4")


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ((30, 1, "nan"), "cannot be recorded (column train_loss: 'nan' is not a"),
        ((30, 0, 1), "cannot be recorded (column train_seconds: '0' is not a"),
        ((0, 1, 1), "cannot be recorded (column images: '0' is not a"),
        ((30, 1, "inf"), "has a value that makes no sense (loss is inf"),
        ((-30, 1, 1), "has a value that makes no sense (samples is -30"),
        ((30, 1, "word"), "has a value that makes no sense (could not convert"),
    ],
)
def test_a_recorder_sums_up_over_the_ranks(
    numbers: tuple, wrong: str, forking: Forking, tmp_path: Path
) -> None:
    """And refuses what could not be read back, before it is written."""
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    env = ENVIRONMENT | {"TRAINKIT_RESULTS_DIR": str(tmp_path)}
    done = forking.run(tmp_path / "unequal.py", *numbers, ranks=2, env=env)
    assert done.returncode == 1 and f"error on rank 0: epoch 2 {wrong}" in done.stderr
    assert "Traceback" not in done.stderr
    (row,) = rows_of(tmp_path)
    assert [row[name] for name in ("images", "steps", "train_seconds", "train_loss")] == [40, 4, 3, 2]
    assert [row[name] for name in ("test_images", "test_loss", "test_accuracy")] == [4, 1, 25]
    ((path,), metric) = ((tmp_path / "runs").glob("*.csv"), ("perplexity", 3))
    assert [(one["metric"], one["value"]) for one in records.read_metrics(path)] == [metric]
