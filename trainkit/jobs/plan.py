"""Plan a comparison on GPUs: the numbers of GPUs, the batch sizes, and the length of an epoch.

The last two come from short runs on one GPU, the probes. At a small batch a fast GPU waits for kernel
launches, and an epoch of 60 ms is noise.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainkit.jobs.stages import STAGES
from trainkit.jobs.sweep import Grid
from trainkit.rank.options import MOST_IMAGES
from trainkit.rank.staging import TRAIN_IMAGES
from trainkit.runtime.errors import UserError
from trainkit.schema.columns import DDP, DP, SINGLE

BATCH_SIZES = (256, 1024, 4096)  # per GPU, to choose from
NEAR_THE_BEST = 0.9
EPOCH_SECONDS = 3  # on one GPU
FEWEST_STEPS = 20  # of an epoch, at the largest batch
EPOCHS = 4  # one to warm up, three to measure
REPEATS = 3
AROUND_SECONDS = 13  # of a run, outside its epochs


@dataclass(frozen=True)
class Probe:
    """The results of a run on one GPU."""

    batch_size: int
    images_per_s: float
    eval_seconds: float

    def run_seconds(self, epochs: int, train_size: int) -> float:
        """Estimate the time of a run on one GPU; on several it is about the same."""
        return AROUND_SECONDS + epochs * (train_size / self.images_per_s + self.eval_seconds)


def probes_of(runs: Iterable[list[dict]]) -> list[Probe]:
    """Return the probes from the rows of their records, smallest batch first; the latest for each batch."""
    latest = {}
    for rows in runs:
        steady = [row for row in rows if not row["warmup"]] or rows
        speed = max(row["images_per_s"] for row in steady)
        seconds = min(row["eval_seconds"] for row in steady)
        latest[rows[0]["global_batch"]] = Probe(rows[0]["global_batch"], speed, seconds)
    return [latest[batch_size] for batch_size in sorted(latest)]


def device_counts(gpus: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, and `gpus` itself."""
    return *(2**i for i in range((gpus - 1).bit_length())), gpus


def batch_sizes(gpus: int, given: int | None, train_size: int | None) -> list[int]:
    """Return the batch sizes per GPU to choose from: those that divide among all numbers of GPUs.

    Raises:
        UserError: if an epoch of `train_size` images is shorter than one step with each of them.
    """
    shared_by = math.lcm(*device_counts(gpus))
    batches = [-(-batch // shared_by) * shared_by for batch in ([given] if given else BATCH_SIZES)]
    fitting = [batch for batch in batches if batch * gpus <= (train_size or MOST_IMAGES)]
    if not fitting:
        raise UserError(
            f"--train-size {train_size or MOST_IMAGES} is not one step with batch {batches[0]} on each of "
            f"{gpus} GPU(s): raise it, or lower --batch-size."
        )
    return fitting


def choose_batch(probes: Sequence[Probe]) -> Probe:
    """Choose the probe with the smallest batch among those nearly as fast as the fastest."""
    best = max(probe.images_per_s for probe in probes)
    near = [probe for probe in probes if probe.images_per_s >= NEAR_THE_BEST * best]
    return min(near, key=lambda probe: probe.batch_size)


def choose_train_size(probe: Probe, gpus: int) -> int:
    """Choose the images for an epoch of about `EPOCH_SECONDS` on one GPU: whole passes, or a part of one."""
    largest = probe.batch_size * gpus
    images = max(round(probe.images_per_s * EPOCH_SECONDS), FEWEST_STEPS * largest)
    if images < TRAIN_IMAGES:
        return images // largest * largest
    return min(round(images / TRAIN_IMAGES), MOST_IMAGES // TRAIN_IMAGES) * TRAIN_IMAGES


def summary(probes: Sequence[Probe], batch_size: int, train_size: int) -> str:
    """Describe what was measured, and chosen."""
    speeds = ", ".join(f"{probe.images_per_s:,.0f} at batch {probe.batch_size}" for probe in probes)
    length = f" ({train_size / TRAIN_IMAGES:g} passes over MNIST)" if train_size > TRAIN_IMAGES else ""
    measured = f"measured on one GPU, images/s: {speeds}\n" if probes else ""
    return f"{measured}batch {batch_size} on each GPU, epochs of {train_size:,} images{length}"


def matrix(gpus: int, batch_size: int, train_size: int, repeats: int) -> list[Grid]:
    """Plan strong scaling, with the same global batch, and weak scaling, with the same batch per GPU.

    Every row has its baseline, the run on one GPU with the same global batch.
    """
    sizes = {"train_sizes": (train_size,), "repeats": repeats}
    if gpus == 1:
        return [Grid(tuple(STAGES.values()), (1,), (batch_size,), **sizes)]
    several = device_counts(gpus)[1:]
    # DataParallel on one GPU is the plain model, which stage single measures.
    return [
        Grid((STAGES[SINGLE], STAGES[DDP]), (1,), (batch_size,), **sizes),
        Grid((STAGES[SINGLE],), (1,), tuple(number * batch_size for number in several), **sizes),
        Grid((STAGES[DP], STAGES[DDP]), several, (batch_size,), scaling="both", **sizes),
    ]
