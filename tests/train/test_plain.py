"""The scripts in plain PyTorch, and one of them with a Recorder, on the first images of MNIST."""

import difflib
import io
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkout import Checkout, wait_until
from cluster import RunningCluster
from conftest import AROUND, BY_FEATURE, ENVIRONMENT, REPOSITORY, STOPS, TESTED, rows_of, succeeded
from forking import Forking
from torchvision import datasets, transforms

from manygpus.record import records
from manygpus.reports import comparison
from manygpus.reports.comparison_report import conclude

PLAIN = REPOSITORY / "01_singlegpu" / "plain.py"
PLAIN_DDP = REPOSITORY / "03_multigpu_ddp" / "plain_ddp.py"
RESUMABLE = REPOSITORY / "03_multigpu_ddp" / "resumable_ddp.py"
REPORT = re.compile(r"^epoch (\d): loss (\S+), (\d+) of (\d+) right, \d+ images/s$", re.MULTILINE)
# What rank 0 and rank 1 have of an epoch, and a number that a test chooses.
UNEQUAL = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
from manygpus.training.recorder import Recorder
model = torch.nn.Linear(2, 1)
one = dist.get_rank()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = Recorder("mine", model, optimizer, batch_size=10, epochs=2, dataset="d")
tests = {"test_samples": (1, 3)[one], "test_loss": (4, 0)[one], "accuracy": (100, 0)[one]}
seen.epoch((30, 10)[one], (1, 3)[one], (1.0, 5.0)[one], **tests, perplexity=(2, 6)[one])
seen.epoch(*sys.argv[1:])"""
# Each rank is given a folder for checkpoints, as it sees the one that they should share.
KEPT = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
from manygpus.checkpoint.checkpointer import Checkpointer
from manygpus.training.recorder import Recorder
rank = dist.get_rank()

class Part:
    state_dict = dict

    def load_state_dict(self, state):
        if rank == 1 and "leaves" in sys.argv:
            os._exit(3)

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if "other lr" in sys.argv else 0.1)
recorder = Recorder("mine", model, optimizer, batch_size=10, epochs=2, dataset="d")
checkpointer = Checkpointer({"model": model, "part": Part(), "recorder": recorder}, sys.argv[1 + rank])
epoch, _ = checkpointer.resume()
recorder.epoch(10, 1.0, 1.0)
checkpointer.save(epoch + 1)
print("trained epoch", epoch, flush=True)
"""
BRANCHING = """\
import sys, torch
from manygpus.training.recorder import Recorder
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epochs = max(3, int(sys.argv[2]))
seen = Recorder("mine", model, optimizer, batch_size=10, epochs=epochs, dataset="d")
for saved in sys.argv[4:]:
    seen.load_state_dict(torch.load(saved))
for epoch in range(seen.first_epoch, int(sys.argv[2]) + 1):
    seen.epoch(10, 1.0, 1.0)
    torch.save(seen.state_dict(), f"epoch-{epoch}.pt")
if int(sys.argv[2]) >= 3:
    seen.finish()"""


@pytest.mark.parametrize(("program", "ranks"), [(PLAIN, None), (PLAIN_DDP, 3)])
def test_the_pair_of_the_lesson_learns_and_saves_the_weights_that_it_reports(
    program: Path, ranks: int | None, forking: Forking, few_images: Path, tmp_path: Path
) -> None:
    """Over ranks with unequal shards of the test images, each of which counts once."""
    script = (program, "--batch-size", 48, "--data-dir", few_images)
    env = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    printed = succeeded(forking.run(*script, ranks=ranks, env=env, cwd=tmp_path)).stdout
    (_, first_loss, _, _), (epoch, loss, right, tested) = REPORT.findall(printed)
    assert (epoch, tested) == ("2", str(TESTED))
    assert float(loss) < float(first_loss) < 3

    model = runpy.run_path(str(program))["Net"]()
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    model.eval()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    test_set = datasets.MNIST(few_images, train=False, transform=transform)
    images, labels = zip(*test_set, strict=True)
    with torch.no_grad():
        predicted = model(torch.stack(images)).argmax(1)
    again = (predicted == torch.tensor(labels)).sum().item()
    assert again > 0.75 * TESTED  # chance is a tenth
    assert abs(again - int(right)) <= 1  # which rounding may change, since batches differ


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_script_that_is_killed_and_one_that_is_stopped_resume(
    ranks: int, forking: Forking, few_images: Path, tmp_path: Path
) -> None:
    """With the losses and the weights of a training that was never stopped."""
    once = tmp_path / "once"
    again = tmp_path / "again"
    once.mkdir()
    again.mkdir()
    script = (RESUMABLE, "--batch-size", 50, "--save-every", 4, "--num-workers", 1, "--data-dir", few_images)
    env = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    undisturbed = succeeded(forking.run(*script, ranks=ranks, env=env, cwd=once)).stdout
    lines = REPORT.findall(undisturbed)
    epochs, losses, right, tested = zip(*lines, strict=True)
    assert epochs == ("1", "2") and tested == (str(TESTED),) * 2
    assert float(losses[1]) < float(losses[0]) < 3
    assert int(right[1]) > 0.75 * TESTED  # chance is a tenth

    killed_in = random.randint(5, 36)  # of 40 steps, 20 in an epoch
    killed = forking.run(AROUND, "kill-in-step", killed_in, *script, ranks=ranks, env=env, cwd=again)
    assert killed.returncode != 0
    epoch, step = divmod((killed_in - 1) // 4 * 4, 20)
    resumed = "resumed from checkpoints/resumable_ddp.pt: epoch {}, {} of 20 steps done"
    stopped = succeeded(forking.run(*STOPS, 2, *script, ranks=ranks, env=env, cwd=again)).stdout
    assert resumed.format(epoch + 1, step) in stopped, killed_in
    step = (step + 2 + 9) // 10 * 10  # ranks ask each other in every tenth step
    assert stopped.endswith(f"saved and stopped in epoch {epoch + 1} after {step} of 20 steps\n"), killed_in
    assert (again / "stopped").exists()
    done = succeeded(forking.run(*script, ranks=ranks, env=env, cwd=again)).stdout
    assert resumed.format(epoch + 1, step) in done, killed_in
    assert REPORT.findall(done) == lines[epoch:], killed_in
    first, second = (
        torch.load(folder / "checkpoints" / "resumable_ddp.pt", weights_only=True)["model"]
        for folder in (once, again)
    )
    assert sum(values.numel() for values in first.values()) == 1_199_882 and "conv1.weight" in first
    assert all(torch.equal(first[name], second[name]) for name in first), killed_in


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("--data-dir", "nowhere"), "there is no MNIST in nowhere"),
        (("--batch-size", 51), "does not divide evenly among 2 ranks"),
        (("--batch-size", 2000), "there are only 1000 images"),
        ((), "resumable_ddp.pt has {'weights': 1}, not "),
    ],
    ids=["no data", "batch that does not divide", "batch too large", "checkpoint of another model"],
)
def test_a_script_says_in_a_line_what_is_wrong(
    arguments: tuple, wrong: str, forking: Forking, few_images: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoints" / "resumable_ddp.pt"
    checkpoint.parent.mkdir()
    torch.save({"model": {}, "settings": {"weights": 1}}, checkpoint)
    script = (RESUMABLE, "--data-dir", few_images, *arguments)
    env = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    done = forking.run(*script, ranks=2, env=env, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert wrong in done.stderr


@pytest.mark.parametrize(
    "program", [PLAIN_DDP, RESUMABLE, BY_FEATURE / "recorded.py"], ids=lambda path: path.stem
)
@pytest.mark.parametrize(("visible", "taken"), [(4, "cuda:1"), (1, "cuda:0")])
def test_a_process_takes_its_gpu_before_it_meets_the_others(
    program: Path, visible: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rank 5, the second of its node, which sees all GPUs of the node, or only its own (--gpus-per-task).

    There is no GPU here, so PyTorch's calls are noted, not made.
    """
    monkeypatch.setattr(signal, "signal", lambda *_: None)
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
    assert len(changed) <= 44
    assert "manygpus" not in "".join(before + after)


# In its first start each rank waits in step 5 until a signal has come.
WAITS = """\
            if step == 5 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
                print("waits", flush=True)
                while not signals_received:
                    time.sleep(0.1)
            optimizer.zero_grad()
"""


def test_a_job_with_nothing_of_the_kit(few_images: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    """It stops before the time limit, comes back, and resumes."""
    place = Checkout(tmp_path / "a checkout", cluster)
    folder = place.folder / "03_multigpu_ddp"
    script = folder / "resumable_ddp.py"
    text = script.read_text()
    # As a rank that is killed, it does not empty Python's buffer: what it has printed is there all the same.
    for line, replacement in (
        ("            optimizer.zero_grad()\n", WAITS),
        ("    dist.destroy_process_group()\n\n\n", "    os._exit(0)\n\n\n"),
    ):
        assert line in text
        text = text.replace(line, replacement)
    script.write_text(text)
    sizes = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=2G")
    options = ("--epochs", 1, "--batch-size", 50, "--data-dir", few_images)
    command = ("sbatch", "--parsable", "--output=job.log", *sizes, "plain_slurm.sh", *options)
    job = int(place.run(*command, cwd=folder, CUDA_VISIBLE_DEVICES="").stdout)
    log = folder / "job.log"
    wait_until(lambda: log.exists() and log.read_text().count("waits\n") == 2)
    cluster.run(["scancel", "--signal=USR2", job])
    state = cluster.wait(job, timeout=300)
    printed = log.read_text()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), printed
    assert "saved and stopped in epoch 1 after 10 of 20 steps\n" in printed
    assert f"resumed from job-{job}/checkpoints/resumable_ddp.pt: epoch 1, 10 of 20 steps done\n" in printed
    assert len(re.findall(rf"^epoch 1: .* of {TESTED} right", printed, re.MULTILINE)) == 1, printed


def test_its_own_loop_is_recorded_stops_and_resumes_and_is_compared(
    forking: Forking, few_images: Path, tmp_path: Path
) -> None:
    """Stopped within an epoch, it has the losses of one never stopped, and the seconds of both starts."""
    script = (BY_FEATURE / "recorded.py", "--epochs", 3, "--batch-size", 100, "--data-dir", few_images)

    def train(job: str, results: Path, *around: object, ranks: int) -> str:
        folder = tmp_path / job
        folder.mkdir(exist_ok=True)
        env = {"CUDA_VISIBLE_DEVICES": "", "MANYGPUS_RESULTS_DIR": str(results), "RANK": "0"}
        env |= ENVIRONMENT | {"MANYGPUS_JOB_DIR": str(folder)}
        return succeeded(forking.run(*around, *script, ranks=ranks, env=env)).stdout

    train("alone", tmp_path, ranks=1)
    train("once", tmp_path / "once", ranks=2)
    printed = train("again", tmp_path, *STOPS, 14, ranks=2)
    assert "epoch 1/3" in printed and "epoch 2/3" not in printed
    checkpoints = tmp_path / "again" / "checkpoints"
    assert (tmp_path / "again" / "stopped").read_text().strip() == str(checkpoints)
    (newest,) = checkpoints.glob("epoch-2-step-[1-9].pt")
    _add_seconds(newest, 1000)
    printed = train("again", tmp_path, ranks=2)
    assert "epoch 1/3" not in printed and "epoch 3/3" in printed
    rows, skipped = comparison.load_some([tmp_path / "runs"])
    of_both_starts = rows[rows.devices == 2]
    assert list(of_both_starts.train_loss) == [row["train_loss"] for row in rows_of(tmp_path / "once")]
    assert [seconds > 1000 for seconds in of_both_starts.train_seconds] == [False, True, False]
    table = comparison.compare(comparison.summarize(rows))
    assert not skipped and list(table.devices) == [1, 2] and list(table.epochs) == ["3", "3"]
    assert conclude(table).startswith("recorded on 2 CPU workers trained ")
    assert set(zip(rows.images, rows.test_images, rows.settings, strict=True)) == {
        (1000, TESTED, "dropout=0.5")
    }
    assert set(rows.optimizer) == {"Adadelta rho=0.9 eps=1e-06 weight_decay=0"}
    assert set(rows.arguments) == {"--batch-size=100"}  # without where, as the folder of the data
    losses = [group.train_loss.iloc[-1] for _, group in rows.groupby("devices")]
    assert losses == pytest.approx([0.5, 0.5], abs=0.2)


def _add_seconds(path: Path, seconds: float) -> None:
    """Have each rank find in a checkpoint that the epoch has taken so much longer."""
    checkpoint = torch.load(path, weights_only=True)
    of_ranks = []
    for packed in checkpoint["per_rank_state"]:
        state = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
        state["seconds"] += seconds
        content = io.BytesIO()
        torch.save(state, content)
        of_ranks.append(torch.frombuffer(content.getbuffer(), dtype=torch.uint8))
    torch.save(checkpoint | {"per_rank_state": of_ranks}, path)


@pytest.fixture
def kept(forking: Forking, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `KEPT` with two ranks and `word`; the second has this folder for its checkpoints."""
    (tmp_path / "mine.py").write_text(KEPT)
    env = ENVIRONMENT | {"MANYGPUS_RESULTS_DIR": str(tmp_path)}

    def run(word: str = "", folder: str = "saved") -> subprocess.CompletedProcess[str]:
        command = (tmp_path / "mine.py", tmp_path / "saved", tmp_path / folder, word)
        return forking.run(*command, ranks=2, env=env)

    return run


def test_a_recorder_resumes_with_two_ranks(kept: Callable, tmp_path: Path) -> None:
    for epoch in (1, 2):
        assert succeeded(kept()).stdout.count(f"trained epoch {epoch}\n") == 2
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1, 2]


def test_a_folder_of_checkpoints_that_the_ranks_do_not_share_is_one_sentence(
    kept: Callable, tmp_path: Path
) -> None:
    """A disk of each node has no such folder, or a file of that name with other weights, or half of one."""
    done = kept(folder="none")
    assert done.returncode == 1 and "UserError: not all ranks see the same" in done.stderr
    assert not (tmp_path / "none").exists() and "trained" not in done.stdout

    succeeded(kept())
    (file,) = (tmp_path / "saved").glob("*.pt")
    other = shutil.copytree(tmp_path / "saved", tmp_path / "other") / file.name
    checkpoint = torch.load(file, weights_only=True)
    checkpoint["parts"]["model"]["weight"] += 1
    torch.save(checkpoint, other)
    done = kept(folder="other")
    assert done.returncode == 1 and "UserError: not all ranks see the same" in done.stderr

    other.write_bytes(other.read_bytes()[:1000])
    done = kept(folder="other")
    assert done.returncode == 1 and "UserError: no checkpoint in" in done.stderr
    assert file.exists()


def test_a_recorder_resumes_with_its_own_training_only(kept: Callable) -> None:
    succeeded(kept())
    done = kept("other lr")
    assert done.returncode == 1
    assert re.search(r"epoch-2-step-0.pt does not fit .*its lr is 0.1, not 0.5", done.stderr), done.stderr
    # Of a rank that another has left the file is good.
    done = kept("leaves")
    assert done.returncode == 1 and "does not fit" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("epochs", "runs"), [(3, 2), (2, 1)], ids=["one that is finished", "one that was killed"]
)
def test_a_record_with_later_epochs_stays(epochs: int, runs: int, forking: Forking, tmp_path: Path) -> None:
    """A framework loads the state of an older folder: a branch of a training that has ended, or its rest."""
    program, env = tmp_path / "mine.py", ENVIRONMENT | {"MANYGPUS_RESULTS_DIR": str(tmp_path)}
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
    env = ENVIRONMENT | {"MANYGPUS_RESULTS_DIR": str(tmp_path)}
    done = forking.run(tmp_path / "unequal.py", *numbers, ranks=2, env=env)
    assert done.returncode == 1 and f"UserError: epoch 2 {wrong}" in done.stderr
    (row,) = rows_of(tmp_path)
    assert [row[name] for name in ("images", "steps", "train_seconds", "train_loss")] == [40, 4, 3, 2]
    assert [row[name] for name in ("test_images", "test_loss", "test_accuracy")] == [4, 1, 25]
    ((path,), metric) = ((tmp_path / "runs").glob("*.csv"), ("perplexity", 3))
    assert [(metric_row["metric"], metric_row["value"]) for metric_row in records.read_metrics(path)] == [
        metric
    ]
