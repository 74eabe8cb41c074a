"""The memory of a job: files in memory count where there is no cgroup of the job."""

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ENVIRONMENT

from manygpus.monitor import memory
from manygpus.monitor.processes import Process

FILE_BYTES = 400_000_000
# Others may write such files meanwhile.
TOLERANCE_BYTES = 150_000_000


def test_files_in_memory_count_unless_a_process_has_them_in_its_memory() -> None:
    job = memory.JobMemory()
    assert job.bytes_of_no_process([]) == pytest.approx(0, abs=TOLERANCE_BYTES)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(FILE_BYTES)
        with mmap.mmap(file.fileno(), FILE_BYTES) as mapped:
            for page in range(0, FILE_BYTES, mmap.PAGESIZE):
                mapped[page] = 1
            shares = memory.shares(os.getpid())
            assert shares.shared_file_bytes == pytest.approx(FILE_BYTES, abs=TOLERANCE_BYTES)
            process = Process(os.getpid(), shared_file_bytes=shares.shared_file_bytes)
            assert job.bytes_of_no_process([process]) == pytest.approx(0, abs=TOLERANCE_BYTES)
        assert job.bytes_of_no_process([]) == pytest.approx(FILE_BYTES, abs=TOLERANCE_BYTES)


WRITES_TO = """
import sys
from pathlib import Path
from manygpus.monitor import memory
job = memory.JobMemory()
Path(sys.argv[1], "file").write_bytes(bytes(int(sys.argv[2])))
print(job.bytes_of_no_process([]))
"""


@pytest.mark.parametrize("hidden", [False, True])
def test_each_tmpfs_counts_unless_another_mount_hides_it(tmp_path: Path, hidden: bool) -> None:
    """As scratch folders are, on nodes without a disk."""
    folder = tmp_path / "scratch of mine"
    folder.mkdir()
    mount = f"mount -t tmpfs tmpfs '{folder}'"
    if hidden:
        mount += f" && mount --bind '{tmp_path}' '{folder}'"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*command, mount], check=False).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    python = [sys.executable, "-c", WRITES_TO, str(folder), str(FILE_BYTES)]
    done = subprocess.run(
        [*command, f'{mount} && exec "$@"', "sh", *python],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        check=True,
    )
    expected_bytes = 0 if hidden else FILE_BYTES
    assert int(done.stdout) == pytest.approx(expected_bytes, abs=TOLERANCE_BYTES)
