"""Train an LSTM on sequences of unequal length, with gradient clipping and a plateau schedule.

Try: torchrun --standalone --nproc-per-node=2 lstm.py --loader workers --epochs 4
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from manygpus import (
    Options,
    Run,
    above_0,
    destroy_distributed,
    entrypoint,
    eval_loader,
    evaluate,
    init_distributed,
    option,
    parse_options,
    resolve_precision,
    train_loader,
    tune_process,
)
from manygpus.data.loaders import generator


class Sums(torch.utils.data.Dataset):
    """The adding problem: two numbers of a sequence are marked, and the target is their sum."""

    name = "adding problem"

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # With this generator, a sequence is the same in every epoch and on any rank.
        random = generator(self.seed, index)
        numbers = torch.rand(5 + index % 11, generator=random)
        marks = (torch.randperm(len(numbers), generator=random) < 2).float()
        return torch.stack([numbers, marks], dim=1), (numbers * marks).sum()


def pack(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[PackedSequence, torch.Tensor]:
    """Put samples of unequal length into one batch."""
    sequences, sums = zip(*samples, strict=True)
    return pack_sequence(sequences, enforce_sorted=False), torch.stack(sums)


class Adder(nn.LSTM):
    """Takes n packed sequences, with 2 numbers in each place; returns their guessed sums, float32 (n,)."""

    def forward(self, sequences: PackedSequence) -> torch.Tensor:
        _, (last_hidden, _) = super().forward(sequences)
        return last_hidden[0].sum(dim=1)


@dataclass(frozen=True)
class LSTMOptions(Options):
    lr: float = option(
        0.01,
        type=above_0(1e6),
        metavar="X",
        help="the first learning rate, of Adam",
        shapes_training=True,
    )
    not_used = {"recipe", "gamma", "lr_warmup_images"}


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, LSTMOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)

    train_set = Sums(10_000, seed=1)
    test_set = Sums(2_000, seed=2)
    train_batches = train_loader(train_set, opts, dist_env, collate_fn=pack)
    test_batches = eval_loader(test_set, opts, dist_env, collate_fn=pack)

    model = Adder(input_size=2, hidden_size=opts.width).to(dist_env.device)
    model = nn.parallel.DistributedDataParallel(model)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer = torch.optim.Adam(model.parameters(), lr=opts.scaled_lr)
    lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)

    run = Run(
        "ddp-lstm",
        opts,
        dist_env,
        train_set,
        model,
        optimizer,
        lr_scheduler,
        unit="sequences",
    )
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for sequences, sums in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            with autocast:
                loss = F.mse_loss(model(sequences), sums)
            loss.backward()
            # DDP has averaged the gradients over all ranks by now, so each rank computes the same norm.
            gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            run.log(loss=loss, gradient_norm=gradient_norm)
        tested = evaluate(model, test_batches, F.mse_loss, autocast)
        # This is the loss of all ranks. The checkpoint of end_of_epoch has the scheduler, so step it first.
        lr_scheduler.step(tested.loss)
        run.end_of_epoch(epoch, tested)
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
