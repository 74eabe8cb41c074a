"""Tries the learner's formulas on made-up epochs, and compares the answers with the learner's own runs."""

from manygpus.record.columns import COLUMNS
from manygpus.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# Before you run: with batch 128, how many times the images/s of one device will two reach? Such as 1.5
prediction = 1.8

# From the table: what does a batch of 256 alone gain? Divide images/s of ONE device with 256 by ONE with 128.
batch_alone = 1.03

# strong or weak?
# The same training, with batch 128, has to take less time. Which scaling shows whether a second device helps?
same_training = strong
# 128 images fill one device, and you may double the batch. Which scaling shows what a second device adds?
full_device = weak

# From one device to two, with batch 128: which gains more, the training of an epoch or the whole run?
gains_more = epoch    # epoch or run
"""
HINTS = """\
## 1

Which epoch must not be in the median, and why? Strong scaling keeps the global batch, weak scaling the
batch of each device.

## 2

Speedup says how many times as fast: it is 2 if two devices lose nothing. Efficiency is the speedup divided by
the best possible one: then it is 1, or 100 %. For the total time, one number of the CSV is enough.
`python ../results/plot_results.py FOLDER --out FOLDER` makes the same comparison: does yours agree?

## 3

`epoch["images_per_s"] for epoch in epochs if not epoch["warmup"]`; `epochs[-1]["elapsed_s"]`.
Speedup is `two / one`, efficiency `two / one / devices`. (128, 128) is strong, (128, 256) weak.
For `batch_alone`, divide the two lines of one device. Strong scaling does the same steps in less time;
weak scaling does different steps, with more images.
"""
SOLUTION = {
    "scaling.py": '''\
@@
-"""One device against two, from the CSVs in runs/ next to this file. Six gaps `...`."""
+"""One device against two, from the CSVs in runs/ next to this file."""
@@
-STRONG = (128, ...)
-WEAK = (128, ...)
+STRONG = (128, 128)
+WEAK = (128, 256)
@@
-    return median(...)
+    return median(epoch["images_per_s"] for epoch in epochs if not epoch["warmup"])
@@
     """Return the seconds of the whole run, with tests. Each epoch has `elapsed_s`, the clock at its end."""
-    return ...
+    return epochs[-1]["elapsed_s"]
@@
     """Return the speedup from the images/s of one device and of two."""
-    return ...
+    return two / one
@@
     """Return the speedup as a share of the best possible one on `devices`."""
-    return ...
+    return two / one / devices
''',
}
STARTS_WITH = "`prediction`"
RECORDED = {
    "results/sample/cpu-xeon-2-cores/scaling/w32.csv": [
        "single-20261122-051438-83bb0ea1",
        "single-20261122-051515-5fb08d68",
        "ddp-20261122-052150-0428d3b8",
        "ddp-20261122-052214-93f617cc",
    ]
}
WRONG = [
    ("scaling.py", "STRONG = (128, 128)", "STRONG = (128, 256)", "mixes both changes"),
    ("scaling.py", "WEAK = (128, 256)", "WEAK = (128, 128)", "STRONG and WEAK compare the same"),
    ("scaling.py", 'not epoch["warmup"]', "True", "marked as `warmup`"),
    ("scaling.py", 'epochs[-1]["elapsed_s"]', 'sum(x["train_seconds"] for x in epochs)', "only the training"),
    ("scaling.py", 'epochs[-1]["elapsed_s"]', 'sum(x["elapsed_s"] for x in epochs)', "keeps counting"),
    ("scaling.py", 'epochs[-1]["elapsed_s"]', 'sum(x["eval_seconds"] for x in epochs)', "only the tests"),
    ("scaling.py", "return two / one\n", "return one / two\n", "upside down"),
    ("scaling.py", "return two / one / devices", "return devices * one / two", "Efficiency is upside down"),
    ("scaling.py", "return two / one / devices", "return two / one", "not divided"),
    ("scaling.py", "return two / one / devices", "return ...", "still a gap"),
    ("answers.txt", "batch_alone = 1.03", "batch_alone = 1.86", "two lines of one device"),
    ("answers.txt", "same_training = strong", "same_training = weak", "half as many steps"),
    ("answers.txt", "full_device = weak", "full_device = strong", "split the 128"),
    ("answers.txt", "gains_more = epoch", "gains_more = run", "tests"),
    ("runs/*.csv", "1,1,1,CPU", "1,1,1,Xeon", "cannot be compared"),
]
# Of a made-up run: two epochs that count, and one that warms up. Before them, the start took a second. They
# have every column of a CSV, since a formula may use any.
EPOCHS = [
    dict.fromkeys(COLUMNS, 1.0)
    | {"warmup": warmup, "images_per_s": speed}
    | {"train_seconds": train, "eval_seconds": test, "elapsed_s": end}
    for warmup, speed, train, test, end in (
        (1.0, 100.0, 10.0, 4.0, 15.0),
        (0.0, 200.0, 5.0, 2.0, 22.0),
        (0.0, 220.0, 4.5, 2.5, 29.0),
    )
]


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    _formulas(workspace.module("scaling.py"))
    one_device, one_device_256 = (workspace.row(stage="single", global_batch=batch) for batch in (128, 256))
    two_devices, two_devices_256 = (
        workspace.row(stage="ddp", devices=2, global_batch=batch) for batch in (128, 256)
    )
    for row in (two_devices, two_devices_256):
        if row.why:
            raise Wrong(
                f"The run of two devices with batch {row.global_batch} cannot be compared: {row.why}."
            )
    if not two_devices_256.weak_efficiency > 0:
        raise Wrong("One device with 128 and two with 256 differ in more than the batch: see the commands.")
    if one_device.epochs != two_devices.epochs:
        raise Wrong(
            "The runs with batch 128 have different numbers of epochs, so you cannot compare their total "
            "times."
        )
    alone = one_device_256.images_per_s / one_device.images_per_s
    shorter = one_device.elapsed_s / two_devices.elapsed_s
    if not is_close(answers.number("batch_alone"), alone):
        raise Wrong(
            f"`batch_alone` is not {answers['batch_alone']}. Divide the images/s in the two lines of one "
            "device."
        )
    if answers.word("same_training", "strong", "weak") == "weak":
        raise Wrong(
            "`same_training`: with 256 there are half as many steps in an epoch, and different ones, so it "
            f"is not the same training in less time. A factor of {alone:.2f} came from the larger batch "
            "alone."
        )
    if answers.word("full_device", "strong", "weak") == "strong":
        raise Wrong(
            "`full_device`: in strong scaling, the two devices split the 128 images, 64 each, so neither is "
            "full."
        )
    truth = "epoch" if two_devices.speedup > shorter else "run"
    if answers.word("gains_more", "epoch", "run") != truth:
        raise Wrong(
            f"`gains_more`: the training of an epoch is {two_devices.speedup:.2f} times as fast, the whole "
            f"run {shorter:.2f} times. The run also has its start and the tests."
        )
    busy = ""
    if two_devices.speedup < 1:
        busy = (
            " Two devices are slower than one here. If other programs used the cores meanwhile, run it "
            "again, or use `recorded` runs."
        )
    return (
        f"Strong scaling with batch 128: {two_devices.speedup:.2f} times, efficiency "
        f"{two_devices.efficiency:.0%}; you "
        f"predicted {prediction:g} times. The whole run became {shorter:.2f} times as fast, since the start "
        "and the tests do not gain as much. Weak scaling gives "
        f"{2 * two_devices_256.weak_efficiency:.2f} times the images/s, efficiency "
        f"{two_devices_256.weak_efficiency:.0%}. That is fair if the batch may grow, but it is not the same "
        f"training in less time: also look at the accuracy.{busy}"
    )


def _formulas(program: object) -> None:
    if ... in (*program.STRONG, *program.WEAK):
        raise Wrong("STRONG or WEAK in mine/scaling.py is still a gap `...`.")
    if tuple(program.STRONG) == (128, 256):
        raise Wrong(
            "STRONG mixes both changes: 128 on one device against 256 on two changes the batch as well as "
            "the devices. In strong scaling, the global batch stays the same."
        )
    if tuple(program.STRONG) == tuple(program.WEAK):
        raise Wrong(
            "STRONG and WEAK compare the same runs. In weak scaling, each device keeps its 128 images."
        )
    if (tuple(program.STRONG), tuple(program.WEAK)) != ((128, 128), (128, 256)):
        raise Wrong("STRONG keeps the global batch of 128. WEAK keeps the 128 images of each device.")
    for name, values, right, hints in (
        ("images_per_s", (EPOCHS,), 210, {200: "leave out the epochs that are marked as `warmup`"}),
        (
            "total_s",
            (EPOCHS,),
            29,
            {
                19.5: "that is only the training, without the start and the tests",
                28: "that lacks the start of the process",
                8.5: "that is only the tests",
                66: "`elapsed_s` keeps counting from epoch to epoch, so do not add it up",
            },
        ),
        (
            "speedup",
            (100, 150),
            1.5,
            {2 / 3: "the division is upside down: more images/s on two devices mean more speedup"},
        ),
        (
            "efficiency",
            (100, 300, 4),
            0.75,
            {
                4 / 3: "Efficiency is upside down: it falls if two devices train fewer images/s",
                3: "that is the speedup, not divided by the number of devices",
                1.5: "you divide by 2, not by `devices`",
            },
        ),
    ):
        _try(name, getattr(program, name), values, right, hints)


def _try(name: str, function: object, values: tuple, right: float, hints: dict[float, str]) -> None:
    try:
        answer = function(*values)
    except TypeError as error:
        if "llipsis" in str(error):  # median(...)
            answer = ...
        else:
            raise
    if answer is ...:
        raise Wrong(f"`{name}` in mine/scaling.py is still a gap `...`.")
    if not isinstance(answer, (int, float)):
        raise Wrong(f"`{name}` in mine/scaling.py returns {answer!r}, not a number.")
    for wrong, hint in hints.items():
        if is_close(answer, wrong, 0.001):
            raise Wrong(f"`{name}`: {hint}.")
    if not is_close(answer, right, 0.001):
        of = "a made-up run" if values[0] is EPOCHS else ", ".join(map(str, values))
        raise Wrong(f"`{name}` of {of} is {answer:g}, but should be {right:g}.")
