"""What two ranks hold of our network with DDP, and with sharded data parallel: a line of JSON."""

import json

import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from trainkit.rank.model import Net
from trainkit.workshop.ranks import in_ranks


def of_ddp(rank: int, size: int) -> tuple[int, str]:
    """The bytes of the weights of a rank, and the sizes of its buckets."""
    model = torch.nn.parallel.DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    for _ in range(3):  # after the first step the buckets are made anew
        model(torch.rand(4, 1, 28, 28)).sum().backward()
    held = sum(weights.untyped_storage().nbytes() for weights in model.parameters())
    return held, model._get_ddp_logging_data()["rebuilt_bucket_sizes"]


def of_sharding(rank: int, size: int) -> tuple[int, int, int]:
    """The bytes of the weights, of the gradients and of the optimizer's state of a rank."""
    model, mesh = Net(), init_device_mesh("cpu", (size,))
    for part in (model.conv1, model.conv2, model.fc1, model.fc2, model):
        fsdp.fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 1, 28, 28)).sum().backward()
    optimizer.step()
    state = [states[name] for states in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    tensors = (model.parameters(), (weights.grad for weights in model.parameters()), state)
    return tuple(sum(4 * tensor.to_local().numel() for tensor in kind) for kind in tensors)


if __name__ == "__main__":
    print(json.dumps([in_ranks(of_ddp), hasattr(fsdp, "fully_shard") and in_ranks(of_sharding)]))
