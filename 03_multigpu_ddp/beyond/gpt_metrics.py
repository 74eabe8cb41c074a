"""What gpt.py tells besides the loss: tokens/s, the share of the GPU's peak (MFU), the lowest loss."""

import math

from trainkit.epoch import Metric, Trained
from trainkit.machine import device_name
from trainkit.options import Options
from trainkit.world import World

from torch import nn

import gpt_data

# Dense TFLOP/s by the datasheets of NVIDIA, by a part of the device's name.
PEAKS = {
    "H100 80GB HBM3": {"fp32": 67, "tf32": 495, "bf16": 989},
    "A100-SXM": {"fp32": 19.5, "tf32": 156, "bf16": 312},
}


def flops_per_token(model: nn.Module) -> int:
    """Operations of forward and backward of gpt.GPT, before it is split (PaLM, appendix B).

    6 for each weight that is multiplied, and the attention, as if each token saw the whole context. What
    activation checkpointing computes anew does not count.
    """
    context, width = model.positions.shape
    weights = sum(one.numel() for one in model.parameters()) - model.positions.numel()
    return 6 * weights + 12 * len(model.blocks) * width * context


def of_epoch(trained: Trained, opts: Options, here: World, flops: int) -> list[Metric]:
    """Of the epoch that was trained; `flops` are those of a token. MFU is NaN where no peak is known."""
    tokens = trained.steps * opts.batch_size * opts.context / trained.seconds
    peaks = [peak for part, peak in PEAKS.items() if part in device_name(here.device)]
    peak = 1e12 * peaks[0][opts.precision] if peaks else math.nan
    return [
        Metric("tokens_per_s", "training", tokens),
        Metric("mfu_percent", "training", 100 * tokens * flops / here.size / peak),
        Metric("lowest_possible_loss", "validation", gpt_data.entropy_rate()),
    ]


def in_one_line(metrics: list[Metric]) -> str:
    rate, share, floor = (one.value for one in metrics)
    mfu = "" if math.isnan(share) else f", MFU {share:.1f} %"
    return f"{rate:,.0f} tokens/s{mfu}; no loss is lower than {floor:.4f}"
