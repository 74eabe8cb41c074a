"""Train the classic MNIST network as DistributedDataParallel does, but write its work out.

Try: torchrun --standalone --nproc-per-node=2 by_hand.py --epochs 2
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from manygpus import (
    Net,
    Options,
    Run,
    augmentation,
    build_optimizer,
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
from manygpus.distributed import process_group


@dataclass(frozen=True)
class ByHandOptions(Options):
    flat: bool = option(
        False,
        help="average all gradients in a single call instead of one by one",
    )
    forget: bool = option(
        False,
        help="do not average, so the ranks drift apart",
        shapes_training=True,
    )


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, ByHandOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed + dist_env.rank)  # different dropout on each rank; rank 0's weights go to all

    # Every rank has all images, and takes its own shard of every batch.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    for weights in model.parameters():
        dist.broadcast(weights.detach(), src=0)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    per_rank_state = {}
    if opts.forget:
        way = "forget"
        per_rank_state = {"model": model}  # the weights of each rank are its own
    elif opts.flat:
        way = "flat"
    else:
        way = "each"
    name = f"ddp-by-hand-{way}"
    run = Run(name, opts, dist_env, train_set, model, optimizer, lr_scheduler, per_rank_state=per_rank_state)
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            with autocast:
                loss = F.nll_loss(model(images), labels)
            loss.backward()
            gradients = [weights.grad for weights in model.parameters()]
            if way == "flat":
                average_in_one_call(gradients)
            elif way == "each":
                average(gradients)
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))
        sums = process_group.gather(sum(weights.double().sum().item() for weights in model.parameters()))
        if dist_env.rank == 0:
            errors.print_line(f"sum of the weights of each rank: {sums}")
    run.finish()
    destroy_distributed()


def average(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its mean over all ranks, with one call per tensor."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def average_in_one_call(tensors: list[torch.Tensor]) -> None:
    """Do the same with all tensors joined into one, as DistributedDataParallel does in its buckets."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    average([flat])
    means = flat.split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))


if __name__ == "__main__":
    main()
