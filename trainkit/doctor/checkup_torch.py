"""The doctor's checks that need PyTorch, in a rank of its job and on the login node.

A step of the checkup imports it, as that may take minutes, or fail.
"""

import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from trainkit import devices as device
from trainkit.data import datasets
from trainkit.distributed import launchers as place
from trainkit.distributed import process_group
from trainkit.distributed.launchers import node
from trainkit.doctor.checkup import FAULT, FIXES, LIMIT, OK, WARNING, Finding, in_words, send
from trainkit.training import clock, run  # noqa: F401  as a rank imports it

SIZES = tuple(2**power for power in (10, 14, 18, 20, 22, 24, 26))  # bytes: 1 KB to 64 MB
REPEATS = 5  # the median of them
SLOW_SECONDS = 1.0  # after such a sum no larger size is tried: it would take four times as long
SLOW_NETWORK_GB_S = 0.1  # the rate of gigabit Ethernet


def software() -> Iterator[Finding]:
    """Report the versions that this rank has imported."""
    commit = device.git_commit() or "unknown (no git there)"
    yield Finding("software", OK, f"torch {torch.__version__}, commit {commit}")


def mnist(data_dir: Path) -> Iterator[Finding]:
    """Check that the data can be read here."""
    datasets.load("mnist", data_dir)
    yield Finding("data", OK, f"MNIST in {data_dir}")


def gpus(tasks: int | None) -> Iterator[Finding]:
    """Check this rank's GPU, chosen as in a training; one rank of a node checks those of all `tasks`."""
    own = device.choose_device(place.read(), use_cuda=True)
    free, size = torch.cuda.mem_get_info(own) if device.is_gpu(own) else (1, 1)
    if free < 0.8 * size:
        message = f"{1 - free / size:.0%} of its GPU's memory is taken before the training starts"
        fix = f"another program computes there; to avoid the node: sbatch --exclude={node()}"
        yield Finding("gpus", WARNING, message, fix)
    if not tasks:
        return
    given, seen = device.gpus_given() or 0, len(device.gpus())
    if given and given != tasks:
        message = f"{tasks} task(s) for {given} GPU(s): there has to be one task per GPU"
        fix = f"sbatch --ntasks-per-node={given} --gpus-per-node={given}"
        yield Finding("gpus", FAULT, message, fix)
    if 0 < seen < given:
        message = f"a task sees {seen} of {given} GPUs, which stops them from copying to each other directly"
        fix = "use --gpus-per-node instead of --gpus-per-task, and leave out --gpu-bind"
        yield Finding("gpus", WARNING, message, fix)
    if seen:
        yield Finding("gpus", OK, f"{device.cards()}, {device.build_and_backend()}")
    elif given:  # others were refused earlier
        message = f"{given} virtual GPU(s) of the practice cluster: the ranks train on the CPU"
        yield Finding("gpus", OK, message)
    else:
        message = "the job has no GPU: it will train on the CPU"
        yield Finding("gpus", WARNING, message, "sbatch --gpus-per-node=2")


def look_from_login_node(data_dir: str, most_gpus: int) -> None:
    """Check the job's Python and, read with it, the data; `most_gpus` is the number on the largest node.

    Raises:
        UserError: if the data cannot be read.
    """
    version = f"torch {torch.__version__.partition('+')[0]} for {device.build_and_backend()}"
    found = [Finding("environment", OK, f"{sys.executable}, {version}")]
    if device.build() == "the CPU only" and most_gpus:
        message = f"PyTorch is for the CPU only, but nodes of this cluster have up to {most_gpus} GPUs"
        fix = "install a PyTorch for GPUs: https://pytorch.org/get-started/locally"
        found.append(Finding("gpus", FAULT, message, fix))
    for finding in found:
        send(finding=finding._asdict())
    datasets.load("mnist", Path(data_dir))
    send(finding=Finding("data", OK, f"MNIST in {data_dir}")._asdict())


def join() -> Iterator[Finding]:
    """Join the process group as the training does; report NCCL's network."""
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "nccl.log")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
        process_group.join(use_cuda=True, timeout=LIMIT - 5)
        process_group.barrier()  # NCCL connects at its first operation
        network = re.search(r"Using network (\S+)", log.read_text(errors="replace") if log.exists() else "")
    way = dist.get_backend() + (f" over {network[1]}" if network else "")  # none within a node
    yield Finding("group", OK, f"all ranks meet at {os.environ['MASTER_ADDR']}, by {way}")


def all_reduce(nodes: int) -> Iterator[Finding]:
    """Check that sums over all ranks are correct, and time them; rank 0 reports the rows."""
    own = device.choose_device(place.read(), use_cuda=True)
    facts = {"nodes": nodes, "job": os.environ["SLURM_JOB_ID"], "ranks": process_group.count()}
    facts |= {"backend": dist.get_backend(), "device_name": device.device_name(own)}
    rows, rank, size = [], process_group.rank(), process_group.count()
    for number_of_bytes in SIZES:
        ramp = torch.arange(number_of_bytes // 4, device=own, dtype=torch.float32) % 1000
        expected = ramp * size + size * (size - 1) / 2  # small whole numbers: exact in float32
        wrong = int((process_group.sum_in_place(ramp + rank) != expected).sum())
        if wrong:
            message = f"{wrong} of the sums over all ranks are wrong, at {in_words(number_of_bytes)}"
            yield Finding("all-reduce", FAULT, message, FIXES["all-reduce"])
        if any(process_group.gather(wrong)):  # on any rank: all ranks stop here
            return
        values, times = torch.zeros(number_of_bytes // 4, device=own), []
        for _ in range(REPEATS):
            started = clock.start(own)
            process_group.sum_in_place(values)
            times.append(clock.stop(own, started))
        seconds = statistics.median(times)
        # In a ring, the bus bandwidth is the rate of the slowest link, to be compared with the hardware's.
        # Source: nccl-tests, doc/PERFORMANCE.md.
        bus = number_of_bytes / seconds / 1e9 * 2 * (size - 1) / size
        rows.append(facts | {"bytes": number_of_bytes, "seconds": seconds, "bus_gb_s": bus})
        if seconds > SLOW_SECONDS:
            break
    if process_group.is_rank_0() and process_group.count() == 1:
        yield Finding("all-reduce", OK, "one rank only: nothing to exchange")
    elif process_group.is_rank_0():
        for row in rows:
            send(row=row)
        yield _network_finding(rows, nodes)
    process_group.leave()


def _network_finding(rows: list[dict], nodes: int) -> Finding:
    rate = rows[-1]["bus_gb_s"]
    message = f"correct; bus bandwidth {rate:.2f} GB/s at {in_words(rows[-1]['bytes'])}"
    if rate < SLOW_NETWORK_GB_S and nodes > 1:
        fix = "check that it is the fast network: SITE_NETWORK_INTERFACE in slurm/site.sh"
        return Finding("all-reduce", WARNING, f"{message}: slower than gigabit Ethernet", fix)
    if rows[-1]["backend"] != "nccl":
        message += ", between CPUs: this says nothing about GPUs"
    return Finding("all-reduce", OK, message)
