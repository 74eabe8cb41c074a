"""Reads the learner's stream on several ranks, with and without workers."""

from collections import Counter
from types import ModuleType

from manygpus.workshop.work import Workspace, Wrong

ANSWERS = """\
# Two ranks with two workers each read the stream as it is: how many times is each sample read in an epoch?
prediction = 2
# If rank 0 has one batch more than rank 1 at the end of an epoch, what happens: error, hang or nothing?
one_more = hang
"""
HINTS = """\
## 1

Count the readers: each rank has `num_workers` of them, or one if there are no workers. Which number does each
reader have, from 0 to the last?

## 2

A reader takes `files[reader :: readers]`. First shuffle a copy of the files with `random.Random(self.epoch)`,
which gives all readers the same order.

## 3

`reader = self.rank * workers + worker.id`. In `batches`, count what each reader is sure to have:
`len(stream.files) // readers` files, and therefore `that * ROWS // batch_size` whole batches for each worker.
Use `drop_last=True`, and `itertools.islice(loader, workers * whole_batches)`.
"""
SOLUTION = {
    "stream.py": '''\
@@
-"""Read a stream of files on several ranks, with several loader workers each. Two functions need a change.
+"""Read a stream of files on several ranks, with several loader workers each.
@@
+import random
 from collections import Counter
 from collections.abc import Iterable, Iterator
+from itertools import islice
@@
-from torch.utils.data import DataLoader, IterableDataset
+from torch.utils.data import DataLoader, IterableDataset, get_worker_info
@@
-        for file in self.files:
+        worker = get_worker_info()  # None where the loader has no workers
+        workers = worker.num_workers if worker else 1
+        reader = self.rank * workers + (worker.id if worker else 0)
+        files = self.files.copy()
+        random.Random(self.epoch).shuffle(files)  # the same order for all readers
+        for file in files[reader :: self.size * workers]:
@@
-    return DataLoader(stream, batch_size, num_workers=workers)
+    loader = DataLoader(stream, batch_size, num_workers=workers, drop_last=True)
+    readers_of_a_rank = max(workers, 1)
+    files_of_a_reader = len(stream.files) // (stream.size * readers_of_a_rank)
+    return islice(loader, readers_of_a_rank * (files_of_a_reader * ROWS // batch_size))
''',
}
STARTS_WITH = "`prediction`"
READER = "self.rank * workers + (worker.id if worker else 0)"
STEP = "[reader :: self.size * workers]"
SHUFFLE = "        random.Random(self.epoch).shuffle(files)  # the same order for all readers\n"
WRONG = [
    ("stream.py", "files" + STEP, "files", "each of its workers"),
    ("stream.py", "files" + STEP, "files[self.rank :: self.size]", "each of its workers"),
    ("stream.py", "files" + STEP, "files[reader % workers :: workers]", "once by every rank"),
    ("stream.py", READER, "self.rank * workers + worker.id", "'NoneType'"),
    ("stream.py", READER, "self.rank + (worker.id if worker else 0)", "are never read"),
    ("stream.py", SHUFFLE, "", "the same order"),
    ("stream.py", "random.Random(self.epoch)", "random.Random(self.epoch + reader)", "all split one list"),
    ("stream.py", "    return islice(loader, ", "    return loader\n    (", "the same number of batches"),
    ("answers.txt", "one_more = hang", "one_more = nothing", "all-reduce"),
]
BATCH = 3


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    program = workspace.module("stream.py")
    for size, workers in ((2, 2), (1, 2), (3, 0)):
        check_samples(program, size, workers)
    check_order(program)
    check_batches(program)
    if answers.word("one_more", "error", "hang", "nothing") != "hang":
        raise Wrong("`one_more`: in that batch rank 0 waits in an all-reduce, which rank 1 never calls.")
    return (
        "Every file is read by one worker of one rank, and all ranks have the same number of batches. "
        "Before, each sample was read four times in an epoch, once by each reader (you predicted "
        f"{prediction:g}), without an error. Such an epoch takes four times as long, and the ranks train on "
        "the same samples. Have many more files than readers, so that little is left out."
    )


def read(program: ModuleType, rank: int, size: int, workers: int, number: int = 12, epoch: int = 0) -> list:
    """Return the batches of a rank."""
    stream = program.Stream(program.files(number), rank, size)
    stream.epoch = epoch
    return [batch.tolist() for batch in program.batches(stream, BATCH, workers)]


def check_samples(program: ModuleType, size: int, workers: int) -> None:
    """12 files, which can be split evenly over the readers."""
    ranks = [Counter(sum(read(program, rank, size, workers), [])) for rank in range(size)]
    where = f"On {size} rank(s) with {workers} worker(s) each"
    for rank, seen in enumerate(ranks):
        if seen and max(seen.values()) > 1:
            if max(seen.values()) == workers == min(seen.values()):
                raise Wrong(
                    f"{where}, rank {rank} reads each sample {workers} times, once in each of its workers."
                )
            raise Wrong(
                f"{where}, rank {rank} reads some samples {max(seen.values())} times: do its workers "
                "all split one list?"
            )
    together = sum(ranks, Counter())
    if size > 1 and together and min(together.values()) == size:
        raise Wrong(f"{where}, each sample is read {size} times, once by every rank.")
    missing = 12 * program.ROWS - len(together)
    if max(together.values(), default=1) > 1:
        raise Wrong(
            f"{where}, some samples are read by several ranks, and {missing} are never read: do all readers "
            "split the same list of files, each with its own number?"
        )
    if missing:
        raise Wrong(f"{where}, {missing} of {12 * program.ROWS} samples are never read.")


def check_order(program: ModuleType) -> None:
    first, second = (read(program, 0, 1, 0, epoch=epoch) for epoch in (0, 1))
    if first == second:
        raise Wrong("Every epoch has the files in the same order: shuffle them by `self.epoch`.")


def check_batches(program: ModuleType) -> None:
    for number, size, workers in ((7, 2, 0), (7, 2, 2), (11, 3, 1)):
        counts = [len(read(program, rank, size, workers, number)) for rank in range(size)]
        if len(set(counts)) > 1:
            raise Wrong(
                f"Of {number} files, with {workers} worker(s), the {size} ranks have {counts} batches. All "
                "ranks need the same number of batches, so leave out the surplus."
            )
        if not counts[0]:
            raise Wrong(f"Of {number} files, the {size} ranks have no batches at all.")
