"""Write the records of runs for TensorBoard, a folder for each run: losses, accuracy, speed and own metrics.

    python results/to_tensorboard.py results/runs
    tensorboard --logdir results/tensorboard

No network is needed. Each call writes all runs anew. To see a training while it runs, give it a
TensorBoardLogger (trainkit/record/loggers.py).
"""

from pathlib import Path

import pandas as pd

from trainkit.compare import comparison
from trainkit.config.command_line import Parser, given_path
from trainkit.errors import REPOSITORY, entrypoint, print_line
from trainkit.files import check_writable, explained
from trainkit.record import records
from trainkit.record.loggers import TensorBoardLogger, config_of, curves

RESULTS = REPOSITORY / "results"


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "paths", nargs="+", type=given_path, help="CSV files of runs, or folders that hold some"
    )
    parser.add_argument("--out", type=given_path, default=RESULTS / "tensorboard", help="folder to write to")
    args = parser.parse_args()
    logger = TensorBoardLogger(args.out)
    rows, skipped = comparison.load_some(args.paths)
    for run_id, rows_of_run in rows.groupby("run_id"):
        folder = args.out / run_id
        # TensorBoard's own error is a traceback.
        check_writable(folder, "the run", "give a different --out.")
        with explained(f"{folder} cannot be written", "give a different --out."):
            for file_of_earlier_call in folder.glob("events.out.tfevents.*"):
                # TensorBoard would show both.
                file_of_earlier_call.unlink()
            _write(run_id, rows_of_run, logger)
    written = f"{rows.run_id.nunique()} runs in {args.out}: tensorboard --logdir {args.out}"
    print_line("\n".join([*skipped, written]))


def _write(run_id: str, rows: pd.DataFrame, logger: TensorBoardLogger) -> None:
    """Write the epochs of a run, and its own metrics."""
    logger.start(run_id, config_of(rows.iloc[-1].to_dict()), first_epoch=rows.epoch.min())
    # Each start has a file of its own. Of its epochs, those count that no later start has made again.
    for file, rows_of_start in rows.groupby("file", sort=False):
        metrics = records.read_metrics(Path(file))
        for row in rows_of_start.to_dict("records"):
            epoch = row["epoch"]
            logger.log(epoch, curves(row, [metric for metric in metrics if metric["epoch"] == epoch]))
    logger.finish()
