"""How long 10,000 runs take to compare, and to say how many GPUs: python results/bench/scale.py

The runs are made up: only how many there are counts here.
"""

import csv
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice, product
from pathlib import Path

from trainkit.records import ADDED, COLUMNS, RANK_COLUMNS, SCHEMA_VERSION, beside

RESULTS = Path(__file__).resolve().parents[1]
EPOCHS = 3
# Every combination is one of 2,000 configurations; the last ones change first.
TRAIN_SIZES, PRECISIONS = (4096, 8192, 16384, 32768, 65536), ("fp32", "bf16")
WIDTHS, BATCHES, DEVICES = (8, 16, 32, 64, 128), tuple(8 * 2**i for i in range(10)), (1, 2, 4, 8)


def main() -> None:
    print("configurations  runs  program            seconds  peak memory, MB")
    for configurations, repeats in ((200, 50), (2000, 5)):
        with tempfile.TemporaryDirectory() as folder:
            write_runs(Path(folder, "runs"), configurations, repeats)
            for name, options in (
                ("plot_results.py", ()),
                ("how_many_gpus.py", ("--set", "1", "--epochs", "9")),
            ):
                command = [sys.executable, str(RESULTS / name), f"{folder}/runs", "--out", f"{folder}/out"]
                start = time.perf_counter()
                subprocess.run([*command, *options], stdout=subprocess.DEVNULL, check=True)
                seconds = time.perf_counter() - start
                usage = resource.getrusage(resource.RUSAGE_CHILDREN)
                peak = usage.ru_maxrss * 1024 / 1e6  # the most of all so far
                count = configurations * repeats
                print(f"{configurations:14}  {count:4}  {name:17}  {seconds:7.1f}  {peak:15.0f}")


def write_runs(folder: Path, configurations: int, repeats: int) -> None:
    """Into a new folder, the files that so many runs of every configuration would have left."""
    folder.mkdir(parents=True)
    chance = random.Random(1)
    every = product(TRAIN_SIZES, PRECISIONS, WIDTHS, BATCHES, DEVICES)
    for number, (images, precision, width, batch, devices) in enumerate(islice(every, configurations)):
        facts = dict.fromkeys(COLUMNS, "") | ADDED
        facts |= {"stage": "ddp" if devices > 1 else "single", "dataset": "mnist", "device_name": "made up"}
        facts |= {"loader": "resident", "workers_per_loader": 0, "recipe": "classic", "lr": 1, "gamma": 0.7}
        facts |= {"images": images, "precision": precision, "width": width, "global_batch": batch}
        facts |= {"devices": devices, "world_size": devices, "nodes": 1, "threads_per_worker": 1}
        facts |= {"batch_per_device": batch // devices, "steps": images // batch, "accumulate": 1}
        facts |= {"train_loss": 0.1, "test_loss": 0.1, "learning_rate": 1, "eval_seconds": 1}
        facts |= {"schema_version": SCHEMA_VERSION}
        seconds = images / batch * (1e-3 + batch * width / devices / 1e6)
        for seed in range(repeats):
            run_id, epochs, ranks = f"{facts['stage']}-{number}-{seed}", [], []
            for epoch in range(1, EPOCHS + 1):
                took = seconds * chance.uniform(1, 1.1)
                epochs.append(
                    facts
                    | {"run_id": run_id, "seed": seed, "epoch": epoch, "warmup": int(epoch == 1)}
                    | {"train_seconds": took, "images_per_s": images / took, "elapsed_s": 5 + epoch * took}
                    | {"test_accuracy": 99 - chance.random() / epoch, "peak_memory_mb": 300}
                )
                ranks += [
                    {"epoch": epoch, "rank": rank, "host": "node1", "device": f"cuda:{rank}"}
                    | {"device_name": "made up", "own_seconds": took, "data_seconds": 0, "peak_memory_mb": 1}
                    for rank in range(devices)
                ]
            _put(folder / f"{run_id}.csv", COLUMNS, epochs)
            _put(beside(folder / f"{run_id}.csv"), RANK_COLUMNS, ranks, delimiter="\t")


def _put(path: Path, columns: dict, rows: list[dict[str, object]], **dialect: str) -> None:
    """Write a table without waiting for the disk, for which a run does wait."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, **dialect)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
