"""Peak memory (MB) of training and evaluating the model on one batch: a run without its data set."""

import argparse

import torch

from trainkit import batches, engine, options, world
from trainkit.checkpoint import Checkpoints
from trainkit.data import Split
from trainkit.model import Net
from trainkit.recipes import optimizer_and_schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="fp32")
    precision = parser.parse_args().precision
    opts = options.parse("", ["--batch-size", "128", "--dry-run"])
    here = world.alone(use_cuda=True, stage_name="this script")
    one = Split(torch.zeros(250, 1, 28, 28, dtype=torch.uint8), torch.zeros(250, dtype=torch.long))
    train_batches = batches.training(one, opts, here.device)
    model = Net(precision).to(here.device, memory_format=torch.channels_last)
    optimizer, schedule = optimizer_and_schedule(opts, model, 1)
    checkpoints = Checkpoints(opts, model, optimizer, schedule, log=None)  # off: no --checkpoint-dir
    for epoch in range(1, 61):
        engine.train_epoch(model, train_batches, optimizer, schedule, epoch, checkpoints, log_interval=10)
        engine.evaluate(model, batches.testing(one, opts, here.device))
    print(engine.peak_memory_mb(here.device))


if __name__ == "__main__":
    main()
