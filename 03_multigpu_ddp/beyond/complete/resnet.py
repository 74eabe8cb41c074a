"""Train torchvision's ResNet-18 on a folder of images, with BatchNorm over the images of all ranks.

Try: torchrun --standalone --nproc-per-node=2 resnet.py --images DIR --loader workers --num-workers 4
DIR/train and DIR/val have a folder for each class. Scale 16-bit images to 8 bits first: Pillow clips them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

from manygpus import (
    Options,
    Run,
    UserError,
    above_0,
    at_least,
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
from manygpus.training.sync_on_cpu import SyncOnCPU


@dataclass(frozen=True)
class ResNetOptions(Options):
    images: Path = option(
        Path("images"),
        type=Path,
        metavar="DIR",
        help="the folder with train/ and val/, each of which has a folder per class",
    )
    size: int = option(
        224,
        type=at_least(32),
        metavar="N",
        help="height and width of an image, in pixels",
        shapes_training=True,
    )
    lr: float = option(
        0.1,
        type=above_0(1e6),
        metavar="X",
        help="the first learning rate, of SGD",
        shapes_training=True,
    )
    not_used = {"recipe", "gamma", "lr_warmup_images", "width"}


def read(folder: Path, size: int) -> tuple[ImageFolder, ImageFolder]:
    """Return the images to train and to validate on, each float32 (3, size, size).

    Raises:
        UserError: if train/ or val/ is missing or has no images, or they have different classes.
    """
    transform = transforms.Compose(
        [
            transforms.Resize(size),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            # The means and standard deviations of ImageNet's colours.
            transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ]
    )
    try:
        train_set = ImageFolder(folder / "train", transform)
        val_set = ImageFolder(folder / "val", transform)
    except OSError as error:
        raise UserError(f"--images {folder} is not to be used ({error}): it needs train/ and val/.") from None
    if train_set.classes != val_set.classes:
        raise UserError(f"--images {folder}: train/ and val/ need folders of the same names, the classes.")
    train_set.name = folder.resolve().name  # the record's name for the data
    return train_set, val_set


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, ResNetOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)

    train_set, val_set = read(opts.images, opts.size)
    train_batches = train_loader(train_set, opts, dist_env)
    val_batches = eval_loader(val_set, opts, dist_env)

    # PyTorch's own SyncBatchNorm runs on GPUs only.
    norm_layer = nn.SyncBatchNorm if dist_env.device.type == "cuda" else SyncOnCPU
    model = resnet18(num_classes=len(train_set.classes), norm_layer=norm_layer)
    model = model.to(dist_env.device, memory_format=torch.channels_last)
    model = nn.parallel.DistributedDataParallel(model)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=opts.scaled_lr, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=opts.epochs)

    run = Run("ddp-resnet18", opts, dist_env, train_set, model, optimizer, lr_scheduler)
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            # About every second image is mirrored, the same ones on any number of ranks.
            mirrored = run.noise(1, 1, 1) > 0
            images = torch.where(mirrored, images.flip(3), images)
            optimizer.zero_grad()
            with autocast:
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        # Once per epoch. The checkpoint of end_of_epoch has the scheduler, so step it first.
        lr_scheduler.step()
        run.end_of_epoch(epoch, evaluate(model, val_batches, F.cross_entropy, autocast))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
