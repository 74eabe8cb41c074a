"""On which device a rank computes, and that it never is another one than it was meant to be.

There need not be a GPU: what PyTorch, the driver and Slurm would tell is planted.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkout import Checkout

from trainkit import machine, options, world
from trainkit.errors import UserError
from trainkit.model import Net
from trainkit.records import read
from trainkit.runlog import RunLog

ONE_STEP = ("--dry-run", "--batch-size", 64, "--precision", "fp32")
OLD_DRIVER = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020)."


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes PyTorch tell of so many GPUs."""

    def plant(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: number > 0)

    return plant


# --- never silently on the CPU ----------------------------------------------------------------------


def test_gpus_that_cannot_be_used_stop_a_stage(tmp_path: Path) -> None:
    """Before it has done anything; unless it is told to use the CPU."""
    checkout = Checkout(tmp_path / "a checkout")
    fault = "import torch; torch.cuda.is_available = lambda: False; torch.cuda.device_count = lambda: 2"
    checkout.plant("single", fault)
    arguments = (checkout.script("single"), *ONE_STEP, "--results-dir", tmp_path / "results")
    refused = checkout.python(*arguments, CUDA_VISIBLE_DEVICES="0,1")
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: PyTorch cannot use the ")
    assert line.endswith(" or add --no-cuda.")
    assert not (tmp_path / "results").exists()
    assert checkout.python(*arguments, "--no-cuda", CUDA_VISIBLE_DEVICES="0,1").returncode == 0


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"SLURM_GPUS_ON_NODE": "2"}, True),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_CLUSTER_NAME": "practice"}, False),
        ({"SLURM_GPUS_ON_NODE": "0"}, False),
        ({}, False),
    ],
)
def test_a_job_that_asked_for_gpus_and_finds_none(
    variables: dict, refused: bool, gpus: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if refused:
        with pytest.raises(UserError, match="Slurm gave this job 2 GPU.* PyTorch sees none"):
            world.alone(use_cuda=True)
    else:
        assert world.alone(use_cuda=True).device.type == "cpu"
    assert world.alone(use_cuda=False).device.type == "cpu"


def test_the_reason_that_pytorch_gives_is_told(gpus: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(warnings.warn(OLD_DRIVER, stacklevel=1)))
    monkeypatch.setattr(machine, "driver", lambda: "driver 535.104.05")
    monkeypatch.setattr(machine, "_has_driver_library", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError) as refused:
        machine.check_usable()
    for told in (
        OLD_DRIVER,
        f"torch {torch.__version__} is built for {machine.build()}, ",
        "driver 535.104.05",
    ):
        assert told in str(refused.value)


def test_a_container_without_the_drivers_library(gpus: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apptainer without --nv: the GPUs' device files are there."""
    gpus(2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_has_driver_library", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match=r"no libcuda.so.1.* \(apptainer exec --nv\)"):
        machine.check_usable()


@pytest.mark.parametrize("visible", ["", "-1", "-1,0,1", "none", "NoDevFiles"])
def test_gpus_that_are_hidden_are_not_missed(
    visible: str, gpus: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert world.alone(use_cuda=True).device.type == "cpu"


@pytest.mark.parametrize(
    ("told", "driver"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
    ],
)
def test_the_driver_is_read_from_the_kernel_module(
    told: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: told)
    assert machine.driver() == f"driver {driver}"


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "a Tesla V100 (sm_70)"),
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "held by another process in exclusive mode",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", "is full before the training starts"),
        ("CUDA error: invalid device ordinal", "srun --gpus-per-task=1"),
        (
            "CUDA error: uncorrectable ECC error encountered\nstack",
            "(CUDA error: uncorrectable ECC error encountered)",
        ),
    ],
)
def test_a_gpu_that_does_not_compute(
    told: str, words: str, gpus: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(told)

    gpus(1)
    v100 = SimpleNamespace(name="Tesla V100", major=7, minor=0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: v100)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(UserError) as refused:
        world.alone(use_cuda=True)
    assert str(refused.value).startswith("GPU 0 of ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rocm_is_recorded_as_such(tmp_path: Path, gpus: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    here = world.World(0, 0, 1, 1, 1, "python", torch.device("cuda", 0))
    opts = options.parse("", ["--results-dir", str(tmp_path)])
    log = RunLog("single", opts, here, devices=1, dataset="mnist", model=Net())
    log.epoch(1, SimpleNamespace(steps=1, seconds=1, loss=1, learning_rate=1), SimpleNamespace(
        samples=1, seconds=1, loss=1, accuracy=1,
    ), [{"rank": 0, "epoch": 1, "host": "n1", "device": "cuda:0", "device_name": "MI300X", "own_seconds": 1,
         "peak_memory_mb": 1}])  # fmt: skip
    (path,) = tmp_path.glob("runs/*.csv")
    (row,) = read(path)
    assert (row["device_name"], row["cuda_version"]) == ("AMD Instinct MI300X", "ROCm 6.4.1")


# --- which GPU is whose -----------------------------------------------------------------------------

# Local rank, ranks of the node, GPUs that it sees, GPUs that Slurm gave, who started it; its GPU, or none.
OWN = {
    "one process": (0, 1, 1, None, "python", 0),
    "the only process sees all": (0, 1, 8, 8, "srun", 0),
    "all are seen": (1, 2, 2, 2, "srun", 1),
    "torchrun": (3, 4, 4, None, "torchrun", 3),
    "isolated by --gpus-per-task": (1, 2, 1, 2, "srun", 0),
    "isolated, on a Slurm that tells no number": (1, 2, 1, None, "srun", 0),
    "two each by --gpus-per-task=2": (3, 4, 2, 8, "srun", 0),
    "two ranks on one GPU": (1, 2, 1, 1, "srun", None),
    "the first of two ranks on one GPU": (0, 2, 1, 1, "srun", None),
    "more ranks of torchrun than GPUs": (1, 2, 1, None, "torchrun", None),
    "more ranks of torchrun than several GPUs": (3, 4, 2, None, "torchrun", None),
}


@pytest.mark.parametrize(
    ("local_rank", "tasks", "visible", "given", "launcher", "gpu"), OWN.values(), ids=OWN
)
def test_the_gpu_of_a_rank(
    local_rank: int, tasks: int, visible: int, given: int | None, launcher: str, gpu: int | None,
    gpus: Callable, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    place = {
        "rank": local_rank,
        "local_rank": local_rank,
        "size": tasks,
        "local_size": tasks,
        "launcher": launcher,
    }
    monkeypatch.setattr(world, "_place", lambda: place | {"nodes": 1})
    monkeypatch.setattr(machine, "try_gpu", lambda device: None)
    monkeypatch.setattr(machine, "card", lambda device: "")
    monkeypatch.setattr(world, "_meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda **_: None)
    gpus(visible)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if given is not None:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", str(given))
    if gpu is not None:
        assert world.join(use_cuda=True, timeout=1).device == torch.device("cuda", gpu)
        return
    with pytest.raises(UserError) as refused:
        world.join(use_cuda=True, timeout=1)
    assert f"rank {local_rank} (local rank {local_rank}) has no GPU of its own" in str(refused.value)
    assert f"{tasks} processes on " in str(refused.value) and f"{visible} visible GPU(s)" in str(
        refused.value
    )


RANK_1_OF_2 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}


@pytest.fixture
def second_rank(gpus: Callable, monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of a rank that sees two GPUs and meets rank 0, on a card of its own."""
    store = dist.HashStore()
    store.set("card of 0", "host 3b:00")
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"):  # join() sets them
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(machine, "try_gpu", lambda device: None)
    monkeypatch.setattr(machine, "card", lambda device: "host 5e:00")
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 1, 2)]))
    gpus(2)
    return store


def test_two_ranks_on_one_card_are_refused_before_nccl_is(second_rank: dist.Store) -> None:
    second_rank.set("card of 0", "host 5e:00")
    with pytest.raises(
        UserError, match=r"rank 1 has the GPU of rank 0.*2 visible GPU.*without --gpu-bind=closest"
    ):
        world.join(use_cuda=True, timeout=1)


NCCL = """NCCL error in: ProcessGroupNCCL.cpp:328, unhandled system error (run with NCCL_DEBUG=INFO)
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketStartConnect: Connect to 10.0.0.2<48741> failed : Software caused connection abort"""
FULL = """NCCL error in: ProcessGroupNCCL.cpp:328, unhandled cuda error (run with NCCL_DEBUG=INFO)
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


@pytest.mark.parametrize(
    ("fails", "error", "words"),
    [
        ("rendezvous", dist.DistNetworkError("Timed out"), "could not meet at n1:1 (Timed out)"),
        (
            "init_process_group",
            dist.DistBackendError(NCCL),
            "NCCL could not connect the 2 processes (socketSt",
        ),
        ("init_process_group", dist.DistBackendError(FULL), "has no memory left for NCCL"),
        ("init_process_group", torch.cuda.OutOfMemoryError("out of memory"), "has no memory left for NCCL"),
    ],
)
def test_the_store_nccl_and_cuda_fail_in_their_own_words(
    fails: str, error: Exception, words: str, second_rank: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, fails, fail)
    with pytest.raises(UserError) as refused:
        world.join(use_cuda=True, timeout=1)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_each_gpu_of_a_process_is_tried_and_draws_its_own_numbers(
    gpus: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    generators = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(machine, "try_gpu", lambda device: tried.append(device.index))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    gpus(0)
    machine.take_all_gpus(7)
    assert tried == []
    gpus(3)
    machine.take_all_gpus(7)
    assert tried == [2, 1, 0]  # PyTorch goes on with the last one
    assert [generator.initial_seed() for generator in generators] == [7, 8, 9]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_every_rank_takes_its_own_slice_of_a_card(
    launcher: str, gpus: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm lists the slices of all ranks, and CUDA would show the first one to each."""
    place = {"rank": 1, "local_rank": 1, "size": 2, "local_size": 2, "nodes": 1, "launcher": launcher}
    monkeypatch.setattr(world, "_place", lambda: place)
    monkeypatch.setattr(machine, "try_gpu", lambda device: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    gpus(1)
    assert world.own_device(use_cuda=True) == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
