"""The environment of SITE_STAGE_ENV, while a node unpacks it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from conftest import ran, succeeded


def _name(process: psutil.Process) -> str:
    """The name of a process; "" if it has ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def test_a_signal_that_asks_ranks_to_save_does_not_end_the_unpacking(tmp_path: Path) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    packed, archive, folder = tmp_path / "packed.tar", tmp_path / "env.tar", tmp_path / "node" / "env"
    succeeded(ran("tar", "--create", "--file", packed, "--directory", tmp_path / "environment", "."))
    os.mkfifo(archive)  # so that tar waits
    command = [sys.executable, "-m", "manygpus.jobs.inside.stage_env", archive, folder, "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as unpacking:
        with archive.open("wb") as pipe:
            children = psutil.Process(unpacking.pid).children(recursive=True)
            step = [child for child in children if _name(child) in ("sh", "tar")]
            for number in (signal.SIGUSR2, signal.SIGTERM):
                for process in step:
                    process.send_signal(number)
            pipe.write(packed.read_bytes())
        told, _ = unpacking.communicate(timeout=60)
    assert step and unpacking.returncode == 0, told
    assert (folder / "bin" / "python").is_file()
