"""A job's ranks looked at before any training: every rank measures, then all is judged in one place.

    srun ... python -m trainkit.checkup --data-dir DIR --results-dir DIR

`slurm/doctor.py --job` puts this in the place of the training script. A rank prints each thing that
it measures at once, as one line of JSON, so that what it found is told even if it hangs or dies
later. Nothing waits without a limit. The doctor collects the lines (`facts`) and judges them
(`judge`). It may run in any Python, so only the standard library is imported before it is needed.
"""

import argparse
import json
import os
import platform
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from trainkit import errors
from trainkit.errors import UserError, first_line

MARK = "checkup "  # begins every line that carries facts
NOTE = ".doctor-{job}-{node}"  # a file that shows whether a folder is shared
OK, WARNING, FAULT = "ok", "warning", "fault"

# Seconds. srun ends the other ranks 60 s after the first one has left (--wait=60 in the job script),
# so a step in which ranks wait for each other has to give up before.
LIMITS = {
    "cores": 10,
    "memory": 10,
    "names": 30,
    "folders": 30,
    "meeting": 45,
    "sharing": 30,
    "torch": 180,
    "data": 60,
    "shm": 30,
    "group": 45,
    "all-reduce": 55,
}
MEETING_SECONDS = 20  # until all ranks have come to the first one; Python starts slowly from a cold disk
SHARING_SECONDS = 15  # until a new file is seen on other nodes; NFS keeps listings for a while

SIZES = (2**10, 2**14, 2**18, 2**22, 2**26)  # bytes: 1 KB to 64 MB
REPEATS = 7  # the median of them

GB = 1e9
# What a stage takes at its default settings: 0.95 GB at the peak (mem. MB in the comparison of the
# main README), and about as much for four loader workers, which share most of theirs.
RANK_GB, LOADER_WORKER_GB = 1.0, 0.25
SHM_GB = 1.0
TENSOR_BYTES = 2**24  # put into /dev/shm: more than a loader's prefetched batches of MNIST
CLOCK_SECONDS = 3.0
SLOW_IMPORT_SECONDS = 30
SLOW_NETWORK_GB_S = 0.1  # what gigabit Ethernet carries


class Finding(NamedTuple):
    """What one check found: `level` is `OK`, `WARNING` or `FAULT`; `fix` says what to do, if anything."""

    check: str
    level: str
    message: str
    fix: str = ""
    node: str | None = None
    rank: int | None = None


# --- measuring, in every rank ---------------------------------------------------------------------


def main() -> None:
    """Measure, and print the facts. Ends well whatever it finds: the doctor judges."""
    parser = argparse.ArgumentParser("python -m trainkit.checkup", description="Started by slurm/doctor.py.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--results-dir", type=Path, required=True)
    options, _ = parser.parse_known_args()  # the job script's other options are the training's
    if "SLURM_STEP_NUM_TASKS" not in os.environ:
        raise UserError("the checkup runs in a job: start it with `python slurm/doctor.py --job`.")
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
    speaks_for_node = os.environ["SLURM_LOCALID"] == "0"

    _tell("place", **_place(size))
    _step("cores", _cores)
    _step("memory", _memory)
    _step("names", _names)
    with ExitStack() as notes:
        folders = {"results": options.results_dir, "job": Path(os.environ["TRAINKIT_JOB_DIR"])}
        if speaks_for_node:
            _step("folders", _leave_notes, folders, notes)
        met = _step("meeting", _receive if rank == 0 else _visit, rank, size)
        complete = met.get("absent") == []
        if speaks_for_node and complete:
            _step("sharing", _look_for_notes, folders, met["nodes"])
        _step("torch", _torch)
        if speaks_for_node:
            _step("data", _load_data, options.data_dir)
        _step("shm", _shared_memory)
        if complete:
            joined = _step("group", _join)
            if "error" not in joined:
                _step("all-reduce", _time_all_reduce)
    _tell("end")


def _tell(topic: str, **facts: object) -> None:
    line = MARK + json.dumps({"rank": int(os.environ["SLURM_PROCID"]), "topic": topic, **facts})
    # One write, and short: the lines of several ranks go through one pipe.
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _step(topic: str, measure: Callable[..., dict], *arguments: object) -> dict:
    """Tell what `measure` returns, or that it failed, or that it took too long, which ends this rank."""

    def give_up() -> None:
        _tell(topic, error=f"not done after {LIMITS[topic]} s")
        os._exit(0)  # the main thread hangs

    _tell(topic, begun=True)
    watch = threading.Timer(LIMITS[topic], give_up)
    watch.daemon = True
    watch.start()
    try:
        facts = measure(*arguments)
    except Exception as error:  # whatever it is, the doctor tells it
        facts = {"error": (first_line(error) or repr(error))[:500]}
    watch.cancel()
    _tell(topic, **facts)
    return facts


def _node() -> str:
    """This node's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME", platform.node())


def _place(size: int) -> dict:
    env = os.environ
    return {
        "size": size,
        "node": _node(),
        "nodes": int(env.get("SLURM_STEP_NUM_NODES", 1)),
        "gpus_on_node": int(env.get("SLURM_GPUS_ON_NODE", 0)),
        "visible": env.get("CUDA_VISIBLE_DEVICES"),
        "folder": env["TRAINKIT_JOB_DIR"],
    }


def _cores() -> dict:
    """The CPUs this rank may use, as a bit mask, which keeps the line short on large nodes."""
    return {
        "mask": sum(1 << core for core in os.sched_getaffinity(0)),
        "per_task": int(os.environ.get("SLURM_CPUS_PER_TASK", 1)),
    }


def _memory() -> dict:
    """Memory in GB: what the node has left, and the smallest limit that Slurm or a cgroup sets."""
    import psutil

    limits = list(_cgroup_limits())
    env = os.environ
    if "SLURM_MEM_PER_NODE" in env:
        limits.append(int(env["SLURM_MEM_PER_NODE"]) * 2**20)
    elif "SLURM_MEM_PER_CPU" in env:
        limits.append(int(env["SLURM_MEM_PER_CPU"]) * int(env["SLURM_CPUS_ON_NODE"]) * 2**20)
    return {
        "available_gb": psutil.virtual_memory().available / GB,
        "limit_gb": min(limits) / GB if limits else None,
    }


def _cgroup_limits() -> Iterator[int]:
    """Bytes, of this process's memory cgroup and those above it; version 1 and 2, see cgroups(7)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            with suppress(OSError):
                text = (folder / file).read_text().strip()
                if text != "max":
                    yield int(text)
            if folder == root:
                break


def _names() -> dict:
    """What this node makes of the master's name, and of its own, by which gloo finds its network."""
    import psutil

    master, own = os.environ["MASTER_ADDR"], platform.node()
    interfaces = psutil.net_if_addrs()
    mine = {entry.address for addresses in interfaces.values() for entry in addresses}
    addresses = _addresses(master)
    return {
        "master": master,
        "addresses": addresses,
        "master_is_here": not mine.isdisjoint(addresses),
        "own": own,
        "own_addresses": _addresses(own),
        "wanted": os.environ.get("GLOO_SOCKET_IFNAME"),
        "interfaces": list(interfaces)[:20],
    }


def _addresses(name: str) -> list[str]:
    try:
        return sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})[:4]
    except OSError:
        return []


def _leave_notes(folders: dict[str, Path], notes: ExitStack) -> dict:
    """A file in each shared folder, for the other nodes to see; it goes when `notes` closes."""
    for folder in folders.values():
        note = folder / _note(_node())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            note.touch()
        except OSError as error:
            raise UserError(f"{folder} cannot be written to ({error.strerror})") from None
        notes.callback(note.unlink, missing_ok=True)
    return {}


def _note(node: str) -> str:
    return NOTE.format(job=os.environ["SLURM_JOB_ID"], node=node)


def _look_for_notes(folders: dict[str, Path], nodes: list[str]) -> dict:
    """For each folder, the nodes whose note is not seen from here."""
    wanted = {_note(node): node for node in nodes}
    deadline = time.monotonic() + SHARING_SECONDS
    while True:
        # By listing, since opening a folder makes NFS ask its server anew.
        seen = {name: {entry.name for entry in folder.iterdir()} for name, folder in folders.items()}
        unseen = {name: sorted(wanted[note] for note in wanted.keys() - seen[name]) for name in folders}
        if not any(unseen.values()) or time.monotonic() > deadline:
            return unseen
        time.sleep(0.5)


def _receive(rank: int, size: int) -> dict:
    """Rank 0 takes the port of the job and waits for the others, plain TCP, before PyTorch does.

    Every visitor gets this node's time, and, when all are here or the time is up, who is absent.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    try:
        server = socket.create_server(("", port), family=family, backlog=size)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise UserError(
            f"port {port} is not free on {_node()} ({why}): submit again, the port follows the job's number"
        ) from None
    deadline = time.monotonic() + MEETING_SECONDS
    nodes, visitors = {_node()}, {}
    with server, ExitStack() as connections:
        while len(visitors) < size - 1 and time.monotonic() < deadline:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            with suppress(OSError, ValueError, KeyError):  # a port scanner is no rank
                connection, _ = server.accept()
                connections.enter_context(connection)
                connection.settimeout(2)
                lines = connections.enter_context(connection.makefile("rw"))
                hello = json.loads(lines.readline())
                if hello["job"] == os.environ["SLURM_JOB_ID"]:
                    _send(lines, time=time.time())
                    visitors[hello["rank"]] = lines
                    nodes.add(hello["node"])
        absent = sorted(set(range(1, size)) - visitors.keys())
        for lines in visitors.values():
            with suppress(OSError):
                _send(lines, absent=absent, nodes=sorted(nodes))
                lines.readline()  # until the visitor closes: whoever closes first keeps the port busy
    return {"absent": absent, "nodes": sorted(nodes)}


def _visit(rank: int, size: int) -> dict:
    """The other ranks go to rank 0, compare clocks with it, and hear who is absent."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=2)
            break
        except socket.gaierror as error:
            raise UserError(f"{address} cannot be resolved ({error.strerror}): mend its name first") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"{address}:{port} cannot be reached ({error.strerror or error})") from None
            time.sleep(0.2)
    with connection, connection.makefile("rw") as lines:
        try:
            connection.settimeout(10)  # rank 0 answers one after the other
            sent = time.time()
            _send(lines, job=os.environ["SLURM_JOB_ID"], rank=rank, node=_node())
            master_time = json.loads(lines.readline())["time"]
            offset = (sent + time.time()) / 2 - master_time
            connection.settimeout(MEETING_SECONDS + 10)
            verdict = json.loads(lines.readline())
        except (OSError, ValueError, TypeError, KeyError):
            raise UserError(
                f"what answers at {address}:{port} is not rank 0 (it may be another program): submit again, "
                "the port follows the job's number"
            ) from None
        return verdict | {"offset_s": offset, "interface": _interface(connection.getsockname()[0])}


def _send(lines: object, **message: object) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def _interface(address: str) -> str:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address.partition("%")[0] for entry in addresses]:
            return name
    return "unknown"


def _load_data(data_dir: Path) -> dict:
    from trainkit import data

    train, test = data.load("mnist", data_dir)
    return {"images": len(train.images) + len(test.images)}


def _torch() -> dict:
    started = time.monotonic()
    import torch

    from trainkit.runlog import git_commit

    return {
        "import_s": time.monotonic() - started,
        "version": torch.__version__,
        "commit": git_commit(),
        "devices": torch.cuda.device_count(),
    }


def _shared_memory() -> dict:
    """Sizes of /dev/shm in GB, after a tensor was put there, as DataLoader's workers do with batches."""
    import torch

    space = os.statvfs("/dev/shm")
    size, free = space.f_blocks * space.f_frsize / GB, space.f_bavail * space.f_frsize / GB
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        try:
            # Asked before: writing to a full /dev/shm is no error but a bus error, which kills the rank.
            os.posix_fallocate(file.fileno(), 0, TENSOR_BYTES)
        except OSError as error:
            raise UserError(
                f"a tensor of {TENSOR_BYTES / 1e6:.0f} MB does not fit into /dev/shm, {free:.2f} of "
                f"{size:.2f} GB free ({error.strerror})"
            ) from None
    torch.ones(TENSOR_BYTES, dtype=torch.uint8).share_memory_()
    return {"size_gb": size, "free_gb": free}


def _join() -> dict:
    """Join the process group as the training does; tells about the device and NCCL's network."""
    import torch
    import torch.distributed as dist

    from trainkit import world

    log = Path(tempfile.gettempdir()) / f"doctor-nccl-{os.environ['SLURM_JOB_ID']}-{os.getpid()}"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
    device = world.join(use_cuda=True, timeout=LIMITS["group"] - 5).device
    dist.barrier()  # NCCL connects at its first operation
    facts = {"backend": dist.get_backend(), "network": None, "device": None}
    if device.type == "cuda":
        free, size = torch.cuda.mem_get_info(device)
        properties = torch.cuda.get_device_properties(device)
        facts |= {"device": properties.name, "free": free / size}
        facts["uuid"] = str(properties.uuid) if hasattr(properties, "uuid") else None
        with suppress(OSError):
            facts["network"] = nccl_network(log.read_text(errors="replace"))
            log.unlink()
    return facts


def nccl_network(log: str) -> str | None:
    """The network that NCCL chose, from its own log: "IB: mlx5_0:1/IB" or "Socket: eth0", say.

    The log has "NET/IB : Using [0]mlx5_0:1/IB [1]... [RO]; OOB eth0:10.0.0.2<0>" for each network that
    it found, and "Using network IB" for its choice. Without such a line it needed none.
    """
    chosen = re.search(r"Using network (\S+)", log)
    if chosen is None:
        return None
    found = re.search(rf"NET/{re.escape(chosen[1])} : Using (.*)", log)
    adapters = re.findall(r"\[\d+\]([^\s:]+(?::\d+/\w+)?)", found[1]) if found else []
    return f"{chosen[1]}: {', '.join(adapters)}" if adapters else chosen[1]


def _time_all_reduce() -> dict:
    """Median seconds of a sum over all ranks for each of `SIZES`, by the slowest rank's clock.

    The sum is checked, number by number.
    """
    import torch
    import torch.distributed as dist

    from trainkit import world

    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    seconds = []
    for size_in_bytes in SIZES:
        ramp = torch.arange(size_in_bytes // 4, device=device, dtype=torch.float32) % 1000
        values = world.total(ramp + rank)
        expected = ramp * size + size * (size - 1) / 2  # small whole numbers: exact in float32
        wrong = int((values != expected).sum())
        if world.largest(wrong, values.device):  # on any rank: all of them stop here
            return {"wrong": wrong, "of": len(values), "bytes": size_in_bytes}
        seconds.append(statistics.median(_time_one(values) for _ in range(REPEATS)))
    world.leave()
    return {"seconds": seconds}


def _time_one(values: object) -> float:
    import torch

    from trainkit import world

    on_gpu = values.device.type == "cuda"
    world.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    world.total(values)
    if on_gpu:
        torch.cuda.synchronize()
    return world.largest(time.perf_counter() - started, values.device)


# --- judging, in one place ------------------------------------------------------------------------

Ranks = dict[int, dict[str, dict]]  # rank -> topic -> facts


def facts(log: str) -> Ranks:
    """What the ranks told, from a job's log; lines that are not theirs, or cut short, are passed over."""
    ranks: Ranks = {}
    for line in log.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            with suppress(ValueError, KeyError):
                told = json.loads(text)
                ranks.setdefault(told.pop("rank"), {})[told.pop("topic")] = told
    return {rank: told for rank, told in sorted(ranks.items()) if "place" in told}


def judge(ranks: Ranks, hosts: list[str], num_workers: int) -> list[Finding]:
    """All findings about a job's ranks, at least one of them heard.

    Args:
        ranks: from `facts`.
        hosts: the job's nodes in Slurm's order, if Slurm could tell.
        num_workers: loader processes that each rank is going to have.
    """
    hosts = hosts or list(_by_node(ranks))
    return [
        *_judge_ranks(ranks, hosts),
        *_judge_gpus(ranks),
        *_judge_cores(ranks, num_workers),
        *_judge_memory(ranks, num_workers),
        *_judge_shm(ranks, num_workers),
        *_judge_names(ranks, hosts),
        *_judge_meeting(ranks),
        *_judge_clocks(ranks),
        *_judge_folders(ranks),
        *_judge_data(ranks),
        *_judge_software(ranks),
        *_judge_all_reduce(ranks),
    ]


def bandwidths(ranks: Ranks) -> list[dict[str, float]]:
    """One row per message size: bytes, seconds, algorithm_gb_s and bus_gb_s (GB/s, 1 GB = 1e9 bytes).

    For n ranks algorithm bandwidth is size / time, and bus bandwidth that times 2 (n - 1) / n: the rate
    of the slowest link, to be compared with the hardware's. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    n = _size(ranks)
    seconds = next(
        (told["all-reduce"].get("seconds") for told in ranks.values() if "all-reduce" in told), None
    )
    if seconds is None or n == 1:
        return []
    return [
        {
            "bytes": size,
            "seconds": time,
            "algorithm_gb_s": size / time / GB,
            "bus_gb_s": size / time / GB * 2 * (n - 1) / n,
        }
        for size, time in zip(SIZES, seconds, strict=True)
    ]


def _size(ranks: Ranks) -> int:
    return max(told["place"]["size"] for told in ranks.values())


def _by_node(ranks: Ranks) -> dict[str, Ranks]:
    nodes: dict[str, Ranks] = {}
    for rank, told in ranks.items():
        nodes.setdefault(told["place"]["node"], {})[rank] = told
    return nodes


def _finished(topic: str, ranks: Ranks) -> Ranks:
    """The ranks that came to the end of the step `topic`."""
    return {
        rank: told
        for rank, told in ranks.items()
        if topic in told and not told[topic].keys() & {"begun", "error"}
    }


def _failed(check: str, topic: str, ranks: Ranks, fix: str) -> list[Finding]:
    """A fault for every rank whose step `topic` failed; `fix` is for errors that bring none along."""
    found = []
    for rank, told in ranks.items():
        if error := told.get(topic, {}).get("error"):
            what, _, mend = error.partition("): ")  # a UserError tells what is wrong: what to do
            message = f"{what})" if mend else error
            found.append(Finding(check, FAULT, message, mend or fix, told["place"]["node"], rank))
    return found


def _judge_ranks(ranks: Ranks, hosts: list[str]) -> list[Finding]:
    size = _size(ranks)
    found = []
    for rank in range(size):
        if rank not in ranks:
            # Slurm fills one node after the other.
            node = hosts[min(rank * len(hosts) // size, len(hosts) - 1)]
            message = "never reported: its Python did not start"
            fix = f"see the job's log; to go on without the node: sbatch --exclude={node}"
            found.append(Finding("ranks", FAULT, message, fix, node, rank))
        elif "end" not in ranks[rank]:
            steps = [topic for topic, told in ranks[rank].items() if "begun" in told]
            if steps:
                message = f"ended without a word in its check of {steps[-1]}: killed, crashed or stuck"
                fix = "see the job's log; more memory: sbatch --mem=16G"
                found.append(Finding("ranks", FAULT, message, fix, ranks[rank]["place"]["node"], rank))
    return found or [Finding("ranks", OK, f"{size} on {len(_by_node(ranks))} node(s), all of them reported")]


def _judge_gpus(ranks: Ranks) -> list[Finding]:
    found = []
    for node, here in _by_node(ranks).items():
        place = next(iter(here.values()))["place"]
        gpus = place["gpus_on_node"]
        tasks = max(len(here), place["size"] // place["nodes"])  # some may not have reported
        seen = [told["torch"]["devices"] for told in _finished("torch", here).values()]
        if not gpus and not any(seen):
            message, fix = "the job has no GPU: it will train on the CPU", "sbatch --gpus-per-node=2"
            found.append(Finding("gpus", WARNING, message, fix, node))
            continue
        if gpus and gpus != tasks:
            message = f"{tasks} task(s) for {gpus} GPU(s): it has to be one task per GPU"
            fix = f"sbatch --ntasks-per-node={gpus} --gpus-per-node={gpus}"
            found.append(Finding("gpus", FAULT, message, fix, node))
        if gpus and seen and not any(seen):
            message = (
                "Slurm gives GPUs but PyTorch sees none (normal on the practice cluster, whose are virtual)"
            )
            fix = "see that `nvidia-smi` works there, and that torch is not a build for CPUs"
            found.append(Finding("gpus", WARNING, message, fix, node))
        elif gpus > 1 and set(seen) == {1}:
            message = "every task sees its own GPU only, which stops GPUs from copying to each other directly"
            fix = "ask with --gpus-per-node in place of --gpus-per-task"
            found.append(Finding("gpus", WARNING, message, fix, node))
        if gpus and place["visible"] is None:
            message = "CUDA_VISIBLE_DEVICES is not set: tasks may see GPUs of other jobs"
            found.append(Finding("gpus", WARNING, message, "leave out --gpu-bind=none", node))
        owners: dict[str, int] = {}
        for rank, told in _finished("group", here).items():
            device = told["group"]
            if device["device"] is None:
                continue
            if device["uuid"] in owners:
                message = f"has the same GPU as rank {owners[device['uuid']]}"
                fix = "one task per GPU: --ntasks-per-node equal to --gpus-per-node"
                found.append(Finding("gpus", FAULT, message, fix, node, rank))
            if device["uuid"]:
                owners[device["uuid"]] = rank
            if device["free"] < 0.8:
                message = f"{1 - device['free']:.0%} of its GPU's memory is taken before the training starts"
                fix = f"something else computes there; without the node: sbatch --exclude={node}"
                found.append(Finding("gpus", WARNING, message, fix, node, rank))
    names = {told["group"]["device"] for told in _finished("group", ranks).values()} - {None}
    return found or [Finding("gpus", OK, f"one per task: {', '.join(sorted(names)) or 'as many as tasks'}")]


def _judge_cores(ranks: Ranks, num_workers: int) -> list[Finding]:
    found = _failed("cores", "cores", ranks, "tell your admin")
    least = []
    for node, here in _by_node(_finished("cores", ranks)).items():
        cores = [told["cores"] for told in here.values()]
        together = 0
        for told in cores:
            together |= told["mask"]
        asked = sum(told["per_task"] for told in cores)
        usable = min(min(told["mask"].bit_count(), told["per_task"]) for told in cores)
        least.append(usable)
        if together.bit_count() < len(cores):
            message = f"{len(cores)} ranks share {together.bit_count()} core(s)"
            fix = "give --cpus-per-task to srun, too (Slurm 22.05 and later), and no --cpu-bind that pins all"
            found.append(Finding("cores", FAULT, message, fix, node))
        elif together.bit_count() < asked:
            message = f"{len(cores)} ranks asked for {asked} cores and run on {together.bit_count()}"
            fix = (
                "srun --cpus-per-task as on the sbatch line; else the node has fewer cores than Slurm is told"
            )
            found.append(Finding("cores", WARNING, message, fix, node))
        if usable < num_workers:
            level = FAULT if usable == 1 else WARNING
            message = f"{usable} CPU(s) per task for the training and {num_workers} loader workers"
            fix = f"sbatch --cpus-per-task={num_workers + 1}, or fewer --num-workers"
            found.append(Finding("cores", level, message, fix, node))
    return found or [Finding("cores", OK, f"{min(least)} per rank")]


def _judge_memory(ranks: Ranks, num_workers: int) -> list[Finding]:
    found = _failed("memory", "memory", ranks, "tell your admin")
    rooms = []
    for node, here in _by_node(_finished("memory", ranks)).items():
        memory = next(iter(here.values()))["memory"]
        room = min(memory["available_gb"], memory["limit_gb"] or float("inf"))
        rooms.append(room)
        least, need = len(here) * RANK_GB, len(here) * (RANK_GB + num_workers * LOADER_WORKER_GB)
        if room < need:
            level = FAULT if room < least else WARNING
            message = f"{room:.1f} GB for {len(here)} rank(s), which take about {need:.1f} GB"
            if num_workers:
                message += f" with {num_workers} loader workers each"
            found.append(Finding("memory", level, message, f"sbatch --mem={int(need) + 1}G", node))
    return found or [Finding("memory", OK, f"{min(rooms):.1f} GB or more on each node")]


def _judge_shm(ranks: Ranks, num_workers: int) -> list[Finding]:
    fix = "a larger /dev/shm (of a container: apptainer --bind, docker --shm-size), or fewer --num-workers"
    found = _failed("shm", "shm", ranks, fix)
    free = []
    for node, here in _by_node(_finished("shm", ranks)).items():
        shm = next(iter(here.values()))["shm"]
        free.append(shm["free_gb"])
        if num_workers and shm["free_gb"] < SHM_GB:
            message = (
                f"{shm['free_gb']:.2f} of {shm['size_gb']:.2f} GB free in /dev/shm, for loaders' batches"
            )
            found.append(Finding("shm", WARNING, message, fix, node))
    if found or not free:
        return found
    return [Finding("shm", OK, f"a tensor fits into /dev/shm, {min(free):.1f} GB or more free")]


def _judge_names(ranks: Ranks, hosts: list[str]) -> list[Finding]:
    found = _failed("names", "names", ranks, "tell your admin")
    nodes = {
        node: next(iter(here.values()))["names"] for node, here in _by_node(_finished("names", ranks)).items()
    }
    if found or not nodes:
        return found
    # Gloo mostly finds a way without, so it is named only as a reason.
    met = _finished("all-reduce", ranks)
    # Several nodes of a practice cluster may be one machine.
    several_machines = len({names["own"] for names in nodes.values()}) > 1
    for node, names in nodes.items():
        master, addresses, own = names["master"], names["addresses"], names["own_addresses"]
        is_master = node == hosts[0]
        if not addresses:
            message = f"the master's name {master} cannot be resolved here"
            fix = f"an admin has to give {node} an address for {master} (DNS or /etc/hosts)"
            found.append(Finding("names", FAULT, message, fix, node))
        elif several_machines and not is_master and all(map(_is_loopback, addresses)):
            message = f"the master's name {master} is {addresses[0]} here, which is this node itself"
            fix = f"an admin has to give {node} the address of {master} in the network (DNS or /etc/hosts)"
            found.append(Finding("names", FAULT, message, fix, node))
        elif is_master and not names["master_is_here"] and not any(map(_is_loopback, addresses)):
            message = f"rank 0 runs here, but {master} is {addresses[0]}, an address of another machine"
            fix = f"an admin has to mend the address of {master} (DNS or /etc/hosts)"
            found.append(Finding("names", FAULT, message, fix, node))
        wanted = names["wanted"].split(",") if names["wanted"] else []
        for unknown in set(wanted) - set(names["interfaces"]):
            message = f"there is no network interface {unknown}, only {', '.join(names['interfaces'])}"
            fix = "correct SITE_NETWORK_INTERFACE in slurm/site.sh"
            found.append(Finding("names", FAULT, message, fix, node))
        if several_machines and not wanted and all(map(_is_loopback, own)) and not met:
            address = own[0] if own else "not known"
            message = f"its own name {names['own']}, by which gloo finds its network, is {address} here"
            fix = "set SITE_NETWORK_INTERFACE in slurm/site.sh to the interface between the nodes"
            found.append(Finding("names", FAULT, message, fix, node))
    if found:
        return found
    master = nodes[min(nodes)]["master"]
    if master != hosts[0]:
        message = (
            f"the name {hosts[0]} is not known there, so the ranks meet at its address in Slurm, {master}"
        )
        return [Finding("names", WARNING, message, "an admin should add it (DNS or /etc/hosts)", hosts[0])]
    return [Finding("names", OK, f"every node resolves the master, {master}")]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _judge_meeting(ranks: Ranks) -> list[Finding]:
    fix = "a firewall between the nodes, or the wrong network: try SITE_NETWORK_INTERFACE, ask your admin"
    found = _failed("meeting", "meeting", ranks, fix)
    done = _finished("meeting", ranks)
    for rank in done.get(0, {}).get("meeting", {}).get("absent", []):
        if "error" not in ranks.get(rank, {}).get("meeting", {"error": "silent"}):
            node = ranks[rank]["place"]["node"]
            found.append(
                Finding("meeting", FAULT, "came too late to rank 0", "run the doctor again", node, rank)
            )
    if found or not done:
        return found
    master_node = ranks[0]["place"]["node"] if 0 in ranks else None
    ways = {told["meeting"]["interface"] for told in done.values() if told["place"]["node"] != master_node}
    way = f" over {', '.join(sorted(ways))}" if ways else ""
    return [Finding("meeting", OK, f"the port is free, and every rank reaches rank 0{way}")]


def _judge_clocks(ranks: Ranks) -> list[Finding]:
    nodes = _by_node(
        {r: told for r, told in _finished("meeting", ranks).items() if "offset_s" in told["meeting"]}
    )
    offsets = {node: next(iter(here.values()))["meeting"]["offset_s"] for node, here in nodes.items()}
    fix = "an admin has to mend the clock (NTP); times in logs and on files mislead until then"
    found = [
        Finding(
            "clocks",
            WARNING,
            f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} rank 0's node",
            fix,
            node,
        )
        for node, offset in offsets.items()
        if abs(offset) > CLOCK_SECONDS
    ]
    if found or not offsets:
        return found
    return [Finding("clocks", OK, f"within {max(map(abs, offsets.values())):.3f} s of each other")]


def _judge_folders(ranks: Ranks) -> list[Finding]:
    fix = "set SITE_RESULTS_DIR and SITE_SCRATCH_DIR in slurm/site.sh to folders on a shared file system"
    found = _failed("folders", "folders", ranks, fix) + _failed("folders", "sharing", ranks, fix)
    done = _finished("sharing", ranks)
    for told in done.values():
        for name, unseen in told["sharing"].items():
            if unseen:
                message = (
                    f"a file that {', '.join(unseen)} wrote in the {name} folder is not seen here: not shared"
                )
                found.append(Finding("folders", FAULT, message, fix, told["place"]["node"]))
    if found or not done:
        return found
    return [
        Finding("folders", OK, "every node writes the results and job folders, and sees the others' files")
    ]


def _judge_data(ranks: Ranks) -> list[Finding]:
    found = _failed("data", "data", ranks, "python -m trainkit.data, and a folder that every node sees")
    done = _finished("data", ranks)
    return found or ([Finding("data", OK, f"MNIST is read on {len(done)} node(s)")] if done else [])


def _judge_software(ranks: Ranks) -> list[Finding]:
    fix = "mend activate_environment in slurm/site.sh: one environment, on a file system that every node sees"
    found = _failed("software", "torch", ranks, fix)
    nodes = _by_node(_finished("torch", ranks))
    software = {node: next(iter(here.values()))["torch"] for node, here in nodes.items()}
    for what in ("version", "commit"):
        known = {node: told[what] for node, told in software.items() if told[what]}
        if len(set(known.values())) > 1:
            listed = ", ".join(f"{node} {value}" for node, value in known.items())
            name = "torch" if what == "version" else "commits of this checkout"
            found.append(Finding("software", FAULT, f"different {name} on the nodes: {listed}", fix))
    for node, told in software.items():
        if told["import_s"] > SLOW_IMPORT_SECONDS:
            message = f"import torch took {told['import_s']:.0f} s"
            fix_slow = "put the environment on a faster file system, or into a container"
            found.append(Finding("software", WARNING, message, fix_slow, node))
    if found or not software:
        return found
    told = next(iter(software.values()))
    commit = told["commit"] or "unknown (no git there)"
    return [Finding("software", OK, f"torch {told['version']}, commit {commit}, the same on every node")]


def _judge_all_reduce(ranks: Ranks) -> list[Finding]:
    group_fix = (
        "mend what is said above about ranks, names and the network; with GPUs, NCCL_DEBUG=INFO tells more"
    )
    found = _failed("all-reduce", "group", ranks, group_fix) + _failed(
        "all-reduce", "all-reduce", ranks, group_fix
    )
    done = _finished("all-reduce", ranks)
    for rank, told in done.items():
        sums = told["all-reduce"]
        if sums.get("wrong"):
            message = (
                f"{sums['wrong']} of {sums['of']} sums over all ranks are wrong, at {sums['bytes']} bytes"
            )
            fix = "do not train there, tell your admin; try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1"
            found.append(Finding("all-reduce", FAULT, message, fix, told["place"]["node"], rank))
    if found:
        return found
    if not done:
        return [Finding("all-reduce", FAULT, "not tried, since not all ranks met", "mend the faults above")]
    group = next(iter(done.values()))["group"]
    way = group["backend"] + (f" over {group['network']}" if group["network"] else "")
    rows = bandwidths(ranks)
    if not rows:
        return [Finding("all-reduce", OK, f"one rank only, by {way}: nothing to exchange")]
    rate = rows[-1]["bus_gb_s"]
    message = f"correct, by {way}; bus bandwidth {rate:.2f} GB/s at 64 MB"
    if rate < SLOW_NETWORK_GB_S and len(_by_node(ranks)) > 1:
        fix = "see that it is the fast network: SITE_NETWORK_INTERFACE in slurm/site.sh"
        return [Finding("all-reduce", WARNING, f"{message}: slower than gigabit Ethernet", fix)]
    return [Finding("all-reduce", OK, message)]


if __name__ == "__main__":
    errors.run(main)
