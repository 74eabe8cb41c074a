"""Train a classifier on a table with a rare class: class weights and metrics are exact over all ranks.

Try: torchrun --standalone --nproc-per-node=2 tabular.py --epochs 3
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabular_data import CATEGORIES, CLASSES, NUMBERS, balanced_weights, load
from tabular_metrics import Counts, in_one_line
from torch import nn

from manygpus import (
    Options,
    Run,
    at_least,
    build_optimizer,
    check_divides,
    destroy_distributed,
    entrypoint,
    errors,
    eval_loader,
    evaluate,
    float32_precision,
    init_distributed,
    option,
    parse_options,
    resolve_precision,
    train_loader,
    tune_process,
)
from manygpus.distributed import process_group

VECTOR = 4  # learned numbers for each category


class TableNet(nn.Module):
    """Two hidden layers over the numbers of a row and a learned vector for each of its categories.

    Takes the rows of `tabular_data.load`, float32 (n, 12), and returns the logits of the classes, float32
    (n, 3). The hidden layers have 4 * `width` neurons.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vectors = nn.ModuleList(nn.Embedding(size, VECTOR) for size in CATEGORIES)
        hidden = 4 * width
        self.layers = nn.Sequential(
            nn.Linear(NUMBERS + VECTOR * len(CATEGORIES), hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, len(CLASSES)),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        columns = rows[:, NUMBERS:].long().unbind(1)
        vectors = [table(column) for table, column in zip(self.vectors, columns, strict=True)]
        return self.layers(torch.cat([rows[:, :NUMBERS], *vectors], dim=1))


@dataclass(frozen=True)
class TabularOptions(Options):
    weights: str = option(
        "exact",
        choices=("exact", "naive", "none"),
        help="how rare classes weigh more: over the whole batch; within each rank's shard; not at all",
        shapes_training=True,
    )
    accumulate: int = option(
        1,
        type=at_least(1),
        metavar="K",
        help="micro-batches in a batch, computed one after the other",
    )
    precision: str = float32_precision()


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, TabularOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    check_divides(
        opts.batch_size,
        parts=dist_env.world_size * opts.accumulate,
        what=f"micro-batches ({dist_env.world_size} processes x --accumulate {opts.accumulate})",
    )
    torch.manual_seed(opts.seed)

    # Every rank has all rows, and takes its own shard of every batch.
    train_set, test_set = load()
    train_batches = train_loader(train_set, opts, dist_env)
    test_batches = eval_loader(test_set, opts, dist_env)
    class_weights = balanced_weights(train_set.targets).to(dist_env.device)
    if opts.weights == "none":
        class_weights = torch.ones_like(class_weights)

    model = TableNet(opts.width).to(dist_env.device)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    run = Run(
        f"tabular-{opts.weights}",
        opts,
        dist_env,
        train_set,
        model,
        optimizer,
        lr_scheduler,
        gradient_accumulation_steps=opts.accumulate,
    )
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for rows, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            # A weighted mean divides by the sum of the weights: here of the whole batch, on all ranks.
            batch_weight = process_group.sum_in_place(class_weights[labels].sum())
            loss = 0
            micro_batches = zip(rows.chunk(opts.accumulate), labels.chunk(opts.accumulate), strict=True)
            for number, (micro_rows, micro_labels) in enumerate(micro_batches, start=1):
                # The gradients of all micro-batches add up. Only the last backward pass all-reduces them.
                is_last = number == opts.accumulate
                with nullcontext() if is_last else model.no_sync():
                    logits = model(micro_rows)
                    if opts.weights == "naive":
                        # This divides by the sum of the weights of this micro-batch only.
                        mean_loss = F.cross_entropy(logits, micro_labels, class_weights)
                        micro_loss = mean_loss / opts.accumulate
                    else:
                        # DDP will divide by the number of ranks, so multiply by it.
                        loss_sum = F.cross_entropy(logits, micro_labels, class_weights, reduction="sum")
                        micro_loss = loss_sum * dist_env.world_size / batch_weight
                    micro_loss.backward()
                loss += micro_loss.detach()
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        counts = Counts(len(CLASSES), dist_env.device)
        tested = evaluate(model, test_batches, counts.loss)
        metrics = counts.metrics(CLASSES)
        run.end_of_epoch(epoch, tested, metrics)
        if dist_env.rank == 0:
            errors.print_line(in_one_line(metrics))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
