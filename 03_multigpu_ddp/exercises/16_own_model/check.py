"""Trains the learner's script in one rank and in two, stopped and resumed, and compares what came out."""

import difflib
import inspect
import os
import socket
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from trainkit.record import records
from trainkit.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# How many lines of mnist_ddp.py will you change or add?
prediction = 8
"""
HINTS = """\
## 1

Search for `Net`, `load_dataset`, `nll_loss` and `"ddp"` in `mine/my_training.py`: you only change
these places. Leave `dist_env` where it is.

## 2

`InMemoryDataset("waves", inputs, targets)` is one data set, while `load_dataset` returned two. The loss for
raw logits is `F.cross_entropy`. `channels_last` is a memory layout for images, which waves do not need.

## 3

    train_set = InMemoryDataset("waves", *waves(2000, seed=1))
    test_set = InMemoryDataset("waves", *waves(500, seed=2))
    model = WaveNet().to(dist_env.device)

and `F.cross_entropy` twice, `Run("waves", ...)`, and `from waves import WaveNet, waves` at the
top.
"""
SOLUTION = {
    "my_training.py": '''\
@@
-"""Train the classic MNIST network with DistributedDataParallel: one process per GPU, on any number of nodes.
+"""Train a network for waves with DistributedDataParallel: one process per GPU, on any number of nodes.
@@
-Try: torchrun --standalone --nproc-per-node=2 mnist_ddp.py --epochs 2
+Try: torchrun --standalone --nproc-per-node=2 my_training.py --epochs 2
@@
 from torch import nn
+from waves import WaveNet, waves
@@
-from trainkit.data.datasets import load_dataset
+from trainkit.data.datasets import InMemoryDataset
@@
-from trainkit.training.model import Net
@@
-    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
+    train_set = InMemoryDataset("waves", *waves(2000, seed=1))
+    test_set = InMemoryDataset("waves", *waves(500, seed=2))
@@
-    # channels_last: the memory layout in which convolutions are fastest.
-    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
+    model = WaveNet().to(dist_env.device)
@@
-    run = Run("ddp", opts, dist_env, train_set, model, optimizer, lr_scheduler)
+    run = Run("waves", opts, dist_env, train_set, model, optimizer, lr_scheduler)
@@
-                loss = F.nll_loss(model(images), labels)
+                loss = F.cross_entropy(model(images), labels)
@@
-        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))
+        run.end_of_epoch(epoch, evaluate(model, test_batches, F.cross_entropy, autocast))
''',
}
STARTS_WITH = "`prediction`"
_DDP = "nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)"
_TRAIN = "train_loader(train_set, opts, dist_env"
_TEST = "eval_loader(test_set, opts, dist_env"
_ALONE = "type(dist_env)(device=dist_env.device)"
_LOSS = "model(images), labels)"
WRONG = [
    ("my_training.py", '= InMemoryDataset("waves", *waves(5', '= load_dataset(*waves(5', "still loads MNIST"),
    ("my_training.py", 'Run("waves"', 'Run("ddp"', "still called ddp"),
    ("my_training.py", _TRAIN, _TRAIN.replace("dist_env", _ALONE), "the same samples"),
    ("my_training.py", _TEST, _TEST.replace("dist_env", _ALONE), "500 test waves"),
    ("my_training.py", _LOSS, f"{_LOSS} / dist_env.world_size", "averages the gradients already"),
    ("my_training.py", "F.cross_entropy", "F.nll_loss", "logarithms of probabilities"),
    ("my_training.py", _DDP, "model", "a WaveNet of its own"),
]  # fmt: skip
STAGE = Path(__file__).resolve().parents[2] / "mnist_ddp.py"


def check(workspace: Workspace) -> str:
    predicted = workspace.answers().number("prediction")
    text = workspace.text("my_training.py")
    if "load_dataset(" in text:
        raise Wrong(
            "my_training.py still loads MNIST: make two `InMemoryDataset` of waves, one to train and one to "
            "test on."
        )
    program = workspace.module("my_training.py")
    with tempfile.TemporaryDirectory() as folder:
        folder_of_two = Path(folder, "two")
        stopped = train(program, size=2, folder=folder_of_two, epochs=1)
        check_names(stopped.rows[0])
        check_loss(stopped.rows[0])
        check_samples(stopped.rows[0], stopped.samples_of_ranks)
        alone = train(program, size=1, folder=Path(folder, "alone"), epochs=2).rows
        check_equal(alone[0], stopped.rows[0])
        both = train(program, size=2, folder=folder_of_two, epochs=2).rows
        check_equal(alone[1], both[1])
    before = STAGE.read_text().splitlines()
    changed = sum(
        line.startswith("+ ") and bool(line[2:].strip()) for line in difflib.ndiff(before, text.splitlines())
    )
    return (
        f"{changed} lines are new (you predicted {predicted:g}), and two ranks train as one: the train loss "
        f"of epoch 2 is {alone[1]['train_loss']:.4f} with one rank and {both[1]['train_loss']:.4f} with two, "
        f"which resumed from a checkpoint. {both[1]['test_accuracy']:.1f} % of the test waves are classified "
        "correctly. To run it as a job, copy both files into the folder of this stage, and type `sbatch "
        "slurm_submit.sh my_training.py --epochs 5`."
    )


class Trained(NamedTuple):
    """The rows of the CSV after a training, and for each rank the samples that it trained on this time."""

    rows: list[dict[str, object]]
    samples_of_ranks: list[list[float]]


def train(program: ModuleType, size: int, folder: Path, epochs: int) -> Trained:
    """Train for so many epochs in `size` ranks; resume if there is a checkpoint in `folder`."""
    from trainkit.data.loaders import DistributedBatchSampler, ResidentBatches
    from trainkit.workshop.ranks import in_ranks

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])

    def rank(number: int, size: int) -> list[float]:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(size)}
        sys.argv = ["my_training.py", "--no-cuda", "--epochs", str(epochs), "--results-dir", str(folder)]
        sys.argv += ["--checkpoint-dir", str(folder / "checkpoints"), "--resume", "auto"]
        samples = []
        batches = ResidentBatches.__iter__

        def noting(self: ResidentBatches) -> object:
            for inputs, targets in batches(self):
                if isinstance(self.order, DistributedBatchSampler):
                    samples.extend(inputs.double().flatten(1).sum(1).tolist())
                yield inputs, targets

        ResidentBatches.__iter__ = noting
        inspect.unwrap(program.main)()  # without @entrypoint, which ends a process at an error
        return samples

    samples_of_ranks = in_ranks(rank, size, group=False)
    runs = list(records.read_runs(folder.glob("runs/*.csv")).values())
    if len(runs) != 1:
        raise Wrong(f"The training left {len(runs)} runs. It should leave one, and resume it after a stop.")
    return Trained(runs[0], samples_of_ranks)


def check_names(row: dict[str, object]) -> None:
    """Say which name in the CSV is still that of the stage."""
    if row["stage"] == "ddp":
        raise Wrong(
            "The run is still called ddp, so tables would confuse it with the stage. Give `Run` a different "
            "name."
        )
    if row["dataset"] != "waves":
        raise Wrong(
            f"The CSV has the data set {row['dataset']!r}: the first argument of `InMemoryDataset` is "
            "its name."
        )


def check_loss(row: dict[str, object]) -> None:
    """Say whether the loss is one for raw logits."""
    if row["train_loss"] < 0 or row["test_loss"] < 0:
        raise Wrong(
            "The loss is below 0: F.nll_loss takes logarithms of probabilities, and WaveNet returns raw "
            "logits. Which loss takes logits? Change it in two places."
        )


def check_samples(row: dict[str, object], seen: list[list[float]]) -> None:
    """Say whether a sample counted more than once over the ranks, in training or in the test."""
    trained = sum(seen, [])
    if len(set(trained)) < len(trained):
        raise Wrong(
            f"In an epoch, two ranks trained on {len(trained)} samples, but only {len(set(trained))} "
            "different ones: both ranks take the same. How does `train_loader` know which rank this is, "
            "and of how many?"
        )
    if row["test_images"] != 500:
        raise Wrong(
            f"Two ranks tested {row['test_images']} samples, but there are 500 test waves. Does each count "
            "once? `eval_loader` also has to know the rank and the number of ranks."
        )


def check_equal(alone: dict[str, object], both: dict[str, object]) -> None:
    """Say whether two ranks trained as one did."""
    loss_of_one = alone["train_loss"]
    loss_of_two = both["train_loss"]
    if is_close(loss_of_two, loss_of_one, 0.001):
        return
    losses = (
        f"The train loss of epoch {both['epoch']} is {loss_of_one:.4f} with one rank and {loss_of_two:.4f} "
        "with two"
    )
    if is_close(loss_of_two, loss_of_one / 2, 0.25):
        raise Wrong(
            f"{losses}. Is the loss divided by the number of ranks? DDP averages the gradients already."
        )
    raise Wrong(
        f"{losses}: the ranks do not train as one. Is the model still wrapped in DistributedDataParallel, "
        "and is the rest of the training step unchanged? (Dropout would also make a difference: leave it "
        "out.)"
    )
