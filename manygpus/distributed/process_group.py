"""Make, use and destroy the process group; which process of it this one is, and its device."""

import atexit
import gc
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported within a group, it would keep that alive

from manygpus import launchers, project
from manygpus.devices import accelerator_of, card, choose_device, gpus
from manygpus.distributed import debugging, meeting_problems
from manygpus.distributed.host_names import Problem
from manygpus.distributed.meeting_problems import DIFFERENT_PORT, DOCTOR
from manygpus.errors import PeerError, UserError, explain, fail, first_line
from manygpus.launchers import DistEnv

# What processes that do meet may need beyond twice --timeout.
PATIENCE_SECONDS = 20
# Between two entries of the log of where this process is, if it is the only one.
LOG_INTERVAL_SECONDS = 60


explain(
    "appears not to match sizes",
    "the ranks have networks of different sizes: start all of them with the same options.",
)
explain(
    r"Parameter.* which did not receive grad for rank \d+: .*",
    "the last step left out some of the network, and DistributedDataParallel waits for its gradients "
    "({found}; TORCH_DISTRIBUTED_DEBUG=INFO names them): use all of it in every step, or see "
    "03_multigpu_ddp/beyond/by_feature/unused.py.",
)


def init_single_process(*, use_gpu: bool, debug_dir: Path | None = None) -> DistEnv:
    """Return the only process, in the stages with one; `debug_dir` is as in `init_distributed`.

    Raises:
        UserError: if a launcher started several processes: each would train the whole model.
    """
    dist_env = _read_env()
    # In a batch script this process is the whole job; in an srun step only part of the step.
    nodes = str(dist_env.num_nodes)
    if dist_env.launcher == "python":
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if dist_env.world_size > 1 or nodes != "1":
        raise UserError(
            f"this stage is one process on one node, but this job has {dist_env.world_size} process(es) "
            f"on {nodes} node(s): ask for one task (--nodes=1 --ntasks=1), or use stage 03, "
            "03_multigpu_ddp/mnist_ddp.py."
        )
    dist_env = _with_device(dist_env, use_gpu, debug_dir, every=LOG_INTERVAL_SECONDS)
    _introduce(dist_env, debug_dir)
    return dist_env


def init_distributed(*, use_gpu: bool, timeout_seconds: int, debug_dir: Path | None = None) -> DistEnv:
    """Meet the other processes: nccl between GPUs, gloo between CPUs.

    A rank that waits for a peer longer than `timeout_seconds` gives up, so a job with a lost or hanging
    rank ends instead of holding its GPUs until the time limit. With a `debug_dir` every rank
    logs where it is (see debugging.py).

    Raises:
        UserError: if the environment contradicts itself, PyTorch cannot use the GPUs, two ranks have one GPU,
            or the ranks, or NCCL, cannot connect.
    """
    # A rank logs where it is twice before the others give up on it.
    dist_env = _with_device(_read_env(), use_gpu, debug_dir, every=timeout_seconds / 2)
    _meet(dist_env, timedelta(seconds=timeout_seconds))
    if not launchers.launcher_of().tells_num_nodes:
        nodes = gather(launchers.node())
        dist_env = replace(dist_env, num_nodes=len({*nodes}), local_world_size=nodes.count(launchers.node()))
    _introduce(dist_env, debug_dir)
    return dist_env


def read_distributed(device: torch.device) -> DistEnv:
    """Return which process this is, in a process group that other code has made.

    Raises:
        UserError: if a launcher started several processes, and there is no group yet, or one for each.
    """
    try:
        dist_env = launchers.read()
    except ValueError as error:
        if count() == 1:
            raise UserError(str(error)) from None
        dist_env = DistEnv()  # they have met in another way, and the group knows who they are
    if dist_env.world_size > 1 and not dist.is_initialized():
        raise UserError(
            f"this is one of {dist_env.world_size} processes, and there is no process group yet: call "
            "torch.distributed.init_process_group first, or what calls it for you, such as Accelerator()."
        )
    if dist_env.world_size > 1 and count() == 1:
        raise UserError(
            f"this is one of {dist_env.world_size} processes, and its process group has only itself: each "
            "would train alone. Take rank and world size from the variables RANK and WORLD_SIZE."
        )
    nodes = max(dist_env.num_nodes, len({*gather(platform.node())}))
    return replace(dist_env, rank=rank(), world_size=count(), num_nodes=nodes, device=device)


def _read_env() -> DistEnv:
    try:
        return launchers.read()
    except ValueError as error:
        raise UserError(str(error)) from None


def _with_device(dist_env: DistEnv, use_gpu: bool, debug_dir: Path | None, every: float) -> DistEnv:
    if debug_dir:
        debugging.begin(debug_dir, dist_env.rank, dist_env.world_size, every)
    return replace(dist_env, device=choose_device(dist_env, use_gpu))


def _introduce(dist_env: DistEnv, debug_dir: Path | None) -> None:
    if debug_dir:
        debugging.introduce(debug_dir, dist_env.rank, dist_env.device, gather)


def _meet(dist_env: DistEnv, timeout: timedelta) -> None:
    """Find the others through the store of rank 0, or torchrun, and make the process group."""
    accelerator = accelerator_of(dist_env.device)
    own_card = card(dist_env.device)
    store = dist.HashStore()
    if dist_env.world_size > 1:
        store = _reach_store(dist_env, timeout)
        _await_all(store, dist_env, own_card, timeout)
    _refuse_shared_card(store, dist_env, own_card)
    unable = "the ranks could not connect to each other"
    site_file = project.site_name()
    what_to_do = f"set SITE_NETWORK_INTERFACE in {site_file} to the network between the nodes; {DOCTOR}."
    with _at_most(timeout, f"{unable} (no answer): {what_to_do}"):
        try:
            dist.init_process_group(
                backend=accelerator.backend,
                store=store,
                rank=dist_env.rank,
                world_size=dist_env.world_size,
                timeout=timeout,
                **accelerator.group_settings(dist_env.device),
            )
        except (RuntimeError, ValueError) as error:
            cause = meeting_problems.not_connected(
                gloo=accelerator.backend == "gloo", nodes=dist_env.num_nodes
            )
            if cause:
                raise UserError(f"{unable}: {cause.what}: {cause.fix}.") from None
            raise UserError(f"{unable} ({first_line(error)}): {what_to_do}") from None


def _reach_store(dist_env: DistEnv, timeout: timedelta) -> dist.Store:
    """Return the store that rank 0, or torchrun, opens for all ranks.

    Raises:
        UserError: if it cannot be reached, or opened.
    """
    silent = Problem("what answers there says nothing: another program has the port", DIFFERENT_PORT)
    # PyTorch asks a silent server again and again, each time for the whole timeout.
    with _at_most(timeout, str(_could_not_meet(dist_env, silent))):
        try:
            # Of 1 process, so that rank 0 does not wait here for the others: PyTorch would tell how many
            # have not come, and not which.
            store, _, _ = next(dist.rendezvous("env://", dist_env.rank, 1, timeout=timeout))
        except ValueError as error:
            cause = Problem(first_line(error), "correct MASTER_PORT")
            raise _could_not_meet(dist_env, cause) from None
        except RuntimeError as error:
            master = os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
            cause = meeting_problems.no_store(master, port, opens_it=dist_env.rank == 0, error=error)
            raise _could_not_meet(dist_env, cause) from None
    return store


def _await_all(store: dist.Store, dist_env: DistEnv, own_card: str, timeout: timedelta) -> None:
    """Wait until all ranks of this training have come to the store, each with the name of its card.

    Raises:
        UserError: if one does not come, or the store is of another training.
        PeerError: if rank 0 has not waited as long as this rank.
    """
    keys = {rank: _roll_key(rank) for rank in range(dist_env.world_size)}
    if dist_env.rank == 0:
        store.set("training", _training(dist_env))
    try:
        _refuse_foreign(store, dist_env, timeout)
        store.set(keys[dist_env.rank], own_card)
        store.wait(list(keys.values()), timeout)
    except RuntimeError:
        try:
            missing = [rank for rank, key in keys.items() if rank != dist_env.rank and not store.check([key])]
        except RuntimeError:  # the store is gone, with rank 0
            raise PeerError("rank 0 has left before all ranks had come: see its error.") from None
        raise _could_not_meet(dist_env, meeting_problems.missing(missing)) from None


def _refuse_foreign(store: dist.Store, dist_env: DistEnv, timeout: timedelta) -> None:
    """Raise a UserError if the store is not that of this training: rank 0 says there which it is."""
    training = _training(dist_env)
    try:
        store.wait(["training"], timeout)
    except RuntimeError:
        if launchers.launcher_of().opens_store:
            cause = meeting_problems.missing([0])
        else:
            cause = meeting_problems.foreign(training=training, other="one that does not use manygpus")
        raise _could_not_meet(dist_env, cause) from None
    other = store.get("training").decode()
    if other != training:
        raise _could_not_meet(dist_env, meeting_problems.foreign(training=training, other=other))


def _roll_key(rank: int) -> str:
    """Return the key at which a rank leaves the name of its card ("" without one) when it has come."""
    return f"card of {rank}"


def _training(dist_env: DistEnv) -> str:
    """Return words by which the ranks of one training know each other; they are the same on all of them."""
    words = [launchers.launcher_of().training_id(), f"{dist_env.world_size} processes"]
    return ", ".join(filter(None, words))


def _refuse_shared_card(store: dist.Store, dist_env: DistEnv, own_card: str) -> None:
    """Raise a UserError if another rank has the same card, which NCCL does not allow."""
    if not own_card:
        return
    for other in range(dist_env.rank):
        if store.get(_roll_key(other)).decode() == own_card:
            raise UserError(
                f"rank {dist_env.rank} has the GPU of rank {other}, or a slice (MIG) of its card "
                f"({dist_env.local_world_size} processes on {platform.node()}, {len(gpus())} visible GPU(s), "
                f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}): start one "
                "process per GPU (--ntasks-per-node equal to --gpus-per-node), without "
                "--gpu-bind=closest, and on one slice of each card only, or add --no-cuda."
            )


@contextmanager
def _at_most(timeout: timedelta, sentence: str) -> Iterator[None]:
    """End this process with a sentence if what it does takes much longer than PyTorch's own timeout.

    Ranks may arrive a whole timeout apart, and connecting then takes a while.
    """
    watch = threading.Timer(2 * timeout.total_seconds() + PATIENCE_SECONDS, fail, [sentence])
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _could_not_meet(dist_env: DistEnv, cause: Problem) -> UserError:
    unable = f"the {dist_env.world_size} processes could not meet at {_store_address()}"
    return UserError(f"{unable}: {cause.what}: {cause.fix}.")


def _store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def destroy_distributed() -> None:
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
    """Return the `value` of rank `source` on every rank; it must be picklable."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


def on_rank_0(action: Callable[[], object]) -> object:
    """Call `action` on rank 0 only; return its value there and None elsewhere.

    Raises:
        Exception: what `action` raises, on rank 0; the others then raise a PeerError, so none waits.
    """
    value = None
    own_error = None
    if is_rank_0():
        try:
            value = action()
        except Exception as error:  # of any kind: the others have to know
            own_error = error
    failed = broadcast(own_error is not None)
    if own_error is not None:
        raise own_error
    if failed:
        raise PeerError("rank 0 had to stop: see its error.")
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
