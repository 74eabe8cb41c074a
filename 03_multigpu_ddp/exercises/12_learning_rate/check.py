"""Tries the learner's rules on numbers, and compares the answers with the recorded trainings."""

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from trainkit.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# Before you look: SGD with the linear rule does well at batch 256 with a warm-up of 20,000 images.
# Will it at batch 1,024, too: yes or no?
prediction = no

# The test accuracy of SGD with the linear rule, the median of three seeds, by batch and warm-up
batch_256_one_epoch = 98.49
batch_1024_one_epoch = 11.35
batch_1024_40_updates = 97.82
batch_1024_three_epochs = 98.16

# Which rule is best for SGD at batch 1,024, with a warm-up of 10 and of 40 updates: none, linear or sqrt?
best_1024_10_updates = sqrt
best_1024_40_updates = linear

# How many whole updates are one epoch of 20,000 images at batch 256 and at 1,024?
updates_256 = 78
updates_1024 = 19

# What must not shrink when the batch grows, so that the linear rule holds: images or updates of the warm-up?
keep = updates

# What do you give to --lr-warmup-images for a warm-up of 40 updates at batch 1,024?
images_1024 = 40960

# AdamW, batch 1,024, linear rule: the lowest and the highest of the medians of the four warm-ups
adamw_1024_lowest = 98.35
adamw_1024_highest = 98.55

# Which rule is best at batch 4,096 and a warm-up of 10 updates, for SGD and for AdamW: none, linear or sqrt?
sgd_4096 = sqrt
adamw_4096 = sqrt
"""
HINTS = """\
## 1

The accuracy is the last number of a line. The median of three numbers is the one in the middle: of 9.8,
11.35 and 88.2 it is 11.35. Accuracies near 10 are those of a network that guesses one digit always.

## 2

The global batch is the batch of one rank times the number of ranks. Four ranks with 16 images each
make a batch of 64, and nothing changes. By what factor is the batch larger than 64? A warm-up of four
updates has a quarter of the learning rate in the first, and all of it from the fourth on.

## 3

`growth = batch_per_rank * ranks / BATCH`. The linear rule is `lr * growth`, the square-root rule `lr *
growth ** 0.5`. In a warm-up, step `step` has `step / warmup_steps` of `lr`, but never more than `lr`. The
same 20,000 images are a good warm-up at batch 256, and at 1,024 the network learns nothing: what is
different?
"""
SOLUTION = {
    "rate.py": '''\
@@
-"""The learning rate for a batch that grew. The gaps are to be filled in.
+"""The learning rate for a batch that grew.
@@
-        return lr  # gap
+        return lr * batch_per_rank * ranks / BATCH
     if rule == "sqrt":
@@
-        return lr  # gap
+        return lr * (batch_per_rank * ranks / BATCH) ** 0.5
     return lr
@@
     """
-    return lr  # gap
+    return lr * min(1, step / warmup_steps)
''',
}
STARTS_WITH = "`prediction`"
SCRIPT = "rate.py"
GROWTH = "batch_per_rank * ranks / BATCH"
WARM = "step / warmup_steps"
WRONG = [
    ("answers.txt", "1024_one_epoch = 11.35", "1024_one_epoch = 96.77", "with Adadelta"),
    ("answers.txt", "1024_one_epoch = 11.35", "1024_one_epoch = 36.45", "the mean of"),
    ("answers.txt", "1024_40_updates = 97.82", "1024_40_updates = 11.35", "`batch_1024_40_updates`"),
    ("answers.txt", "three_epochs = 98.16", "three_epochs = much", "is not a number"),
    ("answers.txt", "10_updates = sqrt", "10_updates = linear", "one of the three seeds"),
    ("answers.txt", "40_updates = linear", "40_updates = sqrt", "`best_1024_40_updates`"),
    ("answers.txt", "updates_256 = 78", "updates_256 = 312", "global batch, here 256"),
    ("answers.txt", "updates_1024 = 19", "updates_1024 = 78", "divided by the batch"),
    ("answers.txt", "keep = updates", "keep = images", "has the same images"),
    ("answers.txt", "= 40960", "= 40", "each with 1,024 images"),
    ("answers.txt", "= 40960", "= 10240", "each with 1,024 images"),
    ("answers.txt", "lowest = 98.35", "lowest = 94.08", "`adamw_1024_lowest`"),
    ("answers.txt", "highest = 98.55", "highest = 98.56", "AdamW,1024,linear"),
    ("answers.txt", "sgd_4096 = sqrt", "sgd_4096 = none", "`sgd_4096`"),
    ("answers.txt", "adamw_4096 = sqrt", "adamw_4096 = linear", "`adamw_4096`"),
    (SCRIPT, "lr * " + GROWTH, "lr * ranks", "0.08 and 0.02"),
    (SCRIPT, "lr * " + GROWTH, "lr * batch_per_rank / BATCH", "of all ranks together"),
    (SCRIPT, "** 0.5", "", "the square root of 4"),
    (SCRIPT, "lr * " + GROWTH, "LR * " + GROWTH, "any learning rate"),
    (SCRIPT, GROWTH + ") ** 0.5", "batch_per_rank * ranks) ** 0.5 / BATCH", "the square root of 4"),
    (SCRIPT, WARM, "(step - 1) / warmup_steps", "0.05, 0.25 and 1"),
    (SCRIPT, "/ warmup_steps", "/ 20", "warm-up of 10 steps"),
    (SCRIPT, f"min(1, {WARM})", WARM, "keeps rising"),
    (SCRIPT, f"lr * min(1, {WARM}", f"min(1, {WARM}", "has 0.125"),
]  # fmt: skip
RECORDED_TRAININGS = Path(__file__).parents[3] / "results/sample/h100/one_gpu/learning_rate.csv"
OPTIMIZERS = ("SGD", "AdamW", "Adadelta")
RULES = ("none", "linear", "sqrt")
WARMUPS = ("10 updates", "40 updates", "1 epoch", "3 epochs")
TABLE = {
    "batch_256_one_epoch": (256, "1 epoch"),
    "batch_1024_one_epoch": (1024, "1 epoch"),
    "batch_1024_40_updates": (1024, "40 updates"),
    "batch_1024_three_epochs": (1024, "3 epochs"),
}
IMAGES = 20_000  # in an epoch


class Training(NamedTuple):
    """What trainings have in common that differ in their seed only."""

    optimizer: str
    batch: int
    rule: str
    warmup: str


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", "yes", "no")
    accuracies = recorded_accuracies()
    check_table(answers, accuracies)
    check_best_rules(answers, accuracies)
    check_updates(answers)
    check_adamw(answers, accuracies)
    program = workspace.module(SCRIPT)
    check_rules(program.scaled)
    check_warm_up(program.warmed_up)
    came = "as you predicted" if prediction == "no" else "you predicted yes"
    return (
        f"The same 20,000 images are not enough of a warm-up at batch 1,024 ({came}): they are 78 updates at "
        "256 and 19 at 1,024. With 40 updates SGD with the linear rule reaches 97.8 % there, and with 57 "
        "98.2 %, more than by any other rule. So count a warm-up in updates, and give --lr-warmup-images "
        "that many times the batch. (Those who found the rule warmed up for five epochs of ImageNet, about "
        "780 updates even at batch 8,192.) A training that fails may lack warm-up, and not have the wrong "
        "rule. AdamW hardly cares at 1,024. At 4,096 five epochs are 20 updates: the square root is best, "
        "no warm-up saves SGD with the linear rule, and all end below what a smaller batch reaches. So a "
        "rule is a first guess: compare the accuracies of your trainings, with several seeds."
    )


def recorded_accuracies() -> dict[Training, list[float]]:
    """Return the test accuracies of the seeds."""
    accuracies = defaultdict(list)
    with RECORDED_TRAININGS.open() as file:
        for row in csv.DictReader(file):
            training = Training(row["optimizer"], int(row["batch"]), row["rule"], row["warmup"])
            accuracies[training].append(float(row["accuracy"]))
    return accuracies


def is_accuracy(answer: float, true: float) -> bool:
    return abs(answer - true) < 0.006


def check_table(answers: Answers, accuracies: dict[Training, list[float]]) -> None:
    for name, (batch, warmup) in TABLE.items():
        answer = answers.number(name)
        seeds = accuracies[Training("SGD", batch, "linear", warmup)]
        if is_accuracy(answer, median(seeds)):
            continue
        if is_accuracy(answer, mean(seeds)):
            raise Wrong(
                f"`{name}`: {answer} is the mean of the three seeds. Take the median, the middle one."
            )
        for optimizer in OPTIMIZERS[1:]:
            if is_accuracy(answer, median(accuracies[Training(optimizer, batch, "linear", warmup)])):
                raise Wrong(f"`{name}`: {answer} is the accuracy with {optimizer}, not with SGD.")
        raise Wrong(
            f"`{name}`: look for the three lines that begin with `SGD,{batch},linear,{warmup},`. The "
            "accuracy is their last number; the median is the one in the middle."
        )


def check_best_rules(answers: Answers, accuracies: dict[Training, list[float]]) -> None:
    for name, optimizer, batch, warmup in (
        ("best_1024_10_updates", "SGD", 1024, "10 updates"),
        ("best_1024_40_updates", "SGD", 1024, "40 updates"),
        ("sgd_4096", "SGD", 4096, "10 updates"),
        ("adamw_4096", "AdamW", 4096, "10 updates"),
    ):
        medians = {rule: median(accuracies[Training(optimizer, batch, rule, warmup)]) for rule in RULES}
        answer = answers.word(name, *RULES)
        if answer == max(RULES, key=medians.get):
            continue
        if name == "best_1024_10_updates" and answer == "linear":
            raise Wrong(
                "`best_1024_10_updates = linear`: only one of the three seeds ends well. The median counts."
            )
        raise Wrong(
            f"`{name}`: compare the medians of the three rules in the lines of {optimizer} with batch "
            f"{batch} and a warm-up of {warmup}."
        )


def check_updates(answers: Answers) -> None:
    for name, batch in (("updates_256", 256), ("updates_1024", 1024)):
        if answers.number(name) != IMAGES // batch:
            raise Wrong(
                f"`{name}`: {IMAGES:,} images, divided by the batch: the global batch, here {batch}, "
                "without the digits behind the point."
            )
    if answers.word("keep", "images", "updates") != "updates":
        raise Wrong(
            "`keep = images`: with a warm-up of one epoch, the training at batch 1,024 that fails has the "
            "same images of warm-up as the one at 256 that ends well. How many updates has each?"
        )
    if answers.number("images_1024") != 40 * 1024:
        raise Wrong("`images_1024`: 40 updates, each with 1,024 images. How many images are that?")


def check_adamw(answers: Answers, accuracies: dict[Training, list[float]]) -> None:
    medians = [median(accuracies[Training("AdamW", 1024, "linear", warmup)]) for warmup in WARMUPS]
    for name, true in (("adamw_1024_lowest", min(medians)), ("adamw_1024_highest", max(medians))):
        if not is_accuracy(answers.number(name), true):
            raise Wrong(
                f"`{name}`: take the lines that begin with `AdamW,1024,linear,`, and of them the median of "
                "each warm-up."
            )


def check_rules(scaled: Callable) -> None:
    if is_close(scaled(0.02, "linear", 64, 4), 0.02) and is_close(scaled(0.02, "linear", 256, 1), 0.02):
        raise Wrong("mine/rate.py: the linear rule still has a gap.")
    four_ranks = scaled(0.02, "linear", 64, 4)
    one_rank = scaled(0.02, "linear", 256, 1)
    if not is_close(four_ranks, one_rank):
        raise Wrong(
            "mine/rate.py: 4 ranks of 64 images each, and one rank of 256, have the same global batch. The "
            f"linear rule gives {four_ranks:g} and {one_rank:g}. Use the batch of all ranks together, not "
            "the number of ranks."
        )
    if not is_close(four_ranks, 0.08):
        raise Wrong(
            "mine/rate.py: at a global batch of 256, the linear rule turns 0.02 into 0.08, and yours into "
            f"{four_ranks:g}."
        )
    if not (is_close(scaled(0.02, "sqrt", 64, 4), 0.04) and is_close(scaled(0.02, "sqrt", 512, 2), 0.08)):
        raise Wrong(
            "mine/rate.py: at a global batch of 256, which is 4 times 64, the square-root rule multiplies "
            "by 2, the square root of 4: 0.04 instead of 0.02. Yours returns "
            f"{scaled(0.02, 'sqrt', 64, 4):g}."
        )
    if not is_close(scaled(0.02, "none", 64, 4), 0.02):
        raise Wrong("mine/rate.py: without a rule, the learning rate stays as it is.")
    for rule, true in (("none", 0.4), ("linear", 0.6), ("sqrt", 0.4 * 1.5**0.5)):
        answer = scaled(0.4, rule, 32, 3)
        if not is_close(answer, true):
            raise Wrong(
                "mine/rate.py: a rule holds for any learning rate, which is the first argument. At a global "
                f"batch of 96, the rule {rule} makes {true:g} of 0.4, and yours {answer:g}."
            )


def check_warm_up(warmed_up: Callable) -> None:
    rates = [warmed_up(1.0, step, 20) for step in (1, 5, 20, 40)]
    if rates[0] == rates[1] == 1:
        raise Wrong("mine/rate.py: the warm-up still has a gap.")
    if rates[3] > 1:
        raise Wrong(
            "mine/rate.py: the learning rate keeps rising after the warm-up. It has to stay constant."
        )
    if not all(is_close(*pair) for pair in zip(rates, [0.05, 0.25, 1, 1], strict=True)):
        raise Wrong(
            "mine/rate.py: in a warm-up of 20 steps to 1.0, the steps 1, 5 and 20 have 0.05, 0.25 and 1. "
            f"Yours have {rates[0]:g}, {rates[1]:g} and {rates[2]:g}."
        )
    shorter = warmed_up(1.0, 5, 10)
    if not is_close(shorter, 0.5):
        raise Wrong(f"mine/rate.py: in a warm-up of 10 steps to 1.0, step 5 has 0.5. Yours has {shorter:g}.")
    half = warmed_up(0.5, 5, 20)
    if not is_close(half, 0.125):
        raise Wrong(
            "mine/rate.py: in a warm-up of 20 steps to 0.5, step 5 has 0.125, a quarter of it. Yours has "
            f"{half:g}."
        )
