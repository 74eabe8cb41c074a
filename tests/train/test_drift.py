"""Ranks that each train a network of their own, or all with the same samples, are told, and not recorded."""

import shutil
from pathlib import Path

from checkout import plant
from conftest import ENVIRONMENT, STAGES, Script, failed, succeeded
from forking import Forking

# The words in `sys.argv` are those of the command line: with `same` all ranks have the same samples,
# with `halves` each has a part of a larger layer, with `expert` a layer of its own beside the others, and
# with `step 0` only rank 0 steps its optimizer. A schedule that each of N ranks steps N times, as that of
# Accelerate.
ON_RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.nn.functional
from manygpus.training.recorder import Recorder
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(4, 2)
model.weight.requires_grad_("thaw" not in sys.argv)
torch.manual_seed(0 if "same" in sys.argv else dist.get_rank())
network = torch.nn.parallel.DistributedDataParallel(model) if "wrapped" in sys.argv else model
optimizer = torch.optim.SGD(model.parameters(), lr=1e20 if "diverge" in sys.argv else 0.1)
lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)
how = {"batch_size": 8, "epochs": 3, "dataset": "noise", "weights_differ": "differ" in sys.argv}
seen = Recorder("ranks", network, optimizer, **how)
if "thaw" in sys.argv:
    model.weight.requires_grad_(True)
    network = torch.nn.parallel.DistributedDataParallel(model)
if "halves" in sys.argv:
    model.weight.data += dist.get_rank()
    network = lambda inputs: torch.distributed.nn.functional.all_reduce(model(inputs))
for epoch in range(3):
    for step in range(8):
        optimizer.zero_grad()
        network(torch.randn(8 // dist.get_world_size(), 4)).square().mean().backward()
        if "expert" in sys.argv:
            dist.all_reduce(model.bias.grad)
        if "step 0" not in sys.argv or dist.get_rank() == 0:
            optimizer.step()
        for _ in range(dist.get_world_size()):
            lr_scheduler.step()
    seen.epoch(64 // dist.get_world_size(), 1.0, 0.5)
"""


def few(results: Path) -> tuple:
    """Options of a short training."""
    size = ("--epochs", 2, "--batch-size", 50, "--no-cuda", "--precision", "fp32", "--width", 4)
    data = ("--dataset", "synthetic", "--train-size", 200, "--test-size", 50)
    return (*size, *data, "--results-dir", results)


def test_ranks_that_each_train_alone_are_told_and_not_recorded(script: Script, tmp_path: Path) -> None:
    """A copy of stage 03 that has lost DistributedDataParallel."""
    own_script = shutil.copy(STAGES["ddp"], tmp_path / "my_copy.py")
    plant(own_script, "nn.parallel.DistributedDataParallel = lambda model, **options: model")
    assert "each of the 2 ranks has trained a Net of its own" in failed(
        script(own_script, *few(tmp_path), ranks=2)
    )
    assert not list((tmp_path / "runs").glob("*.csv"))


def test_ranks_with_the_same_samples_are_told_and_not_recorded(script: Script, tmp_path: Path) -> None:
    """A copy of stage 03 whose own loader does not ask for the rank. Gradients are averaged, for nothing."""
    own_script, text = tmp_path / "my_copy.py", STAGES["ddp"].read_text()
    for of_rank, of_all in (
        ("train_loader(train_set, opts, dist_env", "train_loader(train_set, opts, replace(dist_env, rank=0)"),
        ("torch.manual_seed(opts.seed + dist_env.rank)", "torch.manual_seed(opts.seed)"),
    ):
        assert of_rank in text
        text = text.replace(of_rank, of_all)
    own_script.write_text(
        text.replace("\nimport torch\n", "\nfrom dataclasses import replace\nimport torch\n", 1)
    )
    assert "all 2 ranks have trained with the same samples" in failed(
        script(own_script, *few(tmp_path), ranks=2)
    )
    assert not list((tmp_path / "runs").glob("*.csv"))


def test_a_recorder_tells_ranks_that_train_alone(forking: Forking, tmp_path: Path) -> None:
    """Unless it is told that their weights differ rightly; and nothing of ranks that train together."""
    (tmp_path / "ranks.py").write_text(ON_RANKS)
    env = ENVIRONMENT | {"MANYGPUS_RESULTS_DIR": str(tmp_path)}
    for ways in ([], ["wrapped", "step 0"]):
        alone = forking.run(tmp_path / "ranks.py", *ways, ranks=2, env=env)
        assert alone.returncode == 1
        assert "UserError: each of the 2 ranks has trained a Linear of its own" in alone.stderr
    for ways in (["same"], ["same", "wrapped"]):
        done = forking.run(tmp_path / "ranks.py", *ways, ranks=2, env=env)
        assert done.returncode == 1
        assert "UserError: all 2 ranks have trained with the same samples" in done.stderr
    assert not list((tmp_path / "runs").glob("*.csv"))
    # Also of weights that are trained from some step on, of those that become NaN on all ranks, of those
    # that each rank has for itself beside the others, and of parts of a layer, which rightly have the same
    # samples.
    rightly = (["differ"], ["wrapped"], *(["wrapped", way] for way in ("thaw", "diverge")))
    for ways in (*rightly, ["expert"], ["halves", "same"]):
        succeeded(forking.run(tmp_path / "ranks.py", *ways, ranks=2, env=env))


def test_a_group_of_one_for_each_process_is_told(forking: Forking, tmp_path: Path) -> None:
    """As by a script that counts the ranks from a variable that nobody sets."""
    text = ON_RANKS.replace('"gloo"', '"gloo", rank=0, world_size=1, store=dist.HashStore()')
    (tmp_path / "ranks.py").write_text(text)
    done = forking.run(tmp_path / "ranks.py", ranks=2, env=ENVIRONMENT)
    assert done.returncode == 1
    assert "UserError: this is one of 2 processes, and its process group has only itself" in done.stderr
