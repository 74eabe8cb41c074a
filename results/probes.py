"""Train stage 01 with one batch size after the other, in one process: the probes of compare.py.

All other options go to stage 01. The first batch that fails, mostly for lack of GPU memory, ends the process;
the records of the earlier ones are kept.
"""

import runpy
import shutil
import sys
from pathlib import Path

from trainkit.jobs.stages import STAGES
from trainkit.runtime import errors
from trainkit.runtime.command_line import Parser, at_least


def main() -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--smaller", type=at_least(1), nargs="*", default=[], metavar="N", help="batch sizes to begin with")
    add("--batch-size", type=at_least(1), required=True, metavar="N", help="the largest, and last")
    a_folder = {"type": Path, "required": True, "metavar": "DIR"}
    add("--results-dir", **a_folder, help="of the largest; that of the others is DIR/batchN")
    add("--checkpoint-dir", **a_folder, help="for those of the run, which go to DIR/batchN")
    own, passed_on = parser.parse_known_args()
    train = runpy.run_path(str(STAGES["single"].script))["main"]
    batch_sizes = (*own.smaller, own.batch_size)
    checkpoints = [own.checkpoint_dir / f"batch{batch_size}" for batch_size in batch_sizes]
    for batch_size, folder in zip(batch_sizes, checkpoints, strict=True):
        # The record of the largest, alone in its place, says that all went well.
        results = own.results_dir if batch_size == own.batch_size else own.results_dir / folder.name
        places = ["--results-dir", str(results), "--checkpoint-dir", str(folder), "--keep-checkpoints"]
        errors.tell(f"batch {batch_size}: seconds of a start count from that of this process")
        sys.argv[1:] = [*passed_on, "--batch-size", str(batch_size), *places]
        train()
    for folder in checkpoints:  # kept until here, for a job that goes back to the queue
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    errors.run(main)
