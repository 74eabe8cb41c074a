"""A job's ranks looked at before any training: every rank measures, and tells at once what it found.

    srun ... python -m trainkit.jobs.checkup --data-dir DIR --results-dir DIR

`slurm/doctor.py --job` puts this in the place of the training script. A rank prints each thing that
it measures as one line of JSON, so that what it found is told even if it hangs or dies later. For
the same reason nothing is imported before it is needed, and nothing waits without a limit. The
doctor collects the lines (`finding.read_facts`) and judges them (`judging.judge`).
"""

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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from trainkit import errors, files
from trainkit.command_line import Parser
from trainkit.errors import UserError, first_line
from trainkit.jobs.finding import NOTE, facts_line
from trainkit.network import interface

# Seconds. CUDA and NCCL may need minutes to start on eight GPUs that sleep (no persistence mode), and
# the ranks then come to the group as far apart.
LIMITS = {
    "cores": 10,
    "memory": 10,
    "names": 30,
    "folders": 30,
    "meeting": 45,
    "common-folders": 30,
    "torch": 180,
    "data": 60,
    "shm": 30,
    "gpu": 120,
    "group": 180,
    "all-reduce": 75,
}
MEETING_SECONDS = 20  # until all ranks have come to the first one; Python starts slowly from a cold disk
NOTES_SECONDS = 15  # until a new file is seen on other nodes; NFS keeps listings for a while

SIZES = tuple(2**power for power in (10, 14, 18, 20, 22, 24, 26))  # bytes: 1 KB to 64 MB
REPEATS = 7  # the median of them
SLOW_SECONDS = 1.0  # of a sum: fewer repeats then, and no larger size, which would take four times as long

GB = 1e9
TENSOR_BYTES = 2**24  # put into /dev/shm: more than a loader's prefetched batches of MNIST


def main() -> None:
    """Measure, and print the facts. Ends well whatever it finds: the doctor judges."""
    parser = Parser(prog="python -m trainkit.jobs.checkup", description="Started by slurm/doctor.py.")
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
            _step("common-folders", _look_for_notes, folders, met["nodes"])
        _step("torch", _torch)
        if speaks_for_node:
            _step("data", _load_data, options.data_dir)
        _step("shm", _shared_memory)
        usable = "error" not in _step("gpu", _gpu)
        if complete and usable:
            joined = _step("group", _join)
            if "error" not in joined:
                _step("all-reduce", _time_all_reduce)
    _tell("end")
    errors.note("finished")
    os._exit(0)  # Python's own end could hang, or abort, in the threads of a group that did not come about


def _tell(topic: str, **facts: object) -> None:
    line = facts_line(int(os.environ["SLURM_PROCID"]), topic, **facts)
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
        "job": env["SLURM_JOB_ID"],
        "node": _node(),
        "nodes": int(env.get("SLURM_STEP_NUM_NODES", 1)),
        "cluster": env.get("SLURM_CLUSTER_NAME"),
        "gpus_on_node": int(env.get("SLURM_GPUS_ON_NODE", 0)),
        "gpu_bind": env.get("SLURMD_TRES_BIND", ""),
        "visible": env.get("CUDA_VISIBLE_DEVICES", env.get("ROCR_VISIBLE_DEVICES")),
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

    from trainkit.jobs import processes

    limit = processes.memory_limit(processes.memory_cgroups())
    return {"available_gb": psutil.virtual_memory().available / GB, "limit_gb": limit / GB}


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
    for name, folder in folders.items():
        fix = "set SITE_RESULTS_DIR and SITE_SCRATCH_DIR in slurm/site.sh to folders of yours on every node"
        files.check_writable(folder, f"the {name} folder's files", fix)
        note = folder / _note(_node())
        note.touch()
        notes.callback(note.unlink, missing_ok=True)
    return {}


def _note(node: str) -> str:
    return NOTE.format(job=os.environ["SLURM_JOB_ID"], node=node)


def _look_for_notes(folders: dict[str, Path], nodes: list[str]) -> dict:
    """For each folder, the nodes whose note is not seen from here."""
    wanted = {_note(node): node for node in nodes}
    deadline = time.monotonic() + NOTES_SECONDS
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
        return verdict | {"offset_s": offset, "interface": interface(connection.getsockname()[0])}


def _send(lines: object, **message: object) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def _load_data(data_dir: Path) -> dict:
    from trainkit import data

    train, test = data.load("mnist", data_dir)
    return {"images": len(train) + len(test)}


def _torch() -> dict:
    started = time.monotonic()
    import torch

    from trainkit.machine import git_commit

    facts = {"import_s": time.monotonic() - started, "commit": git_commit()}
    return facts | software() | {"devices": torch.cuda.device_count()}


def software() -> dict:
    """PyTorch's version, what it is built for, and with which NCCL; and the driver that it finds."""
    import torch
    import torch.distributed as dist

    from trainkit import machine

    nccl = ""
    if dist.is_nccl_available():
        name = "RCCL" if torch.version.hip else "NCCL"
        nccl = f"{name} {'.'.join(map(str, torch.cuda.nccl.version()))}"
    driver = "" if torch.version.hip else machine.driver()
    return {"version": torch.__version__, "build": machine.build(), "nccl": nccl, "driver": driver}


def seen_from_login_node() -> dict:
    """The job's Python, what it can compute on here, and why it cannot, if so."""
    import torch

    from trainkit import machine

    facts = {"python": sys.executable} | software()
    try:
        machine.check_usable()
        return facts | {"gpus": [_properties(number) for number in range(torch.cuda.device_count())]}
    except (UserError, RuntimeError) as error:
        return facts | {"unusable": first_line(error)}


def _properties(device: object) -> dict:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "gib": properties.total_memory / 2**30}


def _gpu() -> dict:
    """This rank's GPU, as the training would choose it, after it has computed something."""
    import torch

    from trainkit import machine, world

    device = world.own_device(use_cuda=True)
    if device.type == "cpu":
        return {"name": None}
    free, size = torch.cuda.mem_get_info(device)
    return _properties(device) | {"free": free / size, "card": machine.card(device)}


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
    """Join the process group as the training does; tells about NCCL's network."""
    import torch.distributed as dist

    from trainkit import world

    # A folder of its own, for everybody may write to the temporary folder, and guess a name there.
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "nccl.log")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
        world.join(use_cuda=True, timeout=LIMITS["group"] - 5)
        world.barrier()  # NCCL connects at its first operation
        network = nccl_network(log.read_text(errors="replace")) if log.exists() else None
    return {"backend": dist.get_backend(), "network": network}


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

    The sum is checked, number by number. On a slow network the largest sizes are left out.
    """
    import torch

    from trainkit import machine, world

    rank, size = world.rank(), world.count()
    number = torch.cuda.current_device() if torch.cuda.is_available() else None
    device = torch.device("cpu") if number is None else torch.device("cuda", number)
    seconds = []
    for size_in_bytes in SIZES:
        ramp = torch.arange(size_in_bytes // 4, device=device, dtype=torch.float32) % 1000
        values = world.sum_in_place(ramp + rank)
        expected = ramp * size + size * (size - 1) / 2  # small whole numbers: exact in float32
        wrong = int((values != expected).sum())
        if world.largest(wrong, values.device):  # on any rank: all of them stop here
            return {"wrong": wrong, "of": len(values), "at_bytes": size_in_bytes}
        times = [_time_one(values)]
        while len(times) < REPEATS and sum(times) < 2 * SLOW_SECONDS:
            times.append(_time_one(values))
        seconds.append(statistics.median(times))
        if seconds[-1] > SLOW_SECONDS:
            break
    world.leave()
    measured = {"bytes": SIZES[: len(seconds)], "seconds": seconds}
    return measured | {"device_name": machine.device_name(device)}


def _time_one(values: object) -> float:
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


if __name__ == "__main__":
    errors.run(main)
