"""What a record has of this process: its network, device, software and job; in each epoch its devices."""

import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from manygpus import frozen_code, launchers
from manygpus.devices import accelerator_of, device_name, devices_in_use, peak_memory_mb
from manygpus.distributed import process_group
from manygpus.launchers import DistEnv
from manygpus.network import training_identity
from manygpus.network.model import class_name
from manygpus.record.records import Row
from manygpus.training.precision import precision_of


def of_start(dist_env: DistEnv, model: nn.Module, dataset: str, precision: str) -> Row:
    """Return the columns that every start of a training knows before its first epoch."""
    code = frozen_code.running()
    return {
        "dataset": dataset,
        "model": class_name(model),
        "precision": precision_of(model, precision),
        "device_name": device_name(dist_env.device),
        "threads_per_worker": torch.get_num_threads(),
        "world_size": dist_env.world_size,
        "nodes": dist_env.num_nodes,
        "launcher": dist_env.launcher,
        "script": training_identity.of_script(),
        "job_id": launchers.job_id(),
        "node_list": launchers.node_list(),
        "torch_version": str(torch.__version__),
        "cuda_version": accelerator_of(dist_env.device).version(),
        # Of rank 0, which writes the record: all ranks at once would burden the disk that they share.
        "git_commit": git_commit() if process_group.is_rank_0() else "",
        "changed_files": code.changed_files if code else 0,
        "frozen_code": str(code.folder) if code else "",
    }


def git_commit() -> str:
    """Return the commit of the running script's repository, with "-dirty" if that has changes.

    It is "" for a script that is in no repository. A notebook has no script; it gets the commit of this one.
    """
    code = frozen_code.running()
    if code:
        # A copy is in no repository, unless its job's folder is in another one.
        return code.commit
    script = getattr(sys.modules["__main__"], "__file__", None)
    command = ["git", "describe", "--always", "--dirty"]
    with suppress(OSError, subprocess.TimeoutExpired):  # there is no git, or a disk that hangs
        done = subprocess.run(
            command,
            cwd=Path(script or __file__).resolve().parent,
            capture_output=True,
            errors="replace",
            timeout=30,
        )
        commit = done.stdout.strip().rpartition("\n")[2]  # of a git that also says other things
        if re.fullmatch(r"[\w.+-]{1,100}", commit):
            return commit
    return ""


def rows_of_ranks(epoch: int, device: torch.device, own_seconds: float, data_seconds: float) -> list[Row]:
    """Return the row of each device of every rank, with the columns of `RANK_COLUMNS`; every rank calls it.

    Args:
        own_seconds: how long this rank worked by itself in the epoch, without waiting for others; NaN if
            unknown.
        data_seconds: how long this rank waited for its batches; NaN if unknown.
    """
    rows = [
        {
            "epoch": epoch,
            "rank": process_group.rank(),
            "host": platform.node(),
            "device": str(device_in_use),
            "device_name": device_name(device_in_use),
            "own_seconds": own_seconds,
            "data_seconds": data_seconds,
            "peak_memory_mb": peak_memory_mb(device_in_use),
        }
        for device_in_use in devices_in_use(device)
    ]
    return [row for rows_of_rank in process_group.gather(rows) for row in rows_of_rank]
