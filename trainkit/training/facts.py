"""The columns of a record that every start of a training knows before its first epoch."""

import torch
from torch import nn

from trainkit.devices import build, device_name, git_commit, is_gpu
from trainkit.distributed import launchers as place
from trainkit.distributed import process_group
from trainkit.distributed.launchers import Place
from trainkit.training import identity
from trainkit.training.model import class_name
from trainkit.training.precision import precision_of


def of_start(here: Place, model: nn.Module, dataset: str) -> dict[str, object]:
    """Return the columns about this process's network, device, software and job."""
    return {
        "dataset": dataset,
        "model": class_name(model),
        "precision": precision_of(model),
        "device_name": device_name(here.device),
        "threads_per_worker": torch.get_num_threads(),
        "world_size": here.size,
        "nodes": here.nodes,
        "launcher": here.launcher,
        "script": identity.of_script(),
        "job_id": place.job_id(),
        "node_list": place.node_list(),
        "torch_version": str(torch.__version__),
        "cuda_version": build().removeprefix("CUDA ") if is_gpu(here.device) else "",
        # Of rank 0, which writes the record: all ranks at once would burden the disk that they share.
        "git_commit": git_commit() if process_group.is_rank_0() else "",
    }
