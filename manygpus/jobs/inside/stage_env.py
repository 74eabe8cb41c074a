"""Unpacks a Python environment on the disk of each node of a job (SITE_STAGE_ENV of slurm/site.sh).

    python -m manygpus.jobs.inside.stage_env ARCHIVE FOLDER COMMAND...

COMMAND runs what follows it once on each node (job_env.sh). This prints how long it took, for the log,
or a sentence, and exits with 1. It needs no packages.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from manygpus.errors import UserError, print_line
from manygpus.log_words import ENVIRONMENT, line

# With the archive and the folder. The step in job_env.sh that removes a folder has its lock, but Slurm
# may kill it before it is done. So what the user's other jobs, or earlier starts of this one, have left on
# the node goes first. In an archive of conda-pack, conda-unpack corrects the paths in the files.
# What asks a rank to save (the time limit is near, or a preemption) finds nothing to save here: it must not
# end the job, which then would not come back.
UNPACK = """
trap "" USR2 TERM
problem=$(
    {
        for lock in "${2%/*}"/manygpus-env-*.lock; do
            [ "$lock" != "$2.lock" ] && [ -O "$lock" ] || continue
            flock --nonblock "$lock" rm -rf "${lock%.lock}" "$lock"
        done
        mkdir -p "${2%/*}" && mkdir -m 700 "$2" && tar -x -f "$1" -C "$2" || exit
        [ -x "$2/bin/python" ] || { echo "the archive has no bin/python at its top"; exit 1; }
        [ ! -e "$2/bin/conda-unpack" ] || "$2/bin/python" "$2/bin/conda-unpack"
    } 2>&1
) || { echo "$(hostname): $problem" | head -n 1 >&2; exit 1; }
"""
# It prints the seconds.
IMPORT = "import time; start = time.monotonic(); import torch; print(round(time.monotonic() - start, 1))"
# Of an import in a file system that hangs.
MOST_SECONDS = 300


def main() -> None:
    """Do what the first lines say."""
    archive, folder, *on_each_node = sys.argv[1:]
    try:
        print_line(line(ENVIRONMENT, _stage(archive, Path(folder), on_each_node)))
    except UserError as error:
        print_line(str(error))
        sys.exit(1)


def _stage(archive: str, folder: Path, on_each_node: Sequence[str]) -> str:
    """Unpack the environment, and return in words how long that took, and what it is good for.

    An import of PyTorch from the shared disk, on this node, is measured beside it, and ended if it takes
    longer than both.
    """
    start = time.monotonic()
    shared = subprocess.Popen(
        [sys.executable, "-c", IMPORT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        _unpack(archive, folder, on_each_node)
        seconds = time.monotonic() - start
        local_seconds = _import_seconds(folder / "bin" / "python")
        still_imports = shared.poll() is None
    finally:
        shared.kill()
        shared_seconds, _ = shared.communicate()
    told = f"{archive} unpacked to {folder} in {seconds:.1f} s"
    before = f"more than {time.monotonic() - start:.1f}" if still_imports else shared_seconds.strip()
    if before and local_seconds:
        told += f"; import torch: {before} s from the shared disk, {local_seconds} s from there"
    return told


def _unpack(archive: str, folder: Path, on_each_node: Sequence[str]) -> None:
    done = subprocess.run(
        [*on_each_node, "sh", "-c", UNPACK, "sh", archive, folder], stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise UserError(
            f"SITE_STAGE_ENV could not be unpacked ({_first_error(done.stderr)}): correct {archive}, or "
            f"SITE_STAGE_DIR: {folder.parent} has to be a disk of each node's own, with room for it."
        )


def _first_error(printed: str) -> str:
    """Return the first line that is not about what srun does with the others, or the first."""
    lines = printed.splitlines() or ["srun gives no reason"]
    return next((text for text in lines if not text.startswith(("srun:", "slurmstepd:"))), lines[0])


def _import_seconds(python: Path) -> str:
    """Return how many seconds an import of PyTorch takes; "" without PyTorch."""
    try:
        done = subprocess.run([python, "-c", IMPORT], capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    main()
