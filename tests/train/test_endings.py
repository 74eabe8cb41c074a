"""A run in which all went well also ends well, whatever the process group's threads still have to do."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT

# A thread of the group is held up until Python ends, as on a busy machine, while it gives back a tensor.
SCRIPT = """
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainkit import errors, world

given_back = threading.Event()


class Slow:
    def __del__(self):
        if threading.current_thread() is not threading.main_thread():
            given_back.set()
            for _ in range(200):
                time.sleep(0.01)


def be_busy():
    while not given_back.wait(0.05):
        values = torch.ones(1)
        values.slow = Slow()
        dist.all_reduce(values, async_op=True)
        del values


def close_when_busy(close=dist.destroy_process_group):
    be_busy()
    close()


def main():
    world.join(use_cuda=False, timeout=30)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.itself = [model]  # a reference cycle: the model outlives main()
    if sys.argv[1:] == ["fails"]:
        be_busy()
        raise errors.UserError("planted")
    dist.destroy_process_group = close_when_busy
    world.leave()


if __name__ == "__main__":
    errors.run(main)
"""


RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(("how", "ending"), [((), (0, "")), (("fails",), (1, "error on rank 0: planted\n"))])
def test_the_threads_of_the_group_end_before_python_does(how: tuple, ending: tuple, tmp_path: Path) -> None:
    script = tmp_path / "ending.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, *how]
    done = subprocess.run(command, env=ENVIRONMENT | RANK, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == ending
