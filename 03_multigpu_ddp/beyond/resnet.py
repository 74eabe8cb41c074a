"""Train torchvision's ResNet-18 on a folder of images, its BatchNorm over the images of all ranks.

Try: torchrun --standalone --nproc-per-node=2 resnet.py --images DIR --loader workers --num-workers 4
DIR/train and DIR/val have a folder for each class. Scale images of 16 bits to 8 before: Pillow clips them.
"""

from pathlib import Path

from trainkit.training.run import Run
from trainkit.errors import UserError
from trainkit.data import loaders as batches
from trainkit.training.precision import choose_precision
from trainkit import errors
from trainkit.training.evaluation import evaluate
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.config.command_line import above_0, at_least

import torch
import torch.nn.functional as F
from sync_on_cpu import SyncOnCPU
from torch import nn
from torchvision import transforms as t
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

OWN = {
    "images": options.own(Path("images"), Path, "DIR", "has train/ and val/, and they a folder per class"),
    "size": options.own(224, at_least(32), "N", "pixels of a side of an image", shapes_training=True),
    "lr": options.own(0.1, above_0(1e6), "X", "the first learning rate, of SGD", shapes_training=True),
}


def read(folder: Path, size: int) -> tuple[ImageFolder, ImageFolder]:
    scale = [t.Resize(size), t.CenterCrop(size), t.ToTensor()]
    prepare = t.Compose([*scale, t.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    try:
        train_set, val_set = (ImageFolder(folder / part, prepare) for part in ("train", "val"))
    except OSError as error:
        raise UserError(f"--images {folder} is not to be used ({error}): it needs train/ and val/.") from None
    if train_set.classes != val_set.classes:
        raise UserError(f"--images {folder}: train/ and val/ need folders of the same names, the classes.")
    train_set.name = folder.resolve().name  # the record's name for the data
    return train_set, val_set


def main() -> None:
    opts = options.parse(__doc__, **OWN)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed)

    train_set, val_set = read(opts.images, opts.size)
    train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
    val_batches = batches.testing(val_set, opts, here.device, here.rank, here.size)

    norm = nn.SyncBatchNorm if here.device.type == "cuda" else SyncOnCPU
    model = resnet18(num_classes=len(train_set.classes), norm_layer=norm)
    model = nn.parallel.DistributedDataParallel(model.to(here.device, memory_format=torch.channels_last))
    choose_precision(model, opts, train_set)
    optimizer = torch.optim.SGD(model.parameters(), lr=opts.scaled_lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=opts.epochs)

    run = Run("ddp-resnet18", opts, here, train_set, model, optimizer, schedule, devices=here.size)
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            mirrored = run.noise(1, 1, 1) > 0  # every second image, the same ones on any number of ranks
            images = torch.where(mirrored, images.flip(3), images)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            run.add(loss)
        schedule.step()  # per epoch; before end_of_epoch, whose checkpoint keeps it
        run.end_of_epoch(epoch, evaluate(model, val_batches, F.cross_entropy))
    run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
