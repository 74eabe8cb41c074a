"""Compares the learner's answers with the learner's runs at three batch sizes."""

from trainkit.workshop.work import Workspace, Wrong

RECORDED = {
    "results/sample/cpu-xeon-2-cores/width/runs.csv": [
        "single-20261121-235235-50a33448",  # batch 64
        "single-20261121-235310-46aedae6",  # 256
        "single-20261121-235344-69ec62a3",  # 1024
    ]
}
ANSWERS = """\
# Before you run: which batch is first at 97 % test accuracy? 64, 256 or 1024.
prediction = 256

# From your runs, a batch each:
highest_throughput = 1024
highest_accuracy = 64  # after the last epoch
first_at_97 = 64       # the fewest seconds until then

steps_64 = 156    # optimizer steps of one epoch with batch 64
steps_1024 = 9  # and with batch 1024

# What does an epoch have less of with batch 1024, so that the network learns less in it?
# images, steps or seconds
why = steps
"""
HINTS = """\
## 1

Three columns show it: images/s, acc. % and, with `--target 97`, s to 97 %. A dash there means: never.

## 2

A batch that is not full is dropped. So the steps of an epoch are the images divided by the batch, rounded
down. The number of images is that of `--train-size` (recorded runs: 10,000).

## 3

Every epoch shows the network the same images. But it changes its weights once per step, and with the same
learning rate each change is about as large. Which of the three batches makes the most changes per epoch?
"""
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "throughput = 1024", "throughput = 64", "See the column images/s"),
    ("answers.txt", "accuracy = 64", "accuracy = 1024", "See the column acc. %"),
    ("answers.txt", "first_at_97 = 64", "first_at_97 = 1024", "never gets there, but another one 23 s"),
    ("answers.txt", "first_at_97 = 64", "first_at_97 = 256", "takes 32 s from its start, but another one"),
    ("answers.txt", "steps_64 = 156", "steps_64 = 157", "not full is dropped"),
    ("answers.txt", "steps_1024 = 9", "steps_1024 = 9216", "images of an epoch, not its steps"),
    ("answers.txt", "why = steps", "why = images", "the same images"),
    ("answers.txt", "why = steps", "why = seconds", "does not learn from time"),
]
BATCHES, TARGET = ("64", "256", "1024"), 97


def check(mine: Workspace) -> str:
    answers = mine.answers()
    prediction = answers.word("prediction", *BATCHES)
    runs = {batch: mine.row(TARGET, loader="resident", global_batch=int(batch)) for batch in BATCHES}
    reached = {batch: run.target_s for batch, run in runs.items() if run.target_s > 0}
    if not reached:
        raise Wrong(f"No run has reached {TARGET} %: give more --epochs, the same to all three.")

    given = answers.word("highest_throughput", *BATCHES)
    if runs[given].fastest < max(run.slowest for run in runs.values()):
        raise Wrong(f"`highest_throughput = {given}`: another batch is faster. See the column images/s.")
    given = answers.word("highest_accuracy", *BATCHES)
    if runs[given].test_accuracy < max(run.test_accuracy for run in runs.values()):
        raise Wrong(f"`highest_accuracy = {given}`: another batch ends higher. See the column acc. %.")
    given = answers.word("first_at_97", *BATCHES)
    # Where epochs are short, the start of the process decides: so the seconds of training alone count, too.
    soonest = {min(reached, key=lambda batch: runs[batch][by]) for by in ("target_s", "target_train_s")}
    if given not in soonest:
        took = f"takes {reached[given]:.0f} s from its start" if given in reached else "never gets there"
        raise Wrong(f"`first_at_97 = {given}` {took}, but another one {min(reached.values()):.0f} s.")
    for batch in ("64", "1024"):
        _check_steps(answers.number(f"steps_{batch}"), batch, int(runs[batch].images))
    why = answers.word("why", "images", "steps", "seconds")
    if why == "images":
        raise Wrong(
            "`why = images`: an epoch of each batch shows the same images, up to a last part of a batch."
        )
    if why == "seconds":
        raise Wrong(
            "`why = seconds`: it has, but a network does not learn from time. What happens once per batch?"
        )

    table = "\n".join(
        f"  batch {batch:>4}: {run.images_per_s:6,.0f} images/s, {run.test_accuracy:.2f} % at the end, 97 % "
        + (f"after {reached[batch]:.0f} s" if batch in reached else "never")
        for batch, run in runs.items()
    )
    return (
        f"{table}\nYou expected {prediction} to be first; it is {given}. A large batch makes fewer steps of "
        "the same epochs. So images/s alone does not say which setting is better: seconds to an accuracy do. "
        "More GPUs make the global batch large, and stage 03 comes back to what the learning rate can do "
        "about that."
    )


def _check_steps(given: float, batch: str, images: int) -> None:
    steps = images // int(batch)
    if given == steps:
        return
    if given == images:
        raise Wrong(f"`steps_{batch} = {given:g}` are the images of an epoch, not its steps.")
    if given == steps + 1 or int(given) == steps:
        raise Wrong(f"`steps_{batch} = {given:g}`: a last batch that is not full is dropped.")
    raise Wrong(
        f"`steps_{batch} = {given:g}`: divide the images, those of --train-size, by the batch, "
        "and round down. Recorded runs have 10,000."
    )
