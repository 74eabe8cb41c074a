"""Train an LSTM on sequences of unequal length, with clipped gradients and a rate that falls on a plateau.

Try: torchrun --standalone --nproc-per-node=2 lstm.py --loader workers --epochs 4
"""

from trainkit.training.run import Run
from trainkit.data import loaders as batches
from trainkit.training.precision import choose_precision
from trainkit import errors
from trainkit.training.evaluation import evaluate
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.config.command_line import above_0

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence


class Sums(torch.utils.data.Dataset):
    """The adding problem: of a sequence of numbers two are marked, and the target is their sum."""

    name = "adding problem"

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = batches.generator(self.seed, index)  # the same sequence in every epoch, on any rank
        numbers = torch.rand(5 + index % 11, generator=random)
        marks = (torch.randperm(len(numbers), generator=random) < 2).float()
        return torch.stack([numbers, marks], dim=1), (numbers * marks).sum()


def pack(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[PackedSequence, torch.Tensor]:
    sequences, sums = zip(*samples, strict=True)
    return pack_sequence(sequences, enforce_sorted=False), torch.stack(sums)


class Adder(nn.LSTM):
    def forward(self, sequences: PackedSequence) -> torch.Tensor:
        _, (last, _) = super().forward(sequences)
        return last[0].sum(dim=1)


def main() -> None:
    rate = options.own(0.01, above_0(1e6), "X", "the first learning rate, of Adam", shapes_training=True)
    opts = options.parse(__doc__, lr=rate)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed)
    train_set, test_set = Sums(10_000, seed=1), Sums(2_000, seed=2)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size, collate_fn=pack)
    test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size, collate_fn=pack)
    model = nn.parallel.DistributedDataParallel(Adder(2, opts.width).to(here.device))
    choose_precision(model, opts, train_set)
    optimizer = torch.optim.Adam(model.parameters(), lr=opts.scaled_lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    run = Run("ddp-lstm", opts, here, train_set, model, optimizer, plateau, here.size, unit="sequences")
    for epoch in run.epochs():
        model.train()
        for sequences, sums in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.mse_loss(model(sequences), sums)
            loss.backward()  # behind it the gradients are those of all ranks, and so is their norm
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            run.add(loss, gradient_norm=norm)
        tested = evaluate(model, test_batches, F.mse_loss)
        plateau.step(tested.loss)  # of all ranks; before end_of_epoch, whose checkpoint keeps it
        run.end_of_epoch(epoch, tested)
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
