"""Tries the learner's rules on numbers, and compares the table with the runs."""

from collections import defaultdict
from collections.abc import Callable
from statistics import median

from trainkit.workshop.work import Answers, Workspace, Wrong, is_close

LONG = [
    "single-20261123-192831-8d9df94b",
    "single-20261123-193203-d2675728",
    "single-20261123-193646-c696372b",
]
RECORDED = {
    "results/sample/cpu-xeon-2-cores/learning_rate/runs.csv": [],
    "results/sample/cpu-epyc-avx2-2-cores/learning_rate.csv": LONG,
}
ANSWERS = """\
# Before you look at the runs: which rule is best for SGD at a global batch of 1,024: none, linear or sqrt?
prediction = linear

# The test accuracies (acc. %) of the runs with SGD and a warm-up of 10,000 images
batch_64 = 98.64
batch_256_none = 97.23
batch_256_linear = 98.47
batch_1024_none = 93.68
batch_1024_linear = 14.56
batch_1024_sqrt = 96.96

# How many of its five epochs did the run with SGD, batch 1,024 and the linear rule finish?
epochs_1024_linear = 1

# The test accuracy with a warm-up of 60,000 images (SGD, batch 1,024, linear rule; the median of three seeds)
batch_1024_linear_60000 = 98.14

# How many whole steps are a warm-up of 10,000 images at batch 256 and at 1,024, and one of 60,000 at 1,024?
steps_256 = 39
steps_1024 = 9
steps_1024_60000 = 58

# What must not shrink when the batch grows, so that the linear rule holds: images or steps of the warm-up?
keep = steps

# Which rule is best at batch 4,096, with SGD and with Adadelta (recipe classic): none, linear or sqrt?
sgd_4096 = none
adadelta_4096 = none
"""
HINTS = """\
## 1

In the table, look at the columns batch, variant and acc. %, in the rows whose variant begins with
`sgd`. If a run ended early because its loss became NaN (not a number), a note below the table says so,
and the last column of comparison.md has its epochs.

## 2

The global batch is the batch of one rank times the number of ranks. Four ranks with 16 images each
make a batch of 64, and nothing changes. By what factor is the batch larger than 64? A warm-up of four
steps has a quarter of the learning rate in the first, and all of it from the fourth on.

## 3

`growth = batch_per_rank * ranks / BATCH`. The linear rule is `lr * growth`, the square-root rule `lr *
growth ** 0.5`. In a warm-up, step `step` has `step / warmup_steps` of `lr`, but never more than `lr`. The
same 10,000 images are a good warm-up at batch 256, and at 1,024 the loss becomes NaN: what is different?
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
SCRIPT, GROWTH = "rate.py", "batch_per_rank * ranks / BATCH"
WARM = "step / warmup_steps"
WRONG = [
    ("answers.txt", "= 98.47", "= 98.50", "with Adadelta"),
    ("answers.txt", "= 96.96", "= 93.68", "`batch_1024_sqrt`"),
    ("answers.txt", "linear = 1\n", "linear = 5\n", "ended early"),
    ("answers.txt", "_60000 = 98.14", "_60000 = 14.56", "a warm-up of 10,000 images"),
    ("answers.txt", "steps_1024 = 9", "steps_1024 = 39", "divided by the batch"),
    ("answers.txt", "steps_256 = 39", "steps_256 = 156", "global batch, here 256"),
    ("answers.txt", "keep = steps", "keep = images", "has the same images"),
    ("answers.txt", "sgd_4096 = none", "sgd_4096 = sqrt", "`sgd_4096`"),
    ("answers.txt", "batch_64 = 98.64", "batch_64 = much", "is not a number"),
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
RULES = ("none", "linear", "sqrt")
TABLE = {
    "batch_64": (64, "none"),
    "batch_256_none": (256, "none"),
    "batch_256_linear": (256, "linear"),
    "batch_1024_none": (1024, "none"),
    "batch_1024_linear": (1024, "linear"),
    "batch_1024_sqrt": (1024, "sqrt"),
}


def check(mine: Workspace) -> str:
    answers = mine.answers()
    prediction = answers.word("prediction", *RULES)
    runs = runs_of(mine)
    check_table(answers, runs)
    program = mine.module(SCRIPT)
    check_rules(program.scaled)
    check_warm_up(program.warmed_up)
    came = "as you predicted" if prediction == "linear" else f"you predicted {prediction}"
    return (
        "With SGD, the linear rule brings batch 256 to the accuracy of batch 64. At 1,024 it is the best, "
        f"too ({came}), if the warm-up lasts: with 58 steps it reaches 98.1 %, with 9 its loss becomes NaN. "
        "10,000 images are 39 steps at batch 256 and 9 at 1,024, so count a warm-up in steps. (Those who "
        "found the rule warmed up for five epochs of ImageNet, about 780 steps even at batch 8,192.) At "
        "4,096, five epochs are 20 steps here, and no rule helps. So a "
        "rule is a first guess: compare the accuracies of your runs. (Most of these runs have one seed, so a "
        "few tenths of a percent mean nothing.)"
    )


def runs_of(mine: Workspace) -> dict[tuple[str, int, str, int], tuple[float, int]]:
    """Return accuracy and epochs by recipe, global batch, rule and images of warm-up, as the median of seeds.

    Also of runs that were given up.
    """
    from trainkit.compare import comparison  # loads pandas

    mine.table()  # or it says what is missing
    rows, _ = comparison.load([mine.folder / "runs"])
    last = rows.sort_values("epoch").groupby("run_id").last()
    seeds = defaultdict(list)
    for run in last.itertuples():
        seeds[run.recipe, run.global_batch, run.lr_scale, run.lr_warmup_images].append(run)
    return {
        key: (median(run.test_accuracy for run in same), median(run.epoch for run in same))
        for key, same in seeds.items()
    }


def check_table(answers: Answers, runs: dict) -> None:
    for name, (batch, rule) in TABLE.items():
        (true, _), (other, _) = (run(runs, recipe, batch, rule) for recipe in ("sgd", "classic"))
        given = answers.number(name)
        if given == other != true:
            raise Wrong(f"`{name}`: {given} is the accuracy with Adadelta, whose rows say `classic`.")
        if abs(given - true) > 0.05:
            raise Wrong(
                f"`{name}`: look for the row of `sgd` with batch {batch} and the rule {rule}, column acc. %."
            )
    if answers.number("epochs_1024_linear") != run(runs, "sgd", 1024, "linear")[1]:
        raise Wrong(
            "`epochs_1024_linear`: this run ended early, since its loss became NaN. The column epochs of "
            "comparison.md shows after how many epochs, and so does the note of its row below the table."
        )
    check_warm_up_answers(answers, runs)
    for name, recipe in (("sgd_4096", "sgd"), ("adadelta_4096", "classic")):
        if answers.word(name, *RULES) != best_rule(runs, recipe, 4096):
            raise Wrong(f"`{name}`: compare the accuracies of the three rows of `{recipe}` with batch 4096.")


def check_warm_up_answers(answers: Answers, runs: dict) -> None:
    true, _ = run(runs, "sgd", 1024, "linear", warmup_images=60_000)
    if abs(answers.number("batch_1024_linear_60000") - true) > 0.05:
        raise Wrong(
            "`batch_1024_linear_60000`: three runs have a table of their own, with one row. The other run "
            "with SGD, batch 1,024 and the linear rule has a warm-up of 10,000 images."
        )
    for name, images, batch in (
        ("steps_256", 10_000, 256),
        ("steps_1024", 10_000, 1024),
        ("steps_1024_60000", 60_000, 1024),
    ):
        if answers.number(name) != images // batch:
            raise Wrong(
                f"`{name}`: {images:,} images, divided by the batch: the global batch, here {batch}, "
                "without the digits behind the point."
            )
    if answers.word("keep", "images", "steps") != "steps":
        raise Wrong(
            "`keep = images`: with the linear rule, the run at batch 1,024 that fails has the same images of "
            "warm-up as the one at 256 that ends well. How many steps has each?"
        )


def run(runs: dict, recipe: str, batch: int, rule: str, warmup_images: int = 10_000) -> tuple[float, int]:
    if (recipe, batch, rule, warmup_images) not in runs:
        raise Wrong(
            f"mine/runs has no run of {recipe} with batch {batch}, rule {rule} and {warmup_images:,} images "
            "of warm-up: take the `recorded` ones."
        )
    return runs[recipe, batch, rule, warmup_images]


def best_rule(runs: dict, recipe: str, batch: int) -> str:
    return max(RULES, key=lambda rule: run(runs, recipe, batch, rule)[0])


def check_rules(scaled: Callable) -> None:
    if is_close(scaled(0.02, "linear", 64, 4), 0.02) and is_close(scaled(0.02, "linear", 256, 1), 0.02):
        raise Wrong("mine/rate.py: the linear rule still has a gap.")
    four_ranks, one_rank = scaled(0.02, "linear", 64, 4), scaled(0.02, "linear", 256, 1)
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
        if not is_close(given := scaled(0.4, rule, 32, 3), true):
            raise Wrong(
                "mine/rate.py: a rule holds for any learning rate, which is the first argument. At a global "
                f"batch of 96, the rule {rule} makes {true:g} of 0.4, and yours {given:g}."
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
    if not is_close(shorter := warmed_up(1.0, 5, 10), 0.5):
        raise Wrong(f"mine/rate.py: in a warm-up of 10 steps to 1.0, step 5 has 0.5. Yours has {shorter:g}.")
    if not is_close(half := warmed_up(0.5, 5, 20), 0.125):
        raise Wrong(
            "mine/rate.py: in a warm-up of 20 steps to 0.5, step 5 has 0.125, a quarter of it. Yours has "
            f"{half:g}."
        )
