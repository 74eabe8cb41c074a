"""Computes the numbers from the traces in starter/, and asks the kit for its verdict on them."""

import runpy
import statistics
from pathlib import Path

from trainkit import records, samples
from trainkit.analysis import waste
from trainkit.workshop.work import Answers, Mine, Wrong, near

STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "a_cause = launch_bound", "a_cause = nothing", "of its limit"),
    ("answers.txt", "a_cause = launch_bound", "a_cause = waiting_for_loader", "`data_seconds`"),
    ("answers.txt", "a_power = 29", "a_power = 94", "utilisation"),
    ("answers.txt", "a_power = 29", "a_power = 117", "in watts"),
    ("answers.txt", "a_cure = batch", "a_cure = fewer", "64 images"),
    ("answers.txt", "b_cause = stalled_rank", "b_cause = nothing", "waits is a kernel, too"),
    ("answers.txt", "b_cause = stalled_rank", "b_cause = idle_gpu", "by utilisation alone"),
    ("answers.txt", "b_cause = stalled_rank", "b_cause = waiting_for_loader", "`data_seconds`"),
    ("answers.txt", "b_rank = 2", "b_rank = 0", "waits itself"),
    ("answers.txt", "b_waits = 67", "b_waits = 33", "How much did it not"),
    ("answers.txt", "b_waits = 67", "b_waits = 7", "of rank 2"),
    ("answers.txt", "b_waits = 67", "b_waits = 3", "its batches"),
    ("answers.txt", "b_cure = rank", "b_cure = fewer", "would still be there"),
    ("answers.txt", "c_cause = shared_cores", "c_cause = nothing", "two ranks"),
    ("answers.txt", "c_core = 50", "c_core = 0.5", "in percent"),
    ("answers.txt", "c_core = 50", "c_core = 99", "of the core, by both"),
    ("answers.txt", "c_core = 50", "c_core = 60", "it waited"),
    ("answers.txt", "c_cure = cores", "c_cure = batch", "another core"),
]
STARTER = Path(__file__).parent / "starter"
CAUSES = ("idle_gpu", "waiting_for_loader", "launch_bound", "memory_full", "throttled")
CAUSES += ("shared_cores", "stalled_rank", "nothing")
CURES = {"a": "batch", "b": "rank", "c": "cores"}
of_the_training = runpy.run_path(str(STARTER / "look.py"))["of_the_training"]


def check(mine: Mine) -> str:
    answers = mine.answers()
    prediction = answers.word("prediction", *CURES)
    for job in CURES:
        _check_cause(answers, job)
        _check_number(answers, job)
        _check_cure(answers, job)
    return (
        f"By utilisation you suspected {prediction}. All three wasted, and none of them by what their users "
        "had looked at: `a` is busy with starting kernels, the busiest GPUs of `b` are those that wait, and "
        "the core of `c` is full because two ranks take turns at it. So look first at images/s, then at "
        "power beside its limit, then for the one among equals that differs; the lines that begin with "
        "`watch` do that at the end of each job. For `a` one GPU is enough, or too much: with 64 images in "
        "a step, no GPU could be full."
    )


def _check_cause(answers: Answers, job: str) -> None:
    name, given = f"{job}_cause", answers.word(f"{job}_cause", *CAUSES)
    if given == waste.judge(STARTER / job / samples.FOLDER).findings[0].kind:
        return
    waited, trained = _seconds(job, "data_seconds"), _trained(job)
    if given == "waiting_for_loader":
        raise Wrong(
            f"`{name}`: its ranks wait for batches {max(waited.values()):.1f} of {trained:.1f} s of an epoch "
            "(`data_seconds`). That is not it."
        )
    if given == "throttled":
        raise Wrong(f"`{name}`: the column `throttled` has the reason for which a clock is low: `-` is none.")
    if given == "memory_full":
        raise Wrong(
            f"`{name}`: set `memory_mb` beside `memory_limit_mb`. And a full memory wastes nothing yet."
        )
    hints = {
        "a": "how much of its limit is its power? A GPU at work takes more than half of it.",
        "b": "that is judged by utilisation alone. In NCCL a kernel that waits is a kernel, too: what do the "
        "`own_seconds` of its ranks say?",
        "c": "that core is busy, with two ranks. Look at `core_list` and `waiting`.",
    }
    raise Wrong(f"`{name} = {given}`: {hints[job]}")


def _check_number(answers: Answers, job: str) -> None:
    if job == "a":
        (rows,) = of_the_training(STARTER / job, samples.GPU).values()
        power, limit = (statistics.fmean(row[name] for row in rows) for name in ("power_w", "power_limit_w"))
        given, true = answers.number("a_power"), 100 * power / limit
        if not near(given, true, 0.06):
            hint = "`power_w` by `power_limit_w`, times 100."
            if near(given, power, 0.06):
                hint = "that is in watts."
            if near(given, statistics.fmean(row["utilisation"] for row in rows), 0.05):
                hint = "that is its utilisation."
            raise Wrong(f"`a_power` is not {given:g}: {hint}")
    if job == "b":
        own = _seconds(job, "own_seconds")
        slowest = max(own, key=own.get)
        if answers.number("b_rank") != slowest:
            raise Wrong(
                "`b_rank`: that rank has little work of its own, and waits itself: see `own_seconds`."
            )
        trained, other = _trained(job), next(rank for rank in own if rank != slowest)
        given, true = answers.number("b_waits"), 100 * (1 - own[other] / trained)
        if not near(given, true, 0.03):
            hint = f"`train_seconds` less the `own_seconds` of rank {other}, by `train_seconds`, times 100."
            if near(given, 100 - true, 0.03):
                hint = "so much it worked. How much did it not?"
            if near(given, 100 * (1 - own[slowest] / trained), 0.1):
                hint = f"that is of rank {slowest}. How about those that wait for it?"
            if near(given, 100 * _seconds(job, "data_seconds")[other] / trained, 0.1):
                hint = "so much it waited for its batches. It waits for more than these."
            raise Wrong(f"`b_waits` is not {given:g}: {hint}")
    if job == "c":
        ranks = of_the_training(STARTER / job, samples.RANK).values()
        cores, waiting = (
            100 * statistics.fmean(row[name] for rows in ranks for row in rows)
            for name in ("cores", "waiting")
        )
        given = answers.number("c_core")
        if not near(given, cores, 0.05):
            hint = "`cores` of a rank are those that it used."
            if near(given, cores / 100, 0.05):
                hint = "in percent."
            if near(given, 2 * cores, 0.05):
                hint = "that was used of the core, by both ranks."
            if near(given, waiting, 0.05):
                hint = "so much of the time it waited for one."
            raise Wrong(f"`c_core` is not {given:g}: {hint}")


def _check_cure(answers: Answers, job: str) -> None:
    given = answers.word(f"{job}_cure", "workers", "batch", "cores", "rank", "admin", "fewer")
    if given == CURES[job]:
        return
    hints = {
        "a": "it has one GPU, and 64 images in a step, which are too few for it.",
        "b": "without the rank that the others wait for, its work would still be there.",
        "c": "each rank has all that it needs, but for another core.",
    }
    raise Wrong(f"`{job}_cure = {given}`: {hints[job]}")


def _seconds(job: str, column: str) -> dict[int, float]:
    """Of each rank, in the mean of the epochs behind the warm-up."""
    found: dict[int, list[float]] = {}
    for path in (STARTER / job / "training").glob("*.csv"):
        counted = {row["epoch"] for row in records.read(path) if not row["warmup"]}
        for row in records.read_ranks(path):
            if row["epoch"] in counted:
                found.setdefault(row["rank"], []).append(row[column])
    return {rank: statistics.fmean(values) for rank, values in found.items()}


def _trained(job: str) -> float:
    (path,) = (STARTER / job / "training").glob("*.csv")
    return statistics.fmean(row["train_seconds"] for row in records.read(path) if not row["warmup"])
