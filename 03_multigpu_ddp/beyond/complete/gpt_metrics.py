"""Metrics of the GPTs: the fraction of the GPU's peak (MFU), the lowest possible loss, a rank's memory."""

import math

import gpt_data
import torch
from gpt_model import GPTOptions
from gpu_peaks import peak
from torch import nn

from manygpus import DistEnv, Metric
from manygpus.devices import device_name
from manygpus.training.epoch_results import TrainResult
from manygpus.training.kept_memory import kept_bytes

FLOPS_PER_TFLOPS = 1e12


def flops_per_token(model: nn.Module) -> int:
    """Count the operations of forward and backward of a GPT, before it is wrapped (PaLM, appendix B).

    These are 6 for each weight that is multiplied, and the attention, as if each token saw the whole context.
    What activation checkpointing recomputes does not count.
    """
    context, width = model.positions.shape
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = parameters - model.positions.numel()
    return 6 * weights + 12 * len(model.blocks) * width * context


def of_epoch(
    trained: TrainResult, opts: GPTOptions, dist_env: DistEnv, flops: int, optimizer: torch.optim.Optimizer
) -> list[Metric]:
    """Return the metrics of an epoch, to be called after its last step.

    `flops` are those of a window. MFU is NaN where no peak is known. `kept_mb` is what this rank keeps from
    one step to the next: its part of the weights, the gradients, and the optimizer's state.
    """
    windows_per_s = trained.steps * opts.batch_size / trained.seconds
    peak_flops = FLOPS_PER_TFLOPS * dist_env.world_size * peak(device_name(dist_env.device), opts.precision)
    kept = kept_bytes(optimizer)
    return [
        Metric("mfu_percent", "training", 100 * windows_per_s * flops / peak_flops),
        Metric("lowest_possible_loss", "validation", gpt_data.entropy_rate()),
        *(Metric("kept_mb", name, size / 1e6) for name, size in kept._asdict().items()),
    ]


def in_one_line(metrics: list[Metric]) -> str:
    """Format the metrics of `of_epoch` for a log."""
    values = {metric.metric: metric.value for metric in metrics}
    kept = " + ".join(f"{metric.value:.2f}" for metric in metrics if metric.metric == "kept_mb")
    text = f"no loss is lower than {values['lowest_possible_loss']:.4f}; rank 0 keeps {kept} MB of weights, "
    text += "gradients and optimizer state"
    if math.isnan(values["mfu_percent"]):
        return text
    return f"MFU {values['mfu_percent']:.1f} %; {text}"
