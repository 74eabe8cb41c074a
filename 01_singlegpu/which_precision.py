"""Time training steps of the lesson's network in each precision that this device has.

Try: python which_precision.py --batch-size 256
"""

import statistics

import torch
import torch.nn.functional as F

from manygpus import (
    Net,
    Options,
    UserError,
    build_optimizer,
    entrypoint,
    init_single_process,
    parse_options,
    tune_process,
)
from manygpus.devices import accelerator_of, is_gpu
from manygpus.training import clock
from manygpus.training.precision import set_float32_precision

TURNS = 5  # of all precisions, one after the other: a busy moment of the machine affects all of them
STEPS_ON_GPU = 50  # in a row, as a GPU works through a queue
STEPS_ON_CPU = 2
WORTH_IT = 1.1  # fewer bits must be at least this many times as fast, in every turn


@entrypoint
def main() -> None:
    opts = parse_options(__doc__)
    if opts.precision is not None:
        raise UserError("this script times each precision that the device has: leave out --precision.")
    dist_env = init_single_process(use_gpu=not opts.no_cuda)
    tune_process(dist_env)
    opts = opts.resolve_batch_size(1)
    precisions = available(dist_env.device)
    for precision in precisions:  # a warm-up: a GPU's first steps also choose its kernels
        seconds_per_step(precision, opts, dist_env.device)
    turns = [
        {precision: seconds_per_step(precision, opts, dist_env.device) for precision in precisions}
        for _ in range(TURNS)
    ]

    print(f"precision  ms per step  times as fast as fp32 (least, in {TURNS} turns)")
    best = "fp32"
    best_factor = WORTH_IT
    for precision in precisions:
        milliseconds = 1000 * statistics.median(turn[precision] for turn in turns)
        factor = min(turn["fp32"] / turn[precision] for turn in turns)
        print(f"{precision:9}  {milliseconds:11.3f}  {factor:.2f}")
        if factor >= best_factor:
            best = precision
            best_factor = factor
    print(f"take --precision {best}" if best != "fp32" else "fp32: fewer bits are not clearly faster here")


def available(device: torch.device) -> list[str]:
    """Return the precisions that the device has, the most exact first."""
    precisions = ["fp32"]
    accelerator = accelerator_of(device)
    if accelerator.supports_tf32(device):
        precisions.append("tf32")
    if accelerator.supports_bf16():
        precisions.append("bf16")
    return precisions


def seconds_per_step(precision: str, opts: Options, device: torch.device) -> float:
    """Return the mean of some training steps, on images of noise."""
    set_float32_precision(precision, device)
    torch.manual_seed(opts.seed)
    model = Net(opts.width).to(device, memory_format=torch.channels_last)
    optimizer, _ = build_optimizer(opts, model, steps_per_epoch=1)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
    images = torch.randn(opts.batch_size, 1, 28, 28, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (opts.batch_size,), device=device)
    steps = STEPS_ON_GPU if is_gpu(device) else STEPS_ON_CPU
    started = clock.start(device)
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast:
            loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
    return clock.stop(device, started) / steps


if __name__ == "__main__":
    main()
