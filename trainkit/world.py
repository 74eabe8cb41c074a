"""Who am I: rank, local rank, world size and device; joining, talking in and leaving the process group."""

import atexit
import gc
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401  first imported within a group, it would hold that for good

from trainkit import debugging, machine, startup
from trainkit.errors import PeerError, UserError, fail, first_line

PATIENCE_SECONDS = 20  # beyond --timeout, with processes that meet


@dataclass(frozen=True)
class World:
    """The place of this process among all processes of the run.

    `rank` counts over all processes and `local_rank` over those of this node; `size` is the
    number of processes (the world size), `local_size` the number on this node. `launcher` is
    what started the processes: torchrun, submitit, srun, env (RANK set by hand) or python.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    nodes: int
    launcher: str
    device: torch.device


def alone(use_cuda: bool, debug_dir: Path | None = None) -> World:
    """The world of one process, for the stages that are a single process; `debug_dir` is as in `join`.

    Raises:
        UserError: if a launcher started several processes: each would train the whole model.
    """
    place = _place()
    # In a batch script this process stands for the whole job; in an srun step only for the step.
    nodes = _number("SLURM_JOB_NUM_NODES", 1, 1) if place["launcher"] == "python" else place["nodes"]
    if place["size"] > 1 or nodes > 1:
        raise UserError(
            f"this stage is one process on one node, but this job has {place['size']} process(es) "
            f"on {nodes} node(s): ask for one task (--nodes=1 --ntasks=1), or use stage 03, "
            "03_multigpu_ddp/mnist_ddp.py."
        )
    if debug_dir:
        debugging.begin(debug_dir, place["rank"], every=60)
    device = _device(place, use_cuda)
    machine.limit_threads([machine.cores()])
    if debug_dir:
        debugging.introduce(debug_dir, place["rank"], device, gather)
    startup.mark("device")
    return World(**place, device=device)


def join(use_cuda: bool, timeout: int, debug_dir: Path | None = None) -> World:
    """Meet the other processes: nccl between GPUs, gloo between CPUs.

    A rank that waits for a peer longer than `timeout` seconds gives up, so that a job with a lost
    or sleeping rank ends instead of holding its GPUs until the time limit. With a `debug_dir` every rank
    writes down there where it is (see debugging.py).

    Raises:
        UserError: if the environment contradicts itself, PyTorch cannot use the GPUs, two ranks have one GPU,
            or the ranks, or NCCL, cannot connect.
    """
    place = _place()
    if debug_dir:  # twice before the others give up on a rank
        debugging.begin(debug_dir, place["rank"], every=timeout / 2)
    device = _device(place, use_cuda)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        # PyTorch asks something that says nothing again and again, each time for the whole timeout.
        silence = f"{where} answers, but not as rank 0 would: see that nothing else uses the port."
        with _at_most(timeout, silence):
            store = _meet(place, timeout)
        with _at_most(timeout, f"the {place['size']} processes met at {where}, but not all of them connect."):
            if device.type == "cuda":
                _check_cards(store, place, device)
                _join_by_nccl(store, place, device, timeout)
            else:
                _init(store, place, timeout, backend="gloo")
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the {place['size']} processes could not meet at {where} ({first_line(error)}): see that all of "
            "them run, that every node resolves the address, and that nothing else uses the port."
        ) from None
    machine.limit_threads(gather(machine.cores()))
    if debug_dir:
        debugging.introduce(debug_dir, place["rank"], device, gather)
    startup.mark("process group")
    return World(**place, device=device)


def own_device(use_cuda: bool) -> torch.device:
    """The device that `join` chooses for this process, tried, before it meets any other.

    Raises:
        UserError: as `join`.
    """
    return _device(_place(), use_cuda)


@contextmanager
def _at_most(timeout: int, error: str) -> Iterator[None]:
    """End this process with `error` if what is done within lasts much longer than the timeout."""
    watch = threading.Timer(timeout + PATIENCE_SECONDS, fail, [error])
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _meet(place: dict, timeout: int) -> dist.Store:
    """The store in which the ranks leave their addresses for each other; rank 0, or torchrun, keeps it."""
    if place["size"] == 1:
        return dist.HashStore()
    limit = timedelta(seconds=timeout)
    store, _, _ = next(dist.rendezvous("env://", place["rank"], place["size"], timeout=limit))
    return store


def _check_cards(store: dist.Store, place: dict, device: torch.device) -> None:
    """See that no rank before this one computes on the same card, which NCCL does not allow."""
    rank, own = place["rank"], machine.card(device)
    store.set(f"card of {rank}", own)
    for other in range(rank):
        if own and store.get(f"card of {other}").decode() == own:
            raise UserError(
                f"rank {rank} has the GPU of rank {other}, or a slice (MIG) of its card ({_gpus_of(place)}): "
                "start one process per GPU (--ntasks-per-node equal to --gpus-per-node), without "
                "--gpu-bind=closest, and of each card on one slice only."
            )


def _join_by_nccl(store: dist.Store, place: dict, device: torch.device, timeout: int) -> None:
    # After --timeout PyTorch would hold the GPUs for another minute, to leave a dump in the home folder.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    try:
        _init(store, place, timeout, backend="nccl", device_id=device)
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise UserError(
                f"GPU {device.index} of {platform.node()} has no memory left for NCCL: nvidia-smi shows who "
                "computes there; take another GPU."
            ) from None
        raise UserError(
            f"NCCL could not connect the {place['size']} processes ({first_line(error)}): look with "
            "`python slurm/doctor.py --job`. SITE_NETWORK_INTERFACE in slurm/site.sh chooses the network, "
            "and NCCL_DEBUG=INFO tells more."
        ) from None


def _init(store: dist.Store, place: dict, timeout: int, **how: object) -> None:
    limit = timedelta(seconds=timeout)
    dist.init_process_group(store=store, rank=place["rank"], world_size=place["size"], timeout=limit, **how)


def leave() -> None:
    """Wait for the others and close the process group. Nothing to do for one process.

    The group's threads end with its last user, such as DistributedDataParallel, and that has to be
    before Python ends: they may still have tensors to give back, and one that asks for Python's lock
    (the GIL) too late is ended by force within C++ code, which aborts a run that went well. We are the last
    user, since DistributedDataParallel would wait for the threads without giving up that lock, which they may
    wait for (PyTorch 2.4 to 2.9 at least).
    """
    if dist.is_initialized():
        dist.barrier()
        group = dist.group.WORLD
        backends = [group._get_backend(device) for device in group._device_types]
        dist.destroy_process_group()
        atexit.register(_end_threads, backends)


def _end_threads(backends: list) -> None:
    gc.collect()
    backends.clear()


def barrier() -> None:
    """Wait until every rank is here. Nothing to do for one process."""
    if dist.is_initialized():
        dist.barrier()


def sum_in_place(values: torch.Tensor) -> torch.Tensor:
    """Make `values` their sum over all ranks, and return it."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def largest(value: float, device: torch.device) -> float:
    """The largest `value` of any rank: the slowest rank's seconds, the fullest device's memory."""
    if not dist.is_initialized():
        return value
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def from_first(value: object) -> object:
    """Rank 0's `value`, on every rank; it must be picklable."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_first(action: Callable[[], object]) -> object:
    """Call `action` on rank 0 only, and return its value there, None elsewhere.

    Raises:
        Exception: what `action` raises, on rank 0; PeerError on the others then, so that none waits.
    """
    value = mistake = None
    if is_first():
        try:
            value = action()
        except Exception as error:  # whatever it is, the others have to know
            mistake = error
    if from_first(mistake is not None):
        raise mistake or PeerError("rank 0 had to stop, and tells why.")
    return value


def gather(value: object) -> list:
    """The `value` of every rank, in the order of the ranks; it must be picklable."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def count() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The rank of this process; 0 where there is one process only."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """True on rank 0, and where there is one process only."""
    return rank() == 0


def _place() -> dict:
    """Rank, sizes and launcher, from torchrun's variables, else from the srun step's, else alone."""
    env = os.environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if any(name in env for name in names):
        missing = [name for name in names if name not in env]
        if missing:
            present = ", ".join(name for name in names if name in env)
            raise UserError(
                f"{present} is set but {', '.join(missing)} is not: start the processes with torchrun or "
                f"srun, which set all of them, or run `unset {present.replace(',', '')}` for one process."
            )
        size = _number("WORLD_SIZE", 1)
        nodes = _number("GROUP_WORLD_SIZE", 1, _number("SLURM_STEP_NUM_NODES", 1, 1))
        marks = {"TORCHELASTIC_RUN_ID": "torchrun", "SUBMITIT_EXECUTOR": "submitit", "SLURM_STEP_ID": "srun"}
        launcher = next((name for mark, name in marks.items() if mark in env), "env")
        rank, local_rank = _number("RANK", 0), _number("LOCAL_RANK", 0)
    # Inside an srun step only: in the batch script SLURM_PROCID is set too, and always 0.
    elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        size, nodes = _number("SLURM_STEP_NUM_TASKS", 1), _number("SLURM_STEP_NUM_NODES", 1, 1)
        rank, local_rank, launcher = _number("SLURM_PROCID", 0), _number("SLURM_LOCALID", 0), "srun"
    else:
        rank, local_rank, size, nodes, launcher = 0, 0, 1, 1, "python"
    if rank >= size:
        raise UserError(f"rank {rank} does not fit a world of {size}: ranks count from 0 to WORLD_SIZE - 1.")
    if size > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise UserError(
            f"{size} processes were started but MASTER_ADDR and MASTER_PORT are not both set, so they cannot "
            "meet: start them with torchrun, or export both (the first node's name, and a free port)."
        )
    return {
        "rank": rank,
        "local_rank": local_rank,
        "size": size,
        "local_size": _number("LOCAL_WORLD_SIZE", 1, max(size // nodes, 1)),
        "nodes": nodes,
        "launcher": launcher,
    }


def _number(name: str, smallest: int, default: int | None = None) -> int:
    text = os.environ.get(name, default)
    try:
        number = int(text)
    except (TypeError, ValueError):
        raise UserError(f"{name} is {text!r}, which is not a whole number: unset it or correct it.") from None
    if number < smallest:
        raise UserError(f"{name} is {number}, which is less than {smallest}: unset it or correct it.")
    return number


def _device(place: dict, use_cuda: bool) -> torch.device:
    """The GPU of this process, tried; the CPU with --no-cuda, or where there is no GPU."""
    if use_cuda:
        _take_own_slice(place)
        machine.check_usable()
    if not use_cuda or not torch.cuda.is_available():
        machine.keep_freed_memory()
        if place["launcher"] == "torchrun" or os.environ.get("SUBMITIT_EXECUTOR") == "local":
            machine.pin_to_own_cores(place["local_rank"], place["local_size"])
        return torch.device("cpu")
    device = torch.device("cuda", _index(place))
    machine.try_gpu(device)
    torch.backends.cudnn.benchmark = True  # all steps have the same shapes
    return device


def _take_own_slice(place: dict) -> None:
    """Of several slices of cards (MIG) CUDA shows a process the first one only: name this rank's own."""
    slices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if slices[0].startswith("MIG-") and len(slices) > place["local_rank"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = slices[place["local_rank"]]


def _index(place: dict) -> int:
    """Which of the visible GPUs is this rank's: the local rank's, or the only one that it is shown."""
    visible, tasks = torch.cuda.device_count(), place["local_size"]
    if place["local_rank"] < visible and tasks <= visible:
        return place["local_rank"]
    executor = os.environ.get("SUBMITIT_EXECUTOR")
    by_srun = place["launcher"] == "srun" or executor == "slurm"
    # trainkit.jobs.local sets the variable, too, alike for all ranks.
    by_variable = visible == 1 and "CUDA_VISIBLE_DEVICES" in os.environ and executor != "local"
    given = machine.gpus_given()
    # By srun --gpus-per-task, say, or a wrapper of each rank. `_check_cards` finds two with the same one.
    if (by_srun or by_variable) and (given is None or tasks <= given):
        return 0
    raise UserError(
        f"rank {place['rank']} (local rank {place['local_rank']}) has no GPU of its own ({_gpus_of(place)}): "
        "start one process per GPU (--ntasks-per-node equal to --gpus-per-node), or add --no-cuda."
    )


def _gpus_of(place: dict) -> str:
    """How many GPUs the processes of this node have, and see, in words."""
    given = machine.gpus_given()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "(unset)")
    return (
        f"{place['local_size']} processes on {platform.node()}, {torch.cuda.device_count()} visible GPU(s), "
        f"CUDA_VISIBLE_DEVICES={visible}" + ("" if given is None else f", {given} given by Slurm")
    )
