"""Write the records of runs for TensorBoard, a folder for each run: losses, accuracy, speed and own metrics.

    python results/to_tensorboard.py results/runs
    tensorboard --logdir results/tensorboard

No network is needed. Each call writes all runs anew.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from trainkit.compare import comparison
from trainkit.config.command_line import Parser, given_path
from trainkit.errors import REPOSITORY, UserError, entrypoint, print_line
from trainkit.files import check_writable, explained
from trainkit.record import records

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RESULTS = REPOSITORY / "results"
NUMBERS = ("train_loss", "test_loss", "test_accuracy", "images_per_s", "learning_rate", "peak_memory_mb")


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "paths", nargs="+", type=given_path, help="CSV files of runs, or folders that hold some"
    )
    parser.add_argument("--out", type=given_path, default=RESULTS / "tensorboard", help="folder to write to")
    args = parser.parse_args()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            f"TensorBoard is not installed here ({error}): pip install -e '.[tensorboard]' in the top folder."
        ) from None
    rows, skipped = comparison.load_some(args.paths)
    for run_id, rows_of_run in rows.groupby("run_id"):
        folder = args.out / run_id
        # TensorBoard's own error is a traceback.
        check_writable(folder, "the run", "give another --out.")
        with explained(f"{folder} cannot be written", "give another --out."):
            for file_of_earlier_call in folder.glob("events.out.tfevents.*"):
                # TensorBoard would show both.
                file_of_earlier_call.unlink()
            with SummaryWriter(folder) as writer:
                _write(rows_of_run, writer)
    written = f"{rows.run_id.nunique()} runs in {args.out}: tensorboard --logdir {args.out}"
    print_line("\n".join([*skipped, written]))


def _write(rows: pd.DataFrame, writer: "SummaryWriter") -> None:
    """Write the epochs of a run, and its own metrics."""
    for row in rows.itertuples():
        for name in NUMBERS:
            value = getattr(row, name)
            if not pd.isna(value):
                writer.add_scalar(name, value, row.epoch)
    # Each start has a file of its own. Of its epochs, those count that no later start has made again.
    for file, rows_of_start in rows.groupby("file"):
        for metric in _metrics(Path(file), set(rows_of_start.epoch)):
            name = f"{metric['metric']}/{metric['of']}".rstrip("/")
            writer.add_scalar(name, metric["value"], metric["epoch"])


def _metrics(file: Path, epochs: set[int]) -> list[records.Row]:
    """Read the metrics next to a record of these epochs; none if there is no such file."""
    if not records.beside(file, "metrics").exists():
        return []
    return [row for row in records.read_metrics(file) if row["epoch"] in epochs]
