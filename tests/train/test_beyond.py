"""The variants of stage 03, and stage 02 by hand: each computes what it says, with one rank and with two."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest
import torch
from checkout import Checkout
from cluster import RunningCluster
from conftest import (
    BEYOND,
    BY_FEATURE,
    COMPLETE,
    ENVIRONMENT,
    REPOSITORY,
    STAGES,
    WITHOUT_DROPOUT,
    Script,
    failed,
    furthest,
    rows_of,
    succeeded,
    weights_of,
)
from forking import Forking

from manygpus.record import records

pytestmark = pytest.mark.usefixtures("mnist_dir")

DP_BY_HAND = REPOSITORY / "02_multigpu_dp" / "by_hand.py"
# Those whose difference to the stage is the lesson. The others are trainings of their own.
VARIANTS = ("accumulate.py", "batchnorm.py", "by_hand.py", "captured.py", "fsdp.py", "mixed_precision.py")
VARIANTS += ("best_epoch.py", "by_hand_overlap.py", "compressed.py", "unused.py")
SMALL = ("--train-size", 250, "--test-size", 100, "--batch-size", 60, "--no-cuda", "--epochs", 2)
SMALL += ("--width", 4)
WIDE = ("--width", 32)
# SGD, as to Adadelta and Adam gradients that are twice as large are nearly the same.
EXACT = (*SMALL, "--recipe", "sgd", "--lr", 0.02, "--save-model", "--timeout", 60)
# Each is trained without dropout by so many ranks. A script without a folder is a copy in PLANTED.
TRAININGS = {
    "ddp": ((1, 2), STAGES["ddp"]),
    "each": ((2,), BY_FEATURE / "by_hand.py"),
    "flat": ((2,), BY_FEATURE / "by_hand.py", "--flat"),
    "forget": ((2,), BY_FEATURE / "by_hand.py", "--forget"),
    "late": ((2,), "buckets.py"),
    "at-once": ((2,), "buckets.py", "--wait", "at-once"),
    "accumulate": ((2,), "counted.py", "--accumulate", 5),
    "whole": ((2,), "counted.py", "--accumulate", 1),
    "bf16-hook": ((2,), "compressed.py", "--hook", "bf16"),
    "powersgd": ((2,), "compressed.py", "--hook", "powersgd"),
    # So wide, the network would have two buckets.
    "powersgd-wide": ((2,), "compressed.py", "--hook", "powersgd", *WIDE),
    "small-buckets": ((2,), "compressed.py", "--bucket-mb", 1, *WIDE),
    "fp16": ((2,), "overflow.py"),
    # A step per epoch: BatchNorm makes rounding errors grow faster. So does a narrow network here.
    "sync": ((1, 2), BY_FEATURE / "batchnorm.py", "--norm", "sync", "--train-size", 60, *WIDE),
    "local": ((2,), BY_FEATURE / "batchnorm.py", "--norm", "local", "--train-size", 60, *WIDE),
    "find": ((1, 2), BY_FEATURE / "unused.py", "--graph", "find", *WIDE),
    "static": ((1, 2), BY_FEATURE / "unused.py", "--graph", "static", *WIDE),
    "dp": ((1,), DP_BY_HAND, "--replicas", 3),
}
# By two ranks also with a stop after the first epoch: those that keep more than stage 03 does.
RESUMED = ("fp16", "sync")
# Copies with more lines: the variant, and each of its lines that one more comes before.
COUNTING = """\
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
def counted(group, bucket):
    print("all-reduce")
    return allreduce_hook(group, bucket)
model.register_comm_hook(None, counted)"""
OVERFLOW = """\
if dist_env.rank == 1 and lr_scheduler.last_epoch == 2:
    loss.register_hook(lambda gradient: gradient * torch.inf)"""
SCALE = "print('scale', dist_env.rank, scaler.get_scale(), model.module.fc2.weight.norm().item())"
# The first step of PowerSGD is not to be the 10th here, when DDP has long made its final buckets.
SENT_BY_HOOK = """\
if opts.hook == "powersgd":
    powersgd.start_powerSGD_iter = 3
all_reduce = torch.distributed.all_reduce
def counted(tensor, *arguments, **named):
    print("sends", tensor.numel() * tensor.element_size())
    return all_reduce(tensor, *arguments, **named)
torch.distributed.all_reduce = counted"""
SENDING = "print('sent', sorted(one.numel() for one in self.bucket))"
PLANTED = {
    "buckets.py": (
        "by_hand_overlap.py",
        {"weights.register_post": "self.size = 2**17  # the network is narrow", "flat = torch.cat": SENDING},
    ),
    "compressed.py": ("compressed.py", {"run = Run(": SENT_BY_HOOK}),
    "counted.py": ("accumulate.py", {"run = Run(": COUNTING}),
    "overflow.py": ("mixed_precision.py", {"scaler.scale(": OVERFLOW, "lr_scheduler.step()": SCALE}),
}
PRINTED = "printed.txt"


class Trained:
    """The files of a training's folder: its rows and its weights; and the output of its ranks."""

    def __init__(self, folder: Path) -> None:
        self.rows = rows_of(folder)
        self.weights = weights_of(folder)
        self.printed = (folder / PRINTED).read_text().splitlines()  # one rank's after the other's


@pytest.fixture(scope="module")
def folder(forking: Forking, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all trainings, each in NAME-RANKS or NAME-resumed."""
    results = tmp_path_factory.mktemp("beyond")
    for name, (script, lines) in PLANTED.items():
        text = (BY_FEATURE / script).read_text()
        for before, planted in lines.items():
            (at,) = re.finditer(rf"^( *){re.escape(before)}", text, re.MULTILINE)
            text = text[: at.start()] + indent(planted, at[1]) + "\n" + text[at.start() :]
        (results / name).write_text(text)

    def train(name: str, ranks: int, script: Path | str, *options: object) -> None:
        precision = () if script == "overflow.py" else ("--precision", "fp32")
        command = (*WITHOUT_DROPOUT, results / script, *EXACT, *precision, *options)
        done = succeeded(forking.run(*command, "--results-dir", results / name, env=ENVIRONMENT, ranks=ranks))
        with (results / name / PRINTED).open("a") as file:
            file.write(done.stdout)

    for name, (worlds, *command) in TRAININGS.items():
        for ranks in worlds:
            train(f"{name}-{ranks}", ranks, *command)
    for name in RESUMED:
        checkpoints = ("--checkpoint-dir", results / f"{name}-checkpoints", "--resume", "auto")
        for epochs in (1, 2):  # the second resumes where the first one ended
            train(f"{name}-resumed", 2, *TRAININGS[name][1:], *checkpoints, "--epochs", epochs)
    return results


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[..., Trained]:
    return lambda name, how: Trained(folder / f"{name}-{how}")


ROUNDING = 1e-4  # it came to a tenth of that here


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_stopped_ends_as_one_in_one_go(name: str, trained: Callable) -> None:
    resumed, at_once = trained(name, "resumed"), trained(name, 2)
    assert any("resumed from" in line for line in resumed.printed)
    assert [row["epoch"] for row in resumed.rows] == [1, 2]
    assert furthest(resumed.weights, at_once.weights) < ROUNDING


@pytest.mark.parametrize("way", ["each", "flat"])
def test_gradients_averaged_by_hand_train_as_ddp_does(way: str, trained: Callable) -> None:
    by_hand = trained(way, 2)
    assert furthest(by_hand.weights, trained("ddp", 2).weights) < ROUNDING
    assert {row["stage"] for row in by_hand.rows} == {f"ddp-by-hand-{way}"}
    assert all(len(set(sums)) == 1 and len(sums) == 2 for sums in checksums(by_hand))


@pytest.mark.parametrize("wait", ["late", "at-once"])
def test_buckets_are_sent_before_the_other_gradients_are_there(wait: str, trained: Callable) -> None:
    """Those of the linear layers come first, and travel while the convolutions are computed."""
    by_hand = trained(wait, 2)
    assert furthest(by_hand.weights, trained("ddp", 2).weights) < ROUNDING
    sent = [line for line in by_hand.printed if line.startswith("sent ")]
    assert sent == ["sent [10, 128, 1280, 147456]", "sent [4, 8, 36, 288]"] * 2 * 8


def test_ranks_that_do_not_average_drift_apart(trained: Callable) -> None:
    first, last = (abs(a - b) for a, b in checksums(trained("forget", 2)))
    assert 0 < first < last


def checksums(by_hand: Trained) -> list[list[float]]:
    """Return the sums of the weights that the ranks printed after every epoch."""
    lines = [line for line in by_hand.printed if line.startswith("sum of the weights")]
    return [json.loads(line.partition(":")[2]) for line in lines]


def test_micro_batches_train_as_the_whole_batch(trained: Callable) -> None:
    cut = trained("accumulate", 2)
    assert {(row["stage"], row["accumulate"], row["steps"]) for row in cut.rows} == {("ddp-accumulate", 5, 4)}
    for ranks in (1, 2):
        assert furthest(cut.weights, trained("ddp", ranks).weights) < ROUNDING


def test_micro_batches_all_reduce_their_gradients_once(trained: Callable) -> None:
    calls, of_the_whole = (trained(name, 2).printed.count("all-reduce") for name in ("accumulate", "whole"))
    assert calls == of_the_whole >= 2 * 8


def test_a_communication_hook_sends_fewer_bytes(trained: Callable) -> None:
    """A few of them are of Run's own sums."""
    ddp = trained("ddp", 2)
    gradients = 4 * sum(weights.numel() for weights in ddp.weights.values())
    sent = {}
    for name in ("bf16-hook", "powersgd"):
        lines = [line for line in trained(name, 2).printed if line.startswith("sends ")]
        sent[name] = sum(int(line.split()[1]) for line in lines) / gradients
    ranks, steps = 2, 8
    assert ranks * steps / 2 <= sent["bf16-hook"] < ranks * steps / 2 * 1.01
    # The first three steps send everything.
    assert 3 * ranks <= sent["powersgd"] < 4 * ranks
    assert furthest(trained("bf16-hook", 2).weights, ddp.weights) < 100 * ROUNDING
    assert ROUNDING < furthest(trained("powersgd", 2).weights, ddp.weights) < 0.1


def test_powersgd_over_gloo_has_one_bucket(trained: Callable) -> None:
    """The calls of two get mixed up, and gloo then aborts the process."""
    small = trained("small-buckets", 2)
    gradients = 4 * sum(weights.numel() for weights in small.weights.values())
    sent = trained("powersgd-wide", 2).printed
    assert sent.count(f"sends {gradients}") == 2 * 3  # whole, by both ranks in the first three steps
    assert {row["arguments"] for row in small.rows} == {"--bucket-mb=1"}


def test_an_overflow_on_one_rank_is_a_step_that_all_leave_out(trained: Callable) -> None:
    """Rank 1's gradients were inf in the third step; after a stop the factor is that of before."""
    for run in (2, "resumed"):
        printed = trained("fp16", run).printed
        of_ranks = [
            [tuple(map(float, line.split()[2:])) for line in printed if line.startswith(f"scale {rank} ")]
            for rank in (0, 1)
        ]
        assert of_ranks[0] == of_ranks[1] and len(of_ranks[0]) == 8
        scales, weights = zip(*of_ranks[0], strict=True)
        assert scales == (4096, 4096, *6 * [2048])
        assert weights[0] != weights[1] == weights[2] != weights[3]
    assert {row["precision"] for row in trained("fp16", 2).rows} == {"fp16"}


def test_the_layers_compute_in_fp16(script: Script, tmp_path: Path) -> None:
    """And not only the record says so."""
    text = (BY_FEATURE / "mixed_precision.py").read_text()
    look = "hook = lambda layer, inputs, output: print('computes in', output.dtype)"
    hooked = f"{look}\n    model.module.fc1.register_forward_hook(hook)\n    run = Run("
    assert text.count("    run = Run(") == 1
    (tmp_path / "hooked.py").write_text(text.replace("    run = Run(", f"    {hooked}"))
    done = succeeded(
        script(tmp_path / "hooked.py", *EXACT, "--epochs", 1, "--results-dir", tmp_path, ranks=1)
    )
    assert "computes in torch.float16" in done.stdout and "computes in torch.float32" not in done.stdout


def test_ranks_train_as_one_with_statistics_over_all_and_only_then(trained: Callable) -> None:
    assert furthest(trained("sync", 2).weights, trained("sync", 1).weights) < ROUNDING
    assert furthest(trained("local", 2).weights, trained("sync", 1).weights) > 10 * ROUNDING


def test_statistics_of_one_rank_are_those_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPLETE)
    from manygpus.training.sync_on_cpu import SyncOnCPU

    random = torch.Generator().manual_seed(1)
    images, gradients = (torch.randn(9, 4, 7, 7, generator=random) for _ in range(2))
    results = []
    for norm in (torch.nn.BatchNorm2d(4), SyncOnCPU(4)):
        inputs = images.clone().requires_grad_()
        output = norm(inputs)
        output.backward(gradients)
        results.append([output, inputs.grad, norm.weight.grad, norm.bias.grad, norm.eval()(images)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_branch_that_some_steps_leave_out(trained: Callable) -> None:
    for variant in ("find", "static"):
        assert furthest(trained(variant, 2).weights, trained(variant, 1).weights) < ROUNDING


# The numbers of the weights and the biases that a step leaves out: of a branch, and of a critic.
@pytest.mark.parametrize(
    ("variant", "numbers"), [(BY_FEATURE / "unused.py", "8 9"), (COMPLETE / "vae_counts.py", "9 10")]
)
def test_a_branch_left_out_unannounced_is_one_sentence(
    variant: Path, numbers: str, script: Script, tmp_path: Path
) -> None:
    arguments = (*EXACT, "--precision", "fp32", "--graph", "plain", "--results-dir", tmp_path)
    error = failed(script(variant, *arguments, ranks=2))
    for rank in (0, 1):
        assert f"error on rank {rank}: the last step left out some of the network" in error
        assert f"did not receive grad for rank {rank}: {numbers}" in error
    assert "see 03_multigpu_ddp/beyond/by_feature/unused.py" in error


def test_data_parallel_by_hand_trains_as_the_plain_model(trained: Callable) -> None:
    by_hand = trained("dp", 1)
    assert {(row["stage"], row["devices"], row["batch_per_device"]) for row in by_hand.rows} == {
        ("dp-by-hand", 3, 20)
    }
    assert furthest(by_hand.weights, trained("ddp", 1).weights) < ROUNDING
    phases = [line for line in by_hand.printed if line.startswith("seconds: ")]
    names = ["replicate", "scatter", "forward", "gather", "backward", "sum"]
    assert [re.findall(r"(\w+) [\d.]+", line) for line in phases] == [names, names]


def test_the_programs_of_two_pages_run_on_ranks_of_their_own(script: Script, tmp_path: Path) -> None:
    """What each rank says of itself, on two ranks; graphs by buckets; and unequal numbers of batches."""
    programs = re.compile(r"^```python\n(import.*?)^```", re.DOTALL | re.MULTILINE)
    compiled, join = programs.findall((BEYOND / "README.md").read_text())
    *_, check = programs.findall((BEYOND.parent / "LAUNCHING.md").read_text())
    printed = {}
    for name, code in (("check", check), ("compiled", compiled), ("join", join)):
        (tmp_path / f"{name}.py").write_text(code)
        printed[name] = sorted(succeeded(script(tmp_path / f"{name}.py", ranks=2)).stdout.splitlines())
    for rank, line in enumerate(printed["check"]):
        assert line.startswith(f"rank {rank} of 2, local rank {rank}, on ")
        assert "CUDA_VISIBLE_DEVICES=" in line
    graphs = {int(line.split()[2]): int(line.split()[4]) for line in printed["compiled"]}
    assert graphs[1] > graphs[25] >= 1
    assert all(float(line.split()[-1]) < ROUNDING for line in printed["compiled"])
    steps, weights = zip(*(line.split(" steps, weight ") for line in printed["join"]), strict=True)
    assert steps == ("rank 0: 3", "rank 1: 5") and len({*weights}) == 1


def test_the_examples_run_as_jobs(cluster: RunningCluster, tmp_path: Path) -> None:
    """One by sbatch on two nodes, one by submit.py; modules next to a script are found."""
    checkout = Checkout(tmp_path / "a checkout", cluster)
    small = ("--train-size", 256, "--test-size", 100, "--batch-size", 48, "--no-cuda", "--epochs", 1)
    one_each = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")
    job = checkout.submit("srun", "beyond/complete/lightning/mnist_lightning.py", *small, sbatch=one_each)
    succeeded(
        checkout.submit_py("ddp", "--script", "beyond/complete/tabular.py", "--gpus", 1, *small, "--wait")
    )
    assert checkout.cluster.wait(job, timeout=300)["JobState"] == "COMPLETED", checkout.log(job)
    runs = [records.read(path) for path in (checkout.folder / "results" / "runs").glob("*.csv")]
    recorded = {(rows[0]["stage"], rows[0]["world_size"], rows[0]["nodes"]) for rows in runs}
    assert recorded == {("lightning", 2, 2), ("tabular-exact", 1, 1)}
