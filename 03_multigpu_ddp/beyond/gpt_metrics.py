"""The share of the GPU's peak (MFU), and the lowest loss there is, for gpt.py."""

import math

from trainkit.training.evaluation import Metric, Trained
from trainkit.config.options import Options
from trainkit.devices import device_name
from trainkit.distributed.launchers import Place

from torch import nn

import gpt_data
from gpu_peaks import peak


def flops_per_token(model: nn.Module) -> int:
    """Count the operations of forward and backward of gpt.GPT, before it is split (PaLM, appendix B).

    6 for each weight that is multiplied, and the attention, as if each token saw the whole context. What
    activation checkpointing recomputes does not count.
    """
    context, width = model.positions.shape
    weights = sum(one.numel() for one in model.parameters()) - model.positions.numel()
    return 6 * weights + 12 * len(model.blocks) * width * context


def of_epoch(trained: Trained, opts: Options, here: Place, flops: int) -> list[Metric]:
    """Return the metrics of an epoch; `flops` are those of a window. MFU is NaN where no peak is known."""
    windows_per_s = trained.steps * opts.batch_size / trained.seconds
    most = 1e12 * here.size * peak(device_name(here.device), opts.precision)
    return [
        Metric("mfu_percent", "training", 100 * windows_per_s * flops / most),
        Metric("lowest_possible_loss", "validation", gpt_data.entropy_rate()),
    ]


def in_one_line(metrics: list[Metric]) -> str:
    share, floor = (one.value for one in metrics)
    mfu = "" if math.isnan(share) else f"MFU {share:.1f} %; "
    return f"{mfu}no loss is lower than {floor:.4f}"
