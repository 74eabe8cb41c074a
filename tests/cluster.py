"""A practice cluster for tests: started when a test needs one, and taken down again."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, NO_CLUSTER, REPOSITORY

# The release of Slurm, by its name: `up --slurm`.
SLURM = os.environ.get("PRACTICE_SLURM", "own")
PROGRAM = REPOSITORY / "slurm" / "practice_cluster" / "cluster.py"
UNFINISHED = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED"}
UNFINISHED |= {"SIGNALING"}  # for a moment, when a job is preempted
numbers = itertools.count(1)


@dataclass
class RunningCluster:
    """A cluster that is up, as its user sees it from the login host."""

    name: str

    def run(
        self,
        command: Sequence[object],
        env: dict[str, str] | None = None,
        timeout: float = 120,
        **how: object,
    ) -> subprocess.CompletedProcess:
        """Run `command` on the login host; `env` is added to the environment."""
        return run_program(
            "shell",
            "--name",
            self.name,
            "--",
            *command,
            env=ENVIRONMENT | (env or {}),
            timeout=timeout,
            **how,
        )

    def submit(self, *arguments: object, **how: object) -> int:
        """The number of the job that `sbatch ARGUMENTS` submits."""
        done = self.run(["sbatch", "--parsable", *arguments], **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return int(done.stdout)

    def job(self, number: int) -> dict[str, str]:
        """Return the fields of `scontrol show job`, such as JobState, Reason, ExitCode, Restarts."""
        done = self.run(["scontrol", "--oneliner", "show", "job", number])
        assert done.returncode == 0, done.stdout + done.stderr
        return _fields(done.stdout)

    def wait(self, number: int, timeout: float = 120, until: str = "") -> dict[str, str]:
        """Return the fields of `job` once it is in state `until` or ended; fail after `timeout` seconds.

        One shell of the cluster asks again and again: a Python for each question would take more time than
        many a job.
        """
        states = "|".join(UNFINISHED - {until})
        ask = f"job=$(scontrol --oneliner show job {number}) && [[ $job =~ JobState=({states})\\  ]]"
        command = ["timeout", timeout, "bash", "-c", f'while {ask}; do sleep 0.5; done; echo "$job"']
        done = self.run(command, timeout=timeout + 60)
        assert done.returncode == 0, f"not ended within {timeout} s: {self.job(number)}"
        return _fields(done.stdout)

    def link(self, node: str, up: bool) -> None:
        """Cut or restore the node's network; only if every node is a separate host."""
        done = run_program("network", "--name", self.name, node, "up" if up else "down")
        assert done.returncode == 0, done.stderr


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(.*?)(?= \S+=|$)", line.strip()))


@contextmanager
def running_cluster(
    *options: object, slurm: str = SLURM, nodes: int = 2, gpus: int = 2, accounting: bool = False
) -> Iterator[RunningCluster]:
    """A cluster of this test run's own.

    Where it cannot be had the test is skipped, or fails if REQUIRE_CLUSTER is 1.
    """
    _clear_abandoned()
    name = f"test-{os.getpid()}-{next(numbers)}"
    options += ("--slurm", slurm, "--nodes", nodes, "--gpus", gpus)
    options += () if accounting else ("--no-accounting",)
    started = run_program("up", "--name", name, *options, timeout=600)
    try:
        if started.returncode != 0 and os.environ.get("REQUIRE_CLUSTER") == "1":
            pytest.fail(f"{NO_CLUSTER}{started.stderr}")
        if started.returncode != 0:
            pytest.skip(f"{NO_CLUSTER}{started.stderr}")
        yield RunningCluster(name)
    finally:
        stopped = run_program("down", "--name", name)
        assert stopped.returncode == 0, stopped.stderr


def run_program(*arguments: object, timeout: float = 120, **how: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        **how,
    )


def _clear_abandoned() -> None:
    """Take down what test runs that were killed have left."""
    for folder in Path("/tmp").glob(f"practice-cluster-{os.getuid()}-test-*"):
        name = folder.name.partition(f"-{os.getuid()}-")[2]
        if not Path("/proc", name.split("-")[1]).exists():
            run_program("down", "--name", name)
