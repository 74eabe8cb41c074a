"""The pictures of measurements. Each function reads a committed file and returns what is drawn of it."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from pictures.svg import NORMAL, Picture, Scale

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE = REPOSITORY / "results" / "sample"
H100 = SAMPLE / "h100"
PUBLISHED = {
    series["name"]: series for series in json.loads((REPOSITORY / "tools/bench/published.json").read_text())
}
ENOUGH_WORKERS = "PT RN50 fp32 loader w48"
FEW_WORKERS = "PT RN50 fp32 loader w8"
LANGUAGE_MODEL = "HF ultrascale DP H100"
# Of that series: its source has tokens per second and GPU, and published.json has samples per second.
TOKENS_OF_A_SAMPLE = 4096


class Line(NamedTuple):
    """How a line of a plot looks, and what it is called beside its last point."""

    name: str
    colour: str
    marker: str
    dashes: str = ""


def _throughputs(series: str) -> dict[int, float]:
    """Return the throughput by the number of GPUs: at the largest batch that the series has."""
    return {point["gpus"]: point["throughput"] for point in PUBLISHED[series]["points"]}


def _speedups(throughputs: dict[int, float]) -> dict[int, float]:
    return {gpus: throughput / throughputs[1] for gpus, throughput in throughputs.items()}


def _efficiencies(throughputs: dict[int, float]) -> dict[int, float]:
    """Return percent of what the smallest count reaches on each GPU."""
    fewest = min(throughputs)
    each = throughputs[fewest] / fewest
    return {gpus: 100 * throughput / gpus / each for gpus, throughput in throughputs.items()}


def front() -> Picture:
    """Two reasons why more GPUs do not help: a loader that is too slow, and communication."""
    picture = Picture(
        "Speedup with enough and with too few loader processes, and efficiency up to 256 GPUs", 372
    )
    picture.text(20, 26, "GPUs that wait for images", NORMAL, bold=True)
    picture.text(20, 46, "ResNet-50 on V100, weak scaling: times one GPU", colour="muted")
    counts = [1, 2, 4, 8, 16, 32]
    across = Scale(1, 32, 52, 318, math.log2)
    down = Scale(1, 32, 316, 76, math.log2)
    picture.y_axis(down, counts, 52, 318)
    picture.x_axis(across, counts, 316, "GPUs")
    picture.line([(across(1), down(1)), (across(32), down(32))], "muted", 1.5, "6 4")
    picture.text(across(11.4), down(15.4), "ideal", anchor="end", colour="muted", on_lines=True)
    lines = {
        ENOUGH_WORKERS: Line("48", "compute", "circle"),
        FEW_WORKERS: Line("8", "waiting", "square"),
    }
    for series, look in lines.items():
        speedups = _speedups(_throughputs(series))
        picture.line([(across(gpus), down(times)) for gpus, times in speedups.items()], look.colour, 2.5)
        for gpus, times in speedups.items():
            picture.marker(across(gpus), down(times), look.marker, look.colour)
        last = down(speedups[32])
        picture.text(328, last + 3, f"{speedups[32]:.1f} x", NORMAL, bold=True)
        picture.lines(328, last + 27, [f"{look.name} loader", "processes"])
    picture.text(440, 26, "GPUs that wait for each other", NORMAL, bold=True)
    picture.text(440, 46, "1.3 B weights on H100, weak scaling: % of 8 GPUs", colour="muted")
    efficiencies = _efficiencies(_throughputs(LANGUAGE_MODEL))
    down = Scale(0, 100, 316, 76)
    picture.y_axis(down, [0, 20, 40, 60, 80, 100], 472, 786)
    for number, (gpus, percent) in enumerate(efficiencies.items()):
        left = 480 + 51 * number
        picture.rect(left, down(100), 42, 316 - down(100), "neutral", radius=0)
        picture.rect(left, down(percent), 42, 316 - down(percent), "compute", radius=0)
        picture.text(left + 21, down(percent) - 6, f"{percent:.0f}", NORMAL, "middle", bold=True)
        picture.text(left + 21, 334, str(gpus), anchor="middle")
    picture.line([(472, 316), (786, 316)], "ink", 1)
    picture.text(629, 354, "GPUs", anchor="middle")
    return picture


def scaling() -> Picture:
    """Speedup and efficiency of strong and of weak scaling."""
    picture = Picture("Speedup and efficiency on 1 to 32 V100: weak scaling and strong scaling", 400)
    lines = {
        "NV-PT RN50 amp": Line("ResNet-50, weak", "ink", "circle"),
        "NV-PT BERT fp32 b32,48": Line("BERT, weak", "ink", "ring"),
        "DGX-2 SIM amp STRONG": Line("SIM, strong", "second", "square", "7 4"),
        "DGX-2 NCF amp STRONG": Line("NCF, strong", "second", "triangle", "7 4"),
    }
    for number, look in enumerate(lines.values()):
        left = 52 + 190 * number
        picture.line([(left, 24), (left + 34, 24)], look.colour, 2, look.dashes)
        picture.marker(left + 17, 24, look.marker, look.colour)
        picture.text(left + 42, 28.5, look.name)
    counts = [1, 2, 4, 8, 16, 32]
    across = Scale(1, 32, 52, 350, math.log2)
    down = Scale(1, 32, 344, 84, math.log2)
    picture.text(20, 62, "speedup: times one GPU", NORMAL, bold=True)
    picture.y_axis(down, counts, 52, 350)
    picture.x_axis(across, counts, 344, "GPUs")
    picture.line([(across(1), down(1)), (across(32), down(32))], "muted", 1.5, "6 4")
    right = Scale(1, 32, 462, 740, math.log2)
    percents = Scale(0, 100, 344, 84)
    picture.text(430, 62, "efficiency: speedup / GPUs, %", NORMAL, bold=True)
    picture.y_axis(percents, [0, 20, 40, 60, 80, 100], 462, 740)
    picture.x_axis(right, counts, 344, "GPUs")
    picture.line([(462, percents(100)), (740, percents(100))], "muted", 1.5, "6 4")
    picture.text(across(11), down(14.6), "ideal", anchor="end", colour="muted", on_lines=True)
    for series, look in lines.items():
        throughputs = _throughputs(series)
        speedups = _speedups(throughputs)
        efficiencies = _efficiencies(throughputs)
        for place, values in ((across, speedups), (right, efficiencies)):
            height = down if values is speedups else percents
            points = [(place(gpus), height(value)) for gpus, value in values.items()]
            picture.line(points, look.colour, 2, look.dashes)
            for point in points:
                picture.marker(*point, look.marker, look.colour)
        most = max(throughputs)
        # Two of the lines end close to each other.
        shift = {"ResNet-50, weak": -2, "BERT, weak": 9}.get(look.name, 5)
        picture.text(across(most) + 9, down(speedups[most]) + shift, f"{speedups[most]:.1f}", bold=True)
        picture.text(
            right(most) + 9, percents(efficiencies[most]) + 5, f"{efficiencies[most]:.0f}", bold=True
        )
    return picture


def learning_rate() -> Picture:
    """The accuracy by batch, one line for each rule, for three optimizers."""
    runs = pd.read_csv(H100 / "one_gpu" / "learning_rate.csv")
    medians = runs.groupby(["optimizer", "rule", "warmup", "batch"]).accuracy.median()
    picture = Picture(
        "Test accuracy by batch size, for three rules of the learning rate and three optimizers", 360
    )
    lines = {
        "none": Line("unchanged", "muted", "circle", "2 4"),
        "linear": Line("linear", "second", "square"),
        "sqrt": Line("square root", "ink", "triangle", "7 4"),
    }
    for number, look in enumerate(lines.values()):
        left = 52 + 138 * number
        picture.line([(left, 22), (left + 34, 22)], look.colour, 2, look.dashes)
        picture.marker(left + 17, 22, look.marker, look.colour)
        picture.text(left + 42, 26.5, look.name)
    picture.marker(480, 22, "ring", "second")
    picture.text(492, 26.5, "linear, warm-up of 40 updates instead of 10")
    down = Scale(0, 100, 300, 88)
    batches = [64, 256, 1024, 4096]
    for number, optimizer in enumerate(["SGD", "AdamW", "Adadelta"]):
        left = 52 + 252 * number
        across = Scale(64, 4096, left + 12, left + 200, math.log2)
        picture.text(left, 62, optimizer, NORMAL, bold=True)
        picture.y_axis(down, [0, 20, 40, 60, 80, 100], left, left + 212)
        picture.x_axis(across, batches, 300, "global batch")
        start = medians[optimizer, "none", "10 updates", 64]
        for rule, look in lines.items():
            values = medians[optimizer, rule, "10 updates"].to_dict() | {64: start}
            points = [(across(batch), down(values[batch])) for batch in batches]
            picture.line(points, look.colour, 2, look.dashes)
            for point in points:
                picture.marker(*point, look.marker, look.colour)
        longer = medians[optimizer, "linear", "40 updates"][1024]
        picture.marker(across(1024), down(longer), "ring", "second")
    return picture


def step() -> Picture:
    """Where the time of a step goes, on one worker and on two."""
    rows = pd.read_csv(SAMPLE / "cpu-xeon-2-cores" / "breakdown" / "measured.tsv", sep="\t")
    of_ranks = rows.groupby(["world_size", "phase", "rank"]).seconds.median()
    table = 1000 * of_ranks.groupby(["world_size", "phase"]).mean().unstack()
    picture = Picture("The milliseconds of a training step on one worker and on two, by phase", 216)
    colours = {
        "forward": "compute-tint",
        "backward": "compute",
        "optimizer": "muted",
        "communication": "communication",
        "waiting": "waiting",
    }
    named = [(colour, phase) for phase, colour in colours.items()]
    picture.legend(106, 28, named, 128)
    across = Scale(0, 200, 106, 746)
    for tick in range(0, 201, 50):
        picture.line([(across(tick), 48), (across(tick), 168)], "grid", 1)
    for number, workers in enumerate(table.index):
        top = 56 + 58 * number
        picture.text(98, top + 27, f"{workers} worker{'s' * (workers > 1)}", NORMAL, "end")
        start = table.data[workers]
        for phase, colour in colours.items():
            milliseconds = table[phase][workers]
            picture.rect(across(start), top, across(milliseconds) - across(0), 44, colour, radius=0)
            if milliseconds > 20:
                middle = across(start + milliseconds / 2)
                on_dark = "paper" if colour == "compute" else "ink"
                picture.text(middle, top + 27, f"{milliseconds:.0f}", NORMAL, "middle", colour=on_dark)
            start += milliseconds
        picture.text(across(start) + 8, top + 27, f"{table.step[workers]:.0f} ms", NORMAL, bold=True)
    picture.x_axis(across, [0, 50, 100, 150, 200], 168, "ms of a step of 256 images")
    return picture


def choice() -> Picture:
    """What each number of GPUs takes, in hours and in GPU-hours, for one training."""
    tokens = 100e9
    rates = {gpus: TOKENS_OF_A_SAMPLE * rate for gpus, rate in _throughputs(LANGUAGE_MODEL).items()}
    hours = {gpus: tokens / rate / 3600 for gpus, rate in rates.items()}
    paid = {gpus: gpus * time for gpus, time in hours.items()}
    picture = Picture("Hours and GPU-hours of one training on 8 to 256 H100", 402)
    picture.text(20, 26, "100 billion tokens through 1.3 billion weights, on H100", NORMAL, bold=True)
    across = Scale(4, 128, 72, 740, math.log2)
    down = Scale(0, 2000, 344, 84)
    picture.text(20, 58, "GPU-hours: what you pay", colour="muted")
    picture.y_axis(down, [0, 500, 1000, 1500, 2000], 72, 740)
    picture.x_axis(across, [4, 8, 16, 32, 64, 128], 344, "hours: how long you wait")
    picture.line([(across(hours[gpus]), down(paid[gpus])) for gpus in hours], "muted", 1.5, "6 4")
    for gpus, time in hours.items():
        x, y = across(time), down(paid[gpus])
        picture.marker(x, y, "circle", "compute")
        more = f", +{100 * (paid[gpus] / paid[8] - 1):.0f} %" if gpus > 8 else ""
        picture.text(x + 10, y - 26, f"{gpus} GPUs", NORMAL, bold=True, on_lines=True)
        picture.text(x + 10, y - 9, f"{time:.0f} h{more}", on_lines=True)
    return picture


def batch() -> Picture:
    """Images/s of one GPU by batch, when a step is launched from Python and when it is captured."""
    rows = pd.read_csv(H100 / "one_gpu" / "steps.csv")
    chosen = rows[(rows.loop == "one batch") & rows["shape"].str.endswith(" Adadelta")]
    rates = {}
    for shape, measured in chosen.groupby("shape"):
        # Both of one session: the same step was faster in one session than in the other.
        ways = [by_way.set_index("way").images_per_s for _, by_way in measured.groupby("session")]
        rates[shape] = max((way for way in ways if {"eager", "captured"} <= set(way.index)), key=len)
    shapes = sorted(rates, key=lambda shape: int(shape.split()[0]))
    picture = Picture(
        "Images per second of one H100 by batch size, eager and captured", 100 + 76 * len(shapes)
    )
    picture.legend(170, 28, [("waiting", "eager: Python launches each kernel"), ("compute", "captured")], 290)
    across = Scale(0, 800_000, 170, 700)
    bottom = 48 + 76 * len(shapes)
    for tick in range(0, 800_001, 200_000):
        picture.line([(across(tick), 44), (across(tick), bottom)], "grid", 1)
    for number, shape in enumerate(shapes):
        top = 54 + 76 * number
        size, precision = shape.split()[:2]
        picture.text(160, top + 38, f"batch {int(size):,}, {precision}", anchor="end")
        for row, (way, colour) in enumerate((("eager", "waiting"), ("captured", "compute"))):
            rate = rates[shape][way]
            picture.rect(170, top + 30 * row, across(rate) - 170, 26, colour, radius=0)
            picture.text(across(rate) + 8, top + 30 * row + 18, f"{rate:,.0f}", bold=True)
    picture.x_axis(across, range(0, 800_001, 200_000), bottom, "images/s")
    return picture


def looks_busy() -> Picture:
    """Utilisation and power of a GPU that waits, spins and works."""
    lines = (H100 / "looks_busy.txt").read_text().splitlines()
    picture = Picture("Utilisation and power of an H100 that waits, spins and works", 258)
    picture.legend(120, 28, [("muted", "utilisation, % of 100"), ("compute", "power, % of 700 W")], 210)
    across = Scale(0, 100, 120, 640)
    for tick in (0, 25, 50, 75, 100):
        picture.line([(across(tick), 44), (across(tick), 220)], "grid", 1)
    for number, line in enumerate(lines[1:]):
        name, _, rest = line.partition(":")
        busy, power = float(rest.split("%")[0].split()[-1]), float(rest.split(" W")[0].split()[-1])
        top = 50 + 58 * number
        picture.text(110, top + 29, name, NORMAL, "end", bold=True)
        rows = ((busy, f"{busy:.0f} %", "muted"), (100 * power / 700, f"{power:.0f} W", "compute"))
        for row, (percent, words, colour) in enumerate(rows):
            picture.rect(120, top + 24 * row, across(percent) - 120, 21, colour, radius=0)
            picture.text(across(percent) + 8, top + 24 * row + 16, words, bold=True)
    picture.line([(120, 44), (120, 220)], "ink", 1)
    for tick in (0, 25, 50, 75, 100):
        picture.text(across(tick), 240, f"{tick} %", anchor="middle", colour="muted")
    return picture


def minute() -> Picture:
    """What the monitor sampled of a job that works and of one that waits for its loader."""
    picture = Picture("Power and utilisation of a job that works and of one that waits for its loader", 348)
    picture.line([(52, 22), (86, 22)], "compute", 3)
    picture.text(94, 26.5, "power, % of 700 W")
    picture.line([(262, 22), (296, 22)], "muted", 2, "6 4")
    picture.text(304, 26.5, "utilisation, %")
    jobs = {
        "healthy_4096_bf16_short": "A job that works: batch 4,096",
        "input_bound": "A job that starves: one loader worker",
    }
    for number, (name, title) in enumerate(jobs.items()):
        left = 52 + 384 * number
        samples = pd.read_csv(H100 / "traces" / name / "vm.csv")
        gpu = samples[samples.what == "gpu"]
        seconds = gpu.time - gpu.time.iloc[0]
        across = Scale(0, 30, left, left + 330)
        down = Scale(0, 100, 292, 84)
        picture.text(left, 60, title, NORMAL, bold=True)
        picture.y_axis(down, [0, 25, 50, 75, 100], left, left + 330)
        picture.x_axis(across, [0, 5, 10, 15, 20, 25, 30], 292, "seconds of the job")
        power = 100 * gpu.power_w / gpu.power_limit_w
        for values, colour, thick, dashes in (
            (gpu.utilisation, "muted", 2, "6 4"),
            (power, "compute", 3, ""),
        ):
            points = zip(seconds, values, strict=True)
            picture.line([(across(second), down(value)) for second, value in points], colour, thick, dashes)
    return picture


def gpt_ladder() -> Picture:
    """Tokens per second and memory of a GPT, by what is switched on."""
    rows = pd.read_csv(H100 / "gpt_ladder.csv")
    picture = Picture(
        "Tokens per second and peak memory of a GPT of 124 million weights", 96 + 42 * len(rows)
    )
    picture.text(176, 28, "thousand tokens/s", bold=True)
    picture.text(560, 28, "peak memory, GB", bold=True)
    rates = Scale(0, 500, 176, 496)
    memory = Scale(0, 25, 560, 740)
    bottom = 44 + 42 * len(rows)
    for scale, ticks in ((rates, [0, 100, 200, 300, 400, 500]), (memory, [0, 5, 10, 15, 20, 25])):
        for tick in ticks:
            picture.line([(scale(tick), 40), (scale(tick), bottom)], "grid", 1)
        picture.x_axis(scale, ticks, bottom, "")
    for number, row in enumerate(rows.itertuples()):
        top = 48 + 42 * number
        picture.text(168, top + 20, row.section, anchor="end")
        rate, gigabytes = row.tokens_per_s / 1000, row.peak_memory_mb / 1000
        picture.rect(176, top, rates(rate) - 176, 30, "compute", radius=0)
        picture.text(rates(rate) + 6, top + 20, f"{rate:.0f}", bold=True)
        picture.rect(560, top, memory(gigabytes) - 560, 30, "memory", radius=0)
        picture.text(memory(gigabytes) + 6, top + 20, f"{gigabytes:.1f}", bold=True)
    return picture


def one_gpu_ladder() -> Picture:
    """Images/s of one GPU, made fast line by line."""
    rows = pd.read_csv(H100 / "one_gpu" / "ladder.csv")
    rows = rows[~rows.rung.str.startswith("beside")]
    picture = Picture(
        "Images per second of a ResNet-18 on one H100, made fast line by line", 66 + 30 * len(rows)
    )
    across = Scale(0, 80_000, 130, 740)
    bottom = 20 + 30 * len(rows)
    ticks = range(0, 80_001, 20_000)
    for tick in ticks:
        picture.line([(across(tick), 14), (across(tick), bottom)], "grid", 1)
    for number, row in enumerate(rows.itertuples()):
        top = 18 + 30 * number
        picture.text(122, top + 16, row.rung, anchor="end")
        colour = "compute" if row.rung == "on the gpu" else "waiting"
        picture.rect(130, top, across(row.samples_per_s) - 130, 22, colour, radius=0)
        words = f"{row.samples_per_s:,.0f}"
        picture.text(across(row.samples_per_s) + 7, top + 16, words, bold=True, on_lines=True)
    limits = {
        "the GPU waits for the loader": ("baseline", "baseline"),
        "the GPU waits for launches": ("workers", "compile"),
        "for the loader again": ("reduce-overhead", "captured"),
    }
    names = list(rows.rung)
    for words, (first, last) in limits.items():
        top, end = 18 + 30 * names.index(first), 40 + 30 * names.index(last)
        picture.line([(496, top + 2), (502, top + 2), (502, end - 2), (496, end - 2)], "muted", 1.5)
        picture.text(512, (top + end) / 2 + 4.5, words, on_lines=True)
    picture.x_axis(across, ticks, bottom, "images/s")
    return picture


def timelines() -> Picture:
    """20 ms of three trainings: the GPU waits for its loader, it waits for launches, and it is busy."""
    rows = pd.read_csv(H100 / "one_gpu" / "timelines.csv")
    picture = Picture(
        "What CPU and GPU do in 20 ms of a training: two GPUs that wait, for images and for launches, and a "
        "busy one",
        432,
    )
    picture.legend(
        100,
        26,
        [
            ("compute-tint", "images, by the CPU"),
            ("muted", "a launch, by the CPU"),
            ("compute", "a kernel, on the GPU"),
            ("waiting", "the GPU waits"),
        ],
        174,
    )
    across = Scale(0, 20, 100, 780)
    from_ms = {"waits for the loader": 41, "waits for launches": 0.5, "busy": 40}
    without_workers = rows[rows.timeline == "waits for the loader"].set_index("name").length_us / 1000
    prepared = without_workers["wait for the batch"]
    whole = without_workers["ProfilerStep#4"]
    titles = {
        "waits for the loader": (
            f"No loader workers: the CPU prepares images for {prepared:.0f} of the {whole:.0f} ms of a step"
        ),
        "waits for launches": "Batch 128: most kernels end before the next one is launched",
        "busy": "Batch 2,048: the kernels are longer, and launched ahead of time",
    }
    for number, (name, start) in enumerate(from_ms.items()):
        top = 56 + 116 * number
        picture.text(100, top, titles[name], NORMAL, bold=True)
        chosen = rows[rows.timeline == name]
        images = chosen[(chosen.lane == "mark") & (chosen["name"] == "wait for the batch")]
        lanes = {
            "CPU": ("neutral", [("compute-tint", images), ("muted", chosen[chosen.lane == "launch"])]),
            "GPU": ("waiting", [("compute", chosen[chosen.lane == "gpu"])]),
        }
        for row, (words, (ground, layers)) in enumerate(lanes.items()):
            y = top + 12 + 38 * row
            picture.text(92, y + 20, words, NORMAL, "end")
            picture.rect(100, y, 680, 30, ground, radius=0)
            for colour, spans in layers:
                for begin, end in _merged(spans.start_us / 1000 - start, spans.length_us / 1000):
                    left, right = (across(min(max(edge, 0), 20)) for edge in (begin, end))
                    if right > left:
                        picture.rect(left, y, max(right - left, 0.6), 30, colour, radius=0)
    picture.x_axis(across, [0, 5, 10, 15, 20], 384, "milliseconds")
    return picture


def _merged(starts: pd.Series, lengths: pd.Series) -> list[tuple[float, float]]:
    """Join intervals that are less than 0.02 ms apart, which is less than a picture can show."""
    merged: list[tuple[float, float]] = []
    for start, length in sorted(zip(starts, lengths, strict=True)):
        if merged and start - merged[-1][1] < 0.02:
            merged[-1] = (merged[-1][0], max(merged[-1][1], start + length))
        else:
            merged.append((start, start + length))
    return merged
