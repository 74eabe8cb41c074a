"""Train the classic MNIST network with DistributedDataParallel, and show its curves while it runs.

Try: torchrun --standalone --nproc-per-node=2 loggers.py --logger tensorboard --epochs 2
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from manygpus import (
    Logger,
    MLflowLogger,
    Net,
    Options,
    Run,
    TensorBoardLogger,
    WandbLogger,
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


def logger_of(name: str, results_dir: Path) -> Logger:
    """Return the logger of this name. Each writes to its own folder, and needs no network."""
    if name == "wandb":
        return WandbLogger("mnist", folder=results_dir)
    if name == "mlflow":
        return MLflowLogger(results_dir / "mlflow", experiment="mnist")
    return TensorBoardLogger(results_dir / "tensorboard")


@dataclass(frozen=True)
class LoggerOptions(Options):
    logger: str = option(
        "tensorboard", choices=("tensorboard", "wandb", "mlflow"), help="the tool that shows the curves"
    )


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, LoggerOptions)
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
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    loggers = [logger_of(opts.logger, opts.results_dir)]  # rank 0 alone uses them
    run = Run("ddp-loggers", opts, dist_env, train_set, model, optimizer, lr_scheduler, loggers=loggers)
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
