"""The doctor's checks that need PyTorch, in a rank of its job and on the login node.

A step of the checkup imports it, as that may take minutes, or fail. It needs no package but PyTorch: the
environment of a script that does not use the kit may have no other.
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

from manygpus import devices, launchers, project
from manygpus.distributed import process_group
from manygpus.jobs.doctor.findings import (
    FAULT,
    OK,
    STEP_SECONDS,
    WARNING,
    Finding,
    fix_of,
    for_the_cpu_only,
    send,
    size_in_words,
)
from manygpus.launchers import node
from manygpus.training import clock
from manygpus.training.process_tuning import tune_process

# Of the tensors that are summed: 1 KB to 64 MB.
SIZES_BYTES = tuple(2**power for power in (10, 14, 18, 20, 22, 24, 26))
# Each size is summed so often, and the median counts.
REPEATS = 5
# After a sum that took so long no larger size is tried: it would take four times as long.
SLOW_SECONDS = 1.0
# The rate of gigabit Ethernet is slightly more.
SLOW_NETWORK_GB_S = 0.1
# Less free memory than this share of a GPU's means that another program computes there.
LEAST_FREE_MEMORY = 0.8


def software(trains_with_kit: bool) -> Iterator[Finding]:
    """Report the versions that this rank has imported; with `trains_with_kit` those of our trainings, too."""
    message = f"torch {torch.__version__}"
    if trains_with_kit:
        from manygpus.training import run  # noqa: F401  as a rank imports it
        from manygpus.training.run_facts import git_commit

        message += f", commit {git_commit() or 'unknown (no git there)'}"
    yield Finding("software", OK, message)


def mnist(data_dir: Path) -> Iterator[Finding]:
    """Check that the data can be read here."""
    from manygpus.data import datasets

    datasets.load_dataset("mnist", data_dir)
    yield Finding("data", OK, f"MNIST in {data_dir}")


def gpus(tasks: int | None) -> Iterator[Finding]:
    """Check this rank's GPU, chosen as in a training; one rank of a node checks those of all `tasks`."""
    chosen = devices.choose_device(launchers.read(), use_gpu=True)
    free = devices.accelerator_of(chosen).free_memory_share(chosen)
    if free < LEAST_FREE_MEMORY:
        message = f"{1 - free:.0%} of its GPU's memory is taken before the training starts"
        fix = f"another program uses that GPU; to avoid the node, give sbatch --exclude={node()}"
        yield Finding("gpus", WARNING, message, fix)
    if tasks:
        yield from _gpus_of_the_node(tasks)


def _gpus_of_the_node(tasks: int) -> Iterator[Finding]:
    allocated = devices.gpus_given() or 0
    visible = len(devices.gpus())
    if allocated and allocated != tasks:
        message = f"{tasks} task(s) for {allocated} GPU(s): there has to be one task per GPU"
        fix = f"sbatch --ntasks-per-node={allocated} --gpus-per-node={allocated}"
        yield Finding("gpus", FAULT, message, fix)
    if 0 < visible < allocated:
        message = (
            f"a task sees only {visible} of {allocated} GPUs, so the GPUs cannot copy to each other directly"
        )
        fix = "use --gpus-per-node instead of --gpus-per-task, and leave out --gpu-bind"
        yield Finding("gpus", WARNING, message, fix)
    if visible:
        yield Finding("gpus", OK, f"{devices.cards()}, {devices.build_and_backend()}")
    elif allocated:
        # Those of another cluster were refused earlier.
        message = f"{allocated} virtual GPU(s) of the practice cluster: the ranks train on the CPU"
        yield Finding("gpus", OK, message)
    else:
        message = "the job has no GPU: it will train on the CPU"
        yield Finding("gpus", WARNING, message, "sbatch --gpus-per-node=2")


def look_from_login_node(data_dir: str, most_gpus: int) -> None:
    """Check the job's Python and, read with it, the data; `most_gpus` is the number on the largest node.

    With `data_dir` "" no data are read.

    Raises:
        UserError: if the data cannot be read.
    """
    version = f"torch {torch.__version__.partition('+')[0]} for {devices.build_and_backend()}"
    findings = [Finding("environment", OK, f"{sys.executable}, {version}")]
    if devices.build() == "the CPU only" and most_gpus:
        findings.append(for_the_cpu_only(most_gpus))
    for finding in findings:
        send(finding=finding._asdict())
    if data_dir:
        for finding in mnist(Path(data_dir)):
            send(finding=finding._asdict())


def join() -> Iterator[Finding]:
    """Join the process group as the training does; report NCCL's network."""
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "nccl.log")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
        # The step itself has a little longer, so that the group's own error is what is reported.
        dist_env = process_group.init_distributed(use_gpu=True, timeout_seconds=STEP_SECONDS - 5)
        tune_process(dist_env)
        # NCCL connects at its first operation.
        process_group.barrier()
        words_of_nccl = log.read_text(errors="replace") if log.exists() else ""
    backend = dist.get_backend()
    # Within a node there is none.
    network = re.search(r"Using network (\S+)", words_of_nccl)
    if network:
        backend += f" over {network[1]}"
    yield Finding("group", OK, f"all ranks met at {os.environ['MASTER_ADDR']}, with {backend}")


def all_reduce(nodes: int) -> Iterator[Finding]:
    """Check that sums over all ranks are correct, and time them; rank 0 reports the rows."""
    chosen = devices.choose_device(launchers.read(), use_gpu=True)
    facts = {
        "nodes": nodes,
        "job": os.environ["SLURM_JOB_ID"],
        "ranks": process_group.count(),
        "backend": dist.get_backend(),
        "device_name": devices.device_name(chosen),
    }
    rows = []
    for size_bytes in SIZES_BYTES:
        wrong = _wrong_sums(size_bytes, chosen)
        if wrong:
            message = f"{wrong} of the sums over all ranks are wrong, at {size_in_words(size_bytes)}"
            yield Finding("all-reduce", FAULT, message, fix_of("all-reduce"))
        # Where they are wrong on any rank, all ranks stop here.
        if any(process_group.gather(wrong)):
            return
        seconds = statistics.median(seconds_of_sums(size_bytes, chosen))
        rate = bus_gb_s(size_bytes, seconds, process_group.count())
        rows.append(facts | {"bytes": size_bytes, "seconds": seconds, "bus_gb_s": rate})
        if seconds > SLOW_SECONDS:
            break
    if process_group.is_rank_0() and process_group.count() == 1:
        yield Finding("all-reduce", OK, "one rank only: there is nothing to communicate")
    elif process_group.is_rank_0():
        for row in rows:
            send(row=row)
        yield _network_finding(rows, nodes)
    process_group.destroy_distributed()


def _wrong_sums(size_bytes: int, chosen: torch.device) -> int:
    """Return how many elements of a sum over all ranks are wrong here, for a tensor of this size."""
    world_size = process_group.count()
    ramp = torch.arange(size_bytes // 4, device=chosen, dtype=torch.float32) % 1000
    # Small whole numbers, which are exact in float32.
    expected = ramp * world_size + world_size * (world_size - 1) / 2
    summed = process_group.sum_in_place(ramp + process_group.rank())
    return int((summed != expected).sum())


def seconds_of_sums(size_bytes: int, chosen: torch.device, repeats: int = REPEATS) -> list[float]:
    """Return how long each of some sums over all ranks takes, of a tensor of this size."""
    values = torch.zeros(size_bytes // 4, device=chosen)
    times = []
    for _ in range(repeats):
        started = clock.start(chosen)
        process_group.sum_in_place(values)
        times.append(clock.stop(chosen, started))
    return times


def bus_gb_s(size_bytes: int, seconds: float, world_size: int) -> float:
    """Return the bus bandwidth of a sum, in GB/s, to be compared with the hardware's.

    In a ring, it is the rate of the slowest link. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return size_bytes / seconds / 1e9 * 2 * (world_size - 1) / world_size


def _network_finding(rows: list[dict], nodes: int) -> Finding:
    rate = rows[-1]["bus_gb_s"]
    message = f"correct; bus bandwidth {rate:.2f} GB/s at {size_in_words(rows[-1]['bytes'])}"
    if rate < SLOW_NETWORK_GB_S and nodes > 1:
        fix = f"check that the ranks use the fast network (SITE_NETWORK_INTERFACE in {project.site_name()})"
        return Finding("all-reduce", WARNING, f"{message}: slower than gigabit Ethernet", fix)
    if rows[-1]["backend"] != "nccl":
        message += ", between CPUs: this says nothing about GPUs"
    return Finding("all-reduce", OK, message)
