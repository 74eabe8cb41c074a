"""What DDP's buckets and communication hooks save on a slow network, from the records of compressed.py."""

from pathlib import Path

import pandas as pd

NAMES = {
    "": "all-reduce in fp32, buckets of 1 and 25 MB",
    "--bucket-mb=25": "all-reduce in fp32, one bucket",
    "--hook=bf16": "`--hook bf16`",
    "--hook=powersgd": "`--hook powersgd`",
}


def table(slow: Path, full: Path) -> str:
    """Return a row for each way to send, with the milliseconds of a step in each round, and what was learned.

    Args:
        slow: the CSV of the runs on the slow network.
        full: that of the runs on the network at full speed.
    """
    lines = [
        "| gradients | 100 Mbit/s: ms of a step | full speed: ms of a step | train loss | test accuracy, % |",
        "| --- | --- | --- | --- | --- |",
    ]
    on_slow, on_full = _last_epochs(slow), _last_epochs(full)
    for arguments, name in NAMES.items():
        rows = on_slow[on_slow["arguments"] == arguments]
        cells = [
            rows["ms"].map("{:.0f}".format),
            on_full[on_full["arguments"] == arguments]["ms"].map("{:.0f}".format),
            rows["train_loss"].map("{:.3f}".format),
            rows["test_accuracy"].map("{:.2f}".format),
        ]
        lines.append(f"| {name} | {' | '.join(', '.join(cell) for cell in cells)} |")
    return "\n".join(lines)


def _last_epochs(path: Path) -> pd.DataFrame:
    """Return the last epoch of each run, in the order of the seeds."""
    rows = pd.read_csv(path, keep_default_na=False).sort_values(["seed", "epoch"])
    rows["ms"] = 1000 * rows["train_seconds"] / rows["steps"]
    return rows.groupby("run_id").tail(1)
