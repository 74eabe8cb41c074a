"""Plan a comparison on GPUs: the numbers of GPUs, the batch size, and the length of an epoch.

The last comes from a short run on one GPU, the probe: an epoch of 60 ms is noise.
"""

import math

from trainkit.jobs.stages import STAGES
from trainkit.jobs.sweep import Grid
from trainkit.rank.options import MOST_IMAGES
from trainkit.rank.staging import TRAIN_IMAGES
from trainkit.runtime.errors import UserError
from trainkit.schema.columns import DDP, DP, SINGLE

BATCH_SIZE = 4096  # per GPU: with less a fast GPU waits for kernel launches (results/sample/h100)
EPOCH_SECONDS = 3  # on one GPU
FEWEST_STEPS = 20  # of an epoch, at the largest batch
EPOCHS = 4  # one to warm up, three to measure
REPEATS = 3
AROUND_SECONDS = 13  # of a run, outside its epochs


def device_counts(gpus: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, and `gpus` itself."""
    return *(2**i for i in range((gpus - 1).bit_length())), gpus


def batch_size(gpus: int, given: int | None, train_size: int | None) -> int:
    """Return the batch size per GPU: the next one that divides among all numbers of GPUs.

    Raises:
        UserError: if an epoch of `train_size` images is shorter than one step with it.
    """
    shared_by = math.lcm(*device_counts(gpus))
    batch = -(-(given or BATCH_SIZE) // shared_by) * shared_by
    if batch * gpus > (train_size or MOST_IMAGES):
        raise UserError(
            f"--train-size {train_size or MOST_IMAGES} is not one step with batch {batch} on each of "
            f"{gpus} GPU(s): raise it, or lower --batch-size."
        )
    return batch


def choose_train_size(images_per_s: float, batch: int, gpus: int) -> int:
    """Choose the images for an epoch of about `EPOCH_SECONDS` on one GPU: whole passes, or a part of one."""
    largest = batch * gpus
    images = max(round(images_per_s * EPOCH_SECONDS), FEWEST_STEPS * largest)
    if images < TRAIN_IMAGES:
        return images // largest * largest
    return min(round(images / TRAIN_IMAGES), MOST_IMAGES // TRAIN_IMAGES) * TRAIN_IMAGES


def matrix(gpus: int, batch: int, train_size: int, repeats: int) -> list[Grid]:
    """Plan strong scaling, with the same global batch, and weak scaling, with the same batch per GPU.

    Every row has its baseline, the run on one GPU with the same global batch.
    """
    sizes = {"train_sizes": (train_size,), "repeats": repeats}
    if gpus == 1:
        return [Grid(tuple(STAGES.values()), (1,), (batch,), **sizes)]
    several = device_counts(gpus)[1:]
    # DataParallel on one GPU is the plain model, which stage single measures.
    return [
        Grid((STAGES[SINGLE], STAGES[DDP]), (1,), (batch,), **sizes),
        Grid((STAGES[SINGLE],), (1,), tuple(number * batch for number in several), **sizes),
        Grid((STAGES[DP], STAGES[DDP]), several, (batch,), scaling="both", **sizes),
    ]
