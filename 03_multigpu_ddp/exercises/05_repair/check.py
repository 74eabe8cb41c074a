"""Runs the functions of the learner's script in two ranks, on images that are numbers."""

import os
import time
from collections import Counter
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from manygpus.workshop.ranks import in_ranks
from manygpus.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# Before you start the script: how many of its ten bugs will give an error or a warning on one machine?
prediction = 0
"""
HINTS = """\
## 1

Go through the script function by function. `join` decides who a process is and where the ranks meet; `split`
splits the images; `train_epoch` sets the order and computes the gradient. Ask of every line what it does on
rank 1, and what on the second node.

## 2

The launcher sets `RANK`, `MASTER_ADDR` and `MASTER_PORT`: use them unchanged. `random_split` takes a
`generator=torch.Generator().manual_seed(SEED)`. A `DistributedSampler` has `set_epoch(epoch)`. DDP averages
the gradients in `backward`.

## 3

For the extra part: DDP averages only gradients. `dist.all_reduce(tensor)` sums a tensor over all ranks, and
`dist.barrier()` waits until all ranks have reached it. Sum the losses and count the images on each rank, sum
both over all ranks, and only then divide. A `DistributedSampler` pads a data set that does not divide evenly;
`Subset(images, range(rank, len(images), size))` does not. Put a barrier before each of the two readings of
the clock.
"""
SOLUTION = {
    "broken_ddp.py": '''\
@@
-"""Train a small network on digits with DistributedDataParallel. It runs, and has ten bugs.
+"""Train a small network on digits with DistributedDataParallel.
@@
-from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split
+from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset, random_split
@@
-    os.environ["MASTER_ADDR"] = "localhost"
-    rank = int(os.environ["LOCAL_RANK"])
+    rank = int(os.environ["RANK"])
@@
+    own_random = torch.Generator().manual_seed(SEED)  # the same on every rank
     sizes = [len(images) - validation, validation]
@@
-    train_set, validation_set = random_split(images, sizes)
+    train_set, validation_set = random_split(images, sizes, own_random)
@@
+        dist.barrier()
         start = time.perf_counter()
@@
-        loss, images = train_epoch(model, loader, optimizer, epoch)
+        sums = train_epoch(model, loader, optimizer, epoch)
+        dist.barrier()
@@
-        numbers.append({"loss": loss, "images_per_s": images / seconds, "seconds": seconds})
+        dist.all_reduce(sums)
+        losses, images = sums.tolist()
+        numbers.append({"loss": losses / images, "images_per_s": images / seconds, "seconds": seconds})
@@
-) -> tuple[float, int]:
-    """Train for one epoch; return its mean loss and the number of its images."""
+) -> torch.Tensor:
+    """Train for one epoch; return the sum of the losses of this rank's images, and their number."""
+    loader.sampler.set_epoch(epoch)
@@
-    trained = 0
+    sums = torch.zeros(2)
@@
-        for weights in model.parameters():
-            weights.grad /= dist.get_world_size()
@@
-        trained += len(images)
-    return loss.item(), trained
+        sums += torch.tensor([loss.item() * len(images), len(images)])
+    return sums
@@
-    sampler = DistributedSampler(images, size, rank, shuffle=False)
+    shard = Subset(images, range(rank, len(images), size))
@@
-        for inputs, labels in DataLoader(images, 250, sampler=sampler):
+        for inputs, labels in DataLoader(shard, 250):
@@
-    torch.save(model.module.state_dict(), Path(__file__).with_name("weights.pt"))
+    if rank == 0:
+        torch.save(model.module.state_dict(), Path(__file__).with_name("weights.pt"))
''',
}
STARTS_WITH = "`prediction`"
SCRIPT = "broken_ddp.py"
BATCH = 8
IMAGES = 32
SLOW = 1  # seconds that rank 1 is late, or slower
CLOCK = time.perf_counter  # all processes of a machine have the same
Seen = dict[str, object]


def check(workspace: Workspace) -> str:
    prediction = workspace.answers().number("prediction")
    program = workspace.module(SCRIPT)
    ranks = in_ranks(lambda rank, size: behave(program, rank), size=2)
    remaining = [symptom for symptom in (bug(ranks) for bug in CORE) if symptom]
    if remaining:
        raise Wrong(f"{len(CORE) - len(remaining)} of the first {len(CORE)} repaired. Next: {remaining[0]}")
    extra = [symptom for symptom in (bug(ranks) for bug in EXTRA) if symptom]
    if extra:
        return (
            "The first five are repaired: every process knows who it is and meets the others, and the ranks "
            "train on the right images with the right gradient. None of these bugs gave an error. Some "
            f"numbers of the script are still wrong: {len(extra)} bug(s) are left, which are extra. Check "
            f"again after each. Next: {extra[0]}"
        )
    return (
        f"All ten are repaired. You predicted an error or a warning from {prediction:.0f} of them. On one "
        "machine none of them gave any, and the numbers looked plausible. So check what a program does: "
        "which process is rank 0, which images each rank sees, and what one process would compute. "
        "DOS_AND_DONTS.md has more such bugs."
    )


class Meeting:
    """Stands in for the process group, and notes which rank joins, and where."""

    def __init__(self) -> None:
        self.rank = -1
        self.place = ""

    def init_process_group(
        self, backend: str = "", init_method: str | None = None, rank: int = -1, **more: object
    ) -> None:
        self.rank = rank if rank >= 0 else int(os.environ["RANK"])
        is_address = init_method and init_method.startswith("tcp://")
        self.place = init_method[6:].rpartition(":")[0] if is_address else os.environ["MASTER_ADDR"]


class Spy(nn.Module):
    """A small network that notes which images it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 10)
        self.seen = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += images.flatten().int().tolist()
        return self.linear(images / IMAGES)


class Optimizer(torch.optim.SGD):
    """Notes the gradients and changes nothing; rank 1 is slow in the last step."""

    def __init__(self, model: nn.Module, slow_step: int) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.gradients = []
        self.slow_step = slow_step
        self.done = 0.0

    def step(self) -> None:
        self.gradients.append(self.param_groups[0]["params"][0].grad.flatten().tolist())
        if len(self.gradients) == self.slow_step:
            time.sleep(SLOW * dist.get_rank())
            self.done = CLOCK()


class Known(nn.Module):
    """Answers with the number of each image; only one of five has that label."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.one_hot(images.flatten().long(), 10).float()

    @property
    def module(self) -> nn.Module:
        return self


def behave(program: ModuleType, rank: int) -> Seen:
    """Call the functions of the script in this rank, and return what they do."""
    program.EPOCHS = 2
    program.BATCH = BATCH
    numbers = torch.arange(IMAGES)
    five = numbers[:5]
    tests = [TensorDataset(five.unsqueeze(1), torch.where(five == one, five, 9)) for one in (0, 4)]
    images = TensorDataset(numbers.float().unsqueeze(1), numbers % 10)
    return {
        "joined": [join(program, process) for process in range(4)],
        **split(program, rank, images),
        **fit(program, rank, images),
        "accuracies": [program.evaluate(Known(), test, rank, 2) for test in tests],
        "saved": save(program, rank),
    }


def join(program: ModuleType, process: int) -> tuple[int, str]:
    """Return a rank of two processes on each of two nodes, and the host where it looks for rank 0."""
    place = {"MASTER_ADDR": "n1", "MASTER_PORT": "1", "WORLD_SIZE": "4"}
    ranks = {"RANK": str(process), "LOCAL_RANK": str(process % 2)}
    meeting = Meeting()
    with (
        patch.dict(os.environ, place | ranks),
        patch.object(dist, "init_process_group", meeting.init_process_group),
        patch.object(dist, "get_rank", lambda: meeting.rank),
        patch.object(dist, "get_world_size", lambda: 4),
    ):
        program.join()
    return meeting.rank, meeting.place


def split(program: ModuleType, rank: int, images: TensorDataset) -> Seen:
    torch.manual_seed(rank)
    parts = program.split(images)
    train, validation = (sorted(int(image) for image, _ in part) for part in parts)
    return {"train": train, "validation": validation, "random": torch.rand(1).item()}


def fit(program: ModuleType, rank: int, images: TensorDataset) -> Seen:
    readings = []
    torch.manual_seed(1)
    model = DistributedDataParallel(Spy())
    spy = model.module
    steps = IMAGES // BATCH
    optimizer = Optimizer(model, slow_step=2 * steps)
    loader = program.training_batches(images, rank, 2)
    time.sleep(SLOW * rank)
    came = CLOCK()
    with patch.object(time, "perf_counter", lambda: readings.append(CLOCK()) or readings[-1]):
        epochs = program.fit(model, loader, optimizer)
    seen = spy.seen.copy()

    def loss(numbers: list[int]) -> torch.Tensor:
        chosen = torch.tensor(numbers)
        return F.cross_entropy(spy(chosen.float().unsqueeze(1)), chosen % 10)

    shard = BATCH // 2
    (gradient,) = torch.autograd.grad(loss(seen[:shard]), spy.linear.weight)
    return {
        "orders": [seen[: len(seen) // 2], seen[len(seen) // 2 :]],
        "gradient": optimizer.gradients[0],
        "own_gradient": gradient.flatten().tolist(),
        "last": {key: float(value) for key, value in epochs[-1].items()},
        "losses": [
            loss(part).item() for part in (list(range(IMAGES)), seen[len(seen) // 2 :], seen[-shard:])
        ],
        "came": came,
        "began": readings[0] if readings else came,
        "done": optimizer.done,
        "ended": readings[-1] if readings else came,
    }


def save(program: ModuleType, rank: int) -> list[tuple[str, list[str]]]:
    """Return the files that this rank writes, each with the names of the weights in it."""
    files = []

    def note_file(state: dict[str, object], file: object, *more: object, **options: object) -> None:
        files.append((str(file), sorted(state)))

    with (
        patch.object(torch, "save", note_file),
        patch.dict(os.environ, LOCAL_RANK="0"),  # as on two nodes
    ):
        program.save(DistributedDataParallel(nn.Linear(1, 1)), rank)
    return files


def wrong_rank(ranks: list[Seen]) -> str | None:
    printed = [rank for rank, _ in ranks[0]["joined"]]
    if printed.count(0) == 2:
        return "On two nodes with two ranks each, two processes say that they are rank 0."
    if printed != [0, 1, 2, 3]:
        return f"On two nodes with two ranks each, the four processes say that they are the ranks {printed}."
    return None


def wrong_place(ranks: list[Seen]) -> str | None:
    place = ranks[0]["joined"][2][1]
    if place in ("localhost", "127.0.0.1"):
        return (
            f"On two nodes, the processes of the second node look for rank 0 on {place}, which is their own "
            "node. But rank 0 is on the first node, so the two nodes never meet."
        )
    if place != "n1":
        return f"The launcher says that rank 0 is on n1, but the processes look for it on {place}."
    return None


def wrong_split(ranks: list[Seen]) -> str | None:
    train = ranks[0]["train"]
    validation = ranks[0]["validation"]
    both = set(ranks[1]["train"]) & set(validation)
    if both:
        return (
            f"The ranks do not agree on what is in the validation set: rank 1 trains on {len(both)} of the "
            f"{len(validation)} images that rank 0 validates with, so the accuracy is too high."
        )
    if sorted(train + validation) != list(range(IMAGES)):
        return "After the split, some images are in neither part, or in both."
    if ranks[0]["random"] == ranks[1]["random"]:
        return (
            "The ranks now agree on the validation set, but after the split all of them draw the same random "
            "numbers, so every rank drops the same neurons. The split needs a separate generator."
        )
    return None


def wrong_order(ranks: list[Seen]) -> str | None:
    counts = Counter(ranks[0]["orders"][0] + ranks[1]["orders"][0])
    if sorted(counts.elements()) != list(range(IMAGES)):
        missing = IMAGES - len(counts)
        return f"In an epoch, {missing} of {IMAGES} images are left out: both ranks train on the same images."
    if ranks[0]["orders"][0] == ranks[0]["orders"][1]:
        return "The second epoch has the images in the same order as the first, and so does every later one."
    return None


def wrong_gradient(ranks: list[Seen]) -> str | None:
    got = torch.tensor(ranks[0]["gradient"])
    true = torch.tensor([rank["own_gradient"] for rank in ranks]).mean(dim=0)
    factor = (got @ true / (true @ true)).item()
    if torch.allclose(got, true, rtol=1e-3, atol=1e-6):
        return None
    return (
        f"The gradient that the optimizer gets on two ranks is {factor:.2f} times that of the whole batch "
        "in one process. With a different number of ranks, the factor is different."
    )


def wrong_loss(ranks: list[Seen]) -> str | None:
    printed = ranks[0]["last"]["loss"]
    true, of_rank, of_batch = ranks[0]["losses"]
    of_batches = (of_batch + ranks[1]["losses"][2]) / 2
    if is_close(printed, true, 0.001):
        return None
    sentence = f"The mean loss of an epoch is {true:.3f}. The script prints {printed:.3f}"
    if is_close(printed, of_batch, 0.001) or is_close(printed, of_batches, 0.001):
        return f"{sentence}, the loss of a single batch."
    return (
        f"{sentence}, the loss of rank 0's images." if is_close(printed, of_rank, 0.001) else f"{sentence}."
    )


def wrong_metric(ranks: list[Seen]) -> str | None:
    last = ranks[0]["last"]
    images = last["images_per_s"] * last["seconds"]
    if is_close(images, IMAGES, 0.01):
        return None
    whose = " Those are only the images of one rank." if is_close(images, IMAGES / 2, 0.01) else ""
    return (
        f"The script prints images/s of all ranks. Multiplied by its seconds, that makes {images:.0f} images "
        f"in an epoch of {IMAGES}.{whose}"
    )


def wrong_accuracy(ranks: list[Seen]) -> str | None:
    for known, printed, other in zip(("first", "last"), *(seen["accuracies"] for seen in ranks), strict=True):
        if is_close(printed, 20, 0.001) and printed == other:
            continue
        sentence = (
            f"A model classifies only the {known} of 5 test images correctly, which is 20 %. On two ranks, "
            "the script says "
        )
        if printed != other:
            return (
                f"{sentence}{printed:.1f} % on one and {other:.1f} % on the other: each counts its own "
                "shard only."
            )
        counted = {"33.3": "6, one of them twice", "25.0": "4", "0.0": "4"}.get(f"{printed:.1f}")
        uneven = (
            f": 5 images cannot be split evenly over two ranks, and the script looks at {counted}"
            if counted
            else ""
        )
        return f"{sentence}{printed:.1f} %{uneven}."
    return None


def wrong_seconds(ranks: list[Seen]) -> str | None:
    if ranks[0]["ended"] < ranks[1]["done"]:
        return (
            "In an epoch, the last step of rank 1 takes a second longer than that of rank 0. Rank 0 prints "
            f"{ranks[0]['last']['seconds']:.2f} seconds: its own time, not that of all ranks."
        )
    if ranks[0]["began"] < ranks[1]["came"]:
        return (
            "Rank 1 begins to train a second after rank 0. The clock of rank 0 runs while it waits, and "
            "counts the wait as training."
        )
    return None


def wrong_files(ranks: list[Seen]) -> str | None:
    files = [file for rank in ranks for file in rank["saved"]]
    if any(names != ["bias", "weight"] for _, names in files):
        return (
            f"A network with `weight` and `bias` is saved as {files[0][1]}: the plain one cannot load that."
        )
    if len(files) == 1 and ranks[0]["saved"]:
        return None
    if len({file for file, _ in files}) > 1:
        return "Every rank saves a file of its own, although all have the same weights."
    if files:
        return (
            "Several ranks write the same file at the same time. Even one writer per node is too many: on "
            "two nodes, both would write."
        )
    return "No rank saves the weights."


CORE = [wrong_rank, wrong_place, wrong_split, wrong_order, wrong_gradient]
EXTRA = [wrong_loss, wrong_metric, wrong_accuracy, wrong_seconds, wrong_files]
GENERATOR = "own_random = torch.Generator()"
STEP = "        optimizer.step()\n"
EACH = "        for weights in model.parameters():\n            "
SHARD = "range(rank, len(images), size)"
PADDED = "list(DistributedSampler(images, size, rank, shuffle=False))"
SAVE = "    if rank == 0:\n        torch.save("
WHERE = 'model.module.state_dict(), Path(__file__).with_name("'
JOIN = "    rank = int("
ADDRESS = '    os.environ["MASTER_ADDR"] = '
WRONG = [
    (SCRIPT, '["RANK"]', '["LOCAL_RANK"]', "two processes say that they are rank 0"),
    (SCRIPT, JOIN, ADDRESS + '"localhost"\n' + JOIN, "never meet"),
    (SCRIPT, JOIN, ADDRESS + "os.uname().nodename\n" + JOIN, "The launcher"),
    (SCRIPT, "sizes, own_random", "sizes", "The ranks do not agree"),
    (SCRIPT, GENERATOR, "own_random = torch", "drops the same neurons"),
    (SCRIPT, "    loader.sampler.set_epoch(epoch)\n", "", "the same order as the first"),
    (SCRIPT, "(train_set, size, rank,", "(train_set, size, 0,", "are left out"),
    (SCRIPT, STEP, EACH + "weights.grad /= dist.get_world_size()\n" + STEP, "is 0.50 times that"),
    (SCRIPT, STEP, EACH + "dist.all_reduce(weights.grad)\n" + STEP, "is 2.00 times that"),
]  # fmt: skip
# Mistakes of the extra part: the exercise is done all the same.
TOLD_WHEN_DONE = [
    (SCRIPT, "return sums", "return torch.stack([loss.detach() * sums[1], sums[1]])", "of a single batch"),
    (SCRIPT, "        dist.all_reduce(sums)\n", "", "the loss of rank 0's images"),
    (SCRIPT, "images / seconds", "len(loader.sampler) / seconds", "only the images of one rank"),
    (SCRIPT, SHARD, PADDED, "the script looks at 6"),
    (SCRIPT, SHARD, PADDED.replace("False", "False, drop_last=True"), "script looks at 4"),
    (SCRIPT, "    dist.all_reduce(sums)\n    correct", "    correct", "its own shard only"),
    (SCRIPT, "        dist.barrier()\n        seconds", "        seconds", "its own time, not that of all"),
    (SCRIPT, "        dist.barrier()\n        start", "        start", "while it waits"),
    (SCRIPT, SAVE, "    torch.save(", "write the same file"),
    (SCRIPT, "torch.save(model.module.", "torch.save(model.", "cannot load that"),
    (SCRIPT, SAVE + WHERE, "    torch.save(" + WHERE + '" f"{rank}', "a file of its own"),
]  # fmt: skip
