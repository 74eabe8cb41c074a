"""On which device a rank computes, that it never is another one than it was meant to be, and its threads.

There need not be a GPU: what PyTorch, the driver and Slurm would tell is planted.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkout import Checkout
from conftest import ENVIRONMENT, Script, rows_of, succeeded
from forking import Forking

from manygpus import devices as device
from manygpus.distributed import process_group
from manygpus.errors import UserError
from manygpus.launchers import DistEnv
from manygpus.training import process_tuning

ONE_STEP = ("--dry-run", "--batch-size", 64, "--precision", "fp32")
OLD_DRIVER = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020)."


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes PyTorch report this many GPUs."""

    def plant(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: number > 0)

    return plant


# --- never silently on the CPU ----------------------------------------------------------------------


def test_gpus_that_cannot_be_used_stop_a_stage(tmp_path: Path, checkout: Checkout, forking: Forking) -> None:
    """Before it has done anything; unless the CPU is asked for."""
    fault = "import torch; torch.cuda.is_available = lambda: False; torch.cuda.device_count = lambda: 2"
    checkout.plant("single", fault)
    arguments = (checkout.script("single"), *ONE_STEP, "--results-dir", tmp_path / "results")
    visible = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "0,1"}
    refused = forking.run(*arguments, env=visible)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: PyTorch cannot use the ")
    assert line.endswith(" or add --no-cuda.")
    assert not (tmp_path / "results").exists()
    assert forking.run(*arguments, "--no-cuda", env=visible).returncode == 0


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
        with pytest.raises(
            UserError,
            match=r"^PyTorch cannot use the 2 GPU\(s\) of .*apptainer exec --nv.* or add --no-cuda\.$",
        ):
            process_group.init_single_process(use_gpu=True)
    else:
        assert process_group.init_single_process(use_gpu=True).device.type == "cpu"
    assert process_group.init_single_process(use_gpu=False).device.type == "cpu"


def test_the_reason_that_pytorch_gives_is_told(gpus: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(warnings.warn(OLD_DRIVER, stacklevel=1)))
    monkeypatch.setattr(device, "driver", lambda: "driver 535.104.05")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError) as refused:
        device.usable_gpus()
    for reason in (
        OLD_DRIVER,
        f"torch {torch.__version__} is built for {device.build()}, ",
        "driver 535.104.05",
    ):
        assert reason in str(refused.value)


@pytest.mark.parametrize("visible", ["", "-1", "-1,0,1", "none", "NoDevFiles"])
def test_gpus_that_are_hidden_are_not_missed(
    visible: str, gpus: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert process_group.init_single_process(use_gpu=True).device.type == "cpu"


def test_a_gpu_that_does_not_compute(gpus: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels for it, in use, full or broken: CUDA's error says which."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nstack")

    gpus(1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "ones", fail)
    why = (
        r"does not compute \(CUDA error: CUDA-capable device\(s\) is/are busy or unavailable\): nvidia-smi.*$"
    )
    with pytest.raises(UserError, match=rf"^GPU 0 of \S+ {why}"):
        process_group.init_single_process(use_gpu=True)


# --- which GPU is whose -----------------------------------------------------------------------------

# Local rank, ranks of the node, GPUs that it sees; its GPU.
OWN = {
    "one process": (0, 1, 1, 0),
    "the only process sees all": (0, 1, 8, 0),
    "all are seen": (3, 4, 4, 3),
    "isolated by --gpus-per-task": (1, 2, 1, 0),
    "two each by --gpus-per-task=2": (3, 4, 2, 0),
    "isolated, by a launcher that does not tell how many ranks a node has": (1, 1, 1, 0),
}


@pytest.mark.parametrize(("local_rank", "tasks", "visible", "gpu"), OWN.values(), ids=OWN)
def test_the_gpu_of_a_rank(
    local_rank: int, tasks: int, visible: int, gpu: int, gpus: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "try_gpu", lambda device: None)
    gpus(visible)
    dist_env = DistEnv(local_rank, local_rank, world_size=tasks, local_world_size=tasks, launcher="srun")
    assert device.choose_device(dist_env, use_gpu=True) == torch.device("cuda", gpu)


RANK_1_OF_2 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
# init_distributed sets them.
RANK_1_OF_2 |= dict.fromkeys(("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"), "1")


def test_two_ranks_on_one_card_are_refused_before_nccl_is(
    gpus: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two, which sees two GPUs."""
    store = dist.HashStore()
    store.set("training", "2 processes")
    store.set("card of 0", "host 5e:00")
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device, "try_gpu", lambda device: None)
    monkeypatch.setattr(process_group, "card", lambda device: "host 5e:00")
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 1, 2)]))
    gpus(2)
    with pytest.raises(
        UserError, match=r"rank 1 has the GPU of rank 0.*2 visible GPU.*without --gpu-bind=closest"
    ):
        process_group.init_distributed(use_gpu=True, timeout_seconds=1)


def test_each_gpu_of_a_process_is_tried_and_draws_its_own_numbers(
    gpus: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    generators = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(device, "try_gpu", lambda device: tried.append(device.index))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    gpus(0)
    device.take_all_gpus(7)
    assert tried == []
    gpus(3)
    device.take_all_gpus(7)
    assert tried == [2, 1, 0]  # PyTorch goes on with the last one
    assert [generator.initial_seed() for generator in generators] == [7, 8, 9]


def test_cores_are_shared_with_the_ranks_of_this_host_only() -> None:
    before, own_cores = torch.get_num_threads(), os.sched_getaffinity(0)
    elsewhere = process_tuning.Cores("another boot", own_cores)
    try:
        torch.set_num_threads(len(own_cores))
        process_tuning.limit_threads([process_tuning.own_cores(), elsewhere, elsewhere])
        assert torch.get_num_threads() == len(own_cores)
        process_tuning.limit_threads([process_tuning.own_cores(), process_tuning.own_cores(), elsewhere])
        assert torch.get_num_threads() == max(1, len(own_cores) // 2)
        process_tuning.limit_threads([process_tuning.own_cores()])  # it is lowered, and never raised
        assert torch.get_num_threads() == max(1, len(own_cores) // 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("local_rank", "bound"), [(0, [2, 3]), (1, [4, 5]), (2, [])])
def test_a_rank_takes_its_share_of_the_cores(
    local_rank: int, bound: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on five cores; the share of a third would be empty."""
    bound_cores = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 4, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: bound_cores.update({thread: cores}))
    process_tuning.take_own_cores(local_rank, 2 if bound else 6)
    assert (os.getpid() in bound_cores) == bool(bound)
    assert all(cores == bound for cores in bound_cores.values())


def test_one_process_with_more_threads_than_cores(tmp_path: Path, checkout: Checkout, script: Script) -> None:
    cores = {min(os.sched_getaffinity(0))}
    checkout.plant("single", f"os.sched_setaffinity(0, {cores}); torch.set_num_threads(3)")
    small = ("--epochs", 1, "--train-size", 64, "--test-size", 64, "--width", 4, "--precision", "fp32")
    succeeded(script(checkout.script("single"), *small, "--results-dir", tmp_path))
    assert [row["threads_per_worker"] for row in rows_of(tmp_path)] == [1]


def test_every_rank_takes_its_own_slice_of_a_card(gpus: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm lists the slices of all ranks, and CUDA would show the first one to each."""
    monkeypatch.setattr(device, "try_gpu", lambda device: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    gpus(1)
    dist_env = DistEnv(rank=1, local_rank=1, world_size=2, local_world_size=2, launcher="srun")
    assert device.choose_device(dist_env, use_gpu=True) == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
