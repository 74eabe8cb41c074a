"""What a training prints on rank 0: two lines at its start, one for each epoch, and how it has ended."""

import math

import torch.distributed as dist

from manygpus.errors import print_line
from manygpus.record.columns import BASE_BATCH, lr_factor
from manygpus.record.records import RecordWriter, Row, slow_rank


def print_start(facts: Row) -> None:
    """Print what is trained, how and on what: `facts` are the columns of the record known at the start."""
    if facts["optimizer"]:
        classes = [words.partition(" ")[0] for words in facts["optimizer"].split(" + ")]
        stepped_by = f"optimizer {' and '.join(classes)}"
    else:
        stepped_by = f"recipe {facts['recipe']}"
    print_line(
        f"stage {facts['stage']} · {facts['devices']} x {facts['device_name']} · {facts['dataset']} · "
        f"global batch {facts['global_batch']} · {facts['loader']} loader · {facts['precision']} · "
        f"{stepped_by}"
    )
    started_by = facts["launcher"]
    if dist.is_initialized():
        started_by += f", {dist.get_backend()}"
    learning_rate = f"learning rate {facts['lr']:.6g}"
    if facts["lr_scale"] != "none":
        unscaled = facts["lr"] / lr_factor(facts["lr_scale"], facts["global_batch"])
        learning_rate += f" ({facts['lr_scale']}: {unscaled:.6g} at batch {BASE_BATCH})"
    if facts["lr_warmup_images"]:
        learning_rate += f" after {facts['lr_warmup_images']} images of warm-up"
    print_line(
        f"nodes {facts['nodes']} · ranks {facts['world_size']} ({started_by}) · "
        f"batch {facts['batch_per_device']} per device · {learning_rate}"
    )


def print_epoch(row: Row, rank_rows: list[Row], epochs: int, unit: str, per_sample: float) -> None:
    """Print the line of an epoch, and past the first one which rank holds up the others.

    Args:
        row: the epoch's row of the record.
        rank_rows: the rows of its devices.
        epochs: the number planned.
        unit, per_sample: the unit of the printed speed, and how many of it a sample has.
    """
    speed = row["images_per_s"] * per_sample
    text = f"epoch {row['epoch']}/{epochs}: train loss {row['train_loss']:.4f}, "
    text += f"{speed:,.0f} {unit}/s, {row['train_seconds']:.1f} s"
    tested = []
    if not math.isnan(row["test_accuracy"]):
        tested.append(f"accuracy {row['test_accuracy']:.2f} %")
    if not math.isnan(row["test_loss"]):
        tested.append(f"loss {row['test_loss']:.4f}")
    if tested:
        text += f" | test {', '.join(tested)}, {row['eval_seconds']:.1f} s"
    print_line(text)
    slow = "" if row["warmup"] else slow_rank(rank_rows)
    if slow:
        print_line(f"{slow}.")


def print_end(record: RecordWriter, epochs: int, ended: str = "") -> None:
    """Print why the run has ended before its last epoch, if it has, and where the record of this start is."""
    if ended:
        print_line(f"ended before its last epoch: {ended}")
    elif record.facts["resumed_from"] and not record.rows:
        print_line(f"all {epochs} epochs were done before: nothing left to do (more: --epochs)")
    if record.rows:
        rank_rows = record.of_the_last_epoch
        if len(rank_rows) > 1:
            peaks = [str(round(row["peak_memory_mb"])) for row in rank_rows]
            print_line(f"peak memory of each device, MB: {', '.join(peaks)}")
        print_line(f"results: {record.path}")
    elif record.facts["resumed_from"]:
        print_line(f"results: none of this start, which resumed from {record.facts['resumed_from']}")
    else:
        print_line("results: none, without an epoch")
