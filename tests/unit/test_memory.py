"""The memory of a job: files in /dev/shm count where there is no cgroup of the job."""

import mmap
import os
import tempfile

import pytest

from trainkit.monitor import memory
from trainkit.monitor.processes import Process

FILE_BYTES = 400_000_000
# Others may write such files meanwhile.
TOLERANCE_BYTES = 150_000_000


def test_files_in_memory_count_unless_a_process_has_them_in_its_memory() -> None:
    job = memory.JobMemory()
    assert job.bytes_of_no_process([]) == pytest.approx(0, abs=TOLERANCE_BYTES)
    with tempfile.NamedTemporaryFile(dir=memory.SHARED_FILES) as file:
        file.truncate(FILE_BYTES)
        with mmap.mmap(file.fileno(), FILE_BYTES) as mapped:
            for page in range(0, FILE_BYTES, mmap.PAGESIZE):
                mapped[page] = 1
            shares = memory.shares(os.getpid())
            assert shares.shared_file_bytes == pytest.approx(FILE_BYTES, abs=TOLERANCE_BYTES)
            process = Process(os.getpid(), shared_file_bytes=shares.shared_file_bytes)
            assert job.bytes_of_no_process([process]) == pytest.approx(0, abs=TOLERANCE_BYTES)
        assert job.bytes_of_no_process([]) == pytest.approx(FILE_BYTES, abs=TOLERANCE_BYTES)
