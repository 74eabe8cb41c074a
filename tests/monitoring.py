"""The monitor of a node, run as its own process, and what it has written."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import ENVIRONMENT

from manygpus.errors import UserError
from manygpus.monitor import gpus, samples

NODE = "node-1"
# In a container NVML may tell other numbers of processes, or none at all.
THIS_NAMESPACE = Path("/proc/self/ns/pid").readlink()
NO_RANK = "-" if Path(gpus.PROCESSES_OF_THE_HOST) == THIS_NAMESPACE else "?"
# The monitor does not need these, and shares the memory of the job.
HEAVY = ("torch", "numpy", "pandas", "matplotlib")
MOST_BYTES = 50e6
# NVML's library took half of 53 MB beside an H100.
MOST_BYTES_WITH_A_DRIVER = 70e6
START_SECONDS = 300
PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
# It samples until its input ends, or so many times. Then it prints what it has loaded, and its peak in kB.
PROGRAM = f"""
import os
import resource
import select
import sys
from pathlib import Path

from manygpus.monitor import collector

folder, period, most, variable = sys.argv[1:]
if "FILE_LIMIT" in os.environ:
    limit = int(os.environ["FILE_LIMIT"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
number = 0


def stop(seconds):
    global number
    number += 1
    input_has_ended = select.select([sys.stdin], [], [], seconds)[0]
    return number >= float(most) or bool(input_has_ended)


collector.sample(Path(folder), dict([variable.split("=", 1)]), stop, float(period))
print([name for name in {HEAVY!r} if name in sys.modules])
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(line.split()[1])
"""
Row = dict[str, object]


def start_monitor(
    folder: Path, period: float = 0.1, most: float = math.inf, **variables: str | None
) -> subprocess.Popen:
    """Start the monitor of the job whose folder is `folder`; a variable that is None is not set."""
    command = [sys.executable, "-c", PROGRAM, folder / samples.FOLDER, period, most]
    command.append(f"MANYGPUS_JOB_DIR={folder}")
    environment = ENVIRONMENT | {"SLURMD_NODENAME": NODE} | variables
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.Popen(list(map(str, command)), env=environment, text=True, **PIPES)


@contextmanager
def running_monitor(folder: Path, **arguments: object) -> Iterator[subprocess.Popen]:
    """Run a block beside a monitor that ends well, and was light."""
    with start_monitor(folder, **arguments) as monitor:
        try:
            yield monitor
        finally:
            output, errors = monitor.communicate(timeout=60)
    assert monitor.returncode == 0, errors
    loaded, peak_kb = output.splitlines()
    assert loaded == "[]"
    has_driver = "CUDA_VISIBLE_DEVICES" in arguments
    assert 1024 * float(peak_kb) < (MOST_BYTES_WITH_A_DRIVER if has_driver else MOST_BYTES)


def rows_so_far(folder: Path, kind: str | None = None) -> list[Row]:
    """Return the rows that a monitor has written so far, all or those of a node, a GPU or a rank."""
    try:
        rows = samples.read(folder / samples.FOLDER)
    except UserError:
        # There are none yet.
        return []
    return [row for row in rows if kind in (None, row["what"])]


def notes_so_far(folder: Path) -> list[str]:
    """Return the sentences that a monitor has noted so far, without the name of its node."""
    path = folder / samples.FOLDER / samples.NOTES
    lines = path.read_text().splitlines() if path.exists() else []
    assert all(line.startswith(f"{NODE}: ") for line in lines)
    return [line.removeprefix(f"{NODE}: ") for line in lines]


def with_nvidia_smi(folder: Path) -> dict[str, str]:
    """Return an environment in which that program is there."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.touch(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def wait_until(condition: Callable[[], object], running: subprocess.Popen) -> None:
    """Wait for a condition that a running process brings about."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if condition():
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    raise AssertionError("it has not come")
