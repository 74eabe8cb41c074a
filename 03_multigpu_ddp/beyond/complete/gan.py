"""Train a generative adversarial network, with two networks, two optimizers and two losses in every step.

Try: torchrun --standalone --nproc-per-node=2 gan.py --epochs 5
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manygpus import (
    Options,
    Run,
    above_0,
    destroy_distributed,
    entrypoint,
    float32_precision,
    init_distributed,
    load_dataset,
    option,
    parse_options,
    resolve_precision,
    train_loader,
    tune_process,
)

NOISE = 64  # random numbers from which an image is made


class Generator(nn.Sequential):
    """Turns noise, float32 (n, NOISE), into images (n, 1, 28, 28)."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(NOISE, 2 * width * 7 * 7),
            nn.ReLU(),
            nn.Unflatten(1, (2 * width, 7, 7)),
            nn.ConvTranspose2d(2 * width, width, kernel_size=4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, kernel_size=4, stride=2, padding=1),
        )


class Critic(nn.Sequential):
    """Rates how real images look; returns logits, float32 (n, 1)."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(1, width, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, 1),
        )


@dataclass(frozen=True)
class GANOptions(Options):
    lr: float = option(
        2e-4,
        type=above_0(1e6),
        metavar="X",
        help="learning rate of both Adams",
        shapes_training=True,
    )
    precision: str = float32_precision()
    not_used = {"recipe", "gamma", "lr_warmup_images"}


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, GANOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)

    train_set, _ = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env)

    generator = DistributedDataParallel(Generator(opts.width).to(dist_env.device))
    critic = DistributedDataParallel(Critic(opts.width).to(dist_env.device))
    optimizer = torch.optim.Adam(generator.parameters(), lr=opts.scaled_lr, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=opts.scaled_lr, betas=(0.5, 0.999))

    # The checkpoints keep the second network and its optimizer, too.
    run = Run(
        "ddp-gan",
        opts,
        dist_env,
        train_set,
        generator,
        optimizer,
        lr_scheduler=None,
        extra_state={"critic": critic, "critic_optimizer": critic_optimizer},
    )
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        for images, _ in run.steps(epoch, train_batches):
            # The noise belongs to the step: all ranks together draw what one process would.
            generated = generator(run.noise(NOISE))
            critic_optimizer.zero_grad()
            # DDP needs one forward pass for each backward pass, so both kinds of images go through at once.
            scores = critic(torch.cat([images, generated.detach()]))
            is_real = torch.zeros_like(scores)
            is_real[: len(images)] = 1
            critic_loss = F.binary_cross_entropy_with_logits(scores, is_real)
            critic_loss.backward()
            critic_optimizer.step()

            optimizer.zero_grad()
            # Without DDP's all-reduce: the gradients that the critic gets here are cleared in the next step.
            scores = critic.module(generated)
            loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
            loss.backward()
            optimizer.step()
            run.log(loss=loss, critic_loss=critic_loss)
        run.end_of_epoch(epoch)  # nothing is tested
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
