"""Train the classic MNIST network with DistributedDataParallel, and send its gradients in fewer bytes.

Try: torchrun --standalone --nproc-per-node=2 compressed.py --hook powersgd --epochs 2
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from manygpus import (
    Net,
    Options,
    Run,
    UserError,
    at_least,
    augmentation,
    build_optimizer,
    destroy_distributed,
    entrypoint,
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


@dataclass(frozen=True)
class CompressedOptions(Options):
    hook: str = option("none", choices=("none", "bf16", "powersgd"), help="how the gradients are sent")
    bucket_mb: int | None = option(
        None,
        type=at_least(1),
        metavar="MB",
        help="size of the buckets in which DDP sends the gradients (default: first 1, then 25; PowerSGD with "
        "gloo: all in one)",
    )


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, CompressedOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed + dist_env.rank)  # different dropout on each rank; DDP equalises the weights

    # Every rank has all images, and takes its own shard of every batch.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    # DDP sends rank 0's weights to all ranks once, and averages the gradients over the ranks in every
    # backward pass, which keeps the weights equal. The bucket view saves a copy of the gradients.
    bucket_mb = opts.bucket_mb
    if opts.hook == "powersgd" and dist_env.device.type == "cpu":
        # PowerSGD makes several calls for a bucket. With gloo those of two buckets may overtake each other,
        # and then the process aborts. So all gradients are in one.
        if bucket_mb is not None:
            raise UserError("--hook powersgd on CPUs has all gradients in one bucket: leave out --bucket-mb.")
        bucket_mb = sum(weights.nbytes for weights in model.parameters()) / 2**20
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    # A communication hook replaces the all-reduce of each bucket.
    if opts.hook == "bf16":
        model.register_comm_hook(None, bf16_compress_hook)
    elif opts.hook == "powersgd":
        # Each matrix of gradients is sent as two narrow ones. What that leaves out is added in the next step.
        powersgd = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(powersgd, powerSGD_hook)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    run = Run("ddp-compressed", opts, dist_env, train_set, model, optimizer, lr_scheduler)
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
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
