"""Several ranks: of a function by trainkit.launch, and of stage 03 as STARTING.md shows it without Slurm."""

import ctypes
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from checkout import wait_until
from conftest import ENVIRONMENT, STAGES, ran, rows_of, succeeded
from forking import free_port

import trainkit
from trainkit.runtime.errors import UserError
from trainkit.runtime.launching import RankError

# Functions within a test are sent by value, as those of a cell are.
SESSION = """
import trainkit
class Answer:
    def __init__(self, numbers):
        self.numbers = numbers

def mean(start):
    import torch
    from trainkit import process_group
    here = process_group.join(use_cuda=False, timeout=60)
    number = process_group.sum_in_place(torch.tensor([start + here.rank]))
    print(f"rank {here.rank} of {here.size}: {number.item()}")
    process_group.leave()
    return Answer(number)

answer = trainkit.launch(mean, 5)
print(isinstance(answer, Answer), answer.numbers)
print(trainkit.launch(lambda: "a second time", workers=1))
"""
SLEEPS = """
import os, signal, sys, time
from pathlib import Path
import trainkit

def train(folder):
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        os.fork()  # as a DataLoader does
    Path(folder, str(os.getpid())).touch()
    time.sleep(300)

try:
    trainkit.launch(train, sys.argv[1])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - ENVIRONMENT.keys():
        monkeypatch.delenv(name)


def alive(process: str) -> bool:
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("options", [["-c", SESSION], ["-i"]], ids=["-c", "REPL"])
def test_ranks_meet_and_the_result_is_rank_0s(options: list[str], tmp_path: Path) -> None:
    typed = re.sub(r"\n\n|\n(?=answer)", "\n\n", SESSION) if "-i" in options else None
    done = succeeded(ran(sys.executable, *options, input=typed, cwd=tmp_path))
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["rank 0 of 2: 11", "rank 1 of 2: 11"], done.stderr
    assert lines[2:] == ["True tensor([11])", "a second time"]


def test_what_a_rank_prints_appears_while_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    class Cell(io.StringIO):
        encoding = "ascii"

        def write(self, text: str) -> int:
            if "begun" in text:
                seen.touch()
            return super().write(text)

    def train() -> str:
        print("begun, grün")
        for _ in range(1200):
            if seen.exists():
                return os.environ["OMP_NUM_THREADS"]
            time.sleep(0.05)
        return "nobody reads this"

    monkeypatch.setattr(sys, "stdout", Cell())
    for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    assert trainkit.launch(train, workers=1) == str(len(os.sched_getaffinity(0)))
    assert sys.stdout.getvalue() == "begun, gr?n\n"


def test_the_traceback_is_that_of_the_rank_that_failed() -> None:
    def train() -> None:
        from trainkit.runtime import process_group

        here = process_group.join(use_cuda=False, timeout=60)
        if here.rank == 1:
            raise LookupError("no such class")
        process_group.barrier()

    with pytest.raises(RankError) as caught:
        trainkit.launch(train)
    head, trace, *frames, last = str(caught.value).strip().splitlines()
    assert (head, last) == ("rank 1: LookupError: no such class", "LookupError: no such class")
    assert trace == "Traceback (most recent call last):"
    assert "in train" in frames[0] and 'raise LookupError("no such class")' in frames[1]
    assert len([line for line in frames if "File" in line]) == 1


def test_a_line_that_is_in_no_file_is_shown(tmp_path: Path) -> None:
    """IPython, and the REPL from Python 3.13 on, keep the source of a cell for tracebacks in this way."""
    program = """
import linecache, trainkit
source = "def train():\\n    return 1 / 0  # here\\n"
linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
exec(compile(source, "<cell 1>", "exec"))
trainkit.launch(train)
"""
    done = ran(sys.executable, "-c", program)
    assert '  File "<cell 1>", line 2, in train\n    return 1 / 0  # here\n' in done.stderr


ENDED = "rank 1 ended with exit code {} before train returned: see what it printed (-9: it was killed, "
ENDED += "perhaps for lack of memory)."


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ENDED.format(-9)),
        (lambda: os._exit(0), ENDED.format(0)),
        (lambda: sys.exit(0), "rank 1: left before the end, with exit code 0"),
    ],
    ids=["killed", "left without a word", "sys.exit"],
)
def test_a_rank_that_ends_too_early_ends_the_others(end: Callable, sentence: str, tmp_path: Path) -> None:
    def train() -> None:
        if os.environ["RANK"] == "1":
            wait_until(lambda: list(tmp_path.iterdir()))
            end()
        (tmp_path / str(os.getpid())).touch()
        ctypes.PyDLL(None).sleep(300)  # within C, where no thread of Python can end the process

    with pytest.raises(UserError) as caught:
        trainkit.launch(train)
    assert str(caught.value).strip() == sentence
    (sleeper,) = tmp_path.iterdir()
    assert not alive(sleeper.name)


@pytest.mark.parametrize(
    ("how", "stopped"),
    [(signal.SIGINT, False), (signal.SIGKILL, False), (signal.SIGKILL, True)],
    ids=["interrupted", "killed", "killed while its ranks are stopped"],
)
def test_no_rank_outlives_its_caller(
    how: signal.Signals, stopped: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Neither one that does not obey SIGTERM, nor a process that a rank has started, nor a file of theirs."""
    command, files = [sys.executable, "-c", SLEEPS, tmp_path], tmp_path_factory.mktemp("files")
    env = ENVIRONMENT | {"TMPDIR": str(files)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as caller:
        try:
            wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
            for rank in psutil.Process(caller.pid).children() if stopped else ():
                rank.suspend()
            caller.send_signal(how)
            said, _ = caller.communicate(timeout=60)
        finally:
            caller.kill()
    assert said == ("interrupted\n" if how == signal.SIGINT else "")
    wait_until(lambda: not any(alive(process.name) for process in tmp_path.iterdir()))
    assert not list(files.glob("trainkit-*"))


@pytest.mark.parametrize(
    ("arguments", "workers", "sentence"),
    [
        ((int,), 0, "workers is 0: give a whole number from 1 on"),
        ((int,), "2", "workers is '2': give a whole number from 1 on"),
        ((len, threading.Lock()), 2, "cannot be sent to other processes (cannot pickle '_thread.lock'"),
        ((lambda: Unreadable(),), 1, "train's result cannot be sent back (no group here): return numbers"),
    ],
    ids=["no worker", "a word", "a lock", "a DDP model returned"],
)
def test_a_mistake_is_one_sentence(arguments: tuple, workers: object, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        trainkit.launch(*arguments, workers=workers)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def refuse() -> None:
    raise RuntimeError("no group here")


class Unreadable:
    """Like DistributedDataParallel, it can be pickled, and not be read where there is no process group."""

    def __reduce__(self) -> tuple:
        return refuse, ()


# --- the ways of STARTING.md, as they stand there -------------------------------------------------------

PAGE = STAGES["ddp"].with_name("STARTING.md")
SMALL = "--train-size 300 --test-size 100 --epochs 1 --batch-size 60 --precision fp32 --no-cuda --timeout 60"


def commands(beginning: str) -> str:
    """The block of the page that begins so."""
    (block,) = re.findall(rf"^```\n({beginning}.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return block


def start(text: str, folder: Path) -> subprocess.CompletedProcess:
    """Run the lines of a shell, with fewer images and a port that is free."""
    text = text.replace("--epochs 2", f"{SMALL} --results-dir '{folder}'").replace("29500", free_port())
    path = f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
    return ran("bash", "-c", text, cwd=PAGE.parent, env=ENVIRONMENT | {"PATH": path})


def test_by_hand_and_by_torchrun_on_several_machines(tmp_path: Path) -> None:
    """Both machines are this one; what comes out is the same to the last digit."""
    succeeded(start(commands("place="), tmp_path / "hand"))
    first, second = commands("torchrun ").replace("=first ", "=localhost ").splitlines()
    succeeded(start(f"export OMP_NUM_THREADS=1\n{second} &\n{first}", tmp_path / "torchrun"))
    (hand,), (torchrun,) = rows_of(tmp_path / "hand"), rows_of(tmp_path / "torchrun")
    assert (hand["launcher"], hand["world_size"], hand["nodes"]) == ("env", 2, 1)
    assert (torchrun["launcher"], torchrun["world_size"], torchrun["nodes"]) == ("torchrun", 2, 2)
    assert (hand["train_loss"], hand["test_loss"]) == (torchrun["train_loss"], torchrun["test_loss"])


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGTERM, "at once"), (signal.SIGUSR2, "epoch 1/")],
    ids=["SIGTERM at once", "USR2 in training"],
)
def test_our_torchrun_hands_signals_on_to_its_ranks(number: int, moment: str, tmp_path: Path) -> None:
    """Sent to it alone, as where Slurm signals only what srun has started."""
    launcher = [sys.executable, "-m", "trainkit.runtime.torchrun", "--standalone", "--nproc-per-node=2"]
    folders = ("--results-dir", tmp_path, "--checkpoint-dir", tmp_path / "checkpoints")
    command = [*launcher, STAGES["ddp"], *SMALL.split(), "--epochs", 999, *folders]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])  # as a job starts it
    process = subprocess.Popen(list(map(str, command)), env=ENVIRONMENT, **pipes)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if moment != "at once":
        next(line for line in process.stdout if line.startswith(moment))
    process.send_signal(number)
    output, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint
    assert re.search(r"^stopped after .* by a signal", output, re.MULTILINE), output
    assert "Traceback" not in complaint
    assert list((tmp_path / "checkpoints").glob("epoch-*.pt"))
