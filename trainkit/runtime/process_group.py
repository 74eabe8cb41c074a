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

from trainkit.runtime import debugging, machine, startup
from trainkit.runtime.errors import PeerError, UserError, fail, first_line

PATIENCE_SECONDS = 20  # beyond twice --timeout, with processes that meet


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
    startup.mark("device")
    return _settled(place, device, debug_dir)


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
    what_to_do = (
        "see that all of them run, every node resolves the address, and nothing else uses the port. "
        "`python slurm/doctor.py --job` looks; SITE_NETWORK_INTERFACE in slurm/site.sh chooses the network."
    )
    unable = f"the {place['size']} processes could not meet at {where}"
    try:
        with _at_most(timeout, f"{unable} (something there is silent): {what_to_do}"):
            _meet(place, device, timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{unable} ({first_line(error)}): {what_to_do}") from None
    startup.mark("process group")
    return _settled(place, device, debug_dir)


def own_device(use_cuda: bool) -> torch.device:
    """The device that `join` chooses for this process, tried, before it meets any other.

    Raises:
        UserError: as `join`.
    """
    return _device(_place(), use_cuda)


def _settled(place: dict, device: torch.device, debug_dir: Path | None) -> World:
    machine.limit_threads(gather(machine.cores()))
    if debug_dir:
        debugging.introduce(debug_dir, place["rank"], device, gather)
    return World(**place, device=device)


@contextmanager
def _at_most(timeout: int, error: str) -> Iterator[None]:
    """End this process with `error` if what is done within lasts much longer than the timeout.

    PyTorch asks something that says nothing again and again, each time for the whole timeout.
    """
    # Ranks may come a whole timeout apart, and to connect then takes a while.
    watch = threading.Timer(2 * timeout + PATIENCE_SECONDS, fail, [error])
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _meet(place: dict, device: torch.device, timeout: timedelta) -> None:
    """Find the others by the store that rank 0, or torchrun, keeps, and make the process group."""
    rank, size = place["rank"], place["size"]
    store = dist.HashStore()
    if size > 1:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    how = {"backend": "gloo"}
    if device.type == "cuda":
        _check_cards(store, place, device)
        # After --timeout PyTorch would hold the GPUs for another minute, to leave a dump in the home folder.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        how = {"backend": "nccl", "device_id": device}
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=timeout, **how)


def _check_cards(store: dist.Store, place: dict, device: torch.device) -> None:
    """See that no rank before this one computes on the same card, which NCCL does not allow."""
    rank, own = place["rank"], machine.card(device)
    store.set(f"card of {rank}", own)
    for other in range(rank):
        if own and store.get(f"card of {other}").decode() == own:
            raise UserError(
                f"rank {rank} has the GPU of rank {other}, or a slice (MIG) of its card "
                f"({place['local_size']} processes on {platform.node()}, {torch.cuda.device_count()} visible "
                f"GPU(s), CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}): start "
                "one process per GPU (--ntasks-per-node equal to --gpus-per-node), without "
                "--gpu-bind=closest, and of each card on one slice only, or add --no-cuda."
            )


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


def broadcast(value: object) -> object:
    """Rank 0's `value`, on every rank; it must be picklable."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_rank_0(action: Callable[[], object]) -> object:
    """Call `action` on rank 0 only, and return its value there, None elsewhere.

    Raises:
        Exception: what `action` raises, on rank 0; PeerError on the others then, so that none waits.
    """
    value = mistake = None
    if is_rank_0():
        try:
            value = action()
        except Exception as error:  # whatever it is, the others have to know
            mistake = error
    if broadcast(mistake is not None):
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


def is_rank_0() -> bool:
    """True on rank 0, and where there is one process only."""
    return rank() == 0


def _place() -> dict:
    """Rank, sizes and launcher, from torchrun's variables, else from the srun step's, else alone."""
    env = os.environ
    if any(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
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
    if rank >= size or (size > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env)):
        raise UserError(
            f"rank {rank} of {size} cannot meet the others: start with torchrun, or give each process its "
            "own RANK, from 0 to WORLD_SIZE - 1, and all of them MASTER_ADDR and MASTER_PORT (the first "
            "node's name, and a free port)."
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
        number = smallest - 1
    if number < smallest:
        raise UserError(
            f"{name} is {text!r}, and no whole number from {smallest} on: start the processes with torchrun "
            "or srun, which set it, or unset RANK, WORLD_SIZE and LOCAL_RANK for one process."
        )
    return number


def _device(place: dict, use_cuda: bool) -> torch.device:
    """The GPU of this process, tried; the CPU with --no-cuda, or where there is no GPU."""
    if use_cuda:
        # Of several slices of cards (MIG) CUDA shows a process the first one only: name this rank's own.
        slices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if slices[0].startswith("MIG-") and len(slices) > place["local_rank"]:
            os.environ["CUDA_VISIBLE_DEVICES"] = slices[place["local_rank"]]
        machine.check_usable()
    if not use_cuda or not torch.cuda.is_available():
        machine.keep_freed_memory()
        if place["launcher"] == "torchrun" or os.environ.get("SUBMITIT_EXECUTOR") == "local":
            machine.pin_to_own_cores(place["local_rank"], place["local_size"])
        return torch.device("cpu")
    # Of as many as ranks, that of the local rank; else srun, say, shows each its own, or `_check_cards` finds
    # that two have the same.
    index = place["local_rank"] if torch.cuda.device_count() >= place["local_size"] else 0
    device = torch.device("cuda", index)
    machine.try_gpu(device)
    torch.backends.cudnn.benchmark = True  # all steps have the same shapes
    return device
