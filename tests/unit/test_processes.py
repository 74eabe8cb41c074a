"""The processes of a job are found by their environment, and a rank is told from its helpers."""

import math
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import ENVIRONMENT
from fake_machine import FakeMachine
from monitoring import Row, rows_so_far, running_monitor, wait_until

from manygpus.monitor import processes, samples
from manygpus.monitor.processes import Processes


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(tmp_path, monkeypatch)


def loaders_of_ranks(rows: list[Row]) -> dict[int, int]:
    """Return the number of loader workers of each rank."""
    ranks = [row for row in rows if row["what"] == samples.RANK]
    loaders = {row["number"]: row["loaders"] for row in ranks}
    assert len(loaders) == len(ranks)
    return loaders


# --- which process is what --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "children", "expected"),
    [
        ("", (), {0: 0}),
        ("SLURM_PROCID=3", (), {3: 0}),
        ("SLURM_PROCID=0 SUBMITIT_LOCAL_GLOBALID=2", (), {2: 0}),
        ("SLURM_PROCID=0 RANK=1", (), {1: 0}),
        # As a rank tells its loader workers.
        ("SUBMITIT_LOCAL_GLOBALID=1", ("RANK=1",), {1: 1}),
        ("RANK=0", ("RANK=1",), {0: 0, 1: 0}),
    ],
)
def test_a_process_belongs_to_the_rank_of_its_environment(
    variables: str, children: tuple[str, ...], expected: dict[int, int], machine: FakeMachine
) -> None:
    """Not to that of another job, whose name begins alike."""
    machine.process(7, environment=f"JOB=1 {variables}")
    machine.process(8, environment=f"JOB=12 {variables}")
    for number, child in enumerate(children):
        machine.process(9 + number, environment=f"JOB=1 {variables} {child}", parent=7, is_loader=True)
    assert loaders_of_ranks(Processes({"JOB": "1"}).sample()) == expected


@pytest.mark.parametrize(
    "command", ["-m manygpus.distributed.torchrun", "-m torch.distributed.run", "bin/torchrun"]
)
def test_torchrun_is_no_rank_before_it_has_started_some(machine: FakeMachine, command: str) -> None:
    """That of the second node would count as rank 1, beside the one of the first node."""
    command_line = f"python {command} train.py".replace(" ", "\0")
    machine.process(7, environment="JOB=1 SLURM_PROCID=1", command=command_line)
    assert loaders_of_ranks(Processes({"JOB": "1"}).sample()) == {}


def test_torchrun_is_no_rank(machine: FakeMachine) -> None:
    """Nor is a launcher of another name that does as it does, also when its ranks have ended."""
    machine.process(7, environment="JOB=1 SLURM_PROCID=0")
    for rank in (0, 1):
        environment = f"JOB=1 SLURM_PROCID=0 RANK={rank} TORCHELASTIC_RUN_ID=none"
        machine.process(8 + rank, environment=environment, parent=7)
    job = Processes({"JOB": "1"})
    assert loaders_of_ranks(job.sample()) == {0: 0, 1: 0}
    machine.end(8)
    machine.end(9)
    machine.now += 1
    assert loaders_of_ranks(job.sample()) == {}


FORK_SERVER = "python\0-c\0from multiprocessing.forkserver import main; main(5, 6)"


def test_processes_that_a_script_starts_itself(machine: FakeMachine) -> None:
    """Two ranks, one with a loader worker by way of a process that only forks, and a pool that rests.

    While they import they may still become loader workers.
    """
    job = Processes({"JOB": "1"})

    def sample_after(seconds: int) -> Row:
        machine.process(7)
        machine.process(8, cpu_seconds=seconds, parent=7)
        machine.process(9, cpu_seconds=seconds, parent=7)
        machine.process(10, parent=9, command=FORK_SERVER)
        machine.process(11, cpu_seconds=seconds / 2, parent=10, is_loader=True, command=FORK_SERVER)
        machine.process(12, parent=7)
        machine.process(13, cpu_seconds=seconds, parent=7, command="python\0torch/_inductor/compile")
        machine.now += 1
        _, rank = job.sample()
        return rank

    rows = [sample_after(seconds) for seconds in range(processes.IMPORT_SECONDS + 1)]
    rank = rows[-1]
    assert {row["others"] for row in rows[1:-1]} == {0}
    assert (rank["cores"], rank["loaders"], rank["loader_cores"]) == (0, 0, 0)
    assert (rank["others"], rank["other_cores"]) == (2, 2)
    machine.process(11, parent=7, is_loader=True)
    machine.now += 1
    _, rank = job.sample()
    assert rank["loaders"] == 1


@pytest.mark.parametrize(("before", "ranks"), [("JOB=1", {0: 0}), ("JOB=2", {})])
def test_a_process_that_becomes_another_program(
    before: str, ranks: dict[int, int], machine: FakeMachine
) -> None:
    """As a task of Slurm does, which is a process of Slurm first."""
    machine.process(7, environment=before)
    job = Processes({"JOB": "1"})
    assert loaders_of_ranks(job.sample()) == ranks
    machine.process(7, environment="JOB=1 RANK=5")
    machine.now += 1
    assert loaders_of_ranks(job.sample()) == {5: 0}


SPAWNS = """
import os, torch.multiprocessing
from torch.utils.data import DataLoader

def train(rank):
    for batch in DataLoader(range(10**9), num_workers=1):
        pass

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


# The default of Python 3.14 is a fork server.
LOADS = """
from torch.utils.data import DataLoader

if __name__ == "__main__":
    for batch in DataLoader(range(10**9), num_workers=1, multiprocessing_context="forkserver"):
        pass
"""


@pytest.mark.parametrize(("script", "seen"), [(SPAWNS, (2, 0)), (LOADS, (0, 1))], ids=["ranks", "loader"])
def test_what_a_real_script_starts_itself(script: str, seen: tuple[int, int], tmp_path: Path) -> None:
    """Ranks compute, and are no loader workers of the process that waits for them; nor are their own."""
    (tmp_path / "script.py").write_text(script)
    environment = ENVIRONMENT | {"MANYGPUS_JOB_DIR": str(tmp_path)}
    job = psutil.Popen([sys.executable, tmp_path / "script.py"], env=environment)

    def others_and_loaders() -> set[tuple[int, int]]:
        return {(row["others"], row["loaders"]) for row in rows_so_far(tmp_path, samples.RANK)}

    try:
        with running_monitor(tmp_path, period=0.25):
            wait_until(lambda: seen in others_and_loaders(), job)
    finally:
        for process in [*job.children(recursive=True), job]:
            with suppress(psutil.NoSuchProcess):  # its parent has seen that another one ended
                process.kill()
        job.wait()
    assert max(loaders for _, loaders in others_and_loaders()) == seen[1]
    assert {row["number"] for row in rows_so_far(tmp_path, samples.RANK)} == {"0"}


# --- what they use ----------------------------------------------------------------------------------


def test_what_a_rank_uses_of_cores(machine: FakeMachine) -> None:
    """Since the last sample; what the kernel does not count is unknown."""
    job = Processes({"JOB": "1"})
    machine.process(7, cpu_seconds=50, threads={"one": "7000 7000 1"})
    node, rank = job.sample()
    assert all(map(math.isnan, (rank["cores"], node["cores"], node["network_mb_s"])))
    assert rank["waiting"] is None
    assert rank["memory_mb"] == node["memory_mb"] == 1024
    assert (rank["name"], rank["core_list"], node["core_list"]) == ("R", "0-1", "0-1")
    machine.now += 2
    machine.process(7, cpu_seconds=53, threads={"one": "1007000 1007000 2", "two": "2000000 0 1"})
    node, rank = job.sample()
    assert node["cores"] == rank["cores"] == 1.5
    assert rank["waiting"] == 0.25
    shutil.rmtree(machine.folder / "proc/7/task")
    machine.now += 1
    _, rank = job.sample()
    assert rank["waiting"] is None


def test_of_a_process_that_has_started_between_two_samples_all_counts(machine: FakeMachine) -> None:
    job = Processes({"JOB": "1"})
    job.sample()
    machine.now += 10
    machine.process(7, cpu_seconds=50)
    _, rank = job.sample()
    assert rank["cores"] == 5


@pytest.mark.parametrize(("devices", "mb_s"), [((), 120), (("eth0",), 40), (("eth0", "ib0"), 120)])
def test_what_counts_as_network(devices: tuple[str, ...], mb_s: float, machine: FakeMachine) -> None:
    """lo moves 20 MB/s, eth0 40 and ib0, or a bridge, 80; InfiniBand 20 million words, of four bytes each."""
    bytes_per_second_each_way = {"lo": 10**7, "eth0": 2 * 10**7, "ib0": 4 * 10**7}

    def write_counters(seconds: int) -> None:
        lines = ["Inter-", "face"]
        for name, rate in bytes_per_second_each_way.items():
            moved = rate * seconds
            lines.append(f"{name}: {moved} 0 0 0 0 0 0 0 {moved} 0 0 0 0 0 0 0")
        machine.write({"proc/net/dev": "\n".join(lines)})
        if "ib0" in devices:
            counters = "sys/class/infiniband/mlx5_0/ports/1/counters"
            for direction in ("rcv", "xmit"):
                machine.write({f"{counters}/port_{direction}_data": str(10**7 * seconds)})

    machine.write({f"sys/class/net/{name}/device": "" for name in devices})
    write_counters(100)
    job = Processes({"JOB": "1"})
    job.sample()
    write_counters(102)
    machine.now += 2
    (node,) = job.sample()
    assert node["network_mb_s"] == mb_s


# --- memory -----------------------------------------------------------------------------------------


def test_memory_that_is_shared_counts_once(machine: FakeMachine) -> None:
    """In the sample after a fork as in one that begins with it."""
    machine.process(7)
    job = Processes({"JOB": "1"})
    _, rank = job.sample()
    assert rank["memory_mb"] == 1024
    machine.process(7, share_kb=500_000)
    machine.process(8, share_kb=500_000, is_loader=True)
    machine.now += 1
    for monitor in (job, Processes({"JOB": "1"})):
        node, rank = monitor.sample()
        assert rank["loaders"] == 1
        assert rank["memory_mb"] == node["memory_mb"] == 1024


# Lines of /proc/self/cgroup, and the folder in /sys/fs/cgroup that counts all steps of the job. Those with n1
# are recorded from practice clusters, with 22.05.8, 24.11.5 and 26.05.5: Debian's Slurm adds the name of the
# node. The others are what the sources of 26.05.3 say (src/plugins/cgroup: v1/xcgroup.c and v2/cgroup_v2.c).
IN_USE_BY_VERSION = {1: ("memory.usage_in_bytes", "total_"), 2: ("memory.current", "")}
OF_THE_PRACTICE_CLUSTER = "system.slice/n1_slurmstepd.scope"


@pytest.mark.parametrize(
    ("line", "job", "version"),
    [
        ("4:memory:/slurm_n1/uid_0/job_12/step_0/task_0", "memory/slurm_n1/uid_0/job_12", 1),
        ("4:memory:/slurm/uid_7/job_12/step_batch", "memory/slurm/uid_7/job_12", 1),
        (
            "0::/system.slice/slurmstepd.scope/job_12/step_1/user/task_0",
            "system.slice/slurmstepd.scope/job_12",
            2,
        ),
        (
            f"0::/{OF_THE_PRACTICE_CLUSTER}/job_7401/step_batch/user/task_special",
            f"{OF_THE_PRACTICE_CLUSTER}/job_7401",
            2,
        ),
        (
            f"0::/{OF_THE_PRACTICE_CLUSTER}/s3RDM8HC9BEX00/step_0/user/task_special",
            f"{OF_THE_PRACTICE_CLUSTER}/s3RDM8HC9BEX00",
            2,
        ),
        # A program of the job may make groups of its own.
        (
            "0::/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_extern/user/task_0/step_1/worker",
            "system.slice/slurmstepd.scope/s5K1KKYAYG5D00",
            2,
        ),
    ],
)
def test_memory_of_a_job_in_a_cgroup(
    line: str, job: str, version: int, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that counts against --mem, such as files in /dev/shm; not the cache, which fills what is free."""
    monkeypatch.setattr(processes.memory, "CGROUPS", machine.folder / "cgroup")
    file_in_use, prefix = IN_USE_BY_VERSION[version]
    kinds = {"inactive_file": 300_000_000, "active_file": 200_000_000}
    lines = [f"{prefix}{kind} {number}" for kind, number in kinds.items()]
    machine.write(
        {
            "proc/self/cgroup": f"9:cpu:/\n{line}\n",
            f"cgroup/{job}/memory.stat": "\n".join([*lines, "shmem 1500000000\n"]),
            f"cgroup/{job}/{file_in_use}": "3500000000\n",
        }
    )
    machine.process(7)
    node, rank = Processes({"JOB": "1"}).sample()
    assert (node["memory_mb"], node["shared_files_mb"], rank["memory_mb"]) == (3000, 0, 1024)
    machine.write({"proc/self/cgroup": "0::/user.slice/job_of_mine\n"})
    node, _ = Processes({"JOB": "1"}).sample()
    assert node["memory_mb"] == 1024


def test_the_largest_checkpoint(machine: FakeMachine) -> None:
    """A file, or the folder of all ranks of a sharded one."""
    job = machine.folder / "job"
    machine.process(7, environment=f"MANYGPUS_JOB_DIR={job}")

    def sampled_mb() -> float:
        node, _ = Processes({"MANYGPUS_JOB_DIR": str(job)}).sample()
        return node["checkpoint_mb"]

    assert sampled_mb() == 0
    machine.write({"job/checkpoints/epoch-1.pt": "x" * 3_000_000})
    machine.write({"job/checkpoints/epoch-2.pt": "x" * 2_000_000})
    assert sampled_mb() == 3
    for step in (1, 2):
        for rank in (0, 1):
            machine.write({f"job/checkpoints/sharded-{step}/{rank}": "x" * 2_000_000})
    assert sampled_mb() == 4


@pytest.mark.parametrize(
    ("asked", "limit_mb"),
    [
        ({"SLURM_MEM_PER_NODE": "1000"}, 1048.576),
        ({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_ON_NODE": "2"}, 2097.152),
        ({"SLURM_MEM_PER_NODE": "0"}, 8192),
    ],
)
def test_memory_that_was_asked_for(
    asked: dict[str, str], limit_mb: float, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    (node,) = Processes({"JOB": "1"}).sample()
    assert node["memory_limit_mb"] == limit_mb
