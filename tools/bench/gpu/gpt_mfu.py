"""What brings the GPT of stage 03 closer to the peak of one GPU: batch, loss, attention, 16-bit residuals.

Try: PYTHONPATH=. python3 tools/bench/gpu/gpt_mfu.py --out /tmp/gpt_mfu.csv

124 million weights, windows of 1,024 tokens, bf16 by autocast, fused AdamW and gradient clipping, on random
tokens. Each variant adds to those before it, unless it says otherwise. Beside the CSV, `gpt_kernels.csv` has
the kernels that take the most time in a step of each variant: which attention was chosen is seen there.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch._functorch.config
import torch.nn.functional as F
from measuring import DEVICE, Table, steps_per_s, wait
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "03_multigpu_ddp" / "beyond" / "complete"))

import gpt_metrics
import gpt_model
from gpu_peaks import peak

COLUMNS = [
    "variant", "batch", "tokens_per_s", "slowest", "fastest", "mfu_percent", "ms_per_step", "windows",
    "start_s", "peak_memory_mb", "loss", "device_name", "torch_version",
]  # fmt: skip


GPT2_SMALL = {"vocabulary": 50304, "context": 1024, "width": 768, "layers": 12, "heads": 12}
TINY = {"vocabulary": 512, "context": 32, "width": 32, "layers": 2, "heads": 2}


@dataclass(frozen=True)
class Variant:
    batch: int = 16
    head_compiled: bool = False  # the last norm, the logits and the loss as one compiled function
    bf16_residual: bool = False  # what the blocks add to is bf16, as it is in most large trainings
    attention: SDPBackend | None = None  # None: PyTorch chooses
    loss_chunks: int = 1  # logits are made, used and forgotten in so many parts
    whole: bool = False  # all of the network and the loss are compiled at once
    mode: str | None = None  # of torch.compile


BF16 = Variant(batch=64, head_compiled=True, bf16_residual=True)
CUDNN = replace(BF16, attention=SDPBackend.CUDNN_ATTENTION)
VARIANTS = {
    "as gpt.py --compile, batch 16": Variant(),
    "batch 64": Variant(batch=64),
    "head and loss compiled together": Variant(batch=64, head_compiled=True),
    "residuals in bf16": BF16,
    "cuDNN's attention": CUDNN,
    "batch 32 of that": replace(CUDNN, batch=32),
    "batch 16 of that": replace(CUDNN, batch=16),
    "flash attention in place of cuDNN's": replace(BF16, attention=SDPBackend.FLASH_ATTENTION),
    "loss in 8 chunks": replace(CUDNN, loss_chunks=8),
    "whole model compiled": replace(CUDNN, whole=True, batch=32),
    "max-autotune-no-cudagraphs": replace(CUDNN, mode="max-autotune-no-cudagraphs", batch=32),
    # To compare with "batch 16 of that", which has cuDNN's.
    "batch 16, flash attention": replace(BF16, batch=16, attention=SDPBackend.FLASH_ATTENTION),
    "batch 16, efficient attention": replace(BF16, batch=16, attention=SDPBackend.EFFICIENT_ATTENTION),
    "batch 16, math attention": replace(BF16, batch=16, attention=SDPBackend.MATH),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="names in quotes (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV to write")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a window (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a tiny network, to try this on a CPU")
    args = parser.parse_args()
    # This cache finds a graph again whichever attention `sdpa_kernel` asks for.
    torch._functorch.config.enable_autograd_cache = False
    table = Table(args.out, COLUMNS)
    kernels = Table(args.out.parent / "gpt_kernels.csv", ["variant", "kernel", "ms", "calls"], printed=False)
    for name in args.variants or VARIANTS:
        try:
            measure(name, VARIANTS[name], table, kernels, args)
        except Exception as error:  # the other variants are still to be measured
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        torch._dynamo.reset()
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def measure(name: str, variant: Variant, table: Table, kernels: Table, args: argparse.Namespace) -> None:
    """Train with one variant, and write its rows."""
    shape = GPT2_SMALL
    batch = variant.batch
    if args.small:
        shape = TINY
        batch = 8
    torch.manual_seed(1)
    network = Network(**shape, variant=variant).to(DEVICE)
    autocast = torch.autocast(DEVICE.type, dtype=torch.bfloat16)
    per_token = gpt_metrics.flops_per_token(network)
    optimizer = make_optimizer(network)
    tokens = torch.randint(0, shape["vocabulary"], (batch, shape["context"] + 1), device=DEVICE)
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].flatten()
    loss_of = compiled_loss(network, variant)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with autocast:
            loss = loss_of(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return loss

    with nullcontext() if variant.attention is None else sdpa_kernel(variant.attention):
        started = time.perf_counter()
        for _ in range(2):
            first = step()
        wait()
        start_s = time.perf_counter() - started
        tokens_of_step = batch * shape["context"]
        speeds = [tokens_of_step * speed for speed in steps_per_s(step, 3, args.seconds, 2)]
        profile_a_step(name, step, kernels)
    row = {"device_name": "CPU", "mfu_percent": None, "peak_memory_mb": None}
    if DEVICE.type == "cuda":
        device_name = torch.cuda.get_device_name()
        mfu = 100 * per_token * median(speeds) / (1e12 * peak(device_name, "bf16"))
        row = {"device_name": device_name, "mfu_percent": round(mfu, 2)}
        row["peak_memory_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
        torch.cuda.reset_peak_memory_stats()
    table.add(
        variant=name,
        batch=batch,
        tokens_per_s=round(median(speeds)),
        slowest=round(min(speeds)),
        fastest=round(max(speeds)),
        ms_per_step=round(1000 * tokens_of_step / median(speeds), 2),
        windows=len(speeds),
        start_s=round(start_s, 1),
        loss=round(first.item(), 4),
        torch_version=torch.__version__,
        **row,
    )


class Network(gpt_model.GPT):
    """The network of gpt.py, which also computes its loss."""

    def __init__(self, variant: Variant, **shape: int) -> None:
        super().__init__(**shape, residual_dtype=torch.bfloat16 if variant.bf16_residual else None)
        self.variant = variant

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, the logits of each chunk of tokens made anew in the backward pass."""
        x = x.flatten(0, 1)
        chunks = self.variant.loss_chunks
        if chunks == 1:
            return self.sum_of_losses(x, targets) / len(targets)
        parts = zip(x.chunk(chunks), targets.chunk(chunks), strict=True)
        losses = [checkpoint(self.sum_of_losses, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(targets)

    def sum_of_losses(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.float(), targets, reduction="sum")


def compiled_loss(network: Network, variant: Variant) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function from tokens and targets to the loss, compiled as the variant says."""
    kind = DEVICE.type, torch.bfloat16

    def from_hidden(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(*kind):
            return loss(network.hidden(tokens), targets)

    if variant.whole:
        loss = network.loss
        return torch.compile(from_hidden, mode=variant.mode)
    for block in network.blocks:
        block.forward = torch.compile(block.forward, mode=variant.mode)
    if variant.head_compiled:
        loss = torch.compile(network.loss, mode=variant.mode)
        return from_hidden
    loss_of_logits = torch.compile(gpt_model.loss_of)
    return lambda tokens, targets: loss_of_logits(network(tokens), targets)


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW as gpt.py has it."""
    matrices = [weights for weights in network.parameters() if weights.dim() >= 2]
    others = [weights for weights in network.parameters() if weights.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0006, betas=(0.9, 0.95), fused=True)


def profile_a_step(name: str, step: Callable[[], object], kernels: Table) -> None:
    """Write the twenty kernels that take the most time in one step."""
    if DEVICE.type == "cpu":
        return
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        wait()
    totals: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Optimizer."):
            totals.setdefault(event.name[:110], []).append(event.time_range.elapsed_us() / 1000)
    for kernel, times in sorted(totals.items(), key=lambda total: -sum(total[1]))[:20]:
        kernels.add(variant=name, kernel=kernel, ms=round(sum(times), 3), calls=len(times))


if __name__ == "__main__":
    main()
