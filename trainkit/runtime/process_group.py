"""Join, use and leave the process group; the place and the device of this process in it."""

import atexit
import gc
import io
import os
import pickle
import platform
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401  imported within a group, it would keep that alive

from trainkit.runtime import debugging, names, place
from trainkit.runtime.device import BACKENDS, card, choose_device, cores, gpus, is_gpu, limit_threads
from trainkit.runtime.errors import PeerError, UserError, fail, first_line
from trainkit.runtime.place import Place

PIECE_BYTES = 2**26  # of a large tensor that travels
PATIENCE_SECONDS = 20  # beyond twice --timeout, for processes that do meet


def alone(use_cuda: bool, debug_dir: Path | None = None) -> Place:
    """Return the place of the only process, in the stages with one; `debug_dir` is as in `join`.

    Raises:
        UserError: if a launcher started several processes: each would train the whole model.
    """
    here = _place()
    # In a batch script this process is the whole job; in an srun step only part of the step.
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1") if here.launcher == "python" else str(here.nodes)
    if here.size > 1 or nodes != "1":
        raise UserError(
            f"this stage is one process on one node, but this job has {here.size} process(es) "
            f"on {nodes} node(s): ask for one task (--nodes=1 --ntasks=1), or use stage 03, "
            "03_multigpu_ddp/mnist_ddp.py."
        )
    here = _with_device(here, use_cuda, debug_dir, every=60)
    return _settled(here, debug_dir)


def join(use_cuda: bool, timeout: int, debug_dir: Path | None = None) -> Place:
    """Meet the other processes: nccl between GPUs, gloo between CPUs.

    A rank that waits for a peer longer than `timeout` seconds gives up, so a job with a lost or hanging
    rank ends instead of holding its GPUs until the time limit. With a `debug_dir` every rank
    logs where it is (see debugging.py).

    Raises:
        UserError: if the environment contradicts itself, PyTorch cannot use the GPUs, two ranks have one GPU,
            or the ranks, or NCCL, cannot connect.
    """
    # A rank logs where it is twice before the others give up on it.
    here = _with_device(_place(), use_cuda, debug_dir, every=timeout / 2)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    what_to_do = (
        "check that all of them run, every node resolves the address, and nothing else uses the port. "
        "`python slurm/doctor.py --job` tests it; SITE_NETWORK_INTERFACE in slurm/site.sh sets the network."
    )
    unable = f"the {here.size} processes could not meet at {where}"
    # PyTorch asks a silent server again and again, each time for the whole timeout. Ranks may
    # arrive a whole timeout apart, and connecting then takes a while.
    silent = f"{unable} (something there is silent): {what_to_do}"
    watch = threading.Timer(2 * timeout + PATIENCE_SECONDS, fail, [silent])
    watch.daemon = True
    watch.start()
    try:
        _meet(here, timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        of_names = None
        if here.nodes > 1:
            of_names = names.problem(os.environ["MASTER_ADDR"], gloo=not is_gpu(here.device))
        if of_names:
            what_to_do = f"{of_names.what}: {of_names.fix}."
        raise UserError(f"{unable} ({first_line(error)}): {what_to_do}") from None
    finally:
        watch.cancel()
    return _settled(here, debug_dir)


def joined(device: torch.device) -> Place:
    """Return the place of this process in a process group that other code has made.

    Raises:
        UserError: if a launcher started several processes, and there is no group yet, or one for each.
    """
    try:
        here = place.read()
    except ValueError as error:
        if count() == 1:
            raise UserError(str(error)) from None
        here = Place()  # they have met in another way, and the group knows who they are
    if here.size > 1 and not dist.is_initialized():
        raise UserError(
            f"this is one of {here.size} processes, and there is no process group yet: call "
            "torch.distributed.init_process_group first, or what calls it for you, such as Accelerator()."
        )
    if here.size > 1 and count() == 1:
        raise UserError(
            f"this is one of {here.size} processes, and its process group has only itself: each would train "
            "alone. Take rank and world size from the variables RANK and WORLD_SIZE."
        )
    nodes = max(here.nodes, len({*gather(platform.node())}))
    return replace(here, rank=rank(), size=count(), nodes=nodes, device=device)


def _place() -> Place:
    try:
        return place.read()
    except ValueError as error:
        raise UserError(str(error)) from None


def _with_device(here: Place, use_cuda: bool, debug_dir: Path | None, every: float) -> Place:
    if debug_dir:
        debugging.begin(debug_dir, here.rank, here.size, every)
    return replace(here, device=choose_device(here, use_cuda))


def _settled(here: Place, debug_dir: Path | None) -> Place:
    limit_threads(gather(cores()))
    if debug_dir:
        debugging.introduce(debug_dir, here.rank, here.device, gather)
    return here


def _meet(here: Place, timeout: timedelta) -> None:
    """Find the others through the store of rank 0, or torchrun, and make the process group."""
    store = dist.HashStore()
    if here.size > 1:
        store, _, _ = next(dist.rendezvous("env://", here.rank, here.size, timeout=timeout))
    how = {"backend": BACKENDS[here.device.type]}
    if is_gpu(here.device):
        # NCCL does not allow two ranks on the same card.
        own = card(here.device)
        store.set(f"card of {here.rank}", own)
        for other in range(here.rank) if own else ():
            if store.get(f"card of {other}").decode() == own:
                raise UserError(
                    f"rank {here.rank} has the GPU of rank {other}, or a slice (MIG) of its card "
                    f"({here.local_size} processes on {platform.node()}, {len(gpus())} visible GPU(s), "
                    f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}): start one "
                    "process per GPU (--ntasks-per-node equal to --gpus-per-node), without "
                    "--gpu-bind=closest, and on one slice of each card only, or add --no-cuda."
                )
        # After --timeout PyTorch would hold the GPUs for another minute, to write a dump to the home folder.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        how["device_id"] = here.device
    dist.init_process_group(store=store, rank=here.rank, world_size=here.size, timeout=timeout, **how)


def leave() -> None:
    """Wait for the others and close the process group; do nothing for one process.

    The group's threads end with its last user, such as DistributedDataParallel, and that has to be before
    Python ends: they may still have tensors to release, and a thread that asks for Python's lock (the GIL)
    too late is killed within C++ code, which aborts a run that went well. This function is the last user, as
    DistributedDataParallel would wait for the threads without releasing that lock, which they may need
    (PyTorch 2.4 to 2.9 at least).
    """
    if dist.is_initialized():
        dist.barrier()
        group = dist.group.WORLD
        backends = [group._get_backend(device) for device in group._device_types]
        dist.destroy_process_group()
        atexit.register(backends.clear)
        atexit.register(gc.collect)  # the last comes first


def barrier() -> None:
    """Wait until every rank has arrived; do nothing for one process."""
    if dist.is_initialized():
        dist.barrier()


def sum_in_place(values: torch.Tensor) -> torch.Tensor:
    """Replace `values` by their sum over all ranks, and return it."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def broadcast(value: object, source: int = 0) -> object:
    """Return the `value` of rank `source` on every rank; it must be picklable.

    Its tensors in the CPU's memory travel one by one: each rank needs no more memory than they take.
    """
    if not dist.is_initialized():
        return value
    packed, tensors = _without_tensors(value) if rank() == source else (b"", [])
    travels = [packed, [(one.shape, one.stride(), one.dtype) for one in tensors]]
    dist.broadcast_object_list(travels, src=source)
    packed, layouts = travels
    if rank() != source:
        tensors = [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in layouts]
    for tensor in tensors:
        _broadcast_in_place(tensor, source)
    return value if rank() == source else _WithTensors(packed, tensors).load()


class _WithoutTensors(pickle.Pickler):
    """Leaves a number in the place of each tensor of the CPU, and keeps these in `tensors`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: object) -> int | None:
        plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided
        if not plain or value.requires_grad or value.is_quantized or not value.numel():
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _WithTensors(pickle.Unpickler):
    def __init__(self, packed: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(packed))
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def _without_tensors(value: object) -> tuple[bytes, list[torch.Tensor]]:
    pickler = _WithoutTensors(packed := io.BytesIO())
    pickler.dump(value)
    # Without gaps in memory, as parts of others have them; a layout such as channels_last stays.
    dense = [
        one if torch.empty_like(one).stride() == one.stride() else one.clone() for one in pickler.tensors
    ]
    return packed.getvalue(), dense


def _broadcast_in_place(tensor: torch.Tensor, source: int) -> None:
    """Send a tensor of the CPU, which has no gaps, through the devices that this process group connects."""
    devices = dist.group.WORLD._device_types
    device = "cpu" if torch.device("cpu") in devices else devices[0]
    memory = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for piece in memory.split(PIECE_BYTES):
        travels = piece.to(device)
        dist.broadcast(travels, src=source)
        if travels is not piece:
            piece.copy_(travels)


def on_rank_0(action: Callable[[], object]) -> object:
    """Call `action` on rank 0 only; return its value there and None elsewhere.

    Raises:
        Exception: what `action` raises, on rank 0; the others then raise a PeerError, so none waits.
    """
    value = mistake = None
    if is_rank_0():
        try:
            value = action()
        except Exception as error:  # of any kind: the others have to know
            mistake = error
    if broadcast(mistake is not None):
        raise mistake or PeerError("rank 0 had to stop: see its error.")
    return value


def gather(value: object) -> list:
    """Return the `value` of every rank, in rank order; it must be picklable."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def count() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 if it is the only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_rank_0() -> bool:
    """Return whether this is rank 0, or the only process."""
    return rank() == 0
