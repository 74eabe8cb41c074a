"""A batch in micro-batches with DistributedDataParallel. The function `step` has two mistakes.

Try: torchrun --standalone --nproc-per-node=2 exercises/11_no_sync/mine/accumulate.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PARTS = 4


def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: tuple, parts: int) -> None:
    """Make one step of the optimizer with this rank's shard of a batch, in `parts` micro-batches."""
    images, labels = batch
    optimizer.zero_grad()
    for inputs, targets in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
    optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    for parts in (1, PARTS):
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(20, 10))
        all_reduces = count_all_reduces(model)
        images = torch.randn(64, 20)
        labels = torch.randint(10, (64,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, (images[rank::size], labels[rank::size]), parts)
        if rank == 0:
            print(f"{parts} part(s): {len(all_reduces)} all-reduce(s),", end=" ")
            print(f"size of the gradient {model.module.weight.grad.norm():.4f}")
    dist.destroy_process_group()


def count_all_reduces(model: DistributedDataParallel) -> list[int]:
    """Return a list that gets an entry for each all-reduce of gradients: the number of its elements."""
    all_reduces = []

    def average(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        all_reduces.append(bucket.buffer().numel())
        numbers = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(numbers, async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, average)
    return all_reduces


if __name__ == "__main__":
    main()
