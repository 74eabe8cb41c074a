"""The peak speed of each GPU in its datasheet, in operations per second, by precision."""

import math
import re

# In TFLOP/s, for dense matrices. Many datasheets print twice as much for tf32, fp16 and bf16, which is only
# true for matrices that are half zeros. Source: NVIDIA's datasheets, and its white paper on Ada for the
# GeForce. The keys are PyTorch's names of the GPUs, without "NVIDIA"; {} stands for the size of the memory.
PEAKS = {
    r"Tesla V100-(SXM2|SXM3)-{}": {"fp32": 15.7, "fp16": 125},
    r"Tesla V100-PCIE-{}": {"fp32": 14, "fp16": 112},
    r"Tesla T4": {"fp32": 8.1, "fp16": 65},
    r"A100(-SXM4|-PCIE)-{}|A100 {} PCIe": {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312},
    r"A30": {"fp32": 10.3, "tf32": 82, "fp16": 165, "bf16": 165},
    r"A10": {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125},
    r"A40": {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7},
    r"L4": {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121},
    r"L40S": {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362},
    r"H100 {} HBM3|H200": {"fp32": 67, "tf32": 494.5, "fp16": 989.5, "bf16": 989.5},
    r"H100 PCIe": {"fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756},
    r"H100 NVL|H200 NVL": {"fp32": 60, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5},
    r"GeForce RTX 4090": {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2},
}


def peak(device_name: str, precision: str) -> float:
    """Return the peak TFLOP/s of one device, or NaN if it is not in the table, like a CPU or a MIG slice."""
    name = device_name.removeprefix("NVIDIA ")
    for kind, by_precision in PEAKS.items():
        if re.fullmatch(kind.replace("{}", r"\d+GB"), name):
            return by_precision.get(precision, math.nan)
    return math.nan
