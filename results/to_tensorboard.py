"""Write the records of runs for TensorBoard, a folder for each run: losses, accuracy, speed and own metrics.

    python results/to_tensorboard.py results/runs
    tensorboard --logdir results/tensorboard

No network is needed. Each call writes all runs anew.
"""

import threading
from pathlib import Path

from trainkit.compare import comparison
from trainkit.config.command_line import Parser, given_path
from trainkit.errors import UserError, run, tell
from trainkit.files import check_writable, explained
from trainkit.record import records

RESULTS = Path(__file__).resolve().parent
NUMBERS = ("train_loss", "test_loss", "test_accuracy", "images_per_s", "learning_rate", "peak_memory_mb")


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
        if "failed to map segment" in str(error):  # it is there, and the memory is not
            raise
        raise UserError(
            f"TensorBoard is not installed here ({error}): pip install -e '.[tensorboard]' in the top folder."
        ) from None
    threading.excepthook = lambda _: None  # on a full disk TensorBoard's thread fails, and then its caller
    table, skipped = comparison.load_some(args.paths)
    for run_id, rows in table.groupby("run_id"):
        folder = args.out / run_id
        check_writable(folder, "the run", "give another --out.")  # TensorBoard's own error is a traceback
        with explained(f"{folder} cannot be written", "give another --out."):
            for before in folder.glob("events.out.tfevents.*"):  # TensorBoard would show both
                before.unlink()
            with SummaryWriter(folder) as writer:
                for row in rows.itertuples():
                    for name in NUMBERS:
                        if (value := getattr(row, name)) == value:
                            writer.add_scalar(name, value, row.epoch)
                for file, of_a_start in rows.groupby("file"):
                    for row in _metrics(Path(file), {*of_a_start.epoch}):
                        name = f"{row['metric']}/{row['of']}".rstrip("/")
                        writer.add_scalar(name, row["value"], row["epoch"])
    written = f"{table.run_id.nunique()} runs in {args.out}: tensorboard --logdir {args.out}"
    tell("\n".join([*skipped, written]))


def _metrics(file: Path, epochs: set[int]) -> list[records.Row]:
    """Read the metrics next to a record of these epochs; none if there is no such file."""
    if not records.beside(file, "metrics").exists():
        return []
    return [row for row in records.read_metrics(file) if row["epoch"] in epochs]


if __name__ == "__main__":
    run(main)
