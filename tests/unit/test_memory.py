"""The memory of a job: files in memory count where there is no cgroup of the job."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT

FILE_BYTES = 400_000_000
# For what the kernel and Python add.
TOLERANCE_BYTES = 50_000_000

IN_NO_PROCESS_OR_IN_ONE = """
import mmap
import os
import sys
import tempfile
from manygpus.monitor import memory
from manygpus.monitor.processes import Process
size = int(sys.argv[1])
job = memory.JobMemory()
print(job.bytes_of_no_process([]))
with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
    file.truncate(size)
    with mmap.mmap(file.fileno(), size) as mapped:
        for page in range(0, size, mmap.PAGESIZE):
            mapped[page] = 1
        shared_file_bytes = memory.shares(os.getpid()).shared_file_bytes
        process = Process(os.getpid(), shared_file_bytes=shared_file_bytes)
        print(shared_file_bytes, job.bytes_of_no_process([process]))
    print(job.bytes_of_no_process([]))
"""
WRITES_TO = """
import sys
from pathlib import Path
from manygpus.monitor import memory
job = memory.JobMemory()
Path(sys.argv[2], "file").write_bytes(bytes(int(sys.argv[1])))
print(job.bytes_of_no_process([]))
"""


def _alone(mounts: list[str], script: str, *args: str) -> list[int]:
    """Return the numbers that a Python script prints that has /dev/shm for itself, and further mounts.

    The other tests, which run meanwhile, write there too.
    """
    mount = " && ".join(["mount -t tmpfs tmpfs /dev/shm", *mounts])
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*command, mount], check=False).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    python = [sys.executable, "-c", script, str(FILE_BYTES), *args]
    done = subprocess.run(
        [*command, f'{mount} && exec "$@"', "sh", *python],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        check=True,
    )
    return [int(number) for number in done.stdout.split()]


def test_files_in_memory_count_unless_a_process_has_them_in_its_memory() -> None:
    before, in_process, of_no_process, unmapped = _alone([], IN_NO_PROCESS_OR_IN_ONE)
    assert before == pytest.approx(0, abs=TOLERANCE_BYTES)
    assert in_process == pytest.approx(FILE_BYTES, abs=TOLERANCE_BYTES)
    assert of_no_process == pytest.approx(0, abs=TOLERANCE_BYTES)
    assert unmapped == pytest.approx(FILE_BYTES, abs=TOLERANCE_BYTES)


@pytest.mark.parametrize("hidden", [False, True])
def test_each_tmpfs_counts_unless_another_mount_hides_it(tmp_path: Path, hidden: bool) -> None:
    """As scratch folders are, on nodes without a disk."""
    folder = tmp_path / "scratch of mine"
    folder.mkdir()
    mounts = [f"mount -t tmpfs tmpfs '{folder}'"]
    if hidden:
        mounts.append(f"mount --bind '{tmp_path}' '{folder}'")
    [counted] = _alone(mounts, WRITES_TO, str(folder))
    expected_bytes = 0 if hidden else FILE_BYTES
    assert counted == pytest.approx(expected_bytes, abs=TOLERANCE_BYTES)
