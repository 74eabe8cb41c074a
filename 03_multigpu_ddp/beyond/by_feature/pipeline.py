"""Train a deep network as a pipeline: each rank computes some of its layers, and passes on the output.

Try: torchrun --standalone --nproc-per-node=2 pipeline.py --micro-batches 8 --epochs 2
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from manygpus import (
    DistEnv,
    Options,
    Run,
    Sharded,
    UserError,
    at_least,
    augmentation,
    build_optimizer,
    check_divides,
    destroy_distributed,
    entrypoint,
    eval_loader,
    evaluate,
    float32_precision,
    init_distributed,
    load_dataset,
    option,
    parse_options,
    resolve_precision,
    train_loader,
    tune_process,
)
from manygpus.checkpoint.sharded import check_pytorch

BLOCKS = 8  # of the whole network, over all stages
PIXELS = 28 * 28  # of an image
CLASSES = 10


class Block(nn.Module):
    """Two linear layers with 32 x `width` neurons between them, and a shortcut. All blocks cost the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(PIXELS)
        self.up = nn.Linear(PIXELS, 32 * width)
        self.down = nn.Linear(32 * width, PIXELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    """The blocks of stage number `stage` of `stages`; the last stage also has the output layer.

    The first stage takes images, float32 (n, 1, 28, 28), the others what the stage before returns, float32
    (n, 784). The last stage returns log-probabilities, float32 (n, 10). A block keeps its number in the whole
    network in the names of its weights, so no two stages have weights of the same name.
    """

    def __init__(self, width: int, stage: int, stages: int) -> None:
        super().__init__()
        # Every rank creates all blocks and keeps its own, so a block starts with the same weights on any
        # number of ranks.
        all_blocks = [Block(width) for _ in range(BLOCKS)]
        numbers = range(stage * BLOCKS // stages, (stage + 1) * BLOCKS // stages)
        self.blocks = nn.ModuleDict({str(number): all_blocks[number] for number in numbers})
        self.head = nn.Linear(PIXELS, CLASSES) if stage == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for block in self.blocks.values():
            x = block(x)
        if self.head is None:
            return x
        return F.log_softmax(self.head(x), dim=1)


class InTurn(nn.Module):
    """All stages, one after the other; each rank gets what the last one returns. For evaluation."""

    def __init__(self, stage: nn.Module, dist_env: DistEnv) -> None:
        super().__init__()
        self.stage = stage
        self.rank = dist_env.rank
        self.last_rank = dist_env.world_size - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank > 0:
            x = x.new_empty(len(x), PIXELS)
            dist.recv(x, src=self.rank - 1)
        x = self.stage(x)
        if self.rank < self.last_rank:
            dist.send(x, dst=self.rank + 1)
            x = x.new_empty(len(x), CLASSES)
        dist.broadcast(x, src=self.last_rank)
        return x


@dataclass(frozen=True)
class PipelineOptions(Options):
    micro_batches: int = option(
        4,
        type=at_least(1),
        metavar="M",
        help="micro-batches in a batch, which follow each other through the pipeline",
    )
    precision: str = float32_precision()


@entrypoint
def main() -> None:
    check_pytorch()
    opts = parse_options(__doc__, PipelineOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(1)  # every image goes through all ranks
    check_divides(opts.batch_size, opts.micro_batches, what="micro-batches")
    if BLOCKS % dist_env.world_size:
        raise UserError(
            f"{BLOCKS} blocks do not divide evenly among {dist_env.world_size} processes: start 1, 2, 4 or 8"
        )
    if opts.batch_size < dist_env.world_size:
        raise UserError(
            f"--batch-size {opts.batch_size} is less than the {dist_env.world_size} processes: raise it."
        )
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)

    # Every rank takes every whole batch, as one process would. The first rank needs the images, and the
    # last one the labels.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    as_one_process = replace(dist_env, rank=0, world_size=1)
    train_batches = train_loader(train_set, opts, as_one_process, augmentation(opts))
    test_batches = eval_loader(test_set, opts, as_one_process)

    model = Deep(opts.width, dist_env.rank, dist_env.world_size).to(dist_env.device)
    stage = PipelineStage(
        model, stage_index=dist_env.rank, num_stages=dist_env.world_size, device=dist_env.device
    )
    pipe = ScheduleGPipe(stage, n_microbatches=opts.micro_batches, loss_fn=F.nll_loss)
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    run = Run(
        "pipeline",
        opts,
        dist_env,
        train_set,
        model,
        optimizer,
        lr_scheduler,
        gradient_accumulation_steps=opts.micro_batches,
        sharded=Sharded(model, optimizer),
    )
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            # Forward for all micro-batches, then backward for all, each as soon as it arrives from the
            # neighbour. Only the last rank computes losses, one for each micro-batch.
            micro_losses = []
            if stage.is_first:
                pipe.step(images, target=labels, losses=micro_losses)
            else:
                pipe.step(target=labels, losses=micro_losses)
            optimizer.step()
            lr_scheduler.step()
            # The run averages over all ranks, and the other ranks log 0, so the last rank logs a multiple.
            if stage.is_last:
                loss = dist_env.world_size * torch.stack(micro_losses).mean()
            else:
                loss = images.new_zeros(())
            run.log(loss=loss)
        tested = evaluate(InTurn(model, dist_env), test_batches, F.nll_loss)
        # Every rank has counted all images, and the run adds up these counts.
        run.end_of_epoch(epoch, tested._replace(samples=tested.samples // dist_env.world_size))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
