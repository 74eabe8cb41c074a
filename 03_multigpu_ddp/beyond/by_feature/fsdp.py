"""Train the classic MNIST network with its weights, gradients and optimizer split over the ranks (FSDP).

Try: torchrun --standalone --nproc-per-node=2 fsdp.py --epochs 2
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from manygpus import (
    DistEnv,
    Net,
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
    errors,
    eval_loader,
    evaluate,
    init_distributed,
    load_dataset,
    option,
    parse_options,
    resolve_precision,
    train_loader,
    tune_process,
)
from manygpus.checkpoint.sharded import check_pytorch
from manygpus.distributed import process_group
from manygpus.training.kept_memory import kept_bytes


@dataclass(frozen=True)
class FSDPOptions(Options):
    how: str = option(
        "shard",
        choices=("shard", "ddp"),
        help="each rank has a shard of the network, or all of it",
    )
    replicas: int = option(
        1,
        type=at_least(1),
        metavar="R",
        help="groups of ranks that each hold the network (HSDP), such as one per node",
    )


@entrypoint
def main() -> None:
    check_pytorch()
    opts = parse_options(__doc__, FSDPOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    check_divides(dist_env.world_size, opts.replicas, "replicas", option="the number of ranks")
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed + dist_env.rank)  # different dropout on each rank; rank 0's weights go to all

    # Every rank has all images, and takes its own shard of every batch.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)
    # All ranks take part in every forward pass, so every rank needs the same number of test steps.
    test_steps_of_ranks = process_group.gather(len(test_batches))
    if len(set(test_steps_of_ranks)) > 1:
        raise UserError(
            "the ranks have unequal numbers of test steps: raise --test-batch-size or --test-size."
        )

    # channels_last is faster, but fully_shard refuses it.
    layout = torch.channels_last if opts.how == "ddp" else torch.contiguous_format
    model = Net(opts.width).to(dist_env.device, memory_format=layout)
    if opts.how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        split(model, dist_env, opts.replicas)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    if opts.how == "ddp":
        name = "ddp"
        sharded = None
    else:
        name = "fsdp"
        sharded = Sharded(model, optimizer)
    run = Run(
        name,
        opts,
        dist_env,
        train_set,
        model,
        optimizer,
        lr_scheduler,
        sharded=sharded,
    )
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            with autocast:
                loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))
    print_memory(optimizer)
    run.finish()
    destroy_distributed()


def split(model: nn.Module, dist_env: DistEnv, replicas: int) -> None:
    """Leave each rank its shard of every weight. A layer is whole only while it is used."""
    for weights in model.parameters():
        dist.broadcast(weights.detach(), src=0)
    # A row of the mesh holds the network once, in shards; the gradients are averaged over the rows, too.
    shards = dist_env.world_size // replicas
    mesh = init_device_mesh(dist_env.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for layer in (model.conv1, model.conv2, model.fc1, model.fc2):
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)


def print_memory(optimizer: torch.optim.Optimizer) -> None:
    """Print on rank 0 what each rank keeps from one step to the next, in MB."""
    own_shard = " + ".join(f"{kept / 1e6:.2f}" for kept in kept_bytes(optimizer))
    shards = process_group.gather(own_shard)
    if process_group.is_rank_0():
        errors.print_line(f"MB of weights + gradients + optimizer on each rank: {', '.join(shards)}")


if __name__ == "__main__":
    main()
