"""Measure on one GPU every table of the lessons that a machine without a GPU cannot make.

PYTHONPATH=. python3 tools/bench/on_a_gpu.py --out results/measured

Each section is independent: it has its own time limit, and prints and writes its table at once. Without
names, those of DEFAULT run, which take at most eight minutes; the others run when they are named. Most
sections are a script of tools/bench/gpu, which can be run by itself.
"""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

from manygpus.record import records

REPOSITORY = Path(__file__).resolve().parents[2]
SINGLE = "01_singlegpu/mnist_singlegpu.py"
DDP = "03_multigpu_ddp/mnist_ddp.py"
CAPTURED = "03_multigpu_ddp/beyond/by_feature/captured.py"
SHAPES = {
    "128 tf32": ("--batch-size", 128, "--precision", "tf32"),
    "1024 bf16": ("--batch-size", 1024, "--precision", "bf16"),
    "4096 bf16": ("--batch-size", 4096, "--precision", "bf16"),
}
BENCH = REPOSITORY / "tools" / "bench"
SCRIPTS = BENCH / "gpu"
SHAPES_TO_COMPILE = ("128 tf32 Adadelta", "1024 bf16 Adadelta", "4096 bf16 Adadelta", "128 bf16 Adam")
RUNGS_TO_COMPILE = ("compile", "reduce-overhead", "batch 512", "captured")
BATCHES_OF_TIMELINES = {"waits for the loader": 128, "waits for launches": 128, "busy": 2048}
# Of gpt_ladder.py: DistributedDataParallel and fully_shard on one GPU, where a shard is all of it.
FSDP = (
    "bf16, split over one rank",
    "bf16, compiled",
    "bf16, split, compiled",
    "bf16, compiled, 64 windows",
    "bf16, compiled, 64 windows, bf16 residuals",
    "bf16, split, compiled, 64 windows",
)
# Of gpt_mfu.py: the first has cuDNN's attention.
ATTENTION = (
    "batch 16 of that",
    "batch 16, flash attention",
    "batch 16, efficient attention",
    "batch 16, math attention",
)
# Of one_gpu.py.
IMAGES_ON_THE_GPU = (
    "baseline",
    "on the gpu",
    "beside: strict fp32, on the gpu",
    "beside: fp32, on the gpu",
    "beside: bf16, on the gpu",
    "beside: channels_last, on the gpu",
    "beside: fused, on the gpu",
    "beside: compile, on the gpu",
    "beside: reduce-overhead, on the gpu",
)
TRACED_STEPS = 3  # by breakdown.py --trace
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")  # their durations are microseconds
Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the tables and the runs")
    args = parser.parse_args()
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"there is no section {', '.join(sorted(unknown))}: choose from {', '.join(SECTIONS)}.")
    for name in args.sections or DEFAULT:
        section, seconds = SECTIONS[name]
        print(f"== {name}", flush=True)
        started = time.monotonic()
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            rows = section(folder, started + seconds)
            if rows is not None:  # a script has written its own table
                write(folder.with_suffix(".csv"), rows)
        except subprocess.TimeoutExpired:
            print(f"not whole: it took more than {seconds} s", flush=True)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows as they come, and print them."""
    with path.open("w", newline="") as file:
        for number, row in enumerate(rows):
            if number == 0:
                writer = csv.DictWriter(file, row, lineterminator="\n")
                writer.writeheader()
                print(" | ".join(row), flush=True)
            writer.writerow(row)
            file.flush()
            print(" | ".join(map(str, row.values())), flush=True)


def run(until: float, *command: object) -> str:
    """Run a program of ours, and return what it printed; what went wrong is printed here."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=max(until - time.monotonic(), 1),
    )
    if done.returncode:
        print(f"{command[0]} ended with {done.returncode}: {done.stderr[-1500:]}", flush=True)
    return done.stdout


def script(name: str, *arguments: object) -> Callable[[Path, float], None]:
    """Return a section that is a script of tools/bench/gpu; what it prints is seen at once."""

    def section(folder: Path, until: float) -> None:
        command = [SCRIPTS / f"{name}.py", "--out", folder / f"{name}.csv", *arguments]
        run_in_sight(command, until - time.monotonic())

    return section


def run_in_sight(command: list[object], seconds: float) -> None:
    """Run a script of ours for so long at most, and let it print."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.STDOUT,
        timeout=max(seconds, 1),
    )
    if done.returncode:
        print(f"{' '.join(map(str, command[:2]))} ended with {done.returncode}", flush=True)


def untimed(folder: Path, until: float) -> None:
    """Do at one time what no clock is read in: trainings for their accuracy, torch.compile for its cache."""
    commands = [("warmup.py", "--images", "20000")]
    commands += [("steps.py", "--compile-only", shape) for shape in SHAPES_TO_COMPILE]
    commands += [("one_gpu.py", "--compile-only", rung) for rung in RUNGS_TO_COMPILE]
    # Each of them would start as many compiling processes as there are cores.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    running = []
    for number, (name, *arguments) in enumerate(commands):
        out = folder / f"{number}_{name.removesuffix('.py')}.csv"
        command = [sys.executable, str(SCRIPTS / name), *arguments, "--out", str(out)]
        with out.with_suffix(".log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            running.append(process)
    for process in running[1:] + running[:1]:  # the trainings take longest
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"not done: {process.args[1:]}", flush=True)
    for log in sorted(folder.glob("*.log")):
        print("\n".join(log.read_text().splitlines()[-4:])[-700:], flush=True)


def train(until: float, folder: Path, *command: object) -> list[Row]:
    """Train, and return the rows of the record, which goes to `folder`/runs."""
    before = set(folder.glob("runs/*.csv"))
    run(until, *command, "--results-dir", folder)
    new = set(folder.glob("runs/*.csv")) - before
    return records.read(new.pop()) if new else []


def steady(rows: list[Row]) -> float:
    """Return images per second of the median epoch past the warm-up."""
    return median(row["images_per_s"] for row in rows if not row["warmup"])


def table(steps: Path) -> str:
    """Lay out what steps.py has measured with the recipe classic as a table for people.

    Where the GPU waits for the CPU, sessions differ by more than most ways do. So all rows of a batch are of
    one session, the one in which most ways were measured.
    """
    with steps.open() as file:
        rows = list(csv.DictReader(file))
    lines = []
    for shape in SHAPES:
        ways_of_session = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            if row["shape"] == f"{shape} Adadelta":
                ways_of_session[row["session"]][row["way"]][row["loop"]] = row
        ways = max(ways_of_session.values(), key=len)
        eager = float(ways["eager"]["one batch"]["images_per_s"])
        lines += [step_row(shape, way, loops, eager) for way, loops in ways.items()]
    return markdown(lines)


def markdown(lines: list[dict[str, str]]) -> str:
    """Return the lines, which have the same columns, as a table."""
    cells = [[*lines[0]], ["---"] * len(lines[0]), *([*line.values()] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def ladder_table(ladder: Path) -> str:
    """Lay out what each rung of one_gpu.py adds and gains, without the rungs beside the ladder."""
    with ladder.open() as file:
        rungs = [row for row in csv.DictReader(file) if not row["rung"].startswith("beside")]
    return markdown(
        [
            {
                "rung": row["rung"],
                "the line": row["added"],
                "images/s": f"{int(row['samples_per_s']):,}",
                "min..max": spread(row),
            }
            for row in rungs
        ]
    )


def timeline_table(timelines: Path) -> str:
    """Lay out how long the GPU worked in one step of each timeline: in the middle one of three."""
    with timelines.open() as file:
        intervals = list(csv.DictReader(file))
    lines = []
    for name, batch in BATCHES_OF_TIMELINES.items():
        times = defaultdict(list)
        for interval in intervals:
            if interval["timeline"] == name:
                start = float(interval["start_us"])
                times[interval["lane"]].append((start, start + float(interval["length_us"])))
        begin, end = times["step"][len(times["step"]) // 2]
        inside = [(max(start, begin), min(stop, end)) for start, stop in times["gpu"]]
        inside = sorted((start, stop) for start, stop in inside if stop > start)
        lines.append(
            {
                "the GPU": name.replace("busy", "is busy"),
                "batch": f"{batch:,}",
                "the GPU works": f"{100 * covered(inside) / (end - begin):.0f} %",
            }
        )
    return markdown(lines)


def covered(intervals: list[tuple[float, float]]) -> float:
    """Return how long at least one of the intervals lasts; they are sorted."""
    total = 0.0
    reached = 0.0
    for start, stop in intervals:
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def step_row(shape: str, way: str, loops: dict[str, dict[str, str]], eager: float) -> dict[str, str]:
    """Return a line of the table of steps; `eager`: images/s of the eager step on one batch."""
    alone = loops["one batch"]
    cells = {
        "batch, precision": shape,
        "step": way,
        "images/s": f"{int(alone['images_per_s']):,}",
        "min..max": spread(alone),
        "x eager": f"{int(alone['images_per_s']) / eager:.2f}",
        "ms": f"{float(alone['ms_per_step']):.2f}",
        "in a training, images/s": "",
        "its min..max": "",
        "its ms": "",
    }
    if "kit" in loops:
        training = loops["kit"]
        cells["in a training, images/s"] = f"{int(training['images_per_s']):,}"
        cells["its min..max"] = spread(training)
        cells["its ms"] = f"{float(training['ms_per_step']):.2f}"
    return cells


def spread(row: dict[str, str]) -> str:
    """Return the slowest and the fastest window or epoch."""
    return f"{int(row['slowest']):,}..{int(row['fastest']):,}"


def accuracy(folder: Path, until: float) -> Iterator[Row]:
    """99 % by the recipe fast, captured."""
    options = ("--batch-size", 128, "--precision", "tf32", "--recipe", "fast", "--epochs", 3)
    for seed in (1, 2, 3):
        rows = train(until, folder, CAPTURED, *options, "--seed", seed)
        if rows:
            yield {
                "seed": seed,
                "acc. %": rows[-1]["test_accuracy"],
                "seconds of the epochs": " ".join(f"{row['train_seconds']:.2f}" for row in rows),
                "wall s": f"{rows[-1]['elapsed_s']:.1f}",
            }


def kernels(folder: Path, until: float) -> Iterator[Row]:
    """What the GPU does in a step of stage 03, from the profiler's trace."""
    for shape in ("128 tf32", "1024 bf16", "4096 bf16"):
        run(until, "03_multigpu_ddp/breakdown.py", *SHAPES[shape], "--trace", "--results-dir", folder)
        for trace in folder.glob("breakdown/*.json"):
            (table,) = folder.glob(f"breakdown/{trace.name.split('.')[0]}.tsv")
            with table.open() as file:
                phases = list(csv.DictReader(file, delimiter="\t"))
            steps_s = [float(row["seconds"]) for row in phases if row["phase"] == "step"]
            events = json.loads(trace.read_text())["traceEvents"]
            on_gpu = [event for event in events if event.get("cat") in GPU_EVENTS]
            launched = sum(event["cat"] == "kernel" for event in on_gpu)
            busy_ms = sum(event["dur"] for event in on_gpu) / 1000
            yield {
                "batch, precision": shape,
                "kernels a step": launched // TRACED_STEPS,
                "GPU works ms": f"{busy_ms / TRACED_STEPS:.2f}",
                "step ms": f"{1000 * sorted(steps_s)[len(steps_s) // 2]:.2f}",
            }
            trace.unlink()  # some MB


def traces(folder: Path, until: float) -> Iterator[Row]:
    """Sampled trainings of 20 seconds or more, and their verdicts."""
    long = {
        "captured_64_tf32": (CAPTURED, "--batch-size", 64, "--precision", "tf32", "--epochs", 22),
        "captured_1024_bf16": (CAPTURED, *SHAPES["1024 bf16"], "--train-size", 2_000_000, "--epochs", 4),
        "healthy_4096_bf16": (SINGLE, *SHAPES["4096 bf16"], "--train-size", 4_000_000, "--epochs", 3),
    }
    for name, (script, *options) in long.items():
        results = folder / name / "training"
        printed = run(
            until, "slurm/monitor.py", "--", sys.executable, script, *options, "--results-dir", results
        )
        watched = re.search(r"^watch   (\S+) was watched", printed, re.MULTILINE)
        if watched:
            for samples in Path(watched[1]).glob("monitor/*.csv"):
                shutil.copy(samples, folder / name)
        rows = []
        for path in results.glob("runs/*.csv"):
            rows += records.read(path)
        *verdict, _ = re.findall(r"^watch +(.*)$", printed, re.MULTILINE) or [""]
        if rows:
            yield {"trace": name, "images/s": round(steady(rows)), "verdict": " ".join(verdict)}


def start(folder: Path, until: float) -> Iterator[Row]:
    """Where the time before the first epoch goes: a short run of each stage, and the imports."""
    for script in (SINGLE, DDP):
        results = folder / Path(script).stem
        run(until, script, "--epochs", 1, "--precision", "tf32", "--results-dir", results)
        for path in results.glob("runs/*.csv"):
            (row,) = records.read(path)
            seconds = row["elapsed_s"] - row["train_seconds"] - row["eval_seconds"]
            yield {"what": script, "told": f"{seconds:.1f} s before its epoch"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", SINGLE, "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # "import time: <own microseconds> | <with what it imports> | <name>", after a line of titles
    lines = [line.split("|") for line in done.stderr.splitlines() if line.startswith("import time:")]
    slowest = sorted(lines[1:], key=lambda line: int(line[1]), reverse=True)
    for _, microseconds, name in slowest[:12]:
        yield {"what": f"import {name.strip()}", "told": f"{int(microseconds) / 1e6:.2f} s"}


def fsdp(folder: Path, until: float) -> None:
    """Compare the GPT with fully_shard on one GPU with that without it."""
    command = [BENCH / "gpt_ladder.py", "--out", folder / "gpt_ladder.csv", *FSDP]
    run_in_sight(command, until - time.monotonic())


def gpu_tests(folder: Path, until: float) -> None:
    """Run the tests that need a GPU; with one GPU those that need two are skipped."""
    tests = REPOSITORY / "tests" / "train" / "test_gpu.py"
    report = folder / "report.xml"
    command = ["-m", "pytest", "-n0", "-q", "-rfs", "--durations=5", f"--junit-xml={report}", tests]
    run_in_sight(command, until - time.monotonic())


def compare(folder: Path, until: float) -> Iterator[Row]:
    """`make compare` on one GPU, each run once."""
    started = time.monotonic()
    printed = run(until, "results/compare.py", "--local", "--repeats", 1, "--out", folder)
    print(printed[-3000:], flush=True)
    yield {"make compare, seconds": round(time.monotonic() - started)}


SECTIONS: dict[str, tuple[Callable[[Path, float], Iterable[Row] | None], int]] = {
    "untimed": (untimed, 80),
    "steps": (script("steps"), 190),
    "overhead": (script("overhead"), 30),
    "ladder": (script("one_gpu"), 80),
    "timelines": (script("timelines"), 20),
    "gpt": (script("gpt_mfu"), 80),
    "fsdp": (fsdp, 650),  # the sum of the limits in gpt_ladder.py, which ends its own programs
    "attention": (script("gpt_mfu", *ATTENTION), 90),
    "images_on_the_gpu": (script("one_gpu", *IMAGES_ON_THE_GPU), 100),
    "gpu_tests": (gpu_tests, 400),
    "kernels": (kernels, 90),
    "accuracy": (accuracy, 70),
    "traces": (traces, 220),
    "start": (start, 60),
    "compare": (compare, 200),
}
DEFAULT = ("untimed", "steps", "overhead", "ladder", "timelines", "gpt")

if __name__ == "__main__":
    main()
