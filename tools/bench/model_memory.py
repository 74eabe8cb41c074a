"""Peak memory (MB) of training and evaluating the model on one batch: a run without its data set."""

import argparse

import torch
import torch.nn.functional as F

from trainkit.rank import batches, data, options
from trainkit.rank.evaluation import evaluate
from trainkit.rank.model import Net
from trainkit.rank.precision import set_precision
from trainkit.rank.recipes import optimizer_and_schedule
from trainkit.rank.run import Run
from trainkit.runtime import process_group
from trainkit.runtime.device import peak_memory_mb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="fp32")
    precision = parser.parse_args().precision
    opts = options.parse("", ["--batch-size", "128", "--dry-run"])
    here = process_group.alone(use_cuda=True)
    images, labels = torch.zeros(250, 1, 28, 28, dtype=torch.uint8), torch.zeros(250, dtype=torch.long)
    one = data.Split("zeros", images, labels, data.normalize)
    train_batches = batches.training(one, opts, here.device)
    test_batches = batches.testing(one, opts, here.device)
    model = Net().to(here.device, memory_format=torch.channels_last)
    set_precision(model, precision)
    optimizer, schedule = optimizer_and_schedule(opts, model, 1)
    run = Run("memory", opts, here, one, model, optimizer, schedule, devices=1)
    for epoch in range(1, 61):
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.add(loss)
        evaluate(model, test_batches, F.nll_loss)
    print(peak_memory_mb(here.device))


if __name__ == "__main__":
    main()
