"""Train a generative adversarial network: two networks, two optimizers, two losses in every step.

Try: torchrun --standalone --nproc-per-node=2 gan.py --epochs 5
"""

from trainkit.training.run import Run
from trainkit.data import loaders as batches, datasets as data
from trainkit.training.precision import choose_precision
from trainkit import errors
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.config.command_line import above_0

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NOISE = 64


class Generator(nn.Sequential):
    """Turns noise, float32 (n, NOISE), into images (n, 1, 28, 28)."""

    def __init__(self, width: int) -> None:
        first = nn.Linear(NOISE, 2 * width * 7 * 7), nn.ReLU(), nn.Unflatten(1, (2 * width, 7, 7))
        second = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.ReLU()
        super().__init__(*first, *second, nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1))


class Critic(nn.Sequential):
    """Rates how real images look, float32 (n, 1), as logits."""

    def __init__(self, width: int) -> None:
        first = nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2)
        second = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2)
        super().__init__(*first, *second, nn.Flatten(), nn.Linear(2 * width * 7 * 7, 1))


def main() -> None:
    rate = options.own(2e-4, above_0(1e6), "X", "learning rate of both Adams", shapes_training=True)
    opts = options.parse(__doc__, lr=rate)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed)
    train_set, _ = data.load(opts.dataset, opts.data_dir)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)

    generator = DistributedDataParallel(Generator(opts.width).to(here.device))
    critic = DistributedDataParallel(Critic(opts.width).to(here.device))
    choose_precision(generator, opts, train_set)
    how = {"lr": opts.scaled_lr, "betas": (0.5, 0.999)}
    optimizer = torch.optim.Adam(generator.parameters(), **how)
    of_critic = torch.optim.Adam(critic.parameters(), **how)
    also = {"critic": critic, "critic_optimizer": of_critic}  # in the checkpoints, too
    run = Run("ddp-gan", opts, here, train_set, generator, optimizer, None, devices=here.size, also=also)
    for epoch in run.epochs():
        for images, _ in run.steps(epoch, train_batches):
            made = generator(run.noise(NOISE))  # of this step: N ranks draw what one would
            of_critic.zero_grad()
            scores = critic(torch.cat([images, made.detach()]))  # one forward for each backward
            real = torch.zeros_like(scores)
            real[: len(images)] = 1
            critic_loss = F.binary_cross_entropy_with_logits(scores, real)
            critic_loss.backward()
            of_critic.step()

            optimizer.zero_grad()
            scores = critic.module(made)  # no exchange: gradients that the critic gets here are cleared above
            loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
            loss.backward()
            optimizer.step()
            run.add(loss, critic_loss=critic_loss)
        run.end_of_epoch(epoch)  # nothing is tested
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
