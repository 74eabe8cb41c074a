"""Train the classic MNIST network on each rank alone, and average the weights every few steps (local SGD).

Try: torchrun --standalone --nproc-per-node=2 local_sgd.py --average-every 4 --epochs 2
"""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from trainkit.config.command_line import at_least
from trainkit.config.options import Options, option, parse_options
from trainkit.data.datasets import load_dataset
from trainkit.data.loaders import augmentation, eval_loader, train_loader
from trainkit.distributed.process_group import destroy_distributed, init_distributed
from trainkit.errors import entrypoint
from trainkit.training.evaluation import evaluate
from trainkit.training.model import Net
from trainkit.training.optim import build_optimizer
from trainkit.training.precision import set_float32_precision
from trainkit.training.run import Run
from trainkit.tuning import tune_process


@dataclass(frozen=True)
class LocalSGDOptions(Options):
    average_every: int = option(
        4,
        type=at_least(1),
        metavar="N",
        help="steps between two averagings",
        shapes_training=True,
    )


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, LocalSGDOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    set_float32_precision(opts.precision, dist_env.device)
    torch.manual_seed(opts.seed + dist_env.rank)  # different dropout on each rank; rank 0's weights go to all

    # Every rank has all images, and takes its own shard of every batch.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)

    model = Net(opts.width).to(dist_env.device)
    for weights in model.parameters():
        dist.broadcast(weights.detach(), src=0)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    # Between two averagings, each rank has its own weights and its own state of the optimizer.
    run = Run(
        "local-sgd",
        opts,
        dist_env,
        train_set,
        model,
        optimizer,
        lr_scheduler,
        per_rank_state={"model": model, "optimizer": optimizer},
    )
    run.resume()  # continues where an earlier run stopped
    # PyTorch recommends DDP instead of a period of 1, but we want to measure what a period of 1 costs.
    warnings.filterwarnings("ignore", "When period is 1")
    averager = PeriodicModelAverager(opts.average_every)
    # The averager counts steps. After a resume, it has to include those of earlier starts.
    averager.step = lr_scheduler.last_epoch + 1
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            with autocast:
                loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            averager.average_parameters(model.parameters())
            run.log(loss=loss)
        # All ranks test and save one network.
        average_parameters(model.parameters(), dist.group.WORLD)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
