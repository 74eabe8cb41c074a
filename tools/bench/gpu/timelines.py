"""Two timelines of one training step for a picture: a GPU that waits for its loader, and one that is busy.

Try: python3 tools/bench/gpu/timelines.py --out /tmp/timelines.csv

A third is of a GPU that waits for the CPU to launch its kernels. Made with torch.profiler and a schedule
(wait, warm up, record three steps) as a reader of the page would do it. The CSV has an interval a row:
`lane` is `gpu` (kernels, copies), `cpu` (operators, the outermost only, of each thread) or `step`; times are
in microseconds from the first recorded step. The whole traces lie beside it, compressed.
"""

import argparse
import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from measuring import DEVICE, Table, wait
from one_gpu import (
    BASELINE,
    CHANNELS_LAST,
    COMPILED,
    FUSED,
    LARGER,
    Settings,
    endless_batches,
    generated_images,
    make_step,
    set_precision,
)
from torch.profiler import ProfilerActivity, profile, record_function, schedule

COLUMNS = ["timeline", "lane", "thread", "name", "start_us", "length_us"]
TIMELINES: dict[str, Settings] = {
    "waits for the loader": BASELINE,
    "waits for launches": replace(FUSED, on_the_gpu=True),
    "busy": replace(CHANNELS_LAST, fused=True, on_the_gpu=True, batch=2048),
    "compiled, busy": replace(COMPILED, on_the_gpu=True, batch=LARGER.batch),
}
RECORDED_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timelines", nargs="*", metavar="TIMELINE", help=f"of {', '.join(TIMELINES)}")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV to write")
    parser.add_argument("--width", type=int, default=64, help="as of one_gpu.py (default: %(default)s)")
    args = parser.parse_args()
    images, labels = generated_images(50_000)
    table = Table(args.out, COLUMNS, printed=False)
    for name in args.timelines or TIMELINES:
        trace = args.out.parent / f"trace_{name.replace(' ', '_').replace(',', '')}.json"
        record(TIMELINES[name], images, labels, args.width, trace)
        intervals = read(trace)
        for interval in intervals:
            table.add(timeline=name, **interval)
        with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()
        busy = sum(interval["length_us"] for interval in intervals if interval["lane"] == "gpu")
        whole = sum(interval["length_us"] for interval in intervals if interval["lane"] == "step")
        print(f"{name}: {len(intervals)} intervals, GPU work {busy:.0f} of {whole:.0f} us", flush=True)


def record(settings: Settings, images: torch.Tensor, labels: torch.Tensor, width: int, trace: Path) -> None:
    """Train some steps under the profiler, and write what it recorded of the last three."""
    torch.manual_seed(1)
    set_precision(settings)
    batches = endless_batches(settings, images, labels)
    step = make_step(settings, width, next(batches))
    for _ in range(5):
        step(*next(batches))
    activities = [ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    when = schedule(wait=1, warmup=2, active=RECORDED_STEPS)
    with profile(activities=activities, schedule=when) as profiler:
        for _ in range(3 + RECORDED_STEPS):
            with record_function("wait for the batch"):
                batch = next(batches)
            with record_function("train on it"):
                loss = step(*batch)
                if settings.reads_each_loss:
                    loss.item()
            if profiler.step_num == 2 + RECORDED_STEPS:
                wait()
            profiler.step()
    profiler.export_chrome_trace(str(trace))


def read(trace: Path) -> list[dict[str, object]]:
    """Return the intervals of a trace: all of the GPU, and of the CPU those that are inside of no other."""
    # Of the format of Chrome's traces, "X" is an event with a start and a duration, in microseconds.
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [mark for mark in marks if mark["name"].startswith("ProfilerStep#")]
    events_of_lane = {
        "step": steps,
        "mark": [mark for mark in marks if not mark["name"].startswith("ProfilerStep#")],
        "gpu": [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")],
        "launch": [event for event in events if event.get("cat") == "cuda_runtime"],
        "cpu": outermost([event for event in events if event.get("cat") == "cpu_op"]),
    }
    begin = min(step["ts"] for step in steps)
    intervals = []
    for lane, events_here in events_of_lane.items():
        intervals += [row(lane, event, begin) for event in events_here]
    return intervals


def outermost(operators: list[dict]) -> list[dict]:
    """Return the operators that no other of their thread has called."""
    without_caller = []
    ends = {}  # of the last one found, by thread
    for operator in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        thread = operator["tid"]
        if operator["ts"] >= ends.get(thread, 0):
            without_caller.append(operator)
            ends[thread] = operator["ts"] + operator["dur"]
    return without_caller


def row(lane: str, event: dict, begin: float) -> dict[str, object]:
    return {
        "lane": lane,
        "thread": event["tid"],
        "name": str(event["name"])[:60],
        "start_us": round(event["ts"] - begin, 1),
        "length_us": round(event["dur"], 1),
    }


if __name__ == "__main__":
    main()
