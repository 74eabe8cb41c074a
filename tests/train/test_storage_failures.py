"""The worst day of a run: folders that vanish, disks that fill, numbers that are none. Nothing is lost."""

import errno
import fcntl
import shutil
import signal
import sys
from pathlib import Path
from typing import IO

import pytest
import torch
from checkout import Checkout
from conftest import (
    ENVIRONMENT,
    REPOSITORY,
    STAGES,
    Script,
    failed,
    one_error,
    places,
    ran,
    rows_of,
    start_stage,
    succeeded,
)
from test_checkpoint import wait_for

pytestmark = pytest.mark.usefixtures("mnist_dir")

SMALL = ("--train-size", 640, "--test-size", 100, "--width", 4, "--precision", "fp32")


@pytest.fixture(scope="module")
def two_epochs(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints after epochs 1 and 2, made by two processes, so that it was resumed once."""
    folder = tmp_path_factory.mktemp("two-epochs")
    for epochs in (1, 2):
        succeeded(script("single", *SMALL, "--epochs", epochs, *places(folder)))
    return folder


# --- checkpoints ------------------------------------------------------------------------------------


def test_two_runs_do_not_share_a_folder_of_checkpoints(tmp_path: Path, script: Script) -> None:
    """The first one waits at its second step until the other one has been refused."""
    place = Checkout(tmp_path / "a checkout")
    place.plant(
        "single",
        f"""
        def wait(optimizer):
            while not os.path.exists({str(tmp_path / "go")!r}):
                time.sleep(0.1)

        faults.before_step(2, wait)
        """,
    )
    folders = ("--results-dir", tmp_path, "--checkpoint-dir", tmp_path / "checkpoints")
    training = (*SMALL, "--epochs", 1, "--checkpoint-minutes", 1e-6, *folders)
    first = start_stage(place.script("single"), *training)
    wait_for(lambda: list(tmp_path.glob("checkpoints/*.pt")), first)
    error = one_error(script("single", *training, "--resume", "auto"))
    (tmp_path / "go").touch()
    assert "another run saves its checkpoints in" in error
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 0, output
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK], ids=["Lustre", "NFS"])
def test_on_a_disk_without_locks_a_killed_run_resumes_on_another_host(
    code: int, tmp_path: Path, script: Script
) -> None:
    """Nothing that the first one leaves refuses the second, whatever that is called."""
    place = Checkout(tmp_path / "a checkout")
    place.plant(
        "single",
        f"""
        import fcntl
        import socket

        fcntl.flock = lambda *_: faults.fail(OSError({code}, "no locks"))
        socket.gethostname = lambda: os.environ.get("KILLED", "n2")
        if "KILLED" in os.environ:
            faults.after_epoch(1, lambda: faults.signal_itself(signal.SIGKILL))
        """,
    )
    arguments = (place.script("single"), *SMALL, *places(tmp_path), "--epochs", 2)
    assert script(*arguments, env={"KILLED": "n1"}).returncode == -signal.SIGKILL
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1]
    succeeded(script(*arguments))
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1, 2]


def test_a_lock_that_an_earlier_start_of_the_job_has_left_does_not_refuse_it(
    tmp_path: Path, script: Script
) -> None:
    """As a file server keeps those of a node that failed; another training in the same start is one."""
    job = {"MANYGPUS_JOB_DIR": str(tmp_path), "SLURM_RESTART_COUNT": "1"}
    arguments = (*SMALL, *places(tmp_path), "--epochs", 1)
    (tmp_path / "checkpoints").mkdir()
    with (tmp_path / "checkpoints" / ".lock").open("w") as dead:
        fcntl.flock(dead, fcntl.LOCK_EX)
        for owner in ("", f"start 0.0 of {tmp_path}/another", f"start 1.0 of {tmp_path}"):
            _write_anew(dead, f"process 7 on n2\n{owner}\n")
            assert "another run saves its checkpoints in" in one_error(script("single", *arguments, env=job))
        _write_anew(dead, f"process 7 on n2\nstart 0.0 of {tmp_path}\n")
        succeeded(script("single", *arguments, env=job))


def _write_anew(file: IO[str], text: str) -> None:
    file.seek(0)
    file.truncate()
    print(text, end="", file=file, flush=True)


def test_files_beside_the_checkpoints_stay(script: Script, two_epochs: Path, tmp_path: Path) -> None:
    """Only names that are exactly a checkpoint's count."""
    folder = shutil.copytree(two_epochs / "checkpoints", tmp_path / "checkpoints")
    mine = [folder / name for name in ("epoch-2-step-0-my-best.pt", "my-epoch-1-step-0.pt")]
    for path in mine:
        path.write_bytes(b"mine")
    done = succeeded(script("single", *SMALL, "--epochs", 3, *places(tmp_path)))
    assert "resumed from" in done.stdout
    assert all(path.read_bytes() == b"mine" for path in mine)
    assert [row["epoch"] for row in rows_of(tmp_path)] == [3]


# --- a loss that is no number -----------------------------------------------------------------------


def test_a_loss_that_is_no_number_ends_all_ranks_within_the_epoch(script: Script, tmp_path: Path) -> None:
    """On one of two ranks, at step 5 of an epoch that would take ten minutes."""
    place = Checkout(tmp_path / "a checkout")
    place.plant(
        "ddp",
        """
        losses = 0
        nll_loss = F.nll_loss

        def nan_in_the_fifth(*arguments, **named):
            nonlocal losses
            losses += 1
            loss = nll_loss(*arguments, **named)
            return loss + float("nan") if losses == 5 else loss

        faults.before_every_step(lambda optimizer: time.sleep(0.3))
        if faults.rank() == 1:
            F.nll_loss = nan_in_the_fifth
        """,
    )
    folders = ("--results-dir", tmp_path, "--checkpoint-dir", tmp_path / "checkpoints")
    training = ("--epochs", 2, "--train-size", 20_000, "--batch-size", 10, "--checkpoint-minutes", 1e-6)
    error = failed(script(place.script("ddp"), *training, "--precision", "fp32", *folders, ranks=2))
    for rank in (0, 1):
        assert f"error on rank {rank}: the loss is nan at step 5 of epoch 1: lower --lr" in error
    for path in (tmp_path / "checkpoints").glob("*.pt"):
        assert torch.load(path, weights_only=True)["parts"]["partial_epoch"]["losses"].isfinite().all()


def test_weights_that_are_no_numbers_replace_no_checkpoint(
    script: Script, two_epochs: Path, tmp_path: Path, checkout: Checkout
) -> None:
    """The losses were still numbers, and the last step of all broke the weights."""
    shutil.copytree(two_epochs / "checkpoints", tmp_path / "checkpoints")
    checkout.plant(
        "single",
        """
        def break_the_last_weights(optimizer):
            optimizer.param_groups[-1]["params"][-1].data.fill_(float("nan"))

        faults.after_step(1, break_the_last_weights)
        """,
    )
    folders = ("--results-dir", tmp_path, "--checkpoint-dir", tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").glob("*.pt")}
    training = (*SMALL, "--epochs", 3, "--checkpoint-minutes", 1e-9, "--resume", "auto", *folders)
    error = one_error(script(checkout.script("single"), *training))
    assert "are no longer numbers after step 1 of epoch 3: lower --lr, in a new run" in error
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints").glob("*.pt")} == before


# --- the folder of results --------------------------------------------------------------------------


def test_a_folder_of_results_that_is_removed_is_made_again(script: Script, tmp_path: Path) -> None:
    results = tmp_path / "results"
    place = Checkout(tmp_path / "a checkout")
    place.plant(
        "single", f"import shutil; faults.at_end_of_epoch(2, lambda: shutil.rmtree({str(results)!r}))"
    )
    done = script(place.script("single"), *SMALL, "--epochs", 2, "--results-dir", results)
    assert done.returncode == 0, done
    assert [row["epoch"] for row in rows_of(results)] == [1, 2]


def test_a_file_system_that_breaks_after_the_first_epoch(script: Script, tmp_path: Path) -> None:
    """The disk is full. Both ranks end: rank 0 with the reason, the other one at once."""
    place = Checkout(tmp_path / "a checkout")
    place.plant(
        "ddp",
        """
        def fill_the_disk():
            os.fsync = lambda file: faults.fail(OSError(28, "No space left on device"))

        faults.at_end_of_epoch(2, fill_the_disk)
        """,
    )
    error = failed(script(place.script("ddp"), *SMALL, "--epochs", 3, "--results-dir", tmp_path, ranks=2))
    assert "cannot be written (No space left on device): free the space" in error
    assert "error on rank 1: rank 0 had to stop: see its error." in error
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1]
    assert not list(tmp_path.glob("runs/*.tmp"))


def test_a_file_system_that_hangs_longer_than_the_timeout(script: Script, tmp_path: Path) -> None:
    """Its peers give up; rank 0 writes its row when the file system is back."""
    place = Checkout(tmp_path / "a checkout")
    place.plant(
        "ddp",
        """
        fsync = os.fsync

        def hang_the_disk():
            os.fsync = lambda file: time.sleep(18) or fsync(file)

        faults.at_end_of_epoch(2, hang_the_disk)
        """,
    )
    training = (*SMALL, "--epochs", 3, "--timeout", 8, "--results-dir", tmp_path)
    error = failed(script(place.script("ddp"), *training, ranks=2))
    for rank in (0, 1):
        assert f"error on rank {rank}: lost the other ranks" in error
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1, 2]


OUTPUTS = {
    "| true": "read, write = os.pipe(); os.dup2(write, 1); os.close(read)",
    "> /dev/full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "its own": "sys.stdout = type('Tee', (), {'write': len, 'flush': int})()",
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_nobody_reads_the_output(output: str, script: Script, tmp_path: Path) -> None:
    """And it is in an encoding that lacks some of the letters."""
    stage = f"runpy.run_path({str(STAGES['single'])!r}, run_name='__main__')"
    begins = f"import os, runpy, sys\nsys.stdout.reconfigure(encoding='ascii')\n{output}"
    (tmp_path / "mute.py").write_text(f"{begins}\n{stage}\n")
    done = script(tmp_path / "mute.py", *SMALL, "--epochs", 2, "--results-dir", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1, 2]


# --- what PyTorch says of GPUs and NCCL -------------------------------------------------------------


NCCL = "NCCL error in: NCCLUtils.cpp:88, unhandled {0} error (run with NCCL_DEBUG=INFO)\n{1}\nLast error:\n"
NO_NETWORK = NCCL.format("system", "ncclSystemError: System call (e.g. socket, malloc) failed.")
PEER_LEFT = NCCL.format("remote", "ncclRemoteError: A call failed possibly due to a network error.")
NCCL_ON_A_GPU = NCCL.format("cuda", "ncclUnhandledCudaError: Call to CUDA function failed.")
FRAMES = "\nException raised from create at NCCLUtils.hpp:317 (most recent call first):\nframe #0"
SHM = "unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)"
FULL = "the memory of this process's GPU is full: lower --batch-size"


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", FULL),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", FULL),
        ("torch.distributed.DistBackendError", f"{NCCL_ON_A_GPU}Cuda failure 2 'out of memory'", FULL),
        (
            "torch.distributed.DistBackendError",
            f"{NO_NETWORK}socketStartConnect: Connect to 10.0.0.2<48741> failed : Connection refused",
            "lost the other ranks (socketStartConnect: Connect to 10.0.0.2<48741> failed : Connection",
        ),
        (
            "torch.distributed.DistBackendError",
            PEER_LEFT + FRAMES,
            "lost the other ranks (ncclRemoteError: A call failed possibly due to a network error). If one",
        ),
        (
            "RuntimeError",
            SHM,
            f"loader processes hand over batches through /dev/shm and open files ({SHM[:-4]}",
        ),
    ],
)
def test_an_error_of_a_gpu_or_of_nccl_is_one_sentence(
    kind: str, text: str, sentence: str, script: Script, checkout: Checkout
) -> None:
    checkout.plant("ddp", f"raise {kind}({text!r})")
    done = script(checkout.script("ddp"), env={"RANK": "1"})
    assert f"error on rank 1: {sentence}" in one_error(done)


# A thread of the group is held up until Python ends, as on a busy machine, while it gives back a tensor.
SCRIPT = """
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from manygpus import errors
from manygpus.distributed import process_group

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


@errors.entrypoint
def main():
    process_group.init_distributed(use_gpu=False, timeout_seconds=30)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.itself = [model]  # a reference cycle: the model outlives main()
    if sys.argv[1:] == ["fails"]:
        be_busy()
        raise errors.UserError("planted")
    dist.destroy_process_group = close_when_busy
    process_group.destroy_distributed()


if __name__ == "__main__":
    main()
"""


RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("arguments", "ending"), [((), (0, "")), (("fails",), (1, "error on rank 0: planted\n"))]
)
def test_the_threads_of_the_group_end_before_python_does(
    arguments: tuple, ending: tuple, tmp_path: Path
) -> None:
    script = tmp_path / "ending.py"
    script.write_text(SCRIPT)
    env = ENVIRONMENT | RANK | {"PYTHONPATH": str(REPOSITORY)}  # it ends as a user's Python does
    done = ran(sys.executable, script, *arguments, env=env)
    assert (done.returncode, done.stderr) == ending
