"""Train a classifier on a table with DistributedDataParallel: categories, a rare class, and exact metrics.

Try: torchrun --standalone --nproc-per-node=2 tabular.py --epochs 3
"""

from contextlib import nullcontext

from trainkit.data import loaders as batches
from trainkit import errors
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.training.run import Run
from trainkit.training.precision import choose_precision
from trainkit.training.evaluation import evaluate
from trainkit.training.optim import optimizer_and_schedule
from trainkit.config.command_line import at_least

import torch
import torch.nn.functional as F
from torch import nn

from tabular_data import CATEGORIES, CLASSES, NUMBERS, balanced_weights, load
from tabular_metrics import Counts, in_one_line


class TableNet(nn.Module):
    """Two hidden layers over the numbers of a row and a learned vector for each of its categories.

    Takes the rows of `tabular_data.load`, float32 (n, 12), and returns float32 (n, 3): the logarithms of the
    probabilities, but for a constant. The hidden layers have 4 * `width` neurons.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vectors = nn.ModuleList(nn.Embedding(size, 4) for size in CATEGORIES)
        hidden = 4 * width
        self.layers = nn.Sequential(
            nn.Linear(NUMBERS + 4 * len(CATEGORIES), hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, len(CLASSES)),
        )  # fmt: skip

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        columns = rows[:, NUMBERS:].long().unbind(1)
        vectors = [table(column) for table, column in zip(self.vectors, columns, strict=True)]
        return self.layers(torch.cat([rows[:, :NUMBERS], *vectors], dim=1))


def main() -> None:
    weights = options.own(
        "exact", ("exact", "naive", "none"), None,
        "how rare classes weigh more: in the whole batch alike; within each share by itself; not at all",
        shapes_training=True,
    )  # fmt: skip
    accumulate = options.own(1, at_least(1), "K", "micro-batches of a batch, one after the other")
    opts = options.parse(__doc__, weights=weights, accumulate=accumulate)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    what = f"micro-batches ({here.size} processes x --accumulate {opts.accumulate})"
    options.check_divides(opts.batch_size, here.size * opts.accumulate, what)
    torch.manual_seed(opts.seed)

    # Every rank has all rows, and takes its own share of every batch.
    train_set, test_set = load()
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)
    class_weights = balanced_weights(train_set.targets).to(here.device)
    if opts.weights == "none":
        class_weights = torch.ones_like(class_weights)

    model = TableNet(opts.width).to(here.device)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    choose_precision(model, opts, train_set)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    name, ranks, parts = f"tabular-{opts.weights}", here.size, opts.accumulate
    run = Run(name, opts, here, train_set, model, optimizer, schedule, ranks, accumulate=parts)
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for rows, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            # A weighted mean divides by the sum of the weights: that of the whole batch, on all ranks.
            whole = process_group.sum_in_place(class_weights[labels].sum())
            loss = 0
            micro_batches = zip(rows.chunk(parts), labels.chunk(parts), strict=True)
            for part, (inputs, targets) in enumerate(micro_batches, start=1):
                with model.no_sync() if part < parts else nullcontext():
                    output = model(inputs)
                    if opts.weights == "naive":  # divides by the sum of the weights of this part
                        share = F.cross_entropy(output, targets, class_weights) / parts
                    else:
                        # DDP will divide by the number of ranks, which this takes back.
                        share = (
                            F.cross_entropy(output, targets, class_weights, reduction="sum") * ranks / whole
                        )
                    share.backward()
                loss += share.detach()
            optimizer.step()
            schedule.step()
            run.add(loss)
        counts = Counts(len(CLASSES), here.device)
        tested = evaluate(model, test_batches, counts.loss)
        metrics = counts.metrics(CLASSES)
        run.end_of_epoch(epoch, tested, metrics)
        if here.rank == 0:
            errors.tell(in_one_line(metrics))
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
