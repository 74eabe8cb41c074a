"""Every mistake gets one sentence on stderr and a non-zero exit, never a traceback."""

import re
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from checkout import Checkout, plant
from conftest import (
    BEYOND,
    BY_FEATURE,
    ENVIRONMENT,
    REPOSITORY,
    STAGES,
    Script,
    failed,
    one_error,
    ran,
    rows_of,
    stage_command,
    start_stage,
)
from forking import Forking

from manygpus.checkpoint import sharded
from manygpus.data import staging

pytestmark = pytest.mark.usefixtures("mnist_dir")

# Bad options, and what the error has to name: the option, the value, what to give in its place.
BAD_OPTIONS = [
    ("--batch-size 0", ["--batch-size", "0"]),
    ("--epochs two", ["--epochs", "'two'"]),
    ("--lr nan", ["--lr"]),
    ("--lr-scale linear", ["--lr-scale linear", "--lr"]),
    ("--recipe fast --lr-warmup-images 64", ["--lr-warmup-images", "recipe fast"]),
    ("--batch-size 64 --batch-size-per-gpu 64", ["--batch-size", "--batch-size-per-gpu"]),
    ("--loader workers --num-workers 100000", ["--num-workers", "100000", "256"]),
    ("--batch 64", ["unrecognized arguments: --batch"]),
    ("--local-rank=0", ["unrecognized arguments: --local-rank=0"]),  # of torch.distributed.launch
    ("--batch-size 70000", ["--batch-size", "70000", "60000"]),
    ("--test-size 10001", ["--test-size 10001", "10000"]),
    ("--num-workers 2", ["--num-workers", "--loader workers"]),
    ("--data-dir /nowhere", ["/nowhere", "python -m manygpus.data.datasets"]),
    ("--results-dir /proc/nowhere", ["/proc/nowhere", "--results-dir"]),
]


@pytest.mark.parametrize(("options", "names"), BAD_OPTIONS)
def test_a_bad_option_is_named(options: str, names: list[str], tmp_path: Path, script: Script) -> None:
    error = one_error(script("single", "--results-dir", tmp_path, *options.split()))
    assert [name for name in names if name not in error] == [], error
    assert not list(tmp_path.rglob("*"))


def test_an_error_is_one_sentence_with_its_remedy(tmp_path: Path, script: Script) -> None:
    """As a user reads it: the others are like it."""
    error = one_error(script("single", "--results-dir", tmp_path, "--test-size", 10001))
    assert error == "error: --test-size 10001 is more than the 10000 test images: lower it."


def test_a_copied_checkout_does_not_run_the_code_of_the_first_one(checkout: Checkout) -> None:
    """Its .venv is the first one's, too."""
    stage = checkout.script("single")
    sentence = f"would run the code of {REPOSITORY}: cd '{checkout.folder}' && export PYTHONPATH=$PWD"
    assert sentence in one_error(checkout.run(sys.executable, stage, "--help", PYTHONPATH=""))
    checkout.environment |= {"PYTHONPATH": str(checkout.folder)}
    assert checkout.run(sys.executable, stage, "--help").returncode == 0


def test_a_file_that_a_training_of_ones_own_lacks_keeps_its_traceback(
    forking: Forking, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "from manygpus.errors import entrypoint\nentrypoint(lambda: open('/nowhere/mine'))()"
    )
    done = forking.run(tmp_path / "own.py", env=ENVIRONMENT)
    assert done.returncode == 1 and "own.py" in done.stderr and "Traceback" in done.stderr


BAD_OPTIONS_OF_EXAMPLES = [
    ("accumulate --accumulate 7 --batch-size 60", ["--batch-size 60", "7 micro-batches"]),
    ("accumulate --accumulate 0", ["--accumulate", "0"]),
    ("mixed_precision --precision bf16", ["--precision", "'bf16'"]),
    ("by_hand --flatten", ["unrecognized arguments: --flatten"]),
    ("captured --how captured --precision fp32", ["CUDA graph", "GPU"]),
    ("tabular --weights much", ["--weights", "'much'"]),
    ("tabular --precision bf16", ["--precision", "'bf16'"]),
    ("tabular --test-size 6000", ["--test-size 6000", "5000"]),
    ("gpt --width 16 --heads 3", ["--width 16", "--heads 3"]),
    ("gpt --data-dir . --shards 1 --test-size 2", ["2 windows", "3"]),
    ("gpt --bf16-residuals", ["--bf16-residuals", "--precision bf16"]),
    ("gpt --vocabulary 10", ["--vocabulary", "10"]),
    ("pipeline --micro-batches 7 --batch-size 60", ["--batch-size 60", "7 micro-batches"]),
]


@pytest.mark.full
@pytest.mark.parametrize(("command", "names"), BAD_OPTIONS_OF_EXAMPLES)
def test_a_bad_option_of_an_example_is_named(
    command: str, names: list[str], tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example, *options = command.split()
    if example == "pipeline" and torch.__version__ < sharded.NEEDED:
        pytest.skip(f"needs PyTorch {sharded.NEEDED} or newer")
    error = one_error(
        script(next(BEYOND.glob(f"*/{example}.py")), *options, "--results-dir", tmp_path, ranks=1)
    )
    assert error.startswith("error")
    assert [name for name in names if name not in error] == [], error
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "many", "LOCAL_RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK"),
        ({"FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE"),
    ],
)
def test_a_variable_of_the_launcher_that_is_wrong_is_named(
    environment: dict, variable: str, tmp_path: Path, script: Script
) -> None:
    error = one_error(script("ddp", "--results-dir", tmp_path, env=environment))
    assert re.search(rf"\b{variable}\b", error), error


@pytest.mark.parametrize("stage", ["single", "dp"])
@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_NUM_NODES": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
    ],
    ids=["two nodes", "two processes", "mpirun"],
)
def test_one_process_stages_refuse_more(
    stage: str, environment: dict, tmp_path: Path, script: Script
) -> None:
    done = script(stage, "--results-dir", tmp_path, env=environment)
    assert "use stage 03, 03_multigpu_ddp/mnist_ddp.py" in one_error(done)


def test_a_rank_whose_peer_is_lost_ends_with_a_sentence(
    tmp_path: Path, script: Script, checkout: Checkout
) -> None:
    """Without a launcher to end it, the rank that is left notices by itself."""
    checkout.plant(
        "ddp",
        """
        if faults.rank() == 1:
            faults.after_epoch(1, lambda: faults.signal_itself(signal.SIGKILL))
        """,
    )
    done = script(checkout.script("ddp"), *SMALL, "--timeout", 30, "--results-dir", tmp_path, ranks=2)
    assert "error on rank 0: lost the other ranks" in done.stderr
    assert "Traceback" not in done.stderr and [row["epoch"] for row in rows_of(tmp_path)] == [1]


SMALL = ("--train-size", 1280, "--test-size", 64, "--epochs", 999, "--width", 4, "--precision", "fp32")
WITH_LOADERS = (*SMALL, "--loader", "workers", "--num-workers", 2)


@pytest.mark.full
def test_loader_processes_leave_signals_to_the_one_that_trains_and_end_with_it(tmp_path: Path) -> None:
    """Slurm signals all of them; there are two for training, and two for the test set."""
    with start_stage("single", *WITH_LOADERS, "--results-dir", tmp_path) as process:
        next(line for line in process.stdout if line.startswith("epoch 1/"))
        loaders = psutil.Process(process.pid).children()
        for loader in loaders:
            loader.send_signal(signal.SIGTERM)
            loader.send_signal(signal.SIGUSR2)
        for _ in range(2):
            next(line for line in process.stdout if line.startswith("epoch "))
        assert len(loaders) == 4 and all(loader.is_running() for loader in loaders)
        process.kill()
        assert not psutil.wait_procs(loaders, timeout=120)[1]


# Stopped first, a loader process dies while the training waits for a batch that it has announced.
DYING = """
import psutil

def end_a_loader(optimizer):
    loaders = psutil.Process().children()
    print("loaders", *(loader.pid for loader in loaders))
    first = min(loaders, key=lambda loader: loader.pid)
    if {stopped}:
        time.sleep(0.3)
        first.suspend()
    threading.Timer({seconds}, first.send_signal, [{number}]).start()

faults.before_step(3, end_a_loader)
"""


@pytest.mark.parametrize(
    ("stopped", "number"),
    [(True, 9), (False, 9), (False, 2)],
    ids=["while it is waited for", "at work", "by Ctrl-C"],
)
@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_a_loader_process_is_killed_at_any_moment(
    stopped: bool, number: int, seconds: float, tmp_path: Path, script: Script
) -> None:
    dying = shutil.copy(STAGES["single"], tmp_path / "dying.py")
    plant(dying, DYING.format(stopped=stopped, number=number, seconds=seconds + 0.2 * stopped))
    done = script(dying, *WITH_LOADERS, "--results-dir", tmp_path)
    error = one_error(done)
    assert error.startswith("error: a loader process was killed (")
    assert error.endswith("lower --num-workers, or ask Slurm for more with --mem.")
    (loaders,) = re.findall("^loaders (.*)", done.stdout, re.MULTILINE)
    assert not any(map(psutil.pid_exists, map(int, loaders.split())))  # the others end, too


@pytest.mark.parametrize("loaders", [0, 1])
def test_an_error_of_the_samples_stays_what_it_is(loaders: int, tmp_path: Path, script: Script) -> None:
    """Also one that looks like a dead loader process: of a data set that is fetched over the network, say."""
    failing = shutil.copy(STAGES["single"], tmp_path / "failing.py")
    plant(
        failing,
        """
        from dataclasses import replace
        from manygpus.data import datasets

        def fetched(image):
            raise ConnectionResetError("the store went away")

        def load_dataset(*arguments):
            train_set, test_set = datasets.load_dataset(*arguments)
            return replace(train_set, prepare_one=fetched), test_set
        """,
    )
    arguments = (*WITH_LOADERS, "--num-workers", loaders, "--results-dir", tmp_path)
    done = script(failing, *arguments)
    assert done.returncode == 1
    assert "the store went away" in done.stderr
    assert "Traceback" in done.stderr and "was killed" not in done.stderr


def test_a_mistake_of_a_rank_ends_the_run_without_a_traceback(script: Script) -> None:
    for mistake, expected in (
        (("--results-dir", "/proc/nowhere"), "error on rank 0: results cannot be written to /proc/nowhere"),
        (
            ("--batch-size", 65),
            "--batch-size 65 does not divide evenly among 2 processes: the nearest is 64 or 66.",
        ),
    ):
        assert expected in failed(script("ddp", *mistake, ranks=2))


@pytest.mark.skipif(torch.__version__ < sharded.NEEDED, reason="pipeline.py needs a newer PyTorch")
def test_blocks_that_do_not_divide_among_the_ranks(script: Script) -> None:
    error = failed(script(BY_FEATURE / "pipeline.py", ranks=3))
    assert "8 blocks do not divide evenly among 3 processes: start 1, 2, 4 or 8" in error


def test_data_that_is_not_mnist(mnist_dir: Path, tmp_path: Path, script: Script) -> None:
    raw, name = tmp_path / "data" / "MNIST" / "raw", "t10k-labels-idx1-ubyte"
    raw.mkdir(parents=True)
    for other in staging.FILES.keys() - {name}:
        (raw / other).symlink_to(mnist_dir / "MNIST" / "raw" / other)
    (raw / name).touch()
    done = script("single", "--results-dir", tmp_path, "--data-dir", tmp_path / "data")
    fault = f"{name} is cut short, or too long (0 of 10008 bytes)"
    assert f"no usable MNIST in {tmp_path / 'data'} ({fault}): get it once" in one_error(done)


def test_a_place_for_temporary_files_that_is_too_long_for_sockets(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 80)
    place.mkdir()
    command = stage_command("single", *WITH_LOADERS, "--results-dir", tmp_path)
    done = ran(*command, env=ENVIRONMENT | {"TMPDIR": str(place)})
    assert f"TMPDIR is too long for --loader workers ({place}): export TMPDIR=/tmp." in one_error(done)
