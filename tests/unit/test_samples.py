"""The file of samples: what is written there survives, and is read back."""

import errno
import os
from pathlib import Path

import pytest

from manygpus.monitor import samples


def test_a_disk_may_be_full_only_when_it_is_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = samples.Writer(tmp_path, "n1")

    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        writer.add([{"time": 1, "what": samples.NODE}])


def test_what_a_job_script_has_asked_for(tmp_path: Path) -> None:
    assert samples.read_asked(tmp_path) is None
    (tmp_path / samples.ASKED).write_text("8 2 61440 1\n")
    asked = samples.RequestedResources(
        cpus_per_task=8, tasks_per_node=2, mb_per_node=61440, exclusive_helps=True
    )
    assert samples.read_asked(tmp_path) == asked
    (tmp_path / samples.ASKED).write_text("")
    assert samples.read_asked(tmp_path) is None
