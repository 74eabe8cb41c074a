"""Train a small GPT with DDP, and say what each rank keeps. Only `shard` needs a change.

Try: torchrun --standalone --nproc-per-node=2 exercises/18_fsdp/mine/split.py
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, BLOCKS, CONTEXT = 1024, 128, 4, 16
BATCH = 8  # sequences of a step, of all ranks together
RUNS = Path(__file__).parent / "runs"  # what each run has measured, for the check


class GPT(nn.Module):
    """792,064 weights, most of them in four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def shard(model: GPT) -> nn.Module:
    """Return the network, of which each rank keeps its shard."""
    return DistributedDataParallel(model)


def train(model: nn.Module, tokens: torch.Tensor, steps: int) -> tuple[list[float], dict[str, float]]:
    """Train on this rank's sequences (n, CONTEXT + 1); return the losses and the MB that this rank keeps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, kept(model, optimizer)


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the MB of this rank's weights, gradients and optimizer state."""
    weights = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    parts = {"weights": weights, "gradients": [weight.grad for weight in weights], "AdamW": states}
    return {name: sum(local(tensor).nbytes for tensor in tensors) / 1e6 for name, tensors in parts.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sequences(rank: int, size: int) -> torch.Tensor:
    """Return this rank's shard of the sequences of a step."""
    random = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=random)[rank::size]


def main() -> None:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = shard(GPT().to(device))
    losses, parts = train(model, sequences(rank, size).to(device), steps=20)
    means = torch.tensor(losses, device=device) / size
    dist.all_reduce(means)
    if rank == 0:
        sharded = sum(isinstance(module, FSDPModule) for module in model.modules())
        measured = {"losses": means.tolist(), "megabytes": sum(parts.values()), "sharded_modules": sharded}
        RUNS.mkdir(exist_ok=True)
        (RUNS / f"{size}-ranks.json").write_text(json.dumps(measured))
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}. Rank 0 of {size} keeps:")
        for name, megabytes in parts.items():
            print(f"  {name:9} {megabytes:5.1f} MB")
        print(f"  together  {sum(parts.values()):5.1f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
