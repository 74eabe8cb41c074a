"""The network of gpt.py and gpt_fsdp.py, its loss and its optimizer, and the options of both scripts."""

import math
from dataclasses import dataclass

import gpt_data
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from manygpus import Options, UserError, above_0, at_least, option
from manygpus.config.options import MOST_IMAGES


@dataclass(frozen=True)
class GPTOptions(Options):
    """Every script has some of these options; here they have values that fit this training."""

    layers: int = option(
        2,
        type=at_least(1),
        metavar="N",
        help="transformer blocks",
        shapes_training=True,
    )
    heads: int = option(
        4,
        type=at_least(1),
        metavar="N",
        help="attention heads in each block",
        shapes_training=True,
    )
    width: int = option(
        64,
        type=at_least(1),
        metavar="N",
        help="numbers for each token",
        shapes_training=True,
        column="width",
    )
    context: int = option(
        64,
        type=at_least(2, 2**16),
        metavar="T",
        help="tokens that the network sees at a time",
        shapes_training=True,
    )
    vocabulary: int = option(
        128,
        type=at_least(len(gpt_data.WORDS), 2**16),
        metavar="N",
        help="size of the vocabulary; GPT-2 has 50304",
        shapes_training=True,
    )
    shards: int = option(
        2,
        type=at_least(1, 10_000),
        metavar="N",
        help=f"files of {gpt_data.SHARD_TOKENS:,} tokens to train on",
        shapes_training=True,
    )
    loader: str = option(
        "mapped",
        choices=("mapped",),
        help="tokens are read from disk",
        column="loader",
    )
    epochs: int = option(
        3,
        type=at_least(1),
        metavar="N",
        help="passes over the text, or over --train-size windows",
        shapes_training=True,
    )
    compile: bool = option(
        False,
        help="have torch.compile make fewer and larger kernels",
    )
    checkpoint_activations: bool = option(
        False,
        help="keep one tensor of each block, and recompute the others when they are needed",
    )
    precision: str = option(
        "fp32",
        choices=("fp32", "tf32", "bf16"),
        help="what the layers compute in; bf16 on GPUs that have it",
    )
    bf16_residuals: bool = option(
        False,
        help="with --precision bf16: the residual stream is also bf16, as it always is in gpt_fsdp.py",
        shapes_training=True,
    )
    recipe: str = option(
        "adamw",
        choices=("adamw",),
        help="AdamW, with a warm-up and then a cosine schedule",
        column="recipe",
    )
    lr: float = option(
        0.003,
        type=above_0(1e6),
        metavar="X",
        help="learning rate, with --lr-scale that of batch 64",
        shapes_training=True,
    )
    lr_warmup_images: int = option(
        1024,
        type=at_least(0, MOST_IMAGES),
        metavar="N",
        help="windows over which the learning rate rises from 0",
        shapes_training=True,
        column="lr_warmup_images",
    )
    not_used = {"gamma"}


class Block(nn.Module):
    """Each token looks back at those before it, then works by itself; (n, t, width) to (n, t, width)."""

    def __init__(self, width: int, heads: int, recompute: bool) -> None:
        super().__init__()
        self.heads = heads
        self.recompute = recompute
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Keeps x only; the backward pass computes the rest again.
        if self.recompute and self.training:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        # From (n, t, 3 * width) to three tensors (n, heads, t, width / heads).
        query_key_value = self.query_key_value(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = query_key_value.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer in the shape of GPT-2, without biases and dropout.

    Takes tokens, int64 (n, t), t at most `context`; returns the logits of what follows each, (n * t,
    `vocabulary`). The blocks add to numbers of the type `residual_dtype`, by default that of the weights.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        layers: int,
        heads: int,
        recompute: bool = False,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.residual_dtype = residual_dtype
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, recompute) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, weights in self.named_parameters():
            if weights.dim() != 2:
                continue
            std = 0.02
            # Each block adds the outputs of these two to x, and more blocks should not make the sum larger.
            if name.endswith(("mix.weight", "down.weight")):
                std = 0.02 / math.sqrt(2 * layers)
            nn.init.normal_(weights, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Words are read and predicted with the same vectors: one matrix for both.
        return F.linear(self.norm(self.hidden(tokens)).flatten(0, 1), self.words.weight)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the last block gives, (n, t, width)."""
        x = self.words(tokens) + self.positions[: tokens.shape[1]]
        if self.residual_dtype is not None:
            x = x.to(self.residual_dtype)
        for block in self.blocks:
            x = block(x)
        return x


def build_model(opts: GPTOptions) -> GPT:
    """Return the network that the options describe, on the current default device.

    Raises:
        UserError: if the heads cannot share the width equally, or only the residuals were in bf16.
    """
    if opts.width % opts.heads:
        raise UserError(f"--width {opts.width} is not a multiple of --heads {opts.heads}: change one.")
    if opts.bf16_residuals and opts.precision != "bf16":
        raise UserError("--bf16-residuals needs --precision bf16: add that, or leave it out.")
    return GPT(
        vocabulary=opts.vocabulary,
        context=opts.context,
        width=opts.width,
        layers=opts.layers,
        heads=opts.heads,
        recompute=opts.checkpoint_activations,
        residual_dtype=torch.bfloat16 if opts.bf16_residuals else None,
    )


def compile_blocks(model: GPT) -> None:
    """Compile each block. PyTorch compiles once, and uses the result for all blocks.

    What DistributedDataParallel and fully_shard do happens around the blocks, and is not compiled.
    """
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


def loss_of(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the cost of the true next tokens, in nats and in float32, whatever the type of the logits."""
    return F.cross_entropy(logits.float(), targets, reduction=reduction)


def build_optimizer(
    opts: GPTOptions, model: nn.Module, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW, with weight decay for matrices only, and a warm-up, then a cosine down to a tenth."""
    matrices = [weights for weights in model.parameters() if weights.dim() >= 2]
    vectors = [weights for weights in model.parameters() if weights.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=opts.scaled_lr, betas=(0.9, 0.95), fused=True)
    warmup_steps = opts.lr_warmup_images // opts.batch_size

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def run_name(name: str, opts: GPTOptions) -> str:
    """Return the name for the record: that of the script, and the options that change only the speed."""
    if opts.checkpoint_activations:
        name += "-recomputed"
    if opts.compile:
        name += "-compiled"
    return name
