"""The sampler sees what a job does on its node, and goes on whatever it cannot see."""

import errno
import math
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import fake_nvml
import psutil
import pytest
from conftest import ENVIRONMENT, stage_command

from trainkit.errors import UserError
from trainkit.monitor import connections, gpus, memory, processes
from trainkit.record import samples

Row = dict[str, object]
PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
NODE = "node-1"
# It samples until its input ends, or so many times.
SAMPLER = """
import itertools, os, resource, select, sys
from pathlib import Path
from trainkit.monitor import collector
folder, period, most, *mine = sys.argv[1:]
if "FILE_LIMIT" in os.environ:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FILE_LIMIT"]), resource.RLIM_INFINITY))
taken = itertools.count(1)
def stop(seconds):
    return next(taken) >= float(most) or bool(select.select([sys.stdin], [], [], seconds)[0])
collector.sample(Path(folder), dict(word.split("=", 1) for word in mine), stop, float(period))
print({"torch", "numpy", "pandas", "matplotlib"} & sys.modules.keys() or "light")
print(*[line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")])
"""


def start_sampler(
    folder: Path, period: float = 0.1, most: float = math.inf, **env: str | None
) -> subprocess.Popen:
    """The sampler of the job whose folder is `folder`; a variable that is None is not set."""
    command = [sys.executable, "-c", SAMPLER, folder / "monitor", period, most, f"TRAINKIT_JOB_DIR={folder}"]
    variables = ENVIRONMENT | {"SLURMD_NODENAME": NODE} | env
    variables = {name: value for name, value in variables.items() if value is not None}
    return subprocess.Popen(list(map(str, command)), env=variables, text=True, **PIPES)


@contextmanager
def sampled(folder: Path, **how: object) -> Iterator[subprocess.Popen]:
    """With a sampler that ends well, and was light."""
    with start_sampler(folder, **how) as sampler:
        try:
            yield sampler
        finally:
            told, errors = sampler.communicate(timeout=60)
    assert sampler.returncode == 0, errors
    assert told.startswith("light\n")
    with_a_driver = "CUDA_VISIBLE_DEVICES" in how  # its library took half of 53 MB beside an H100
    assert float(told.split()[-1]) * 1024 < (70e6 if with_a_driver else 50e6)


def seen(folder: Path, what: str = "") -> list[Row]:
    """The rows so far, all or those of a kind."""
    try:
        return [row for row in samples.read(folder / "monitor") if what in row["what"]]
    except UserError:  # there are none yet
        return []


def nvidia_smi(folder: Path) -> dict[str, str]:
    """The environment in which that program is there."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.touch(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def notes(folder: Path) -> list[str]:
    path = folder / "monitor" / samples.NOTES
    lines = path.read_text().splitlines() if path.exists() else []
    assert all(line.startswith(f"{NODE}: ") for line in lines)
    return [line.removeprefix(f"{NODE}: ") for line in lines]


def wait_until(condition: Callable[[], object], running: subprocess.Popen) -> None:
    for _ in range(6000):
        if condition():
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    raise AssertionError("it has not come")


def ranks(rows: list[Row]) -> dict[int, int]:
    """Rank -> its loader workers."""
    rows = [row for row in rows if row["what"] == samples.RANK]
    assert len({row["number"] for row in rows}) == len(rows)
    return {row["number"]: row["loaders"] for row in rows}


# --- processes --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mnist_dir")
def test_ranks_and_their_loader_workers(tmp_path: Path) -> None:
    """Of a real training under torchrun, which is no rank itself."""
    options = ("--no-cuda", "--epochs", 100, "--loader", "workers", "--num-workers", 1)
    command = stage_command("ddp", *options, "--results-dir", tmp_path, processes=2)
    environment = ENVIRONMENT | {"TRAINKIT_JOB_DIR": str(tmp_path)}
    job = psutil.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    both: dict[str, Row] = {}

    def at_work() -> bool:
        rows = seen(tmp_path, samples.RANK)
        both.update({row["number"]: row for row in rows if row["cores"] > 0 and row["loader_cores"] > 0})
        return both.keys() == {"0", "1"}

    try:
        with sampled(tmp_path, period=0.25):
            wait_until(at_work, job)
            node = seen(tmp_path, samples.NODE)[-1]
    finally:
        for process in [*job.children(recursive=True), job]:
            process.kill()
        job.communicate()
    for row in both.values():
        assert row["loaders"] > 0
        assert 50 < row["memory_mb"] < node["memory_mb"] < node["memory_limit_mb"]
        assert row["name"] in ("R", "S", "D")
        assert row["core_list"][0].isdecimal()
        assert math.isnan(row["waiting"]) or 0 <= row["waiting"] <= 1
    assert node["cores"] > 0
    assert node["network_mb_s"] >= 0
    assert notes(tmp_path) == []


SPAWNS = """
import os, torch.multiprocessing
from torch.utils.data import DataLoader

def train(rank):
    for batch in DataLoader(range(10**9), num_workers=1):
        pass

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


def test_ranks_that_a_script_starts_itself(tmp_path: Path) -> None:
    """They compute, and are no loader workers of the process that waits for them; nor are their own."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    environment = ENVIRONMENT | {"TRAINKIT_JOB_DIR": str(tmp_path)}
    job = psutil.Popen([sys.executable, tmp_path / "spawns.py"], env=environment)
    try:
        with sampled(tmp_path, period=0.25):
            wait_until(lambda: any(row["others"] == 2 for row in seen(tmp_path, samples.RANK)), job)
    finally:
        for process in [*job.children(recursive=True), job]:
            process.kill()
        job.wait()
    assert {(row["number"], row["loaders"]) for row in seen(tmp_path, samples.RANK)} == {("0", 0)}


TALKS = """
import socket, sys
_, how, *port = sys.argv
ends = [socket.create_server(("localhost", 0))] if how != "calls" else []
print(ends[0].getsockname()[1] if ends else "", flush=True)
if how != "hears":
    ends.append(socket.create_connection(("localhost", port[0] if port else ends[0].getsockname()[1])))
    print(flush=True)
while how != "calls":
    ends.append(ends[0].accept()[0])
    print(flush=True)
sys.stdin.read()
"""


def test_who_has_met_whom() -> None:
    """Processes connected to another, to themselves, to one that is not the job's, and to nobody."""

    def start(*how: str) -> tuple[subprocess.Popen, str]:
        process = subprocess.Popen([sys.executable, "-c", TALKS, *how], text=True, **PIPES)
        return process, process.stdout.readline().strip()

    processes = []
    try:
        for how in ("hears", "hears", "hears", "itself"):
            processes.append(start(how))
        (one, port), (agent, port_of_agent), (stranger, port_of_stranger), (alone, _) = processes
        for to in (port, port_of_agent, port_of_stranger):
            processes.append(start("calls", to))
        for process, _ in (*processes[:3], processes[3], processes[3], *processes[4:]):
            process.stdout.readline()
        two, of_agent, of_stranger = (process for process, _ in processes[4:])
        families = {0: [one.pid], 1: [two.pid], 2: [of_agent.pid], 3: [of_stranger.pid], 4: [alone.pid]}
        meetings = connections.Meetings()
        expected = {0: "rank", 1: "rank", 2: "-", 3: "host", 4: "-"}
        assert meetings.look(families, [agent.pid]) == expected
        two.kill()
        two.wait()
        assert meetings.look(families, [agent.pid]) == expected  # it has met it all the same
    finally:
        for process, _ in processes:
            process.kill()
            process.communicate()


class Machine:
    """A /proc and a /sys to be looked at, on a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder, 1000.0
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(folder / "proc"))
        monkeypatch.setattr(processes, "SYS", folder / "sys")
        monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: [0, 1])
        memory = ("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "Shmem", "Active", "Inactive")
        lines = "".join(f"{name}: {8_000_000 * name.startswith('Mem')} kB\n" for name in memory)
        self.write({"proc/meminfo": lines, "proc/stat": "btime 0\n"})
        self.write({"proc/1/environ": "", "proc/net/dev": "-\n-\nlo: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0"})

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, errors="surrogateescape")

    def process(
        self,
        pid: int = 7,
        ticks: int = 0,
        env: str = "JOB=1",
        parent: int = 1,
        pss: int = 10**6,
        loader: bool = False,
        command: str = "",
        **threads: str,
    ) -> None:
        """One that has loaded PyTorch and has 1 GB resident, `pss` kB its share; `threads`: their schedstat.

        `loader`: it catches the signals that a loader worker does.

        A larger number has started later. The kernel cuts names within a letter.
        """
        cells = ["R", str(parent), *["0"] * 9, str(ticks), *["0"] * 7, str(500 + pid), *["0"] * 30]
        files = {"environ": env.replace(" ", "\0"), "stat": f"{pid} (a) \udcc3) {' '.join(cells)}"}
        pages = 1_000_000 * 1024 // os.sysconf("SC_PAGE_SIZE")
        files |= {"statm": f"{pages} {pages} 0 0 0 0 0", "maps": "/lib/libtorch.so", "cmdline": command}
        files |= {"status": f"Name: a\nSigCgt:\t{0x44C2 if loader else 0x2:016x}\n"}
        files |= {"smaps_rollup": f"Rss: 1000000 kB\nPss: {pss} kB\n"}
        files |= {f"task/{name}/schedstat": text for name, text in threads.items()}
        self.write({f"proc/{pid}/{name}": text for name, text in files.items()})


@pytest.mark.parametrize(
    ("variables", "children", "expected"),
    [
        ("", (), {0: 0}),
        ("SLURM_PROCID=3", (), {3: 0}),
        ("SLURM_PROCID=0 SUBMITIT_LOCAL_GLOBALID=2", (), {2: 0}),
        ("SLURM_PROCID=0 RANK=1", (), {1: 0}),
        ("SUBMITIT_LOCAL_GLOBALID=1", ("RANK=1",), {1: 1}),  # as a rank tells its loader workers
        ("RANK=0", ("RANK=1",), {0: 0, 1: 0}),
    ],
)
def test_whose_rank(variables: str, children: tuple[str, ...], expected: dict, machine: Machine) -> None:
    """Rank -> its loader workers. Not that of another job, which has the same name to begin with."""
    machine.process(7, env=f"JOB=1 {variables}")
    machine.process(8, env=f"JOB=12 {variables}")
    for number, child in enumerate(children):
        machine.process(9 + number, env=f"JOB=1 {variables} {child}", parent=7, loader=True)
    assert ranks(processes.Processes({"JOB": "1"}).sample()) == expected


@pytest.mark.parametrize(
    "command", ["-m trainkit.distributed.torchrun", "-m torch.distributed.run", "bin/torchrun"]
)
def test_torchrun_is_no_rank_before_it_has_started_some(machine: Machine, command: str) -> None:
    """That of the second node would count as rank 1, beside the one of the first node."""
    machine.process(7, env="JOB=1 SLURM_PROCID=1", command=f"python {command} train.py".replace(" ", "\0"))
    assert ranks(processes.Processes({"JOB": "1"}).sample()) == {}


def test_torchrun_is_no_rank(machine: Machine) -> None:
    """Nor is a launcher of another name that does as it does, also when its ranks have ended."""
    machine.process(7, env="JOB=1 SLURM_PROCID=0")
    for rank in (0, 1):
        machine.process(8 + rank, env=f"JOB=1 SLURM_PROCID=0 RANK={rank} TORCHELASTIC_RUN_ID=none", parent=7)
    job = processes.Processes({"JOB": "1"})
    assert ranks(job.sample()) == {0: 0, 1: 0}
    for pid in ("8", "9"):
        shutil.rmtree(machine.folder / "proc" / pid)
    machine.now += 1
    assert ranks(job.sample()) == {}


def test_processes_that_a_script_starts_itself(machine: Machine) -> None:
    """Two ranks, one with a loader worker by way of a process that only forks, and a pool that rests.

    While they import they may still become loader workers.
    """
    forks = "python\0-c\0from multiprocessing.forkserver import main"
    second = os.sysconf("SC_CLK_TCK")
    job = processes.Processes({"JOB": "1"})

    def sample(seconds: int) -> Row:
        machine.process(7)
        for pid in (8, 9):
            machine.process(pid, ticks=seconds * second, parent=7)
        machine.process(10, parent=9, command=forks)
        machine.process(11, ticks=seconds * second // 2, parent=10, loader=True)
        machine.process(12, parent=7)
        machine.process(13, ticks=seconds * second, parent=7, command="python\0torch/_inductor/compile")
        machine.now += 1
        return job.sample()[1]

    found = [sample(second) for second in range(processes.IMPORT_SECONDS + 1)]
    rank = found[-1]
    assert {row["others"] for row in found[1:-1]} == {0}
    assert (rank["cores"], rank["loaders"], rank["loader_cores"]) == (0, 0, 0)
    assert (rank["others"], rank["other_cores"]) == (2, 2)
    machine.process(11, parent=7, loader=True)
    machine.now += 1
    assert job.sample()[1]["loaders"] == 1


def test_memory_that_is_shared_counts_once(machine: Machine) -> None:
    """In the sample after a fork as in one that begins with it."""
    machine.process(7)
    job = processes.Processes({"JOB": "1"})
    assert job.sample()[1]["memory_mb"] == 1024
    for pid in (7, 8):
        machine.process(pid, pss=500_000, loader=pid == 8)
    machine.now += 1
    for looks in (job, processes.Processes({"JOB": "1"})):
        node, row = looks.sample()
        assert row["loaders"] == 1
        assert row["memory_mb"] == node["memory_mb"] == 1024


@pytest.mark.parametrize("before", ["JOB=1", "JOB=2"])
def test_a_process_that_becomes_another_program(before: str, machine: Machine) -> None:
    """As a task of Slurm does, which is a process of Slurm first."""
    machine.process(7, env=before)
    job = processes.Processes({"JOB": "1"})
    assert ranks(job.sample()) == ({} if before == "JOB=2" else {0: 0})
    machine.process(7, env="JOB=1 RANK=5")
    machine.now += 1
    assert ranks(job.sample()) == {5: 0}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_what_a_rank_uses_of_cores(machine: Machine) -> None:
    """Since the last sample; what the kernel does not count is unknown."""
    job, other = processes.Processes({"JOB": "1"}), processes.Processes({"JOB": "1"})
    second = os.sysconf("SC_CLK_TCK")
    other.sample()
    machine.now += 10
    machine.process(7, 50 * second, one="7000 7000 1")
    assert other.sample()[1]["cores"] == 5  # of one that has started between two samples all
    node, rank = job.sample()
    assert all(map(math.isnan, (rank["cores"], node["cores"], node["network_mb_s"])))
    assert rank["waiting"] is None
    assert rank["memory_mb"] == node["memory_mb"] == 1024
    assert (rank["name"], rank["core_list"], node["core_list"]) == ("R", "0-1", "0-1")
    machine.now += 2
    machine.process(7, 53 * second, one="1007000 1007000 2", two="2000000 0 1")
    node, rank = job.sample()
    assert node["cores"] == rank["cores"] == 1.5
    assert rank["waiting"] == 0.25
    shutil.rmtree(machine.folder / "proc/7/task")
    machine.now += 1
    assert job.sample()[1]["waiting"] is None


@pytest.mark.parametrize(
    ("line", "in_use", "kinds"),
    [
        ("0::/system.slice/slurmstepd.scope/job_12/step_1/user/task_0", "memory.current", ""),
        ("4:memory:/slurm/uid_7/job_12/step_1", "memory.usage_in_bytes", "total_"),
    ],
)
def test_memory_of_a_job_in_a_cgroup(
    line: str, in_use: str, kinds: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that counts against --mem, such as files in /dev/shm; not the cache, which fills what is free."""
    monkeypatch.setattr(memory, "CGROUPS", machine.folder / "cgroup")
    _, controller, path = line.split(":")
    folder = f"cgroup/{controller}{path.partition('/step')[0]}"
    lines = f"{kinds}inactive_file 300000000\n{kinds}active_file 200000000\nshmem 1500000000\n"
    machine.write({"proc/self/cgroup": f"9:cpu:/\n{line}\n", f"{folder}/memory.stat": lines})
    machine.write({f"{folder}/{in_use}": "3500000000\n"})
    machine.process(7)
    node, rank = processes.Processes({"JOB": "1"}).sample()
    assert (node["memory_mb"], node["shared_files_mb"], rank["memory_mb"]) == (3000, 0, 1024)
    machine.write({"proc/self/cgroup": "0::/user.slice/job_of_mine\n"})
    assert processes.Processes({"JOB": "1"}).sample()[0]["memory_mb"] == 1024


def test_files_in_memory_count_where_there_is_no_cgroup() -> None:
    """Unless a process has them in its memory. Others may write such files meanwhile."""
    size, some = 400_000_000, 150_000_000
    job = memory.JobMemory()
    assert job.bytes_of_no_process([]) == pytest.approx(0, abs=some)
    with tempfile.NamedTemporaryFile(dir=memory.SHARED_FILES) as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as mapped:
            for page in range(0, size, mmap.PAGESIZE):
                mapped[page] = 1
            shares = memory.shares(os.getpid())
            mine = processes.Process(os.getpid(), shared_file_bytes=shares.shared_file_bytes)
            assert mine.shared_file_bytes == pytest.approx(size, abs=some)
            assert job.bytes_of_no_process([mine]) == pytest.approx(0, abs=some)
        assert job.bytes_of_no_process([]) == pytest.approx(size, abs=some)


def test_the_largest_checkpoint(machine: Machine) -> None:
    job = machine.folder / "job"
    machine.process(7, env=f"TRAINKIT_JOB_DIR={job}")

    def sampled_mb() -> float:
        return processes.Processes({"TRAINKIT_JOB_DIR": str(job)}).sample()[0]["checkpoint_mb"]

    assert sampled_mb() == 0
    machine.write(
        {"job/checkpoints/epoch-1.pt": "x" * 3_000_000, "job/checkpoints/epoch-2.pt": "x" * 2_000_000}
    )
    assert sampled_mb() == 3
    parts = {f"job/checkpoints/sharded-{step}/{rank}": "x" * 2_000_000 for step in (1, 2) for rank in (0, 1)}
    machine.write(parts)
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
    asked: dict[str, str], limit_mb: float, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert processes.Processes({"JOB": "1"}).sample()[0]["memory_limit_mb"] == limit_mb


@pytest.mark.parametrize(("devices", "mb_s"), [((), 120), (("eth0",), 40), (("eth0", "ib0"), 120)])
def test_what_counts_as_network(devices: tuple[str, ...], mb_s: float, machine: Machine) -> None:
    """lo moves 20 MB/s, eth0 40 and ib0, or a bridge, 80; InfiniBand 20 million words, of four bytes each."""

    def write(seconds: int) -> None:
        rates = {"lo": 10**7, "eth0": 2 * 10**7, "ib0": 4 * 10**7}
        zeros = "0 0 0 0 0 0 0"
        lines = [f"{name}: {rate * seconds} {zeros} {rate * seconds} {zeros}" for name, rate in rates.items()]
        machine.write({"proc/net/dev": "\n".join(["Inter-", "face", *lines])})
        if "ib0" in devices:
            ports = "sys/class/infiniband/mlx5_0/ports/1/counters/port_{}_data"
            machine.write({ports.format(way): str(10**7 * seconds) for way in ("rcv", "xmit")})

    machine.write({f"sys/class/net/{name}/device": "" for name in devices})
    write(100)
    looks = processes.Processes({"JOB": "1"})
    looks.sample()
    write(102)
    machine.now += 2
    assert looks.sample()[0]["network_mb_s"] == mb_s


# --- the file ---------------------------------------------------------------------------------------


def test_a_sampler_that_is_killed_goes_on_in_the_same_file(tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0"} | nvidia_smi(tmp_path)  # the GPU is not there
    with start_sampler(tmp_path, **environment) as sampler:
        wait_until(lambda: len(seen(tmp_path)) > 2, sampler)
        sampler.kill()
    before, told = seen(tmp_path), notes(tmp_path)
    path = tmp_path / "monitor" / f"{NODE}.csv"
    with path.open("a") as file:
        file.write("1795338532.112,node,,,10")  # as if killed while it wrote
    with sampled(tmp_path, most=2, **environment) as sampler:
        sampler.wait(60)
    assert seen(tmp_path)[: len(before)] == before
    assert len(seen(tmp_path)) == len(before) + 2
    assert path.read_text().count("time,what") == 1
    assert len(told) == 1 and notes(tmp_path) == told


def test_a_disk_that_was_full_gets_the_samples_after_that(tmp_path: Path) -> None:
    """The limit on the size of a file stands in for the disk: there is space for a part of a line."""
    with sampled(tmp_path, FILE_LIMIT="1000") as sampler:
        path = tmp_path / "monitor" / f"{NODE}.csv"
        wait_until(lambda: path.exists() and path.stat().st_size == 1000, sampler)
        time.sleep(0.3)
        resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        wait_until(lambda: len(seen(tmp_path)) > 2, sampler)


def test_a_disk_may_be_full_only_when_it_is_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = samples.Writer(tmp_path, NODE)

    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        writer.add([{"time": 1, "what": samples.NODE}])


# --- GPUs -------------------------------------------------------------------------------------------


Sample = Callable[..., list[Row]]
GIVEN = {"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": None}  # by Slurm, which shows only these
CELLS = {name for name, kinds in samples.COLUMNS.items() if samples.GPU in kinds} - {"time"}
# In a container NVML may tell other numbers of processes, or none at all.
HERE = Path("/proc/self/ns/pid").readlink()
NOBODY = "-" if Path(gpus.PROCESSES_OF_THE_HOST) == HERE else "?"


@pytest.fixture
def told() -> list[str]:
    """The notes of `sample`."""
    return []


@pytest.fixture
def sample(told: list[str], monkeypatch: pytest.MonkeyPatch) -> Sample:
    """The rows of some samples of a node that answers by a script; `ranks`: process -> rank."""

    def run(
        most: int = 1,
        env: dict[str, str | None] | None = None,
        ranks: dict[int, int] | None = None,
        readable: bool = True,
        **script: object,
    ) -> list[Row]:
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.Nvml(**script))
        monkeypatch.setattr(gpus, "PROCESSES_OF_THE_HOST", HERE if readable else "another")
        for name, value in (GIVEN | (env or {})).items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        looks = gpus.Gpus(told.append)
        return [row | {"sample": number} for number in range(most) for row in looks.sample(ranks or {})]

    return run


def empty(row: Row) -> set[str]:
    return {name for name in CELLS if row.get(name) is None}


def test_a_gpu_is_written_down_in_the_units_of_its_columns(sample: Sample, told: list[str]) -> None:
    busy = {"memory_mb": 40_000, "utilisation": 97, "power_w": 612.5, "energy_j": 123456.789}
    busy |= {"clock_mhz": 1755, "temperature_c": 66, "throttled": "SwPowerCap", "pids": (8, 7, 1)}
    script = [{}, busy, {"pids": (1,)}, {"name": "NVIDIA A100"}]
    first, second, third, fourth = sample(gpus=script, ranks={7: 0, 8: 11})
    assert [row["number"] for row in (first, second, third, fourth)] == [0, 1, 2, 3]
    expected = {name: busy[name] for name in busy.keys() & samples.COLUMNS}
    expected |= {"throttled": "power", "ranks": "0+11", "name": fake_nvml.GPU["name"]}
    expected |= {"memory_limit_mb": 85_000, "power_limit_w": 700, "clock_limit_mhz": 1980}
    assert expected.items() <= second.items()
    assert (first["throttled"], first["ranks"], third["ranks"]) == ("-", "-", "?")
    assert fourth["name"] == "NVIDIA A100"
    assert sample(gpus=[{}], readable=False)[0]["ranks"] == "?"
    assert told == []


def test_why_a_clock_is_low(sample: Sample, told: list[str]) -> None:
    reasons = {
        "": "-",
        "GpuIdle": "-",
        "HwSlowdown HwThermalSlowdown": "heat",
        "SwThermalSlowdown": "heat",
        "SwPowerCap GpuIdle": "power",
        "HwSlowdown HwPowerBrakeSlowdown": "power",
        "SwPowerCap SwThermalSlowdown": "heat+power",
        "HwSlowdown": "other",
        "GpuIdle ApplicationsClocksSetting": "-",
        "GpuIdle HwSlowdown": "-",
        "GpuIdle ApplicationsClocksSetting SwPowerCap": "power+other",
        "ApplicationsClocksSetting SwPowerCap": "power+other",
    }
    rows = sample(len(reasons), gpus=[{"throttled": list(reasons)}])
    assert [row["throttled"] for row in rows] == list(reasons.values())
    assert told == []


@pytest.mark.parametrize(
    ("words", "reading", "columns"),
    [
        ("the name", "name", ("name",)),
        ("memory", "memory_mb", ("memory_mb", "memory_limit_mb")),
        ("processes", "pids", ("ranks",)),
        ("throttling", "throttled", ("throttled",)),
        (", ".join(gpus.READINGS), "", tuple(CELLS - {"what", "number"})),
    ],
)
def test_a_reading_that_fails_is_an_empty_cell(
    words: str, reading: str, columns: tuple[str, ...], sample: Sample, told: list[str]
) -> None:
    """Or all of a GPU that is lost: a note for each GPU, and the others go on."""
    failing = dict.fromkeys([reading] if reading else fake_nvml.GPU, "NOT_SUPPORTED")
    rows = sample(3, gpus=[failing, {}, failing])
    assert [empty(row) for row in rows] == 3 * [{*columns}, set(), {*columns}]
    assert {*told} == {f"GPU {number}: NVML does not report {words} (Not Supported)" for number in (0, 2)}


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        ("2,0", "20"),
        ("1,7,2", "1"),
        ("-1", ""),
        ("", ""),
        ("GPU-00000003-0000-0000-0000-000000000000,1", "31"),
        (None, "0123"),
    ],
)
def test_which_gpus_are_the_jobs(visible: str | None, numbers: str, sample: Sample, told: list[str]) -> None:
    rows = sample(gpus=[{}] * 4, env={"CUDA_VISIBLE_DEVICES": visible})
    assert [str(row["number"]) for row in rows] == list(numbers)
    assert told == []


@pytest.mark.parametrize(
    ("env", "readable", "numbers"),
    [
        ({}, True, "1 13"),
        ({}, False, "0123 0123"),
        ({"SLURM_JOB_ID": "1"}, True, "0123 0123"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, True, "01 01"),
    ],
    ids=["not given", "processes of the host", "by Slurm", "chosen"],
)
def test_gpus_that_nobody_has_given_are_those_with_a_rank(
    env: dict[str, str], readable: bool, numbers: str, sample: Sample
) -> None:
    """From then on, or where one cannot see; there is another's, too."""
    used = [{}, {"pids": [(7,), ()]}, {"pids": (1,)}, {"pids": [(), (7,)]}]
    rows = sample(2, gpus=used, env={"SLURM_JOB_ID": None} | env, ranks={7: 0}, readable=readable)
    found = ("".join(str(row["number"]) for row in rows if row["sample"] == moment) for moment in (0, 1))
    assert " ".join(found) == numbers


def test_slices_of_a_card(sample: Sample, told: list[str]) -> None:
    """NVML shows their memory and processes, and the rest of whole cards only."""
    alike = {"name": "NVIDIA A100 MIG 1g.5gb", "memory_limit_mb": 5_000, "pids": (3,)}
    slices = [{"uuid": f"MIG-{letter}"} | alike for letter in "ab"]
    chosen = "MIG-a,MIG-gone,MIG-b"  # one that is refused is left out alone
    rows = sample(gpus=[{}, *slices], env={"CUDA_VISIBLE_DEVICES": chosen}, ranks={3: 3})
    found = [(row["number"], row["memory_limit_mb"], row["ranks"]) for row in rows]
    assert found == [(0, 5_000, "3"), (2, 5_000, "3")]
    known = {"what", "number", "name", "memory_mb", "memory_limit_mb", "ranks"}
    assert all(empty(row) == CELLS - known for row in rows)
    assert told[0].startswith("GPU 0: NVML does not report utilisation, power,")
    assert told[0].endswith(" (Not Supported)")


@pytest.mark.parametrize(
    ("init", "env", "driver", "why"),
    [
        ("LIBRARY_NOT_FOUND", {"CUDA_VISIBLE_DEVICES": "0"}, True, "NVML Shared Library Not Found"),
        ("DRIVER_NOT_LOADED", {"SLURM_GPUS_ON_NODE": "4"}, True, "Driver Not Loaded"),
        (None, {"SLURM_GPUS_ON_NODE": "4"}, True, "it lists none"),
        (None, {"SLURM_GPUS_ON_NODE": "4"}, False, None),  # virtual ones
        (None, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "-1"}, True, None),  # hidden
        (None, {}, True, None),
    ],
)
def test_gpus_are_missed_where_there_should_be_some(
    init: str | None,
    env: dict[str, str],
    driver: bool,
    why: str | None,
    sample: Sample,
    told: list[str],
    tmp_path: Path,
) -> None:
    there = nvidia_smi(tmp_path) if driver else {"PATH": "/nonexistent"}
    assert sample(init=init, env=there | env) == []
    sentence = f"NVML shows no GPU of this job ({why}): see what nvidia-smi prints there"
    assert told == ([sentence] if why else [])
