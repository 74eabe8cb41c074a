"""Compares how long the learner's runs waited, and looks at what the program makes of some images."""

import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from manygpus.record import records
from manygpus.workshop.work import Answers, Workspace, Wrong, check_alike, is_close

ANSWERS = """\
# Before you run: how many seconds out of 100 does the training wait for images?
prediction = 30

# From your runs, after the warm-up:
waited = 60  # seconds out of 100, in the first run
waits = 5.6   # seconds out of 100, in the fixed run
times = 10   # images/s of the fixed run, divided by those of the first
workers = 10 # how many, working as in the first run, would supply the fixed training
"""
HINTS = """\
## 1

`for pixel in image.flatten()` makes an object of each of 784 pixels, and Python goes through them four
times. Which functions of PyTorch do this for all pixels at once? And for all images of a batch?

## 2

`images.mean(dim=(1, 2, 3), keepdim=True)` returns the mean of each image of a batch (n, 1, 28, 28); `std`
takes the same arguments, and `correction=0`. An `InMemoryDataset` has two ways to prepare images:
`prepare_one` prepares one image, in a loader process, and `prepare` a batch, on the device. `--loader
resident`, the default, calls the second.

## 3

`replace(split, prepare=prepare, prepare_one=None)`, where `prepare` takes bytes (n, 1, 28, 28) and begins
with `images = images.float()`. In the first run the one worker is busy all the time, so it prepares as many
images per second as that run trains on. Divide the fixed images/s by that number, and round up.
"""
SOLUTION = {
    "training.py": '''\
@@
-    """Return the same images, prepared in my way, one by one in the processes of the loader."""
-    return replace(split, prepare_one=prepare_one)
+    """Return the same images, prepared in my way, a batch at once on the device."""
+    return replace(split, prepare=prepare, prepare_one=None)
@@
-def prepare_one(image: torch.Tensor) -> torch.Tensor:
-    """Turn the bytes of one image (1, 28, 28) into float32 with mean 0 and standard deviation 1."""
-    pixels = [float(pixel) for pixel in image.flatten()]
-    mean = sum(pixels) / len(pixels)
-    std = (sum((pixel - mean) ** 2 for pixel in pixels) / len(pixels)) ** 0.5
-    return torch.tensor([(pixel - mean) / std for pixel in pixels]).view(1, 28, 28)
+def prepare(images: torch.Tensor) -> torch.Tensor:
+    """Turn bytes (n, 1, 28, 28) into float32, each image with mean 0 and standard deviation 1."""
+    images = images.to(torch.float32, memory_format=torch.channels_last)
+    mean = images.mean(dim=(1, 2, 3), keepdim=True)
+    std = images.std(dim=(1, 2, 3), keepdim=True, correction=0)
+    return (images - mean) / std
''',
}
STARTS_WITH = "`prediction`"
RECORDED = {"results/sample/cpu-xeon-2-cores/exercises/waiting_loader": []}
WRONG = [
    ("answers.txt", "waited = 60", "waited = 40", "how long the run trained"),
    ("answers.txt", "waited = 60", "waited = 0.6", "which is a percentage"),
    ("answers.txt", "waits = 5.6", "waits = 60", "belongs to the other run"),
    ("answers.txt", "times = 10", "times = 0.1", "upside down"),
    ("answers.txt", "workers = 10", "workers = 2", "a worker prepares 932"),
    ("training.py", "prepare=prepare, prepare_one=None", "prepare_one=prepare", "those of the stage"),
    ("training.py", "dim=(1, 2, 3)", "dim=(0, 1, 2, 3)", "of the whole batch"),
    ("training.py", "(images - mean) / std", "((images - mean) / std).flatten(1)", "keep the shape"),
    ("training.py", "(images - mean) / std", "images / 255", "mean 0 and standard deviation 1"),
    ("runs/*f70386a6.ranks.tsv", "\t7.", "\t0.", "None of your runs waits"),
    ("runs/*f70386a6.monitor.json", "waiting_for_loader", "shared_cores", "its verdict does not say so"),
    ("runs/*a59c7524.csv", "T10:02:19Z", "T10:01:19Z", "is not fixed"),
    ("runs/*a59c7524.csv", ",8,297578,", ",16,297578,", "differ in width"),
]
# Of 100 seconds: a run that waits for its loader waits for more than this,
WAITING_SECONDS = 30
# and one that is fixed for less than this.
CURED_SECONDS = 25
# A fix gains more than the wait explains if it gains more than this many times as much.
MORE_THAN_THE_WAIT = 1.2


class Watched(NamedTuple):
    """A monitored run: the row of its last epoch, images/s and the seconds out of 100 that it waited, both
    after the warm-up, and the kinds of its findings."""

    row: dict[str, object]
    speed: float
    waited: float
    kinds: list[str]


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    first, fixed = _two([_watched(path) for path in sorted(workspace.folder.glob("runs/*.csv"))])
    _check_images(workspace, fixed.row["loader"])
    _check_answers(answers, first, fixed)
    worst = "as the worst" if first.kinds[0] == "waiting_for_loader" else "though not as the worst"
    times = fixed.speed / first.speed
    explained = 100 / (100 - first.waited)
    rest = ""
    if times > MORE_THAN_THE_WAIT * explained and first.row["device_name"].startswith("CPU"):
        rest = (
            f"The wait alone explains a factor of {explained:.1f}. In addition, the loader process took a "
            "core from the threads of the training, which in every operation wait for the slowest of them. "
            "With OMP_NUM_THREADS=1, the training itself takes about as long beside the loader as without "
            "it. "
        )
    return (
        f"Out of 100 seconds, the training waited for {first.waited:.0f} (you predicted {prediction:g}). Its "
        f"own lines do not show that, but the verdict names the wait, {worst}. Now it waits for "
        f"{fixed.waited:.0f}, and is {times:.1f} times as fast, with the same images. {rest}More workers, "
        "with a core each, would have hidden the wait, until a faster device shows it again. So first look "
        "at what is done for each image. Do that for a whole batch, or once before the training, and only "
        "then add workers."
    )


def _watched(path: Path) -> Watched:
    rows = records.read(path)
    rank_rows = records.read_ranks(path)
    counted = {row["epoch"] for row in rows if not row["warmup"]}
    if not counted:
        raise Wrong(
            f"mine/runs/{path.name} has only the warm-up: run it with two epochs or more, or remove it."
        )
    seconds = sum(row["train_seconds"] for row in rows if row["epoch"] in counted)
    waited = sum(row["data_seconds"] for row in rank_rows if row["epoch"] in counted)
    if math.isnan(waited):
        raise Wrong(f"mine/runs/{path.name} did not record how long it waited: remove it, and run it again.")
    speed = statistics.median(row["images_per_s"] for row in rows if row["epoch"] in counted)
    try:
        verdict = json.loads(path.with_suffix(".monitor.json").read_text())
    except FileNotFoundError:
        raise Wrong(
            f"mine/runs/{path.name} has no verdict, since nothing monitored the run. Remove it, and run it "
            "again as the README shows."
        ) from None
    return Watched(
        rows[-1], speed, 100 * waited / seconds, [finding["kind"] for finding in verdict["findings"]]
    )


def _two(runs: list[Watched]) -> tuple[Watched, Watched]:
    """Return the run that waits longest, and the newest."""
    if not runs:
        raise Wrong("There are no runs in mine/runs yet: run the commands of the README, or use `recorded`.")
    runs = sorted(runs, key=lambda run: run.row["started_at"])
    first = max(runs, key=lambda run: run.waited)
    fixed = runs[-1]
    if first.waited < WAITING_SECONDS:
        raise Wrong(
            f"None of your runs waits for more than {first.waited:.0f} out of 100 seconds. The first run has "
            "to be that of the starter, with --loader workers --num-workers 1. If it was, other programs "
            "held the cores: run it again on a quiet machine, or use `recorded`."
        )
    if "waiting_for_loader" not in first.kinds:
        raise Wrong(
            f"The first run waits for {first.waited:.0f} out of 100 seconds, but its verdict does not say "
            "so. If it was too short, give it more --epochs."
        )
    check_alike(first.row, fixed.row)
    if fixed.waited >= CURED_SECONDS or fixed.waited > first.waited / 2:
        raise Wrong(
            f"Your newest run waits for {fixed.waited:.0f} out of 100 seconds, and the first for "
            f"{first.waited:.0f}: that is not fixed. More workers take more cores. What is done for each "
            "image?"
        )
    return first, fixed


def _check_images(workspace: Workspace, loader: str) -> None:
    """Check that the network gets the same images as from the starter, by the loader of the fixed run."""
    import torch

    from manygpus.data.datasets import InMemoryDataset, normalize, normalize_one

    random = torch.Generator().manual_seed(1)
    brightness = torch.tensor([40, 80, 120, 250]).view(4, 1, 1, 1)
    images = (torch.rand(4, 1, 28, 28, generator=random) * brightness).to(torch.uint8)
    labels = torch.zeros(4, dtype=torch.int64)
    split = workspace.module("training.py").my_images(
        InMemoryDataset("mnist", images, labels, normalize, normalize_one)
    )
    if loader == "resident":
        made = split.prepare(split.inputs.clone())
    else:
        made = torch.stack([split[index][0] for index in range(4)])
    pixels = images.float()
    std, mean = torch.std_mean(pixels, dim=(1, 2, 3), keepdim=True, correction=0)
    if made.shape != pixels.shape:
        raise Wrong(f"From 4 images (4, 1, 28, 28), your program makes {tuple(made.shape)}: keep the shape.")
    if torch.allclose(made, (pixels - mean) / std, atol=0.01):
        return
    hint = "each image needs mean 0 and standard deviation 1, as before."
    if torch.allclose(made, normalize(images), atol=0.01):
        hint = (
            "these images are those of the stage. The resident loader calls `prepare`, never `prepare_one`."
        )
    if torch.allclose(made, (pixels - pixels.mean()) / pixels.std(), atol=0.01):
        hint = "the mean of the whole batch is subtracted. `dim` sets what a mean is taken over."
    raise Wrong(f"With the {loader} loader, your program does not make the images of the starter: {hint}")


def _check_answers(answers: Answers, first: Watched, fixed: Watched) -> None:
    for name, run, other in (("waited", first, fixed), ("waits", fixed, first)):
        answer = answers.number(name)
        if abs(answer - run.waited) <= max(1.0, 0.05 * run.waited):
            continue
        hint = "take 100 x data_seconds / train_seconds, of the epochs after the warm-up."
        if is_close(answer, 100 - run.waited, 0.03):
            hint = "that is how long the run trained. For how long did it wait?"
        if is_close(answer, other.waited, 0.03):
            hint = "that belongs to the other run."
        if is_close(answer, run.waited / 100, 0.1):
            hint = "give the seconds out of 100, which is a percentage."
        raise Wrong(f"`{name}` is not {answer:g}: {hint}")
    answer = answers.number("times")
    times = fixed.speed / first.speed
    if not is_close(answer, times, 0.05):
        hint = "The division is upside down." if is_close(answer, 1 / times, 0.05) else "Divide the images/s."
        raise Wrong(f"`times` is not {answer:g}. {hint}")
    each = first.speed / max(first.row["workers_per_loader"], 1)
    answer = answers.number("workers")
    needed = fixed.speed / each
    if not math.floor(0.95 * needed) <= answer <= math.ceil(1.05 * needed):
        raise Wrong(
            f"`workers` is not {answer:g}: a worker prepares {each:,.0f} images/s, as the first run shows, "
            f"in which it was never idle. The fixed training needs {fixed.speed:,.0f}."
        )
