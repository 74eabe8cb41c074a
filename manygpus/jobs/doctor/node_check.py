"""Measure the nodes of a job before its ranks start: what each computes, and the all-reduce of pairs.

    srun --ntasks-per-node=1 ... python -m manygpus.jobs.doctor.node_check FIRST_NODE

jobs/scripts/job_env.sh starts it (SITE_NODE_CHECK), with a process on each node. Each prints what it has
measured as one line of JSON, so that it counts even if the process hangs later; jobs/inside/slow_nodes.py
judges. The processes meet at the first node, which waits `READY_SECONDS` for the others, and then goes on
without those that have not come.

Each node is in a pair with up to three different ones, one after the other, as a slow node is the one that
has no fast pair. DLRover's check has two such rounds (docs/design/straggler-detection.md there). Every
measurement is in a process of its own, a fork, which can be ended if it hangs in a driver.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from manygpus import devices
from manygpus.errors import first_line
from manygpus.jobs.doctor import checkup_torch
from manygpus.jobs.inside.slow_nodes import ENDED, send
from manygpus.launchers import node

# Two square matrices of so many rows are multiplied. On a CPU that takes a millisecond: other programs on the
# machine interrupt some of the products, and not the fastest one.
ROWS_ON_CPU, ROWS_ON_GPU = 256, 4096
# On each device.
COMPUTE_SECONDS = 0.5
# Of the tensor that a pair sums, and how often it does. The fastest sum counts.
PAIR_BYTES, PAIR_BYTES_ON_GPU = 2**20, 2**26
PAIR_REPEATS = 40
MOST_ROUNDS = 3
# After these a measurement is ended.
MOST_SECONDS = 30
# So long the first node waits for the others once it is ready itself: they may import PyTorch from a slow
# disk.
READY_SECONDS = 60
PORT_SECONDS = MOST_SECONDS + READY_SECONDS

Round = list[tuple[str, str]]


def main() -> None:
    """Measure, and print the results."""
    is_first = node() == sys.argv[1]
    store = _store(is_first) if is_first else None
    rates, error = _in_a_fork(_compute)
    send(node=node(), gflop_s=rates, error=error)
    store = store or _store(is_first)
    present = _meet(store, is_first, well=not error)
    if node() in present:
        _measure_pairs(store, present, is_first)
    if is_first:
        send(**{ENDED: True})
    os._exit(0)  # the threads of a store whose first node has left might delay the end


def _store(is_first: bool) -> dist.TCPStore:
    """Return the store of the first node."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_first,
        timeout=timedelta(seconds=PORT_SECONDS),
        wait_for_workers=False,
    )


def _meet(store: dist.TCPStore, is_first: bool, well: bool) -> list[str]:
    """Return the nodes that are ready, by the first one's word."""
    keys = [f"ready-{index}" for index in range(int(os.environ["SLURM_STEP_NUM_NODES"]))]
    store.set(keys[int(os.environ["SLURM_NODEID"])], node() if well else "")
    if is_first:
        _wait(store, keys, READY_SECONDS)
        names = [store.get(key).decode() for key in keys if store.check([key])]
        store.set("present", json.dumps([name for name in names if name]))
    return json.loads(store.get("present"))


def _measure_pairs(store: dist.TCPStore, present: Sequence[str], is_first: bool) -> None:
    """Measure this node's pairs, and on the first node print the results of all."""
    for number, pairs in enumerate(rounds(present)):
        for pair in pairs:
            if node() in pair:
                gb_s, error = _in_a_fork(_all_reduce, pair, number)
                store.set(f"{number}-{node()}", json.dumps({"pair": pair, "gb_s": gb_s or 0, "error": error}))
        keys = [f"{number}-{name}" for pair in pairs for name in pair]
        _wait(store, keys, MOST_SECONDS)
        if is_first:
            for key in filter(lambda key: store.check([key]), keys):
                send(node=key.partition("-")[2], **json.loads(store.get(key)))


def rounds(nodes: Sequence[str]) -> list[Round]:
    """Return pairs of nodes in rounds: no two have each other twice, and no node is in two pairs of a round.

    It is the beginning of a round-robin tournament, by the circle method.
    """
    players = [*nodes, *([""] if len(nodes) % 2 else [])]  # with "" a node rests
    half = len(players) // 2
    result = []
    for _ in range(min(MOST_ROUNDS, len(players) - 1)):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        result.append([pair for pair in pairs if all(pair)])
        players = [players[0], players[-1], *players[1:-1]]
    return result


def _wait(store: dist.TCPStore, keys: list[str], seconds: float) -> None:
    """Wait until all keys are set, or for so many seconds."""
    with suppress(RuntimeError):  # DistStoreError
        store.wait(keys, timedelta(seconds=seconds))


def _in_a_fork(measure: Callable, *arguments: object) -> tuple[object, str]:
    """Return what a function returns in a process of its own, and the error that it ended with."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            sender.send((measure(*arguments), ""))
        except Exception as error:  # of any kind: the log names it
            sender.send((None, first_line(error) or repr(error)))

    process = context.Process(target=work, daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(MOST_SECONDS):
            return None, f"{measure.__name__.strip('_')} did not end within {MOST_SECONDS} s"
        return receiver.recv()
    except EOFError:
        return None, f"{measure.__name__.strip('_')} was killed"
    finally:
        process.kill()


def _compute() -> dict[str, float]:
    """Return the rate of a CPU core and of each GPU, in GFLOP/s."""
    torch.set_num_threads(1)
    rates = {"CPU core": _gflop_s(torch.device("cpu"), ROWS_ON_CPU)}
    for number, gpu in enumerate(devices.usable_gpus()):
        rates[f"GPU {number}"] = _gflop_s(gpu, ROWS_ON_GPU)
    return rates


def _gflop_s(device: torch.device, rows: int) -> float:
    matrix = torch.rand(rows, rows, device=device)
    fastest_seconds = float("inf")
    until = time.monotonic() + COMPUTE_SECONDS
    while time.monotonic() < until:
        devices.wait_for(device)
        start = time.perf_counter()
        matrix @ matrix
        devices.wait_for(device)
        fastest_seconds = min(fastest_seconds, time.perf_counter() - start)
    return 2 * rows**3 / fastest_seconds / 1e9


def _all_reduce(pair: tuple[str, str], number: int) -> float:
    """Return the bus bandwidth of an all-reduce between this node and another one, in GB/s."""
    gpus = devices.usable_gpus()
    device = gpus[0] if gpus else torch.device("cpu")
    accelerator = devices.accelerator_of(device)
    accelerator.set_device(device)
    dist.init_process_group(
        accelerator.backend,
        store=dist.PrefixStore(f"{number}-{pair}", _store(is_first=False)),
        rank=pair.index(node()),
        world_size=2,
        timeout=timedelta(seconds=MOST_SECONDS),
    )
    size_bytes = PAIR_BYTES_ON_GPU if gpus else PAIR_BYTES
    times = checkup_torch.seconds_of_sums(size_bytes, device, PAIR_REPEATS)
    return checkup_torch.bus_gb_s(size_bytes, min(times), world_size=2)


if __name__ == "__main__":
    main()
