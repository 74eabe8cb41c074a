"""Finds the best number of workers in the learner's runs, and what limits it."""

from trainkit.workshop.work import Workspace, Wrong, check_alike, is_close

EXERCISES = "results/sample/cpu-xeon-2-cores/exercises"
RECORDED = {
    f"{EXERCISES}/runs.csv": [  # with 0, 1, 2 and 4 loader workers
        "single-20261122-021127-4ffdbdd1",
        "single-20261122-021209-dfa6a2e8",
        "single-20261122-021249-6f0cc289",
        "single-20261122-021329-3f1d50f9",
    ],
    f"{EXERCISES}/strong_weak.csv": ["single-20261122-021517-5602262a"],  # resident
}
ANSWERS = """\
# Before you run: which number of workers is best, 0, 1, 2 or 4?
prediction = 2

# From your runs:
best = 1    # number of workers with the most images/s
percent = 99 # images/s of that run, in percent of the resident run
limit = training   # training, cores or loader
"""
HINTS = """\
## 1

The column variant of the table has the number of workers; a row with nothing there has 0. Two rows whose
min..max overlap are equally good.

## 2

Compare the best row with the row of the resident loader. If they are about equal, could any loader be
faster?

## 3

If the best row is about equal to resident (95 % or more), the answer is `training`. If it is clearly below,
does the speed still grow from 2 workers to 4? If it does, `loader`; if it stays or falls, there are no cores
for more workers: `cores`.
"""
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "best = 1", "best = 0", "but another number 1,336"),
    ("answers.txt", "percent = 99", "percent = 110", "divide the best run's"),
    ("answers.txt", "limit = training", "limit = loader", "could a loader do better"),
    ("answers.txt", "limit = training", "limit = cores", "no loader at all"),
    ("runs/single-20261122-021517*.csv", ",13", ",9", "which no loader can have"),
    ("runs/single-20261122-021517*.csv", ",resident,", ",other,", "no run of loader resident"),
]
NUMBERS = ("0", "1", "2", "4")


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = int(answers.word("prediction", *NUMBERS))
    runs = {int(n): workspace.row(loader="workers", workers_per_loader=int(n)) for n in NUMBERS}
    resident = workspace.row(loader="resident")
    for run in runs.values():
        check_alike(resident, run)
    speeds = {n: run.images_per_s for n, run in runs.items()}
    best = max(speeds, key=speeds.get)
    # Within the spread of the epochs, and two percent, it is chance which one is ahead.
    equal = [n for n, run in runs.items() if run.fastest >= 0.98 * runs[best].slowest]
    answer = int(answers.word("best", *NUMBERS))
    if answer not in equal:
        raise Wrong(
            f"`best = {answer}` trains {speeds[answer]:,.0f} images/s, but another number "
            f"{speeds[best]:,.0f}."
        )
    share = 100 * speeds[answer] / resident.images_per_s
    if share > 110:
        raise Wrong(
            f"`best = {answer}` has {share:.0f} % of the resident run's speed, which no loader can have: "
            "another program used the machine meanwhile. `reset`, and measure again, or take `recorded` runs."
        )
    percent = answers.number("percent")
    if not is_close(percent, share):
        raise Wrong(
            f"`percent = {percent:g}`: divide the best run's images/s by the resident run's, times 100."
        )
    limits = {
        "training": share > 93,
        "cores": share < 97 and not (4 in equal and runs[4].slowest > 1.05 * runs[2].fastest),
        "loader": share < 97 and 4 in equal and runs[4].fastest > runs[2].slowest,
    }
    limit = answers.word("limit", *limits)
    if not limits[limit]:
        raise Wrong(_not(limit, share))
    sweep = ", ".join(f"{n}: {speed:,.0f}" for n, speed in speeds.items())
    return (
        f"Images/s by workers: {sweep}; resident: {resident.images_per_s:,.0f}. You expected {prediction} to "
        f"be best; the best is {' and '.join(map(str, equal))}. A CPU trains so slowly that a few workers "
        "keep up with it. A GPU that trains ten or a hundred times as fast needs more of them, each with a "
        "core of the job (--cpus-per-task): sweep again there, and take the smallest number that reaches the "
        "top."
    )


def _not(limit: str, share: float) -> str:
    if limit == "training":
        return f"The best run has only {share:.0f} % of the resident run's speed: it does wait for images."
    if share >= 97:
        return (
            f"The best run has {share:.0f} % of the speed of the resident run, which has all images at hand "
            "and no loader at all: could a loader do better?"
        )
    if limit == "loader":
        return "Four workers are no faster than two: what would a fifth worker run on?"
    return "Four workers are faster than two, so there were cores for them: try still more workers."
