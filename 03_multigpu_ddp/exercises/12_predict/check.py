"""Computes Amdahl's law and the interval of how_many_gpus.py from the runs in mine/runs."""

import math

from trainkit.advice import advice, run_set
from trainkit.compare import comparison
from trainkit.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# Four devices, global batch 128: how many times the images/s of one?
prediction = 3
# By hand
serial_ms = 19.6    # the part of a step at batch 128 that the devices do not share
four = 3294         # images/s
most_128 = 3        # devices
most_512 = 6
# From the kit
low = 2790          # images/s of four devices at batch 128
high = 3850
refused = 8         # devices
"""
HINTS = """\
## 1

T(1) = s + p and T(2) = s + p / 2. Subtract half of the first from the second: what is left?

## 2

s = 2 T(2) - T(1), and p = T(1) - s. Four devices take s + p / 4 for a step of 128 images.
For the efficiency, write N T(N) = N s + p: it grows by s with every device.

## 3

N s + p may be T(1) / 0.7 at most, so N is (T(1) / 0.7 - p) / s at most. Round down. In the table of
how_many_gpus.py, the interval is below its number; what it does not predict, and why, is below the
table.
"""
STARTS_WITH = "`prediction`"
RECORDED = {  # each twice: one worker and two at batch 128, then at 512
    "results/sample/cpu-xeon-2-cores/scaling/w32.csv": [
        "single-20261122-051438-83bb0ea1", "single-20261122-052850-9d48f0c7",
        "ddp-20261122-052150-0428d3b8", "ddp-20261122-053552-e086724d",
        "single-20261122-051552-d4ea067b", "single-20261122-053003-5ab77490",
        "ddp-20261122-052237-b6e7be4c", "ddp-20261122-053639-e1b02513",
    ]
}  # fmt: skip
WRONG = [
    ("answers.txt", "serial_ms = 19.6", "serial_ms = 38.6", "half of p"),
    ("answers.txt", "serial_ms = 19.6", "serial_ms = 58.1", "whole step on two devices"),
    ("answers.txt", "four = 3294", "four = 5296", "four times those of one"),
    ("answers.txt", "four = 3294", "four = 4404", "twice those of two"),
    ("answers.txt", "most_128 = 3", "most_128 = 9", "N T(N)"),
    ("answers.txt", "most_512 = 6", "most_512 = 3", "the batch is larger"),
    ("answers.txt", "low = 2790", "low = 3280", "the middle of the interval"),
    ("answers.txt", "high = 3850", "high = 5340", "four devices at batch 128"),
    ("answers.txt", "refused = 8", "refused = 4", "twice as many as were measured"),
    ("runs/ddp-*.csv", ",128,64,1,fp32", ",132,66,1,fp32", "no run of stage ddp and devices 2"),
]  # fmt: skip
ASKED = advice.Constraints(epochs=50, gpus=(1, 2, 4, 8), batches=(128, 512), gpus_per_node=8)
LEAST = 0.7  # efficiency


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    one_device, two_devices, serial = steps(workspace, 128)
    check_amdahl(answers, one_device, two_devices, serial)
    most = {batch: check_most(answers, batch, *steps(workspace, batch)) for batch in (128, 512)}
    low, middle, high = asked(workspace)
    for name, true in {"low": low, "high": high}.items():
        answer = answers.number(name)
        if is_close(answer, true, 0.04):
            continue
        if is_close(answer, middle):
            raise Wrong(f"`{name}`: {answer:g} is the middle of the interval, whose ends are below it.")
        raise Wrong(f"`{name}` is not {answer:g}: look for DDP with four devices at batch 128, images/s.")
    if answers.number("refused") != 8:
        raise Wrong("`refused`: the kit predicts up to twice as many as were measured. What is left?")
    four = amdahl(128, one_device, serial)
    return (
        f"By hand, four devices train {four:,.0f} images/s, {four * one_device / 128:.2f} times as many as "
        "one (you "
        f"predicted {prediction:g}). The kit says {low:,.0f} to {high:,.0f}, {middle:,.0f} in the middle. "
        "Two measurements always agree with a law of two numbers, so yours was never tested. And Amdahl's s "
        "is constant, while an exchange has more rounds with every device. The kit fits several laws, trusts "
        "those that predict runs which were left out of the fit, and gives an interval for what remains "
        f"unknown. With a batch of 512, {most[512]} devices keep 70 %, not {most[128]}: how many are best "
        "depends on the batch. Only a run on four is certain. What such a run costs is in the "
        "exercise `next_run`."
    )


def steps(workspace: Workspace, batch: int) -> tuple[float, float, float]:
    """Return the seconds of a step on one device and on two, and of the part that they do not divide."""
    rows = (
        workspace.row(stage=stage, devices=n, global_batch=batch) for stage, n in (("single", 1), ("ddp", 2))
    )
    one_device, two_devices = (batch / row.images_per_s for row in rows)
    if two_devices <= one_device / 2:
        raise Wrong(
            f"In mine/runs, two devices are more than twice as fast as one at batch {batch}: something "
            "disturbed these runs. Repeat them, or take `recorded`."
        )
    return one_device, two_devices, 2 * two_devices - one_device


def amdahl(batch: int, one_device: float, serial: float) -> float:
    """Return the images/s of four devices."""
    return batch / (serial + (one_device - serial) / 4)


def check_amdahl(answers: Answers, one_device: float, two_devices: float, serial: float) -> None:
    """Say what is wrong with s, and with four devices."""
    answer = answers.number("serial_ms") / 1000
    if not is_close(answer, serial, 0.06):
        if is_close(answer, one_device - two_devices, 0.03):
            raise Wrong("`serial_ms`: that is T(1) - T(2), which is half of p.")
        if is_close(answer, two_devices, 0.03):
            raise Wrong("`serial_ms`: that is the whole step on two devices, which has p / 2 in it.")
        raise Wrong(f"`serial_ms` is not {1000 * answer:g}: s = 2 T(2) - T(1), in milliseconds.")
    answer = answers.number("four")
    true = amdahl(128, one_device, serial)
    if not is_close(answer, true, 0.03):
        if is_close(answer, 4 * 128 / one_device, 0.03):
            raise Wrong("`four`: these are four times those of one device. Where is s?")
        if is_close(answer, 2 * 128 / two_devices, 0.03):
            raise Wrong("`four`: these are twice those of two devices. But s is not divided again.")
        raise Wrong(f"`four` is not {answer:g}: 128 images in s + p / 4 seconds.")


def check_most(answers: Answers, batch: int, one_device: float, two_devices: float, serial: float) -> int:
    """Check the largest count that keeps the efficiency; close to the next one, both are right."""
    limit = (one_device / LEAST - (one_device - serial)) / serial
    answer = answers.number(f"most_{batch}")
    if not math.floor(0.97 * limit) <= answer <= math.floor(1.03 * limit):
        small = (
            " It is more than at 128, since the batch is larger." if batch == 512 and answer < limit else ""
        )
        raise Wrong(
            f"`most_{batch}` is not {answer:g}: N T(N) = N s + p, and it may be T(1) / 0.7 at most.{small}"
        )
    return int(answer)


def asked(workspace: Workspace) -> tuple[float, float, float]:
    """Ask how_many_gpus.py for four devices at batch 128: low, middle and high."""
    rows, _ = comparison.load([workspace.folder / "runs"])
    for _, of_a_set in run_set.sets(rows):
        for option in advice.advise(of_a_set, ASKED).options:
            if (option.stage, option.shape.devices, option.global_batch) == ("ddp", 4, 128):
                return advice.interval(option.images_per_s)
    raise Wrong("how_many_gpus.py predicts nothing for four devices from mine/runs: take `recorded`.")
