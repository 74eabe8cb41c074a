"""The parts that a Run is made of, each alone in a loop of one's own. test_early_stopping.py has another."""

import random
import re
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import BY_FEATURE, ENVIRONMENT, REPOSITORY, STOPS, succeeded
from forking import Forking

# A signal to the second rank alone: both have to leave the loop after the same step.
STOPPED = """
import os
import signal
import time

import torch
import torch.distributed as dist
from manygpus import destroy_distributed
from manygpus.checkpoint.checkpointer import Checkpointer

dist.init_process_group("gloo")
checkpointer = Checkpointer({"model": torch.nn.Linear(1, 1)})
checkpointer.resume()
for step in range(1, 10_000):
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.001)
    if checkpointer.step(1, step):
        break
assert checkpointer.should_stop()
steps = [0] * dist.get_world_size()
dist.all_gather_object(steps, step)
if dist.get_rank() == 0:
    print("left after steps", *steps)
destroy_distributed()
"""


def test_a_signal_to_one_rank_stops_all_after_the_same_step(forking: Forking, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STOPPED)
    done = succeeded(forking.run(tmp_path / "own.py", ranks=2, env=ENVIRONMENT, cwd=tmp_path))
    steps_of_ranks = set(done.stdout.partition("left after steps ")[2].split())
    assert len(steps_of_ranks) == 1
    assert 3 <= int(steps_of_ranks.pop()) < 9_999


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR2"])
def test_a_signal_before_the_first_step_ends_a_script_as_without_a_checkpointer(
    number: str, forking: Forking, tmp_path: Path
) -> None:
    """Seen: a script that only evaluates, and so never calls `step`, could only be ended by KILL."""
    (tmp_path / "own.py").write_text(
        "import os, signal, torch\nfrom manygpus.checkpoint.checkpointer import Checkpointer\n"
        "Checkpointer({'model': torch.nn.Linear(1, 1)}).resume()\n"
        f"os.kill(os.getpid(), signal.{number})\n"
    )
    done = forking.run(tmp_path / "own.py", env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == -signal.Signals[number], done.stderr


# Ranks with unequal numbers of batches, as on the page about Join; one gets a signal within an epoch.
UNEVEN = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from manygpus import destroy_distributed
from manygpus.checkpoint import stop_signal
from manygpus.checkpoint.checkpointer import Checkpointer

stop_signal.SECONDS_BETWEEN_MEETINGS = 0  # the ranks ask each other after every epoch
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
checkpointer = Checkpointer({"model": model}, every_steps=1, per_rank_state={"optimizer": optimizer})
first_epoch, _ = checkpointer.resume()
for epoch in range(first_epoch, 4):
    with Join([model]):
        for step in range(3 + 4 * rank):
            optimizer.zero_grad()
            model(torch.full((4, 1), 1.0 + step + rank)).square().mean().backward()
            optimizer.step()
            if sys.argv[1:] == [str(epoch)] and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
    if checkpointer.step(epoch + 1, 0):
        break
else:
    print("rank", rank, "ends with", model.module.weight.item().hex(), flush=True)
checkpointer.finish()
destroy_distributed()  # a group that ends with the last line may hang it (seen: PyTorch 2.4, 2.5)
"""


def test_ranks_with_unequal_numbers_of_batches_stop_and_resume(forking: Forking, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(UNEVEN)
    ends = []
    for folder, stops in (("once", [()]), ("again", [(2,), ()])):
        (cwd := tmp_path / folder).mkdir()
        for stop in stops:
            done = succeeded(forking.run(tmp_path / "own.py", *stop, ranks=2, env=ENVIRONMENT, cwd=cwd))
            assert ("stopped after epoch 2" in done.stdout) == bool(stop)
        ends.append(sorted(re.findall("rank .* ends with .*", done.stdout)))
    assert len(ends[0]) == 2 and ends[0] == ends[1]


# A loop as a user has it, on one process or many, with a network that is whole or split over the ranks. It is
# disturbed in one step: the last rank, or one that writes, is killed, or gets a signal.
OWN = """
import os, random, resource, signal, sys, threading
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from manygpus.checkpoint import stop_signal
from manygpus.checkpoint.checkpointer import Checkpointer

stop_signal.SECONDS_BETWEEN_MEETINGS = 0  # the ranks ask each other in every step
STEPS, EPOCHS = 5, 3
how, disturbance, disturbed_in = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, world_size = 0, 1
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

went_on = threading.Event()
write = torch.save

def write_disturbed(*what, **how):
    if threading.current_thread() is not threading.main_thread():  # which pickles tensors by it
        if disturbance == "killed while it writes":
            os.kill(os.getpid(), signal.SIGKILL)
        went_on.wait(60) or os._exit(1)
    write(*what, **how)

def disturb():
    if disturbance in ("slow disk", "killed while it writes"):
        torch.save = write_disturbed
    elif disturbance == "full disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    else:
        os.kill(os.getpid(), signal.Signals[disturbance])

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, int(os.environ.get("OUTPUTS", "1"))))
if how == "split":
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    from manygpus.checkpoint.sharded import Sharded
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
elif world_size > 1:
    model = DistributedDataParallel(model)
if how == "zero":
    from torch.distributed.optim import ZeroRedundancyOptimizer
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 + np.cos(epoch))
loss_sum = torch.zeros(())
losses = []
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(1 + rank)
trained = {"split": Sharded(model, optimizer)} if how == "split" else {"model": model, "optimizer": optimizer}
batch_size = int(os.environ.get("BATCH", "4"))
checkpointer = Checkpointer(
    trained | {"lr_scheduler": lr_scheduler},
    every_steps=int(os.environ["EVERY"]),
    settings={"batch size": batch_size, "data": Path("data"), "class weights": torch.ones(2)},
    per_rank_state={"loss_sum": loss_sum, "losses": losses},
)
first_epoch, step = checkpointer.resume()
for epoch in range(first_epoch, EPOCHS + 1):
    while step < STEPS:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * epoch + 10 * step + rank))
        inputs += random.random() + np.random.rand()
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        if STEPS * (epoch - 1) + step + 1 == disturbed_in:
            if not disturbance.startswith("SIG"):
                checkpointer.finish()  # the disturbance is for the next checkpoint
            if rank == world_size - 1:
                disturb()
        optimizer.step()
        loss_sum += loss.detach()
        losses.append(np.float64(loss.item()))
        step += 1
        if STEPS * (epoch - 1) + step == disturbed_in + 3:
            went_on.set()
        if checkpointer.step(epoch, step):
            if world_size > 1:
                dist.destroy_process_group()
            sys.exit()
    print(f"rank {rank}, epoch {epoch}: {(loss_sum.item() + sum(losses)).hex()}", flush=True)
    lr_scheduler.step()
    loss_sum.zero_()
    step = 0
checkpointer.finish()
if world_size > 1:
    dist.destroy_process_group()
"""
SPLIT = pytest.mark.skipif(torch.__version__ < "2.9", reason="needs PyTorch 2.9 or newer")
Own = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def own(forking: Forking, tmp_path: Path) -> Own:
    """Run `OWN` in a folder of its own; the job's, as the script sees it."""
    (tmp_path / "own.py").write_text(OWN)

    def run(folder: str, how: str, disturbance: str = "", step: int = 0, **others: object) -> object:
        job = tmp_path / folder
        job.mkdir(exist_ok=True)
        ranks = others.pop("ranks", 2)
        env = ENVIRONMENT | {"EVERY": "3", "MANYGPUS_JOB_DIR": str(job)} | others
        return forking.run(tmp_path / "own.py", how, disturbance, step, ranks=ranks, env=env)

    return run


@pytest.mark.full
def test_the_script_of_the_page_resumes_with_the_losses_of_one_never_stopped(
    forking: Forking, few_images: Path, tmp_path: Path
) -> None:
    script = (BY_FEATURE / "own_loop.py", "--batch-size", 50, "--data-dir", few_images)
    env = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    for folder in ("once", "again"):
        (tmp_path / folder).mkdir()
    once = succeeded(forking.run(*script, ranks=2, env=env, cwd=tmp_path / "once")).stdout
    stopped = succeeded(forking.run(*STOPS, 5, *script, ranks=2, env=env, cwd=tmp_path / "again")).stdout
    assert "stopped after step" in stopped
    done = succeeded(forking.run(*script, ranks=2, env=env, cwd=tmp_path / "again")).stdout
    losses = [re.findall(r"epoch \d: loss .*", text) for text in (once, stopped + done)]
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def _losses(*outputs: subprocess.CompletedProcess[str]) -> set[str]:
    return {line for done in outputs for line in done.stdout.splitlines() if line.startswith("rank ")}


@pytest.mark.parametrize(
    ("how", "ranks"),
    [("whole", None), ("whole", 2), ("zero", 2), pytest.param("split", 2, marks=SPLIT)],
)
def test_killed_and_stopped_by_both_signals_a_loop_has_the_losses_of_one_never_stopped(
    how: str, ranks: int | None, own: Own, tmp_path: Path
) -> None:
    """To the last digit, with the signals to one rank only."""
    once = succeeded(own("once", how, ranks=ranks))
    assert len(_losses(once)) == 3 * (ranks or 1)
    killed_in = random.randint(1, 12)
    killed = own("again", how, "SIGKILL", killed_in, ranks=ranks)
    assert killed.returncode != 0
    job = tmp_path / "again"
    outputs = [killed]
    # Neither in the first step of a start, which hears no signal before its end.
    for number, disturbed_in in (("SIGUSR2", killed_in + 1), ("SIGTERM", killed_in + 3)):
        (job / "stopped").unlink(missing_ok=True)
        stopped = succeeded(own("again", how, number, disturbed_in, ranks=ranks))
        assert "stopped after" in stopped.stdout, killed_in
        assert (job / "stopped").read_text() == f"{job / 'checkpoints'}\n"
        outputs.append(stopped)
    outputs.append(succeeded(own("again", how, ranks=ranks)))
    assert _losses(*outputs) == _losses(once), killed_in


@SPLIT
def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(own: Own, tmp_path: Path) -> None:
    once = succeeded(own("once", "split"))
    killed = own("again", "split", "killed while it writes", 8)  # the third checkpoint is made in step 9
    assert killed.returncode != 0
    left = sorted(path.name for path in (tmp_path / "again" / "checkpoints").glob("[!.]*"))
    assert left == ["epoch-1-step-3", "epoch-2-step-1"]
    done = succeeded(own("again", "split"))
    assert "resumed from" in done.stdout and "epoch-2-step-1" in done.stdout
    assert _losses(killed, done) == _losses(once)


@SPLIT
def test_the_training_continues_while_the_shards_are_written(own: Own, tmp_path: Path) -> None:
    """The last rank's file of the checkpoint of step 9 is not written before step 11 is done."""
    succeeded(own("again", "split", "slow disk", 8))
    kept = sorted(path.name for path in (tmp_path / "again" / "checkpoints").glob("*epoch*"))
    assert kept == ["epoch-3-step-2", "epoch-3-step-5"]


@SPLIT
def test_a_rank_that_cannot_write_is_one_sentence_and_the_earlier_checkpoints_stay(
    own: Own, tmp_path: Path
) -> None:
    done = own("again", "split", "full disk", 8)
    assert done.returncode != 0
    (error,) = re.findall(r"UserError: the checkpoint .*", done.stderr)
    assert "on rank 1" in error and "free the space" in error
    kept = sorted(path.name for path in (tmp_path / "again" / "checkpoints").glob("*epoch*"))
    assert kept == ["epoch-1-step-3", "epoch-2-step-1"]


def test_a_loop_that_does_not_resume_is_told_in_its_first_step(forking: Forking, tmp_path: Path) -> None:
    """And not at its first checkpoint, which may be minutes later."""
    (tmp_path / "own.py").write_text(
        "import torch\nfrom manygpus.checkpoint.checkpointer import Checkpointer\n"
        "Checkpointer({'model': torch.nn.Linear(1, 1)}).step(1, 1)\n"
    )
    done = forking.run(tmp_path / "own.py", env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode != 0 and "call resume()" in done.stderr


CANNOT_BE_SAVED = """
import argparse, pathlib, sys
import torch
from manygpus.checkpoint.checkpointer import Checkpointer

class Tracker:
    path = pathlib.Path("best.pt")
    def state_dict(self):
        return {"path": self.path}
    def load_state_dict(self, state):
        self.path = state["path"]

options = argparse.Namespace(lr=0.1)
parts, others = {
    "part": ({"best_accuracy": 0.0}, {}),
    "part of a rank": ({}, {"per_rank_state": {"best_accuracy": 0.0}}),
    "setting": ({}, {"settings": {"options": options}}),
    "state": ({"tracker": Tracker()}, {}),
    "state of a rank": ({}, {"per_rank_state": {"tracker": Tracker()}}),
}[sys.argv[1]]
model = torch.nn.Linear(1, 1)
checkpointer = Checkpointer({"model": model} | parts, **others)
checkpointer.resume()
print("the loop begins", flush=True)
checkpointer.step(1, 1)
print("the first step is done", flush=True)
"""


@pytest.mark.parametrize(
    ("what", "place", "printed"),
    [
        ("part", "best_accuracy is a float", ""),
        ("part of a rank", "best_accuracy is a float", ""),
        ("setting", "settings['options'] is a Namespace", ""),
        # What an object saves is known only when it is asked.
        ("state", "tracker['path'] is a PosixPath", "the loop begins\n"),
        ("state of a rank", "tracker['path'] is a PosixPath", "the loop begins\n"),
    ],
)
def test_what_cannot_be_saved_is_named_before_anything_is_lost(
    what: str, place: str, printed: str, forking: Forking, tmp_path: Path
) -> None:
    """And not at the first checkpoint, which may be the one at the time limit."""
    (tmp_path / "own.py").write_text(CANNOT_BE_SAVED)
    done = forking.run(tmp_path / "own.py", what, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode != 0 and done.stdout == printed
    assert f"UserError: {place}" in done.stderr


# What the two loops of CHECKPOINTER.md need around them. Each loss of each rank is printed, and in one batch
# the last rank gets a signal, which may be between two micro-batches.
AROUND_THE_LOOP = """
import os, random, signal
from itertools import count, islice

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss as loss_function
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from manygpus.data.samplers import ResumableSampler
from manygpus.signals import obey_the_trainer
from manygpus.checkpoint import stop_signal
from manygpus.checkpoint.checkpointer import Checkpointer

stop_signal.SECONDS_BETWEEN_MEETINGS = 0  # the ranks ask each other in every step
epochs, batch_size, accumulate = 3, 2, 3
rank, world_size = 0, 1
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

class Samples:
    def __len__(self):
        return 26

    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + np.random.rand() if "noise" in os.environ["HOW"] else 0
        return torch.full((4,), float(index)) + noise, torch.ones(1)

batches = count(1)

def loss_and_print(*given):
    loss = loss_function(*given)
    print(f"rank {rank}: {loss.item().hex()}", flush=True)
    if next(batches) == int(os.environ["STOPPED_IN"]) and rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    return loss

train_set = Samples()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
if world_size > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(1 + rank)
checkpointer = Checkpointer({"model": model, "optimizer": optimizer})
first_epoch, step = checkpointer.resume()

def main(step):
    LOOP
        step = 0
        checkpointer.save(epoch + 1)

main(step)
if world_size > 1:
    dist.destroy_process_group()
"""
TRAINING_STEP = """
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        if checkpointer.step(epoch, step):
            return
"""
# What the page says in words: for several ranks, or one with persistent workers; for workers; and for the
# sampler that skips.
ON_RANKS = {
    "shuffle=True": "sampler=DistributedSampler(train_set, num_replicas=world_size, rank=rank)",
    "manual_seed(epoch)": "manual_seed(epoch * world_size + rank); train_loader.sampler.set_epoch(epoch)",
}
WITH_WORKERS = {"generator=": "num_workers=2, worker_init_fn=obey_the_trainer, generator="}
PERSISTENT = {"generator=": f"persistent_workers=True, {WITH_WORKERS['generator=']}"}
WITH_SAMPLER = {
    "sampler=DistributedSampler": "sampler=ResumableSampler",
    "set_epoch(epoch)": "set_epoch(epoch); train_loader.sampler.done = step * batch_size",
    "islice(train_loader, step, None)": "train_loader",
}


def _loop_of_the_page(how: str, changes: dict[str, str]) -> str:
    """A script with one of the loops of CHECKPOINTER.md."""
    page = (REPOSITORY / "03_multigpu_ddp" / "CHECKPOINTER.md").read_text()
    loops = re.findall(r"```python\n(loader_seeds = .*?)```", page, re.DOTALL)
    (loop,) = (loop for loop in loops if ("accumulate" in loop) == (how == "accumulation"))
    loop = loop.replace("\n        ...  # the training step\n", TRAINING_STEP)
    for before, after in changes.items():
        assert before in loop
        loop = loop.replace(before, after)
    loop = loop.replace("loss_function(", "loss_and_print(")
    return AROUND_THE_LOOP.replace("    LOOP\n", textwrap.indent(loop, "    "))


@pytest.mark.parametrize(
    ("how", "ranks", "stopped_in", "changes"),
    [
        ("loop", None, 18, {}),
        ("loop", 2, 10, ON_RANKS),
        ("loop", None, 18, ON_RANKS | PERSISTENT),
        ("accumulation", None, 16, {}),
        ("accumulation", 2, 7, ON_RANKS),
        ("loop with noise", None, 18, WITH_WORKERS),
        ("loop with noise", 2, 10, ON_RANKS | WITH_SAMPLER),
    ],
)
def test_the_loops_of_the_page_are_exact_after_a_stop_within_an_epoch(
    how: str, ranks: int | None, stopped_in: int, changes: dict[str, str], forking: Forking, tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(_loop_of_the_page(how.partition(" ")[0], changes))
    env = ENVIRONMENT | {"HOW": how, "STOPPED_IN": "0"}
    for folder in ("once", "again"):
        (tmp_path / folder).mkdir()
    once = succeeded(forking.run(script, ranks=ranks, env=env, cwd=tmp_path / "once"))
    again = {"ranks": ranks, "env": env, "cwd": tmp_path / "again"}
    signalled = {"env": env | {"STOPPED_IN": str(stopped_in)}}
    stopped = succeeded(forking.run(script, **again | signalled))
    assert re.search("stopped after step .* of epoch 2", stopped.stdout)
    done = succeeded(forking.run(script, **again))
    for rank in range(ranks or 1):
        losses = [
            re.findall(f"rank {rank}: (.*)", text) for text in (once.stdout, stopped.stdout + done.stdout)
        ]
        assert len(losses[0]) >= 18 and losses[0] == losses[1]


WHOLE = [
    ("whole", {"BATCH": "8"}, "was made with batch size 4"),
    ("whole", {"ranks": None}, "was made with ranks 2"),
    ("whole", {"OUTPUTS": "2"}, "does not fit this training"),
]


@pytest.mark.parametrize(
    ("how", "change", "reason"),
    [*WHOLE, pytest.param("split", {"OUTPUTS": "2"}, "its weights have other names or shapes", marks=SPLIT)],
)
def test_a_checkpoint_of_another_training_is_refused(
    how: str, change: dict[str, object], reason: str, own: Own
) -> None:
    succeeded(own("again", how))
    done = own("again", how, **change)
    assert done.returncode != 0 and reason in done.stderr
