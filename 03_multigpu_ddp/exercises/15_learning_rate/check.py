"""Tries the learner's rules on numbers, and judges the decision by the recorded trainings."""

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from manygpus.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# Before you look: SGD with the linear rule does well at batch 256 with a warm-up of 20,000 images.
# Does the same warm-up do well at batch 1,024, too: yes or no?
prediction = no

# What must not shrink when the batch grows: the images or the updates of the warm-up?
keep = updates

# Your decision. How many GPUs do you take, 8 or 32?
gpus = 8

# For each optimizer: the rule (none, linear or sqrt), the learning rate, and the updates of warm-up,
# such as: linear, 0.08, 10
sgd = linear, 0.32, 57
adamw = linear, 0.016, 40
adadelta = sqrt, 4, 40

# What number do you give to --lr-warmup-images for your training with SGD?
warmup_images = 58368
"""
HINTS = """\
## 1

The global batch is the batch of one rank times the number of ranks. Four ranks with 16 images each
make a batch of 64, and nothing changes. By what factor is the batch larger than 64? A warm-up of four
updates has a quarter of the learning rate in the first update, and all of it from the fourth on.

## 2

`growth = batch_per_rank * ranks / BASE_BATCH`. The linear rule is `lr * growth`, the square-root rule
`lr * growth ** 0.5`. In a warm-up, step `step` has `step / warmup_steps` of `lr`, but never more than `lr`.

## 3

8 GPUs with 128 images each make a batch of 1,024, and 32 make 4,096. Print the trainings of each optimizer
at both. At which batch is there a line whose last numbers, all of them, are at least 97.5? An accuracy
near 10 is that of a network that guesses: its learning rate rose too fast.
"""
SOLUTION = {
    "rate.py": '''\
@@
-"""Recorded trainings, beside the learning rates of two rules and a warm-up. Fill in the three gaps.
+"""Recorded trainings, beside the learning rates of two rules and a warm-up.
@@
-        return lr  # gap
+        return lr * batch_per_rank * ranks / BASE_BATCH
     if rule == "sqrt":
@@
-        return lr  # gap
+        return lr * (batch_per_rank * ranks / BASE_BATCH) ** 0.5
     return lr
@@
     """
-    return lr  # gap
+    return lr * min(1, step / warmup_steps)
''',
}
STARTS_WITH = "`prediction`"
SCRIPT = "rate.py"
GROWTH = "batch_per_rank * ranks / BASE_BATCH"
WARM = "step / warmup_steps"
SGD = "sgd = linear, 0.32, 57"
ADADELTA = "adadelta = sqrt, 4, 40"
WRONG = [
    ("answers.txt", "keep = updates", "keep = images", "has the same images"),
    ("answers.txt", "gpus = 8", "gpus = 32", "only 20 updates"),
    ("answers.txt", "gpus = 8", "gpus = 16", "either 8 or 32"),
    ("answers.txt", SGD, "sgd = linear, 0.32", "three things"),
    ("answers.txt", SGD, "sgd = cubic, 0.32, 57", "none, linear or sqrt"),
    ("answers.txt", SGD, "sgd = linear, 0,32, 57", "three things"),
    ("answers.txt", SGD, "sgd = linear, 0.16, 57", "multiplied by the number of GPUs"),
    ("answers.txt", SGD, "sgd = linear, 0.02, 57", "the learning rate of batch 64"),
    ("answers.txt", SGD, "sgd = linear, 0.08, 57", "by the rule linear, 0.02 becomes 0.32"),
    ("answers.txt", SGD, "sgd = linear, 0.32, 0", "without any warm-up"),
    ("answers.txt", SGD, "sgd = linear, 0.32, 30", "no training with this warm-up"),
    ("answers.txt", SGD, "sgd = linear, 0.32, 10", "2 of 3 seeds only guess"),
    ("answers.txt", SGD, "sgd = linear, 0.32, 19", "warm-up of 19 updates is too short"),
    ("answers.txt", SGD, "sgd = sqrt, 0.08, 19", "the square root is too cautious"),
    ("answers.txt", SGD, "sgd = none, 0.02, 10", "without a rule"),
    ("answers.txt", "adamw = linear, 0.016, 40", "adamw = none, 0.001, 10", "without a rule"),
    ("answers.txt", ADADELTA, "adadelta = linear, 16, 10", "a warm-up of 10 updates is too short"),
    ("answers.txt", ADADELTA, "adadelta = linear, 16, 19", "the best of one seed"),
    ("answers.txt", ADADELTA, "adadelta = sqrt, 4, 19", "the best of one seed"),
    ("answers.txt", ADADELTA, "adadelta = sqrt, 2.83, 40", "by the rule sqrt, 1 becomes 4"),
    ("answers.txt", "images = 58368", "images = 57", "updates of 1,024 images each"),
    ("answers.txt", "images = 58368", "images = 7296", "of all GPUs together"),
    (SCRIPT, "lr * " + GROWTH, "lr * ranks", "0.08 and 0.02"),
    (SCRIPT, "lr * " + GROWTH, "lr * batch_per_rank / BASE_BATCH", "of all ranks together"),
    (SCRIPT, "** 0.5", "", "the square root of 4"),
    (SCRIPT, "lr * " + GROWTH, "0.02 * " + GROWTH, "any learning rate"),
    (SCRIPT, GROWTH + ") ** 0.5", "batch_per_rank * ranks) ** 0.5 / BASE_BATCH", "the square root of 4"),
    (SCRIPT, WARM, "(step - 1) / warmup_steps", "0.05, 0.25 and 1"),
    (SCRIPT, "/ warmup_steps", "/ 20", "warm-up of 10 steps"),
    (SCRIPT, f"min(1, {WARM})", WARM, "keeps rising"),
    (SCRIPT, f"lr * min(1, {WARM}", f"min(1, {WARM}", "is 0.125"),
]  # fmt: skip
RECORDED_TRAININGS = Path(__file__).parents[3] / "results/sample/h100/one_gpu/learning_rate.csv"
BASE_LR = {"SGD": 0.02, "AdamW": 0.001, "Adadelta": 1.0}  # good at BASE_BATCH
BASE_BATCH = 64
RULES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}  # the exponent of the growth of the batch
IMAGES_PER_GPU = 128
BATCH = 8 * IMAGES_PER_GPU
REQUIRED = 97.5  # % of the test images, by every seed
GUESSING = 20.0  # %: below it a network has learned nothing


class Decision(NamedTuple):
    """What a learner would submit for one optimizer."""

    rule: str
    lr: float
    warmup_updates: int


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", "yes", "no")
    program = workspace.module(SCRIPT)
    check_rules(program.scaled)
    check_warm_up(program.warmed_up)
    check_what_to_keep(answers)
    accuracies = recorded_accuracies()
    check_gpus(answers)
    for optimizer in BASE_LR:
        check_decision(answers, optimizer, accuracies)
    check_images(answers)
    outcome = "as you predicted" if prediction == "no" else "you predicted yes"
    images = int(answers.number("warmup_images"))
    rule = decision(answers, "SGD").rule
    return (
        f"The same 20,000 images are not enough of a warm-up at batch 1,024 ({outcome}): they are 78 updates "
        "at 256 and only 19 at 1,024. So count a warm-up in updates. With SGD you submit\n"
        f"python submit.py --gpus 8 --recipe sgd --lr 0.02 --lr-scale {rule} --lr-warmup-images {images} "
        "--batch-size 1024 --epochs 5 --train-size 20000\n"
        "SGD needs the linear rule and a long warm-up. AdamW accepts either rule and every warm-up here. "
        "Adadelta does best with the square root: the linear rule reaches 97.5 % only with the longest "
        "warm-up. With 32 GPUs, five epochs are 20 updates, and nothing reaches 97.5 %. So a rule is a first "
        "guess: try it with several seeds, since one may be lucky, and count on the worst. Three are few."
    )


def recorded_accuracies() -> dict[tuple[str, str, int], list[float]]:
    """Return the test accuracies of all seeds at BATCH, by optimizer, rule and updates of warm-up."""
    accuracies = defaultdict(list)
    with RECORDED_TRAININGS.open() as file:
        for row in csv.DictReader(file):
            if int(row["batch"]) == BATCH:
                training = (row["optimizer"], row["rule"], int(row["warmup_updates"]))
                accuracies[training].append(float(row["accuracy"]))
    return accuracies


def check_what_to_keep(answers: Answers) -> None:
    if answers.word("keep", "images", "updates") != "updates":
        raise Wrong(
            "`keep = images`: with a warm-up of one epoch, the training at batch 1,024 that fails has the "
            "same images of warm-up as the one at 256 that ends well. How many updates does each have?"
        )


def check_gpus(answers: Answers) -> None:
    gpus = answers.number("gpus")
    if gpus == 32:
        raise Wrong(
            "`gpus = 32`: the global batch is then 4,096, and five epochs have only 20 updates. Print the "
            "trainings at 4,096. Does any of them reach 97.5 %?"
        )
    if gpus != 8:
        raise Wrong("`gpus`: you can have either 8 or 32.")


def decision(answers: Answers, optimizer: str) -> Decision:
    """Return the decision for an optimizer.

    Raises:
        Wrong: if it is not of the form `linear, 0.08, 10`.
    """
    name = optimizer.lower()
    parts = [part.strip().lower() for part in answers[name].split(",")]
    try:
        rule, lr, updates = parts[0], float(parts[1]), int(parts[2].removesuffix("updates"))
        complete = len(parts) == 3
    except (IndexError, ValueError):
        complete = False
    if not complete:
        raise Wrong(
            f"`{name} = {answers[name]}`: give three things, with commas between them and a decimal point: "
            "the rule, the learning rate, and the updates of warm-up, such as linear, 0.08, 10."
        )
    if rule not in RULES:
        raise Wrong(f"`{name}`: the rule is none, linear or sqrt, not {rule!r}.")
    return Decision(rule, lr, updates)


def check_decision(
    answers: Answers, optimizer: str, accuracies: dict[tuple[str, str, int], list[float]]
) -> None:
    name = optimizer.lower()
    chosen = decision(answers, optimizer)
    check_learning_rate(name, chosen, BASE_LR[optimizer])
    seeds = accuracies.get((optimizer, chosen.rule, chosen.warmup_updates))
    if not seeds:
        if chosen.warmup_updates == 0:
            raise Wrong(
                f"`{name}`: without any warm-up, nobody recorded how it ends. Look at the shortest one."
            )
        updates = sorted({updates for of, _, updates in accuracies if of == optimizer})
        recorded = ", ".join(map(str, updates))
        raise Wrong(
            f"`{name}`: no training with this warm-up was recorded at batch 1,024. Those that were recorded "
            f"have {recorded} updates."
        )
    if min(seeds) >= REQUIRED:
        return
    worst, best = min(seeds), max(seeds)
    case = f"`{name}`, rule {chosen.rule}, {chosen.warmup_updates} updates of warm-up"
    if best >= REQUIRED:
        raise Wrong(
            f"{case}: that is the best of one seed. It ends at {best:g} %, and a different seed at {worst:g} "
            "%. Your training runs once, so count on the worst."
        )
    guessing = sum(accuracy < GUESSING for accuracy in seeds)
    if guessing:
        raise Wrong(
            f"{case}: {guessing} of {len(seeds)} seeds only guess ({worst:g} %). The learning rate has grown "
            f"16 times, and a warm-up of {chosen.warmup_updates} updates is too short for it."
        )
    if chosen.rule == "none":
        raise Wrong(f"{case}: without a rule, 95 updates are too few. The best seed ends at {best:g} %.")
    if chosen.rule == "sqrt":
        raise Wrong(
            f"{case}: the square root is too cautious for {optimizer}, with only 95 updates. The best seed "
            f"ends at {best:g} %."
        )
    raise Wrong(
        f"{case}: a warm-up of {chosen.warmup_updates} updates is too short. The best seed ends at "
        f"{best:g} %."
    )


def check_learning_rate(name: str, chosen: Decision, base_lr: float) -> None:
    growth = BATCH / BASE_BATCH
    true = base_lr * growth ** RULES[chosen.rule]
    if is_close(chosen.lr, true):
        return
    if is_close(chosen.lr, base_lr * 8):
        raise Wrong(
            f"`{name}`: {chosen.lr:g} is multiplied by the number of GPUs. The batch counts, which grows "
            "from 64 to 1,024."
        )
    if is_close(chosen.lr, base_lr):
        raise Wrong(
            f"`{name}`: {chosen.lr:g} is still the learning rate of batch 64. What does your rule make of it?"
        )
    raise Wrong(
        f"`{name}`: by the rule {chosen.rule}, {base_lr:g} becomes {true:g} at batch 1,024, not "
        f"{chosen.lr:g}. What does your rate.py print?"
    )


def check_images(answers: Answers) -> None:
    updates = decision(answers, "SGD").warmup_updates
    images = answers.number("warmup_images")
    if images == updates * IMAGES_PER_GPU:
        raise Wrong("`warmup_images`: the images of all GPUs together count, not those of one GPU.")
    if images != updates * BATCH:
        raise Wrong(
            f"`warmup_images`: your warm-up has {updates} updates of 1,024 images each. How many images is "
            "that?"
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
            "mine/rate.py: at a global batch of 256, the linear rule turns 0.02 into 0.08, but yours returns "
            f"{four_ranks:g}."
        )
    if not (is_close(scaled(0.02, "sqrt", 64, 4), 0.04) and is_close(scaled(0.02, "sqrt", 512, 2), 0.08)):
        raise Wrong(
            "mine/rate.py: a global batch of 256 is 4 times 64, so the square-root rule multiplies by 2, the "
            "square root of 4: 0.02 becomes 0.04. Yours returns "
            f"{scaled(0.02, 'sqrt', 64, 4):g}."
        )
    if not is_close(scaled(0.02, "none", 64, 4), 0.02):
        raise Wrong("mine/rate.py: without a rule, the learning rate stays as it is.")
    for rule, true in (("none", 0.4), ("linear", 0.6), ("sqrt", 0.4 * 1.5**0.5)):
        answer = scaled(0.4, rule, 32, 3)
        if not is_close(answer, true):
            raise Wrong(
                "mine/rate.py: a rule holds for any learning rate, which is the first argument. At a global "
                f"batch of 96, the rule {rule} turns 0.4 into {true:g}, but yours returns {answer:g}."
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
            "mine/rate.py: in a warm-up of 20 steps to 1.0, steps 1, 5 and 20 have the learning rates 0.05, "
            f"0.25 and 1. Yours have {rates[0]:g}, {rates[1]:g} and {rates[2]:g}."
        )
    shorter = warmed_up(1.0, 5, 10)
    if not is_close(shorter, 0.5):
        raise Wrong(
            "mine/rate.py: in a warm-up of 10 steps to 1.0, the learning rate of step 5 is 0.5. Yours is "
            f"{shorter:g}."
        )
    half = warmed_up(0.5, 5, 20)
    if not is_close(half, 0.125):
        raise Wrong(
            "mine/rate.py: in a warm-up of 20 steps to 0.5, the learning rate of step 5 is 0.125, a quarter "
            f"of 0.5. Yours is {half:g}."
        )
