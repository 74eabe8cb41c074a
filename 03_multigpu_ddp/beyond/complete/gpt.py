"""Train a small GPT on generated text, with DistributedDataParallel or split over the ranks.

Try: torchrun --standalone --nproc-per-node=2 gpt.py
"""

import math

import gpt_data
import gpt_metrics
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp, init_device_mesh
from torch.utils.checkpoint import checkpoint

from trainkit import errors
from trainkit.config.command_line import above_0, at_least
from trainkit.config.options import MOST_IMAGES, Options, option, parse_options
from trainkit.distributed import process_group
from trainkit.distributed.launchers import DistEnv
from trainkit.distributed.process_group import destroy_distributed, init_distributed
from trainkit.errors import UserError, entrypoint
from trainkit.training.best import Best
from trainkit.training.evaluation import evaluate
from trainkit.training.precision import set_float32_precision
from trainkit.training.run import Run
from trainkit.training.sharded import Sharded, check_pytorch
from trainkit.tuning import tune_process

# Some are options of every script, with values that fit this training.
OPTIONS = {
    "layers": option(
        2,
        type=at_least(1),
        metavar="N",
        help="transformer blocks",
        shapes_training=True,
    ),
    "heads": option(
        4,
        type=at_least(1),
        metavar="N",
        help="of the attention in each block",
        shapes_training=True,
    ),
    "width": option(
        64,
        type=at_least(1),
        metavar="N",
        help="numbers for each token",
        shapes_training=True,
        column="width",
    ),
    **gpt_data.OPTIONS,
    "how": option(
        "ddp",
        choices=("ddp", "shard"),
        help="all of the network on each rank, or a share of it",
    ),
    "compile": option(
        False,
        help="have torch.compile make fewer and larger kernels",
    ),
    "checkpoint_activations": option(
        False,
        help="keep one tensor of each block, and recompute the others when they are needed",
    ),
    "precision": option(
        "fp32",
        choices=("fp32", "tf32", "bf16"),
        help="what the layers compute in; bf16 on GPUs that have it",
    ),
    "recipe": option(
        "adamw",
        choices=("adamw",),
        help="warm-up, then a cosine",
        column="recipe",
    ),
    "lr": option(
        0.003,
        type=above_0(1e6),
        metavar="X",
        help="learning rate, with --lr-scale that of batch 64",
        shapes_training=True,
    ),
    "lr_warmup_images": option(
        1024,
        type=at_least(0, MOST_IMAGES),
        metavar="N",
        help="windows over which the learning rate rises from 0",
        shapes_training=True,
        column="lr_warmup_images",
    ),
}


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
    `vocabulary`).
    """

    def __init__(
        self, vocabulary: int, context: int, width: int, layers: int, heads: int, recompute: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, recompute) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, weights in self.named_parameters():
            if weights.dim() != 2:
                continue
            std = 0.02
            # Each block adds the outputs of these two to x, and the sum should not grow with the blocks.
            if name.endswith(("mix.weight", "down.weight")):
                std = 0.02 / math.sqrt(2 * layers)
            nn.init.normal_(weights, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        # Words are read and predicted with the same vectors: one matrix for both.
        return F.linear(self.norm(x).flatten(0, 1), self.words.weight)


def loss_of(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return what the true next tokens cost, in nats, in float32 whatever the logits are."""
    return F.cross_entropy(logits.float(), targets, reduction=reduction)


def split(model: GPT, dist_env: DistEnv, precision: str) -> None:
    """Leave each rank its share of every weight. A block is put together for its own turn only."""
    mesh = init_device_mesh(dist_env.device.type, (dist_env.world_size,))
    policy = fsdp.MixedPrecisionPolicy()
    # Weights travel in bf16, and gradients are added up in float32.
    if precision == "bf16":
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)


def build_optimizer(
    opts: Options, model: nn.Module, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW, which pulls only matrices towards 0, and a warm-up, then a cosine down to a tenth."""
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


@entrypoint
def main() -> None:
    check_pytorch()
    opts = parse_options(__doc__, **OPTIONS)
    if opts.width % opts.heads:
        raise UserError(f"--width {opts.width} is not a multiple of --heads {opts.heads}: change one.")
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    set_float32_precision(opts.precision, dist_env.device)
    torch.manual_seed(opts.seed)  # the same weights on every rank

    paths = process_group.broadcast(
        process_group.on_rank_0(lambda: gpt_data.write(opts.data_dir, opts.shards))
    )
    # The first file is for the test, the others are for the training.
    train_text = gpt_data.Text(paths[1:], opts.context)
    test_text = gpt_data.Text(paths[:1], opts.context)
    train_batches = gpt_data.training(train_text, opts, dist_env)
    test_batches = gpt_data.validating(test_text, opts, dist_env)

    model = GPT(
        vocabulary=opts.vocabulary,
        context=opts.context,
        width=opts.width,
        layers=opts.layers,
        heads=opts.heads,
        recompute=opts.checkpoint_activations,
    ).to(dist_env.device)
    flops_per_window = opts.context * gpt_metrics.flops_per_token(model)
    # What is compiled for one block serves all of them. What splits a block is around it, and not compiled.
    if opts.compile:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    if opts.how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        split(model, dist_env, opts.precision)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, opts.epochs * len(train_batches))

    name = f"gpt-{opts.how}"
    if opts.checkpoint_activations:
        name += "-recomputed"
    if opts.compile:
        name += "-compiled"
    sharded = Sharded(model, optimizer) if opts.how == "shard" else None
    best_file = opts.checkpoint_dir / "best.pt" if opts.checkpoint_dir else None
    best = Best(model, sharded, best_file)
    run = Run(
        name,
        opts,
        dist_env,
        train_text,
        model,
        optimizer,
        lr_scheduler,
        extra_state={"best": best},
        sharded=sharded,
        unit="tokens",
        per_sample=opts.context,
    )
    train_loss = torch.compile(loss_of) if opts.compile else loss_of
    run.resume()  # goes on where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for tokens, targets in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            with autocast:
                loss = train_loss(model(tokens), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        tested = evaluate(model, test_batches, loss_of, autocast)
        if opts.checkpoint_dir:
            best.keep(epoch, tested.loss)
        metrics = gpt_metrics.of_epoch(run.trained, opts, dist_env, flops_per_window)
        run.end_of_epoch(epoch, tested, metrics)
        if dist_env.rank == 0:
            errors.print_line(gpt_metrics.in_one_line(metrics))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
