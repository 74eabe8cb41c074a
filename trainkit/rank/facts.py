"""The columns of a record that every start of a training knows before its first epoch."""

import torch
from torch import nn

from trainkit.rank import identity
from trainkit.rank.model import class_name
from trainkit.rank.precision import precision_of
from trainkit.runtime import place, process_group
from trainkit.runtime.device import build, device_name, git_commit, is_gpu
from trainkit.runtime.place import Place


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
