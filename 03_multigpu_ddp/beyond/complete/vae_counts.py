"""Train a variational autoencoder on gene counts with DistributedDataParallel (see SPECIAL_LOSSES.md).

Try: torchrun --standalone --nproc-per-node=2 vae_counts.py --epochs 100 --gamma 0.95 --patience 3
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import NegativeBinomial

from manygpus import (
    InMemoryDataset,
    Options,
    Run,
    build_optimizer,
    destroy_distributed,
    entrypoint,
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

GENES = 200
PLATES = 3
TYPES = 8  # of cells
LATENT = 10  # numbers in the state of a cell
TRAIN_CELLS = 5_000  # without --train-size
MAX_TRAIN_CELLS = 100_000
TEST_CELLS = 2_000
KL_WARMUP_CELLS = 20_000  # after this many, the KL divergence counts in full
# The columns of a cell: the counts of its genes, a 1 for its plate, and the noise for its evaluation.
COLUMNS = (GENES, PLATES, LATENT)


def draw_cells(count: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw cells of one known negative binomial model, the same on every rank and at every --seed.

    `part` is 1 for training, and 2 for the held-out cells, which come from the same model.

    Returns:
        Inputs, float32 (count, sum(COLUMNS)), and the true type of each cell, int64 (count,).
    """
    tissue = np.random.default_rng(0)
    random = np.random.default_rng(part)
    log_level = tissue.normal(0, 1, GENES)
    log_of_type = tissue.normal(0, 0.35, (TYPES, GENES))
    log_of_plate = tissue.normal(0, 0.5, (PLATES, GENES))  # each plate catches some genes better than others
    dispersion = tissue.uniform(1, 5, GENES)
    types = random.integers(TYPES, size=count)
    plates = random.integers(PLATES, size=count)
    rates = np.exp(log_level + log_of_type[types] + log_of_plate[plates])
    library_sizes = random.lognormal(np.log(500), 0.4, (count, 1))  # molecules caught of a cell
    means = library_sizes * rates / rates.sum(1, keepdims=True)
    counts = random.poisson(random.gamma(dispersion, means / dispersion))
    plate_columns = np.eye(PLATES)[plates]
    noise = random.normal(size=(count, LATENT))
    inputs = np.hstack([counts, plate_columns, noise])
    return torch.from_numpy(inputs).float(), torch.from_numpy(types)


class Output(NamedTuple):
    """The network's output for n cells, all float32."""

    dispersion: torch.Tensor  # (GENES,), of the counts' negative binomial distributions
    logits: torch.Tensor  # (n, GENES), of the same: log of mean / dispersion
    mean: torch.Tensor  # (n, LATENT), of the latent state
    log_variance: torch.Tensor  # (n, LATENT)
    guess: torch.Tensor | None  # (n, PLATES), the critic's guess, if it was asked


class CountsVAE(nn.Module):
    """Encodes cells to a latent state, and decodes it to a negative binomial distribution for every gene.

    The decoder gets the plate, so the latent state need not contain it. A critic still tries to infer the
    plate from the latent state, and the encoder learns to leave no trace of it.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.encoder = _two_layers(GENES + PLATES, hidden, 2 * LATENT)
        self.decoder = _two_layers(LATENT + PLATES, hidden, GENES)
        self.log_dispersion = nn.Parameter(torch.zeros(GENES))
        self.critic = nn.Linear(LATENT, PLATES)

    def encode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and log-variance of each cell's latent state, float32 (n, LATENT) both."""
        counts, plates, _ = inputs.split(COLUMNS, dim=1)
        return self.encoder(torch.cat([counts.log1p(), plates], dim=1)).chunk(2, dim=1)

    def forward(
        self, inputs: torch.Tensor, noise: torch.Tensor | None = None, ask_critic: bool = False
    ) -> Output:
        """Reconstruct `inputs` of `draw_cells`; `noise`, float32 (n, LATENT), replaces each cell's own."""
        counts, plates, own_noise = inputs.split(COLUMNS, dim=1)
        mean, log_variance = self.encode(inputs)
        if noise is None:
            noise = own_noise
        state = mean + (0.5 * log_variance).exp() * noise
        log_shares = self.decoder(torch.cat([state, plates], dim=1)).log_softmax(dim=1)
        log_means = log_shares + counts.sum(dim=1, keepdim=True).clamp(min=1).log()
        # This equals `state`, but with the opposite gradient, so the encoder unlearns what helps the critic.
        guess = self.critic(2 * state.detach() - state) if ask_critic else None
        return Output(
            dispersion=self.log_dispersion.exp(),
            logits=log_means - self.log_dispersion,
            mean=mean,
            log_variance=log_variance,
            guess=guess,
        )


def _two_layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def negative_elbo(
    output: Output, counts: torch.Tensor, reduction: str = "mean", kl_weight: float = 1.0
) -> torch.Tensor:
    """Return the cost of the cells' counts and latent states together, in nats, as a mean or sum."""
    distribution = NegativeBinomial(output.dispersion, logits=output.logits, validate_args=False)
    of_counts = -distribution.log_prob(counts).sum(dim=1)
    kl = 0.5 * (output.mean.square() + output.log_variance.exp() - 1 - output.log_variance).sum(dim=1)
    losses = of_counts + kl_weight * kl
    return losses.sum() if reduction == "sum" else losses.mean()


@dataclass(frozen=True)
class CountsOptions(Options):
    graph: str = option(
        "find", choices=("find", "plain"), help="with find_unused_parameters, or without it, which fails"
    )
    precision: str = float32_precision()


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, CountsOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)

    # The counts are both the input and the target.
    train_count = min(opts.train_size or TRAIN_CELLS, MAX_TRAIN_CELLS)
    train_inputs, _ = draw_cells(train_count, part=1)
    test_inputs, _ = draw_cells(TEST_CELLS, part=2)
    train_set = InMemoryDataset("gene counts", train_inputs, train_inputs[:, :GENES])
    test_set = InMemoryDataset("gene counts", test_inputs, test_inputs[:, :GENES])
    train_batches = train_loader(train_set, opts, dist_env)
    test_batches = eval_loader(test_set, opts, dist_env)

    model = CountsVAE(hidden=4 * opts.width).to(dist_env.device)
    # Every second step leaves the critic out, and DDP would wait for its gradients.
    model = nn.parallel.DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        find_unused_parameters=opts.graph == "find",
    )
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    run = Run("ddp-vae", opts, dist_env, train_set, model, optimizer, lr_scheduler)
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for inputs, counts in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            # The steps so far, including those of earlier starts. They are the same on all ranks.
            step = lr_scheduler.last_epoch
            output = model(inputs, run.noise(LATENT), ask_critic=step % 2 == 1)
            kl_weight = min(1, step * opts.batch_size / KL_WARMUP_CELLS)
            loss = negative_elbo(output, counts, kl_weight=kl_weight)
            if output.guess is not None:
                _, plates, _ = inputs.split(COLUMNS, dim=1)
                loss = loss + F.cross_entropy(output.guess, plates)
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, negative_elbo))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
