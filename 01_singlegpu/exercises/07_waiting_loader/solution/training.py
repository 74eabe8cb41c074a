"""Stage 01 with images that are prepared in another way: each gets mean 0 and standard deviation 1."""

from dataclasses import replace

from trainkit import batches, data, errors, options, process_group
from trainkit import Net, Run, choose_precision, evaluate, optimizer_and_schedule

import torch
import torch.nn.functional as F


def my_images(split: data.Split) -> data.Split:
    """Return the same images, prepared in my way, a batch at once on the device."""
    return replace(split, prepare=prepare, prepare_one=None)


def prepare(images: torch.Tensor) -> torch.Tensor:
    """Turn bytes (n, 1, 28, 28) into float32, each image with mean 0 and standard deviation 1."""
    images = images.to(torch.float32, memory_format=torch.channels_last)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    std = images.std(dim=(1, 2, 3), keepdim=True, correction=0)
    return (images - mean) / std


def main() -> None:
    opts = options.parse(__doc__)
    here = process_group.alone(not opts.no_cuda, opts.debug_dir)
    opts = opts.for_devices(1)
    torch.manual_seed(opts.seed)

    # By default all images go to the device once and stay there.
    train_set, test_set = map(my_images, data.load(opts.dataset, opts.data_dir))
    train_batches = batches.training(train_set, opts, here.device)
    test_batches = batches.testing(test_set, opts, here.device)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(here.device, memory_format=torch.channels_last)
    choose_precision(model, opts, train_set)
    optimizer, schedule = optimizer_and_schedule(opts, model, len(train_batches))

    run = Run("single", opts, here, train_set, model, optimizer, schedule, devices=1)
    for epoch in run.epochs():  # goes on where an earlier run stopped
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.add(loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss))
    run.finish()


if __name__ == "__main__":
    errors.run(main)
