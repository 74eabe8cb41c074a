"""Compares the answers with what the traces in mine/runs show, those of three runs on two ranks each."""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from manygpus.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# Before you start a run: with all gradients in one bucket, what percentage of its all-reduce is hidden?
prediction = 0  # percent

# Rank 0 of `small`, its last step
longest = backward     # the longest of data, forward, backward, optimizer
buckets_small = 6      # how many all-reduces?
hidden_small = 17      # ms of communication until the last bucket is handed over
exposed_small = 5.4    # ms of communication from then on

# Rank 0 of `one`, its last step
buckets_one = 1
exposed_one = 7.8      # ms of communication after the bucket is handed over

# `late`, the last step
wait_late = 62         # ms in which the all-reduce of rank 0 only waits for rank 1
late_phase = data      # what made rank 1 late: data, forward, backward, optimizer or network
"""
HINTS = """\
## 1

`torch.profiler.schedule(wait=..., warmup=..., active=..., repeat=1)` says which steps are traced, and the
profiler counts a step at every `profiler.step()`. What it gives to `on_trace_ready` is a function that gets
the profiler, and can call `export_chrome_trace`. The name of the file needs the run and the rank.

## 2

`c10d::allreduce_` is the call in which DDP hands a bucket over, and returns at once. `gloo:all_reduce`, on
a different thread, is the communication. When the last bucket is handed over, the last gradient is computed.
Communication before that moment is hidden, and communication after it is exposed. `backward` ends only when
all gradients have arrived, so its bar includes both.

## 3

`schedule=schedule(wait=1, warmup=2, active=2, repeat=1)`, and `with record_function("data"):` around each
phase. `exposed` is the end of the last `gloo:all_reduce` minus the start of the last `c10d::allreduce_`. For
`wait_late`, subtract durations: the two bars of `gloo:all_reduce` in `late` end at the same time, and the bar
of rank 1 is as long as the communication takes. The rest of the bar of rank 0 is waiting.
"""
SOLUTION = {
    "train.py": """\
@@
-\"""Train a small network with DDP on two CPU ranks, and write a trace of it. Two functions need a change.
+\"""Train a small network with DDP on two CPU ranks, and write a trace of it.
@@
-from torch.profiler import ProfilerActivity, profile
+from torch.profiler import ProfilerActivity, profile, record_function, schedule
@@
-    return profile(activities=[ProfilerActivity.CPU])
+    return profile(
+        activities=[ProfilerActivity.CPU],
+        schedule=schedule(wait=1, warmup=2, active=2, repeat=1),
+        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(RUNS / f"{run}.rank-{rank}.json")),
+    )
@@
-            images, labels = next_batch(random, late_ms)
-            loss = F.cross_entropy(model(images), labels)
-            loss.backward()
-            optimizer.step()
-            optimizer.zero_grad()
-    if rank == 0:
-        profiler.export_chrome_trace(str(RUNS / f"{run}.rank-0.json"))
+            with record_function("data"):
+                images, labels = next_batch(random, late_ms)
+            with record_function("forward"):
+                loss = F.cross_entropy(model(images), labels)
+            with record_function("backward"):
+                loss.backward()
+            with record_function("optimizer"):
+                optimizer.step()
+                optimizer.zero_grad()
+            profiler.step()
""",
}
STARTS_WITH = "`prediction`"
RECORDED = {"03_multigpu_ddp/exercises/20_profile/recorded": []}
OF_SMALL = "runs/small.rank-0.json"
WRONG = [
    (OF_SMALL, '"ProfilerStep#', '"Step ', "where a step begins"),
    (OF_SMALL, "ProfilerStep#3", "ProfilerStep#0", "begins with step 0"),
    ("runs/one.rank-1.json", '"rank": 1', '"rank": 0', "is a trace of rank 0"),
    ("runs/late.rank-1.json", '"traceEvents": [', '"traceEvents": ', "is incomplete"),
    (OF_SMALL, '"name": "backward"', '"name": "back"', "has no range `backward`"),
    (OF_SMALL, "gloo:all_reduce", "gloo:broadcast", "has no all-reduce"),
    ("runs/late.rank-1.json", '"name": "data", "pid"', '"name": "loading", "pid"', "has no range `data`"),
    ("answers.txt", "longest = backward", "longest = forward", "A different phase is longer"),
    ("answers.txt", "buckets_small = 6", "buckets_small = 12", "twice as many"),
    ("answers.txt", "buckets_small = 6", "buckets_small = 24", "one step of one rank"),
    ("answers.txt", "hidden_small = 17", "hidden_small = 39", "adds up all bars"),
    ("answers.txt", "hidden_small = 17", "hidden_small = 22.5", "all of the communication"),
    ("answers.txt", "exposed_small = 5.4", "exposed_small = 0", "inside `backward`"),
    ("answers.txt", "exposed_small = 5.4", "exposed_small = 25.8", "the whole of `backward`"),
    ("answers.txt", "exposed_small = 5.4", "exposed_small = 39", "those that are hidden"),
    ("answers.txt", "buckets_one = 1", "buckets_one = 2", "twice as many"),
    ("answers.txt", "exposed_one = 7.8", "exposed_one = 0", "inside `backward`"),
    ("answers.txt", "wait_late = 62", "wait_late = 71.8", "the whole bar of rank 0"),
    ("answers.txt", "wait_late = 62", "wait_late = 8.8", "the communication itself"),
    ("answers.txt", "late_phase = data", "late_phase = network", "over the same network"),
    ("answers.txt", "late_phase = data", "late_phase = backward", "longer on rank 0"),
]
PHASES = ("data", "forward", "backward", "optimizer")
STEP = re.compile(r"ProfilerStep#(\d+)")
ALL_REDUCE = re.compile(r"all_?reduce", re.IGNORECASE)
SETTLED = 2  # DDP rebuilds its buckets at the start of step 1, so this is the first usual step
GENEROUS = 0.2  # by this share an answer in ms may differ from the trace


class Bar(NamedTuple):
    """An event in a trace, from `start` to `end` in ms."""

    name: str
    thread: int
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


class Step(NamedTuple):
    """A step of one rank: its phases, the calls that hand buckets over, and the communication."""

    number: int
    phases: dict[str, Bar]
    handed_over: list[Bar]
    all_reduces: list[Bar]

    @property
    def computed(self) -> float:
        """Return when the last gradient was computed."""
        return self.handed_over[-1].start

    @property
    def hidden(self) -> float:
        """Return for how long some all-reduce ran while gradients were still to be computed."""
        total = 0.0
        reached = 0.0
        for bar in self.all_reduces:
            end = min(bar.end, self.computed)
            total += max(0.0, end - max(bar.start, reached))
            reached = max(reached, end)
        return total

    @property
    def exposed(self) -> float:
        return max(bar.end for bar in self.all_reduces) - self.computed


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    small, _ = read_run(workspace, "small")
    one, _ = read_run(workspace, "one")
    late = read_run(workspace, "late")
    if len(one[-1].all_reduces) >= len(small[-1].all_reduces):
        raise Wrong(
            f"Your run `one` has {len(one[-1].all_reduces)} all-reduces in a step, and `small` has "
            f"{len(small[-1].all_reduces)}: give each the --bucket-mb of the README."
        )
    _check_longest(answers, small)
    _check_buckets(answers, "buckets_small", small)
    _check_hidden(answers, small)
    _check_exposed(answers, "exposed_small", small)
    _check_buckets(answers, "buckets_one", one)
    _check_exposed(answers, "exposed_one", one)
    wait = _check_late(answers, late)
    in_small, in_one = small[-1], one[-1]
    return (
        f"With {len(in_small.all_reduces)} buckets, {in_small.hidden:.1f} ms of the communication were "
        f"hidden behind the backward pass, and {in_small.exposed:.1f} ms were exposed. With one bucket, all "
        f"of it was exposed, {in_one.exposed:.1f} ms, since the bucket is full only when the last gradient "
        f"is computed (you predicted that {prediction:g} % would be hidden). In `late`, the network looks "
        f"slow on rank 0. In fact rank 0 waits {wait:.0f} ms for the loader of rank 1, which only the trace "
        "of rank 1 shows. On CPUs even hidden communication is not free, as gloo's threads take cores from "
        "the backward pass. In a trace of GPUs, read the rows of the GPU: NCCL's kernels are on a stream of "
        "their own, and `backward` returns before the GPU has done its work."
    )


def read_run(workspace: Workspace, run: str) -> list[list[Step]]:
    """Return the traced steps of rank 0 and of rank 1.

    Raises:
        Wrong: if the traces are not what the exercise asks for.
    """
    return [_read_rank(workspace, run, rank) for rank in (0, 1)]


def _read_rank(workspace: Workspace, run: str, rank: int) -> list[Step]:
    name = f"mine/runs/{run}.rank-{rank}.json"
    _check_that_it_exists(workspace, run, rank)
    try:
        trace = json.loads(workspace.text(f"runs/{run}.rank-{rank}.json"))
    except ValueError:
        raise Wrong(f"{name} is incomplete. Did two ranks write it, or was the run stopped?") from None
    of = trace.get("distributedInfo", {}).get("rank", rank)
    if of != rank:
        raise Wrong(f"{name} is a trace of rank {of}: each rank writes its own.")
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    bars = [
        Bar(event["name"], event["tid"], event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000)
        for event in sorted(events, key=lambda event: event["ts"])
    ]
    steps = [_step(bar, bars) for bar in bars if STEP.fullmatch(bar.name)]
    if not steps:
        raise Wrong(
            f"{name} does not show where a step begins, so it holds the whole run, with the first batch of "
            "the loader and the time to connect. Give the profiler a `schedule`, and call `profiler.step()` "
            "at the end of each step."
        )
    if steps[0].number < SETTLED:
        raise Wrong(
            f"{name} begins with step {steps[0].number}. The first steps are not like the others: the loader "
            "prepares its first batch, gloo connects, memory is reserved, and DDP rebuilds its buckets after "
            "step 0. Let the schedule skip three steps, with `wait` and `warmup`."
        )
    for step in steps:
        _check_step(name, step)
    return steps


def _check_that_it_exists(workspace: Workspace, run: str, rank: int) -> None:
    runs = workspace.folder / "runs"
    if (runs / f"{run}.rank-{rank}.json").exists():
        return
    if rank == 1:
        raise Wrong(
            f"mine/runs has a trace of rank 0 of `{run}`, and none of rank 1. Only both together show "
            "whether rank 0 communicates or waits for rank 1. Let every rank write a file."
        )
    raise Wrong(
        f"mine/runs has no {run}.rank-0.json. Start the run `{run}` of the README, or use our traces with "
        "`recorded`."
    )


def _step(whole: Bar, bars: Iterable[Bar]) -> Step:
    inside = [bar for bar in bars if whole.start <= bar.start < whole.end]
    phases = {bar.name: bar for bar in inside if bar.name in PHASES}
    all_reduces = [bar for bar in inside if ALL_REDUCE.search(bar.name)]
    return Step(
        int(STEP.fullmatch(whole.name)[1]),
        phases,
        [bar for bar in all_reduces if bar.thread == whole.thread],
        [bar for bar in all_reduces if bar.thread != whole.thread],
    )


def _check_step(name: str, step: Step) -> None:
    for phase in PHASES:
        if phase not in step.phases:
            raise Wrong(
                f"{name}: step {step.number} has no range `{phase}`. Put each of its four phases "
                f"({', '.join(PHASES)}) into a `record_function` of that name."
            )
    if not step.handed_over or not step.all_reduces:
        raise Wrong(
            f"{name}: step {step.number} has no all-reduce. Is the network still wrapped in "
            "DistributedDataParallel?"
        )


def _check_longest(answers: Answers, small: list[Step]) -> None:
    answer = answers.word("longest", *PHASES)
    step = small[-1]
    longest = max(bar.duration for bar in step.phases.values())
    if step.phases[answer].duration < (1 - GENEROUS) * longest:
        raise Wrong(
            f"`longest`: `{answer}` takes {step.phases[answer].duration:.1f} ms. A different phase is longer."
        )


def _check_buckets(answers: Answers, name: str, steps: list[Step]) -> None:
    answer = answers.number(name)
    step = steps[-1]
    if answer == len(step.all_reduces):
        return
    if answer == len(step.handed_over) + len(step.all_reduces):
        raise Wrong(
            f"`{name} = {answer:g}` is twice as many. Count only the bars `gloo:all_reduce`, which are the "
            "communication, and only those of one of the two steps. In `c10d::allreduce_` DDP only hands a "
            "bucket over."
        )
    raise Wrong(f"`{name}`: count the bars `gloo:all_reduce` in one step of one rank.")


def _check_hidden(answers: Answers, small: list[Step]) -> None:
    answer = answers.number("hidden_small")
    if _near(answer, [step.hidden for step in small]):
        return
    step = small[-1]
    if _near(answer, [sum(bar.duration for bar in step.all_reduces)]):
        raise Wrong(
            f"`hidden_small = {answer:g}` adds up all bars. But several all-reduces run at the same time, "
            "and some run when nothing is left to compute."
        )
    if _near(answer, [step.hidden + step.exposed]):
        raise Wrong(f"`hidden_small = {answer:g}` is all of the communication: only a part of it is hidden.")
    raise Wrong(
        "`hidden_small`: from the start of the first `gloo:all_reduce` until the last `c10d::allreduce_`, "
        "for how many ms does at least one `gloo:all_reduce` run?"
    )


def _check_exposed(answers: Answers, name: str, steps: list[Step]) -> None:
    answer = answers.number(name)
    if _near(answer, [step.exposed for step in steps]):
        return
    step = steps[-1]
    if answer == 0:
        raise Wrong(
            f"`{name} = 0`: all bars are inside `backward`, but after the last bucket is handed over, "
            "`backward` computes nothing more. From then on it waits for the communication."
        )
    if _near(answer, [step.phases["backward"].duration]):
        raise Wrong(f"`{name} = {answer:g}` is the whole of `backward`, which computes most of the time.")
    if _near(answer, [sum(bar.duration for bar in step.all_reduces)]):
        raise Wrong(f"`{name} = {answer:g}` adds up all bars, with those that are hidden.")
    raise Wrong(
        f"`{name}`: measure from the start of the last `c10d::allreduce_`, when the last gradient is "
        "computed, until the end of the last `gloo:all_reduce`."
    )


def _check_late(answers: Answers, late: list[list[Step]]) -> float:
    """Return for how many ms rank 0 waited in its last step."""
    of_rank_0, of_rank_1 = (steps[-1] for steps in late)
    wait = of_rank_1.all_reduces[0].start - of_rank_0.all_reduces[0].start
    more_data = of_rank_1.phases["data"].duration - of_rank_0.phases["data"].duration
    if more_data < wait / 2 or wait <= 0:
        raise Wrong("In your run `late`, rank 1 is not late. Give it the --late-ms of the README.")
    _check_wait(answers.number("wait_late"), wait, of_rank_0, of_rank_1)
    phase = answers.word("late_phase", *PHASES, "network")
    if phase == "network":
        raise Wrong(
            f"`late_phase = network`: the same all-reduce takes {of_rank_1.all_reduces[0].duration:.1f} ms "
            "on rank 1, over the same network. What did rank 1 do when rank 0 began to wait?"
        )
    if phase != "data":
        raise Wrong(
            f"`late_phase = {phase}`: compare each phase of rank 1 with that of rank 0. (`backward` is "
            "longer on rank 0, as rank 0 waits in it.)"
        )
    return wait


def _check_wait(answer: float, wait: float, of_rank_0: Step, of_rank_1: Step) -> None:
    whole = of_rank_0.all_reduces[0].duration
    communication = of_rank_1.all_reduces[0].duration
    nearest = min((wait, whole, communication), key=lambda duration: abs(duration - answer))
    if not _near(answer, [nearest]):
        raise Wrong(
            "`wait_late`: both bars end at the same time. By how many ms is the bar of rank 0 longer than "
            "that of rank 1?"
        )
    if nearest == whole:
        raise Wrong(
            f"`wait_late = {answer:g}` is the whole bar of rank 0. As soon as rank 1 is there, data moves, "
            "and that part of the bar is communication."
        )
    if nearest == communication:
        raise Wrong(
            f"`wait_late = {answer:g}` is the communication itself, the bar of rank 1. In the rest of its "
            "bar, rank 0 waits."
        )


def _near(answer: float, of_trace: Iterable[float]) -> bool:
    """Return whether a learner may have read this number from the trace: by eye, rounded, from any step."""
    return any(is_close(answer, true, GENEROUS) or abs(answer - true) <= 0.5 for true in of_trace)
