"""A job's ranks looked at before any training: every rank measures, and tells at once what it found.

    srun ... python -m trainkit.jobs.checkup --data-dir DIR --results-dir DIR

`slurm/doctor.py --job` puts this in the place of the training script. A rank prints each finding as one
line of JSON, so that what it found is told even if it hangs or dies later. For the same reason nothing is
imported before it is needed, and nothing waits without a limit.
"""

import json
import os
import platform
import re
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from trainkit import errors, files
from trainkit.command_line import Parser, at_least
from trainkit.errors import UserError, first_line
from trainkit.jobs.finding import FAULT, MARK, NOTE, OK, WARNING, Finding, fault_of, has_fault

# Seconds of a step. CUDA and NCCL may need minutes to start on eight GPUs that sleep (no persistence mode),
# and the ranks then come to the group as far apart.
LIMITS = {
    "cores": 10,
    "names": 30,
    "folders": 60,
    "software": 180,
    "data": 60,
    "gpus": 120,
    "memory": 10,
    "shm": 10,
    "group": 180,
    "all-reduce": 75,
}
# What to do about an error that does not say it itself.
FIXES = {
    "folders": "set SITE_RESULTS_DIR and SITE_SCRATCH_DIR in slurm/site.sh to folders that every node sees",
    "software": "mend activate_environment in slurm/site.sh: one environment, which every node sees",
    "gpus": "see `nvidia-smi` there, and tell your admin",
    "group": "mend what is said of ranks, names and the network; try SITE_NETWORK_INTERFACE, NCCL_DEBUG=INFO",
    "all-reduce": "do not train there, tell your admin; try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1",
}
NOTES_SECONDS = 15  # until a new file is seen on other nodes; NFS keeps listings for a while

# What a stage takes at its default settings: 0.95 GB at the peak (mem. MB in the comparison of the
# main README), and about as much for four loader workers, which share most of theirs. CUDA and NCCL
# are reported to take 2 to 4 GB of the host's memory.
RANK_GB, GPU_RANK_GB, LOADER_WORKER_GB = 1.0, 4.0, 0.25
SHM_GB = 1.0
GB = 1e9

SIZES = tuple(2**power for power in (10, 14, 18, 20, 22, 24, 26))  # bytes: 1 KB to 64 MB
REPEATS = 5  # the median of them
SLOW_SECONDS = 1.0  # of a sum: no larger size then, which would take four times as long
SLOW_NETWORK_GB_S = 0.1  # what gigabit Ethernet carries


def main() -> None:
    """Measure, and tell. Ends well whatever it finds."""
    parser = Parser(prog="python -m trainkit.jobs.checkup", description="Started by slurm/doctor.py.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--results-dir", type=Path, required=True)
    parser.add_argument("--num-workers", type=at_least(0), default=0)
    options, _ = parser.parse_known_args()  # the job script's other options are the training's
    env = os.environ
    if "SLURM_STEP_NUM_TASKS" not in env:
        raise UserError("the checkup runs in a job: start it with `python slurm/doctor.py --job`.")
    size, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_STEP_NUM_NODES"])
    tasks = max(size // nodes, 1)  # of a node
    speaks_for_node = env["SLURM_LOCALID"] == "0"
    folders = {"results": options.results_dir, "job": Path(env["TRAINKIT_JOB_DIR"])}

    tell(size=size, folder=env["TRAINKIT_JOB_DIR"])
    _step("cores", _cores, options.num_workers)
    able = _step("names", _names)
    if speaks_for_node:
        _step("folders", _leave_notes, folders)
    if not _step("software", _software):
        _end()
    able &= _step("gpus", _gpus, tasks if speaks_for_node else None)
    if speaks_for_node:
        _step("data", _data, options.data_dir)
        _step("memory", _memory, tasks, options.num_workers)
        _step("shm", _shared_memory, options.num_workers)
        _step("folders", _look_for_notes, folders, nodes)
    if able and _step("group", _join):
        _step("all-reduce", _all_reduce, nodes)
    _end()


def tell(**facts: object) -> None:
    """A line for the doctor. One write, and short: the lines of several ranks go through one pipe."""
    line = MARK + json.dumps({"rank": int(os.environ.get("SLURM_PROCID", 0)), **facts})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _node() -> str:
    """This node's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME", platform.node())


def _end() -> NoReturn:
    tell(ended=True)
    errors.note("finished")
    os._exit(0)  # Python's own end could hang, or abort, in the threads of a group that did not come about


def _step(step: str, check: Callable[..., Iterable[Finding]], *arguments: object) -> bool:
    """Tell what `check` finds, or that it failed, or took too long, which ends this rank.

    Returns whether there is no fault. That all is well one rank of a node tells.
    """

    def tell_of(finding: Finding) -> None:
        rank = None if finding.level == OK else int(os.environ["SLURM_PROCID"])
        tell(finding=finding._replace(node=_node(), rank=rank)._asdict())

    def give_up() -> None:
        tell_of(Finding(step, FAULT, f"not done after {LIMITS[step]} s", FIXES.get(step, "tell your admin")))
        _end()  # the main thread hangs

    tell(begun=step)
    watch = threading.Timer(LIMITS[step], give_up)
    watch.daemon = True
    watch.start()
    try:
        found = list(check(*arguments))
    except Exception as error:  # whatever it is, the doctor tells it
        text = (first_line(error) or repr(error))[:500]
        found = [fault_of(step, text, FIXES.get(step, "tell your admin"))]
    watch.cancel()
    worse = [finding for finding in found if finding.level != OK]
    for finding in worse or (found if os.environ["SLURM_LOCALID"] == "0" else []):
        tell_of(finding)
    return not has_fault(found)


def _cores(num_workers: int) -> Iterator[Finding]:
    """Whether this rank has the CPUs that it asked for, and enough of them for its loader."""
    asked, own = int(os.environ.get("SLURM_CPUS_PER_TASK", 1)), len(os.sched_getaffinity(0))
    if own < asked:
        message = f"asked for {asked} cores and may run on {own}"
        fix = "give --cpus-per-task to srun, too (Slurm 22.05 and later), and no --cpu-bind that pins all"
        yield Finding("cores", FAULT if own == 1 else WARNING, message, fix)
    usable = min(asked, own)
    if usable < num_workers:
        message = f"{usable} CPU(s) per task for the training and {num_workers} loader workers"
        fix = f"sbatch --cpus-per-task={num_workers + 1}, or fewer --num-workers"
        yield Finding("cores", FAULT if usable == 1 else WARNING, message, fix)
    yield Finding("cores", OK, f"{usable} per rank")


def _names() -> Iterator[Finding]:
    """Whether this node knows the way to the master."""
    master = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(master, None)
        yield Finding("names", OK, f"resolves the master, {master}")
    except OSError:
        fix = f"an admin has to give {_node()} an address for {master} (DNS or /etc/hosts)"
        yield Finding("names", FAULT, f"the master's name {master} cannot be resolved here", fix)


def _leave_notes(folders: dict[str, Path]) -> list[Finding]:
    """A file in each shared folder, for the other nodes to see; the doctor removes it."""
    for name, folder in folders.items():
        files.check_writable(folder, f"the {name} folder's files", FIXES["folders"])
        (folder / NOTE.format(job=os.environ["SLURM_JOB_ID"], node=_node())).touch()
    return []


def _look_for_notes(folders: dict[str, Path], nodes: int) -> Iterator[Finding]:
    pattern = NOTE.format(job=os.environ["SLURM_JOB_ID"], node="*")
    deadline = time.monotonic() + NOTES_SECONDS
    for name, folder in folders.items():
        # By listing, since opening a folder makes NFS ask its server anew.
        while (seen := len(list(folder.glob(pattern)))) < nodes and time.monotonic() < deadline:
            time.sleep(0.5)
        if seen < nodes:
            message = f"files of {seen} of {nodes} nodes are seen in the {name} folder here: it is not shared"
            yield Finding("folders", FAULT, message, FIXES["folders"])
    yield Finding("folders", OK, "writes the results and job folders, and sees the files of the other nodes")


def _software() -> Iterator[Finding]:
    import torch

    from trainkit.machine import git_commit

    commit = git_commit() or "unknown (no git there)"
    yield Finding("software", OK, f"torch {torch.__version__}, commit {commit}")


def _data(data_dir: Path) -> Iterator[Finding]:
    from trainkit import data

    data.load("mnist", data_dir)
    yield Finding("data", OK, f"MNIST in {data_dir}")


def _gpus(tasks: int | None) -> Iterator[Finding]:
    """This rank's GPU, as the training would choose it, and for one rank those of its node's `tasks`."""
    import torch

    from trainkit import machine, world

    device = world.own_device(use_cuda=True)
    if device.type == "cuda":
        free, size = torch.cuda.mem_get_info(device)
        if free < 0.8 * size:
            message = f"{1 - free / size:.0%} of its GPU's memory is taken before the training starts"
            fix = f"something else computes there; without the node: sbatch --exclude={_node()}"
            yield Finding("gpus", WARNING, message, fix)
    if not tasks:
        return
    given, seen = machine.gpus_given() or 0, torch.cuda.device_count()
    if given and given != tasks:
        message = f"{tasks} task(s) for {given} GPU(s): it has to be one task per GPU"
        fix = f"sbatch --ntasks-per-node={given} --gpus-per-node={given}"
        yield Finding("gpus", FAULT, message, fix)
    if 0 < seen < given:
        message = f"a task sees {seen} of {given} GPUs, which stops them from copying to each other directly"
        fix = "ask with --gpus-per-node in place of --gpus-per-task, and leave out --gpu-bind"
        yield Finding("gpus", WARNING, message, fix)
    if seen:
        yield Finding("gpus", OK, f"{_cards()}, {_software_of_gpus()}")
    elif given:  # else it would have been refused before
        message = f"{given} virtual GPU(s) of the practice cluster: the ranks train on the CPU"
        yield Finding("gpus", OK, message)
    else:
        message = "the job has no GPU: it will train on the CPU"
        yield Finding("gpus", WARNING, message, "sbatch --gpus-per-node=2")


def _cards() -> str:
    """The GPUs that this process sees, such as "2 x NVIDIA H200, 140 GiB, driver 580.65.06"."""
    import torch

    from trainkit import machine

    all_of_them = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    kinds = Counter(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in all_of_them)
    cards = [f"{count} x {kind}" for kind, count in kinds.items()]
    return ", ".join(cards if torch.version.hip else [*cards, machine.driver()])


def _software_of_gpus() -> str:
    """What this PyTorch was built for, such as "CUDA 13.2, NCCL 2.30.7"; with ROCm it is RCCL."""
    import torch

    from trainkit import machine

    if not torch.distributed.is_nccl_available():
        return machine.build()
    return f"{machine.build()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def look_from_login_node(data_dir: str, most_gpus: int) -> None:
    """The job's Python and, read by it, the data; `most_gpus` are those of the largest node.

    Raises:
        UserError: if the data cannot be read.
    """
    import psutil  # noqa: F401  the job's own measurements need it
    import torch

    from trainkit import data, machine, run  # noqa: F401  what a rank imports

    gpus, found = "no GPU here, as usual on a login node", []
    try:
        machine.check_usable()
        if torch.cuda.is_available():
            gpus = _cards()
    except (UserError, RuntimeError) as error:  # no job's GPU
        found.append(Finding("gpus", WARNING, first_line(error), "see `nvidia-smi` here, ask your admin"))
    if machine.build() == "the CPU only" and most_gpus:
        message = f"PyTorch is for the CPU only, but nodes of this cluster have up to {most_gpus} GPUs"
        fix = "install a PyTorch for GPUs: https://pytorch.org/get-started/locally"
        found.append(Finding("gpus", FAULT, message, fix))
    version = f"torch {torch.__version__.partition('+')[0]} for {_software_of_gpus()}"
    for finding in (Finding("environment", OK, f"{sys.executable}, {version}; {gpus}"), *found):
        tell(finding=finding._asdict())
    data.load("mnist", Path(data_dir))
    tell(finding=Finding("data", OK, f"MNIST in {data_dir}")._asdict())


def _memory(tasks: int, num_workers: int) -> Iterator[Finding]:
    """Whether what the node has left, and the job may take of it, is enough for its ranks."""
    import psutil
    import torch

    from trainkit.jobs import processes

    limit = processes.memory_limit(processes.memory_cgroups())
    room = min(psutil.virtual_memory().available, limit) / GB
    least = tasks * (GPU_RANK_GB if torch.cuda.is_available() else RANK_GB)
    need = least + tasks * num_workers * LOADER_WORKER_GB
    if room < need:
        message = f"{room:.1f} GB for {tasks} rank(s), which take about {need:.1f} GB"
        if num_workers:
            message += f" with {num_workers} loader workers each"
        yield Finding("memory", FAULT if room < least else WARNING, message, f"sbatch --mem={int(need) + 1}G")
    yield Finding("memory", OK, f"{room:.1f} GB")


def _shared_memory(num_workers: int) -> Iterator[Finding]:
    """Through /dev/shm the workers of a DataLoader hand over their batches."""
    space = shutil.disk_usage("/dev/shm")
    message = f"{space.free / GB:.2f} of {space.total / GB:.2f} GB free in /dev/shm, for loaders' batches"
    if num_workers and space.free < SHM_GB * GB:
        fix = (
            "a larger /dev/shm (of a container: apptainer --bind, docker --shm-size), or fewer --num-workers"
        )
        yield Finding("shm", WARNING, message, fix)
    yield Finding("shm", OK, message)


def _join() -> Iterator[Finding]:
    """Join the process group as the training does; tells NCCL's network."""
    import torch.distributed as dist

    from trainkit import world

    # A folder of its own, for everybody may write to the temporary folder, and guess a name there.
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "nccl.log")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
        world.join(use_cuda=True, timeout=LIMITS["group"] - 5)
        world.barrier()  # NCCL connects at its first operation
        network = re.search(r"Using network (\S+)", log.read_text(errors="replace") if log.exists() else "")
    way = dist.get_backend() + (f" over {network[1]}" if network else "")  # none within a node
    yield Finding("group", OK, f"all ranks meet at {os.environ['MASTER_ADDR']}, by {way}")


def _all_reduce(nodes: int) -> Iterator[Finding]:
    """Whether sums over all ranks are correct, and what the network carries; rank 0 tells the rows."""
    import torch
    import torch.distributed as dist

    from trainkit import machine, world

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    facts = {"nodes": nodes, "job": os.environ["SLURM_JOB_ID"], "ranks": world.count()}
    facts |= {"backend": dist.get_backend(), "device_name": machine.device_name(device)}
    rows = []
    for number_of_bytes in SIZES:
        wrong = _wrong_sums(number_of_bytes, device)
        if wrong:
            message = f"{wrong} of the sums over all ranks are wrong, at {in_words(number_of_bytes)}"
            yield Finding("all-reduce", FAULT, message, FIXES["all-reduce"])
        if world.largest(wrong, device):  # on any rank: all of them stop here
            return
        values = torch.zeros(number_of_bytes // 4, device=device)
        seconds = statistics.median(_time_one(values) for _ in range(REPEATS))
        rows.append(facts | bandwidth(world.count(), number_of_bytes, seconds))
        if seconds > SLOW_SECONDS:
            break
    if world.is_first() and world.count() == 1:
        yield Finding("all-reduce", OK, "one rank only: nothing to exchange")
    elif world.is_first():
        tell(rows=rows)
        yield _judge_network(rows, nodes)
    world.leave()


def _wrong_sums(number_of_bytes: int, device: object) -> int:
    """How many of the numbers of a sum over all ranks are wrong on this one."""
    import torch

    from trainkit import world

    rank, size = world.rank(), world.count()
    ramp = torch.arange(number_of_bytes // 4, device=device, dtype=torch.float32) % 1000
    expected = ramp * size + size * (size - 1) / 2  # small whole numbers: exact in float32
    return int((world.sum_in_place(ramp + rank) != expected).sum())


def _time_one(values: object) -> float:
    """Seconds of a sum over all ranks, by the slowest rank's clock."""
    import torch

    from trainkit import world

    on_gpu = values.device.type == "cuda"
    world.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    world.sum_in_place(values)
    if on_gpu:
        torch.cuda.synchronize()
    return world.largest(time.perf_counter() - started, values.device)


def bandwidth(ranks: int, number_of_bytes: int, seconds: float) -> dict[str, float]:
    """What a sum over all ranks has shown: bytes, seconds, algorithm_gb_s and bus_gb_s (1 GB = 1e9 bytes).

    For n ranks algorithm bandwidth is size / time, and bus bandwidth that times 2 (n - 1) / n: the rate
    of the slowest link, to be compared with the hardware's. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    algorithm = number_of_bytes / seconds / GB
    rates = {"algorithm_gb_s": algorithm, "bus_gb_s": algorithm * 2 * (ranks - 1) / ranks}
    return {"bytes": number_of_bytes, "seconds": seconds} | rates


def _judge_network(rows: list[dict], nodes: int) -> Finding:
    rate = rows[-1]["bus_gb_s"]
    message = f"correct; bus bandwidth {rate:.2f} GB/s at {in_words(rows[-1]['bytes'])}"
    if rate < SLOW_NETWORK_GB_S and nodes > 1:
        fix = "see that it is the fast network: SITE_NETWORK_INTERFACE in slurm/site.sh"
        return Finding("all-reduce", WARNING, f"{message}: slower than gigabit Ethernet", fix)
    return Finding("all-reduce", OK, message)


def in_words(number_of_bytes: int) -> str:
    """Such as 4 MB."""
    return f"{number_of_bytes // 2**10} KB" if number_of_bytes < 2**20 else f"{number_of_bytes // 2**20} MB"


if __name__ == "__main__":
    errors.run(main)
