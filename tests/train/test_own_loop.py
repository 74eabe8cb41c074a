"""The parts that a Run is made of, each alone in a loop of one's own. test_early_stopping.py has another."""

from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, succeeded
from forking import Forking

from trainkit.config.options import parse_options
from trainkit.errors import UserError
from trainkit.training.checkpoint import Checkpointer

# A signal to the second rank alone: both have to leave the loop after the same step.
STOPPED = """
import os
import signal
import time

import torch
import torch.distributed as dist
from trainkit.training.stop_signal import StopSignal

dist.init_process_group("gloo")
stop_signal = StopSignal(torch.device("cpu"))
for step in range(1, 10_000):
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.001)
    if stop_signal.should_stop():
        break
steps = [0] * dist.get_world_size()
dist.all_gather_object(steps, step)
if dist.get_rank() == 0:
    print("left after steps", *steps)
dist.destroy_process_group()
"""


def test_a_signal_to_one_rank_stops_all_after_the_same_step(forking: Forking, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STOPPED)
    done = succeeded(forking.run(tmp_path / "own.py", ranks=2, env=ENVIRONMENT))
    steps_of_ranks = set(done.stdout.partition("left after steps ")[2].split())
    assert len(steps_of_ranks) == 1
    assert 3 <= int(steps_of_ranks.pop()) < 9_999


def _train(folder: Path, *arguments: object, until: int = 3, width: int = 4) -> list[torch.Tensor]:
    """Train up to an epoch, and return the weights."""
    opts = parse_options("", ["--epochs", "3", "--checkpoint-dir", str(folder), *map(str, arguments)])
    torch.manual_seed(1)
    model = torch.nn.Linear(width, 1)
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer(opts, dataset="noise", model=model, parts={"optimizer": optimizer})
    checkpointer.resume()
    for epoch in checkpointer.epochs():
        optimizer.zero_grad()
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        checkpointer.save(epoch + 1)
        if epoch == until:
            break
    checkpointer.finish()
    return [weights.detach() for weights in model.parameters()]


def test_checkpoints_continue_a_loop_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole")
    _train(tmp_path / "stopped", until=2)
    resumed = _train(tmp_path / "stopped", "--resume", "auto")
    assert all(map(torch.equal, whole, resumed))
    with pytest.raises(UserError, match="add --resume auto"):
        _train(tmp_path / "stopped")
    with pytest.raises(UserError, match="does not fit this training"):
        _train(tmp_path / "stopped", "--resume", "auto", width=5)
