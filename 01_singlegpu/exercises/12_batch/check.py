"""Compares the learner's answers with the learner's runs at three batch sizes."""

from manygpus.workshop.work import Workspace, Wrong, check_alike

RECORDED = {
    "results/sample/cpu-xeon-2-cores/width/runs.csv": [
        "single-20261121-235235-50a33448",  # batch 64
        "single-20261121-235310-46aedae6",  # 256
        "single-20261121-235344-69ec62a3",  # 1024
    ]
}
ANSWERS = """\
# Before you run: which batch reaches 97 % test accuracy first? 64, 256 or 1024.
prediction = 256

# From your runs (each answer is a batch):
highest_throughput = 1024
highest_accuracy = 64  # after the last epoch
first_at_97 = 64       # in the fewest seconds

steps_64 = 156    # optimizer steps in one epoch with batch 64
steps_1024 = 9  # and with batch 1024

# Of what does an epoch with batch 1024 have fewer, so that the network learns less: images, steps or seconds?
why = steps
"""
HINTS = """\
## 1

Look at three columns: images/s, acc. % and, with `--target 97`, s to 97 %, in which a dash means never.

## 2

A batch that is not full is dropped. So the number of steps in an epoch is the images divided by the batch,
rounded down. `--train-size` is the number of images (10,000 in the recorded runs).

## 3

Every epoch shows the network the same images. But its weights change once per step, and with the same
learning rate each change is about equally large. Which of the three batches makes the most changes per epoch?
"""
STARTS_WITH = "`prediction`"
TOLD_WHEN_DONE = [("answers.txt", "throughput = 1024", "throughput = 1,024", "1,387 images/s")]
WRONG = [
    ("runs/single-20261121-235310*.csv", ",fp32,", ",bf16,", "differ in precision"),
    ("answers.txt", "throughput = 1024", "throughput = 64", "See the column images/s"),
    ("answers.txt", "accuracy = 64", "accuracy = 1024", "See the column acc. %"),
    (
        "answers.txt",
        "first_at_97 = 64",
        "first_at_97 = 1024",
        "never reaches it; a different batch takes 23 s",
    ),
    ("answers.txt", "first_at_97 = 64", "first_at_97 = 256", "takes 32 s from its start; a different batch"),
    ("answers.txt", "steps_64 = 156", "steps_64 = 157", "dropped if it is not full"),
    ("answers.txt", "steps_1024 = 9", "steps_1024 = 9216", "images of an epoch, not of its steps"),
    ("answers.txt", "why = steps", "why = images", "the same images"),
    ("answers.txt", "why = steps", "why = seconds", "does not learn from time"),
]
BATCHES = ("64", "256", "1024")
TARGET_PERCENT = 97  # of the test images


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", *BATCHES)
    runs = {
        batch: workspace.row(TARGET_PERCENT, loader="resident", global_batch=int(batch)) for batch in BATCHES
    }
    for run in runs.values():
        check_alike(runs["64"], run, "global_batch", "images")
    reached = {batch: run.target_s for batch, run in runs.items() if run.target_s > 0}
    if not reached:
        raise Wrong(f"No run has reached {TARGET_PERCENT} %: give all three runs the same larger --epochs.")

    answer = answers.word("highest_throughput", *BATCHES)
    if runs[answer].fastest < max(run.slowest for run in runs.values()):
        raise Wrong(f"`highest_throughput = {answer}`: a different batch is faster. See the column images/s.")
    answer = answers.word("highest_accuracy", *BATCHES)
    if runs[answer].test_accuracy < max(run.test_accuracy for run in runs.values()):
        raise Wrong(
            f"`highest_accuracy = {answer}`: a different batch ends with a higher one. See the column acc. %."
        )
    answer = answers.word("first_at_97", *BATCHES)
    # Where epochs are short, the start of the process decides: so the seconds of training alone count, too.
    soonest = {min(reached, key=lambda batch: runs[batch][by]) for by in ("target_s", "target_train_s")}
    if answer not in soonest:
        took = f"takes {reached[answer]:.0f} s from its start" if answer in reached else "never reaches it"
        raise Wrong(
            f"`first_at_97 = {answer}` {took}; a different batch takes {min(reached.values()):.0f} s."
        )
    for batch in ("64", "1024"):
        _check_steps(answers.number(f"steps_{batch}"), batch, int(runs[batch].images))
    why = answers.word("why", "images", "steps", "seconds")
    if why == "images":
        raise Wrong(
            "`why = images`: with each batch size, an epoch shows the same images, except for a last "
            "partial batch."
        )
    if why == "seconds":
        raise Wrong(
            "`why = seconds`: that is true, but a network does not learn from time. What happens once per "
            "batch?"
        )

    table = "\n".join(
        f"  batch {batch:>4}: {run.images_per_s:6,.0f} images/s, {run.test_accuracy:.2f} % at the end, 97 % "
        + (f"after {reached[batch]:.0f} s" if batch in reached else "never")
        for batch, run in runs.items()
    )
    return (
        f"{table}\nYou predicted {prediction}, and {answer} was first. With a large batch, the same "
        "number of epochs has fewer steps. So images/s alone does not show which setting is better, but the "
        "seconds to an accuracy do. More GPUs make the global batch large, and stage 03 shows what the "
        "learning rate can do about that."
    )


def _check_steps(answer: float, batch: str, images: int) -> None:
    steps = images // int(batch)
    if answer == steps:
        return
    if answer == images:
        raise Wrong(f"`steps_{batch} = {answer:g}` is the number of images of an epoch, not of its steps.")
    if answer == steps + 1 or int(answer) == steps:
        raise Wrong(f"`steps_{batch} = {answer:g}`: the last batch is dropped if it is not full.")
    raise Wrong(
        f"`steps_{batch} = {answer:g}`: divide the number of images (--train-size) by the batch, and round "
        "down. The recorded runs have 10,000 images."
    )
